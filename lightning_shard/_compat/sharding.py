"""Private API of torch's FSDP2, and of Lightning's strategy on it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

# The file by which Lightning knows a folder of shards.
from lightning.fabric.utilities.load import _METADATA_FILENAME
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_shard._compat.model_states import Kind

METADATA_FILENAME = _METADATA_FILENAME

__all__ = [
    "METADATA_FILENAME",
    "Board",
    "ReentrantRoot",
    "dtypes_of_all",
    "follow_freezing",
    "local_bytes",
    "observe_reduction",
    "observe_unshard",
    "parameters_in_no_unit",
    "refuse_double_backward",
    "sharded_parameters",
    "unit_tensors",
    "whole_numbers",
]


def _groups(module: FSDPModule) -> list[Any]:
    groups: list[Any] = module._get_fsdp_state()._fsdp_param_groups
    return groups


def sharded_parameters(module: FSDPModule) -> Iterator[nn.Parameter]:
    """The sharded parameters that belong to ``module``'s own unit, not to units inside it."""
    for group in _groups(module):
        for parameter in group.fsdp_params:
            yield parameter.sharded_param


Waiting = Callable[[], AbstractContextManager[None]]
"""Opens a context around a collective."""


def observe_reduction(
    module: FSDPModule, note: Callable[[list[nn.Parameter], list[nn.Parameter]], None], waiting: Waiting
) -> None:
    """Call ``note(reached, first)`` whenever the unit of ``module`` is about to reduce its gradients.

    There is no public hook at which a unit's unsharded gradients can be seen.

    Args:
        module: A unit.
        note: Gets the sharded parameters that this rank's backward has reached, and those that had no gradient before.
        waiting: Opened around the reduction.

    """
    for group in _groups(module):
        group.post_backward = _observed(group, group.post_backward, note, waiting)


def _observed(
    group: Any, post_backward: Callable[..., None], note: Callable[..., None], waiting: Waiting
) -> Callable[..., None]:
    def observed(*unused: Any) -> None:
        if group.reduce_grads:
            reached, first = [], []
            for parameter in group.fsdp_params:
                if not hasattr(parameter, "_unsharded_param"):
                    continue
                gradient = parameter.unsharded_accumulated_grad
                if gradient is not None or parameter.unsharded_param.grad is not None:
                    reached.append(parameter.sharded_param)
                if parameter.sharded_param.grad is None:
                    first.append(parameter.sharded_param)
            note(reached, first)
        with waiting():
            post_backward(*unused)

    return observed


def observe_unshard(module: FSDPModule, note: Callable[[], None], waiting: Waiting) -> None:
    """Call ``note`` before each all-gather of the unit of ``module``; only its state knows when one is needed.

    Args:
        module: A unit.
        note: Called before.
        waiting: Opened around the all-gather.

    """
    for group in _groups(module):
        group.unshard = _noted(group, group.unshard, note, waiting)


def refuse_double_backward(module: FSDPModule, refuse: Callable[[], None]) -> None:
    """Call ``refuse`` when a backward through the unit of ``module`` is itself recorded for another backward.

    The unit's gathered parameters are released after it, which the second backward would not notice.
    """
    for group in _groups(module):
        group.pre_backward = _single(group.pre_backward, refuse)


def _single(pre_backward: Callable[..., None], refuse: Callable[[], None]) -> Callable[..., None]:
    def single(*args: Any) -> None:
        if torch.is_grad_enabled():
            refuse()
        pre_backward(*args)

    return single


def _noted(group: Any, unshard: Callable[..., None], note: Callable[[], None], waiting: Waiting) -> Callable[..., None]:
    def noted(*args: Any, **kwargs: Any) -> None:
        if group._all_gather_result is not None or group.is_unsharded:
            unshard(*args, **kwargs)
            return
        note()
        with waiting():
            unshard(*args, **kwargs)

    return noted


def whole_numbers() -> None:
    """Let ``float(norm)`` and ``norm.item()`` of sharded tensors be the whole's; every rank must then call them.

    torch hands out this rank's part of a sum that has not been added up yet, without a word.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(torch.ops.aten._local_scalar_dense.default, _whole_number)


def _whole_number(op_call: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    (tensor,) = args
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().item()


class Board:
    """Notes of all ranks, in the store through which they found each other; it needs no collective.

    Args:
        rank: This rank.
        ranks: The number of ranks.

    """

    def __init__(self, rank: int, ranks: int) -> None:
        # There is no public way to the store of a process group that Lightning or a launcher has set up.
        self._store = PrefixStore("lightning_shard/board", _get_default_store())
        self._rank = rank
        self._ranks = ranks
        self._written = False

    def write(self, note: str) -> None:
        """Put this rank's note up."""
        self._store.set(str(self._rank), note)
        self._written = True

    def clear(self) -> None:
        """Take this rank's note down."""
        if self._written:
            self._store.set(str(self._rank), "")
            self._written = False

    def read(self) -> list[str | None]:
        """The notes of all ranks; ``None`` where there is none."""
        keys = [str(rank) for rank in range(self._ranks)]
        return [self._store.get(key).decode() or None if self._store.check([key]) else None for key in keys]


