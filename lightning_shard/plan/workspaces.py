"""What operators allocate inside themselves, which nobody outside sees: found by running them once on real tensors.

The CPU's convolutions and low-precision products reorder their operands into layouts of their own. How much that takes
depends on the processor, so it is measured where the plan is made: each operator of a step, with each combination of
shapes, once, on zeros. Only for plans of the CPU; what GPUs' kernels take is not known here.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_shard._compat.recording import has_flops
from lightning_shard._compat.simulating import on_real_tensors
from lightning_shard.telemetry.allocator import AllocatorTracker

MOST = 2**27
"""Bytes of an operator's tensors up to which it is tried: beyond, trying takes as long as the step."""


_BUFFERED = {
    "c10d::_allgather_base_": 0,
    "c10d::allgather_": 0,
    "c10d::_reduce_scatter_base_": 1,
    "c10d::reduce_scatter_": 1,
}
"""Collectives that gloo carries out in a buffer as large as the whole, and which argument that is."""


class Workspaces:
    """Measures operators, each combination of shapes once.

    Args:
        allocator: Of this process.

    """

    def __init__(self, allocator: AllocatorTracker) -> None:
        self._allocator = allocator
        self._known: dict[Any, int] = {}

    def of(self, func: Any, args: Any, kwargs: Any) -> int:
        """Bytes that the operator takes for itself while it runs, beside its results.

        Args:
            func: An operator of the dispatcher.
            args: Its arguments, with tensors that need no data.
            kwargs: Likewise.

        """
        if (collective := _BUFFERED.get(str(func._schema.name))) is not None:
            return sum(tensor.nbytes for tensor in _tensors(args[collective]))
        if not has_flops(func):
            return 0
        key = (func, _outline((args, kwargs)))
        if key not in self._known:
            self._known[key] = self._measure(func, args, kwargs)
        return self._known[key]

    def _measure(self, func: Any, args: Any, kwargs: Any) -> int:
        tensors = list(_tensors((args, kwargs)))
        if any(tensor.device.type != "cpu" for tensor in tensors) or sum(t.nbytes for t in tensors) > MOST:
            return 0
        with on_real_tensors(), torch.no_grad():
            real_args, real_kwargs = _real(args), _real(kwargs)
            func(*real_args, **real_kwargs)  # the first call also fills caches
            with self._allocator.phase("operator") as phase:
                result = func(*real_args, **real_kwargs)
        found = phase.bytes
        del result
        return max(0, found.peak_bytes - found.left_bytes)


def _outline(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(_outline(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _outline(item)) for key, item in value.items())
    return value


def _real(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype).zero_()
    if isinstance(value, list | tuple):
        return type(value)(_real(item) for item in value)
    if isinstance(value, dict):
        return {key: _real(item) for key, item in value.items()}
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
