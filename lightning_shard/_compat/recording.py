"""Private API behind the recording of a step: identities of memory, counts of FLOPs, operators that draw numbers."""

from typing import Any

import torch
from torch import Tensor, nn

# The base class of modes that see every operator is public in its documentation only.
from torch.utils._python_dispatch import TorchDispatchMode

# `FlopCounterMode` is public, but sums up by module; the counts by operator are this table.
from torch.utils.flop_counter import flop_registry

__all__ = ["OperatorWatch", "has_backward_hooks", "has_flops", "storage_identity", "unwatched", "version"]


def unwatched() -> Any:
    """A context in which no mode sees functions of tensors: ours, and a metric's, are no operations of the step."""
    return torch._C.DisableTorchFunction()


def storage_identity(tensor: Tensor) -> int:
    """A number that tensors share exactly if they share memory, also where the memory is fake and has no address."""
    with unwatched():
        return int(tensor.untyped_storage()._cdata)


def has_flops(operator: Any) -> bool:
    """Whether an operator of the dispatcher is one of those that are counted in FLOPs: products and convolutions."""
    return operator.overloadpacket in flop_registry


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks for its backward; there is no public list of them."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def version(tensor: Tensor) -> int:
    """How often a tensor's memory was changed in place, as autograd counts it; the counter has no public name."""
    return tensor._version


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of every operator how many floating-point operations it does, and whether it draws random numbers."""

    def __init__(self, on_flops: Any, on_random: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_flops = on_flops
        self._on_random = on_random

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self._on_flops(int(count(*args, **(kwargs or {}), out_val=result)))
        if torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, args, kwargs or {}):
            self._on_random()
        return result


def _without_dropout(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this is an attention that would draw only for its dropout, and has none."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given == 0.0)
    return False