def follow_freezing(module: FSDPModule) -> None:
    """Let a unit that is whole already take over which of its parameters are trained now.

    It does so only when it gathers them, and one that is kept from forward to backward may have no backward to end it.
    """
    for group in _groups(module):
        group.pre_forward = _following(group, group.pre_forward)


def _following(group: Any, pre_forward: Callable[..., Any]) -> Callable[..., Any]:
    def following(*args: Any) -> Any:
        if group.is_unsharded:
            for parameter in group.fsdp_params:
                parameter.unsharded_param.requires_grad_(parameter.sharded_param.requires_grad)
        return pre_forward(*args)

    return following


def dtypes_of_all(module: FSDPModule) -> None:
    """Let the unit of ``module`` take its dtypes from all of its parameters.

    It takes them, once, from those that are trained at the first forward: after unfreezing, the gradients of a unit
    that was frozen then would be reduced in the wrong dtype.
    """
    for group in _groups(module):
        group._init_mp_dtypes = _of_all(group, group._init_mp_dtypes)


def _of_all(group: Any, init_dtypes: Callable[[], None]) -> Callable[[], None]:
    def of_all() -> None:
        init_dtypes()
        if group._orig_dtype is None:
            originals = {parameter.orig_dtype for parameter in group.fsdp_params}
            reduced = {parameter.reduce_dtype for parameter in group.fsdp_params}
            if len(originals) == 1 and len(reduced) == 1:
                (group._orig_dtype,) = originals
                (group._reduce_dtype,) = reduced

    return of_all


class ReentrantRoot:
    """Makes a root unit's hooks fire once, however often the module is called inside one of its own calls.

    A step runs with the root's parameters whole; ``self(x)`` inside it would otherwise shard them again when it
    returns. The unit's own hooks know nothing of nested calls, so they are replaced by ones that count.

    Args:
        module: The root unit, before its first forward.

    """

    def __init__(self, module: FSDPModule) -> None:
        assert isinstance(module, nn.Module)
        self._module: Any = module
        self._state: Any = module._get_fsdp_state()
        self._depth = 0
        self._state._pre_forward_hook_handle.remove()
        self._state._post_forward_hook_handle.remove()
        module.register_forward_pre_hook(self._enter_hook, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._leave_hook, with_kwargs=False, always_call=True)

    def call(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method with the root's parameters whole, as a forward of the module would have them.

        Not through the module's own call: hooks that users put on its forward would fire once too often.
        """
        outermost = self._depth == 0
        if outermost:
            args, kwargs = self._state._pre_forward(self._module, args, kwargs)
            # A step may have a backward in it, and go on.
            self._module.set_reshard_after_backward(False, recurse=False)
        self._depth += 1
        try:
            output = method(*args, **kwargs)
        finally:
            self._depth -= 1
            if outermost:
                self._module.set_reshard_after_backward(True, recurse=False)
        return self._state._post_forward(self._module, args, output) if outermost else output

    def _enter_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        return self._state._pre_forward(module, args, kwargs) if self._depth == 1 else None

    def _leave_hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self._depth -= 1
        if self._depth or (output is None and sys.exc_info()[1] is not None):
            return None  # after an exception there is no output, and nothing to go on with
        return self._state._post_forward(module, args, output)


def local_bytes(parameter: nn.Parameter) -> int:
    """Bytes of memory that this rank holds of a parameter at rest, padding included."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return int(local.untyped_storage().nbytes())


def unit_tensors(module: FSDPModule) -> Iterator[tuple[Kind, Tensor]]:
    """Every tensor that the unit of ``module`` holds now for model states, with its kind; gathers and all.

    Only the shards are parameters of the module at rest. What is whole in between lies in the unit's own lists.
    """
    for group in _groups(module):
        for parameter in group.fsdp_params:
            yield "parameters", parameter.sharded_param
            yield from (("gathered", output) for output in parameter.all_gather_outputs)
            if (smaller_world := getattr(parameter, "_sharded_post_forward_param_data", None)) is not None:
                yield "gathered", smaller_world
            unsharded = getattr(parameter, "_unsharded_param", None)
            # The latter two: accumulated without synchronization.
            own, whole = parameter.sharded_param.grad, parameter.unsharded_accumulated_grad
            for gradient in (own, whole, None if unsharded is None else unsharded.grad):
                if gradient is not None:
                    yield "gradients", gradient
        if group._partial_reduce_output is not None:  # HSDP, reduced within the group of ranks only
            yield "gradients", group._partial_reduce_output
        if group._all_gather_result is not None:
            yield "buckets", group._all_gather_result.all_gather_output
        # Shared by the units below one root, from its first forward on.
        if (gather := getattr(group.comm_ctx, "all_gather_state", None)) is not None:
            yield "buckets", gather.all_gather_result.all_gather_output
        for reduction in getattr(group.comm_ctx, "reduce_scatter_states", ()):
            yield "buckets", reduction.reduce_scatter_input


def parameters_in_no_unit(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of ``module`` that no unit shards, also while units are whole."""
    in_units: set[int] = set()
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            for group in _groups(unit):
                for parameter in group.fsdp_params:
                    for name in ("sharded_param", "_sharded_post_forward_param", "_unsharded_param"):
                        in_units.add(id(getattr(parameter, name, None)))
    yield from (parameter for parameter in module.parameters() if id(parameter) not in in_units)
