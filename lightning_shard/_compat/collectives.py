"""How torch's dispatcher names the collectives of ``torch.distributed``, and what their arguments are.

The operators behind the public functions are no public API, so their names are read here, and only here. Written for
torch 2.13.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

# Functional collectives name their group; the table of names has no public door.
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup

# The base class of modes that see every operator is public in its documentation only.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Collective", "Operation", "TorchDispatchMode", "read_collectives"]

Operation = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "gather", "scatter", "send"
]

# operator -> what it is, and which argument's elements are counted
_COLLECTIVES: dict[str, tuple[Operation, int]] = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::allgather_coalesced_": ("all_gather", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::gather_": ("gather", 1),
    "c10d::scatter_": ("scatter", 0),
    "c10d::send": ("send", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", 0),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::broadcast_": ("broadcast", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_c10d_functional::isend": ("send", 0),
}
_OF_ONE_RANK = {"gather", "scatter"}  # the counted argument is one rank's part of the whole
_FUNCTIONAL_GATHER = "_c10d_functional::all_gather"  # only the input is an argument, again one rank's part
_NOT_COUNTED = {
    "c10d::barrier",
    "c10d::monitored_barrier_",
    "c10d::check_for_nan",
    "c10d::recv_",  # counted where it is sent
    "c10d::recv_any_source_",
    "_c10d_functional::irecv",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",  # waits, too
}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One call of a collective, or of a send, as one rank sees it."""

    operation: Operation
    """What is done."""

    elements: int
    """n, the elements of the whole: of the gathered tensor for an all-gather, of the tensor that is cut for a
    reduce-scatter, of all ranks' parts for a gather or scatter."""

    dtype: torch.dtype
    """The elements' type."""

    ranks: int
    """Size of the process group."""


def read_collectives(operator: Any, args: tuple[Any, ...]) -> Iterator[Collective]:
    """The communication that a call of a dispatcher operator is; nothing for operators that do not communicate.

    Args:
        operator: What ``__torch_dispatch__`` got.
        args: Its positional arguments.

    Raises:
        NotImplementedError: If the operator communicates in a way that is not known here.

    """
    if operator.namespace not in ("c10d", "_c10d_functional"):
        return
    name = operator._schema.name
    if name in _NOT_COUNTED:
        return
    if name == "_c10d_functional::batch_p2p_ops":
        sent = [tensor for kind, tensor in zip(args[0], args[3], strict=True) if kind == "isend"]
        yield from _collectives("send", sent, _group_size(args[4]), whole=True)
        return
    if name not in _COLLECTIVES:
        raise NotImplementedError(f"{name} communicates in a way that is not known here: it cannot be counted.")
    operation, counted = _COLLECTIVES[name]
    functional = operator.namespace == "_c10d_functional"
    group = args[-1] if functional else next(arg for arg in args if isinstance(arg, torch.ScriptObject))
    whole = operation not in _OF_ONE_RANK and not name.startswith(_FUNCTIONAL_GATHER)
    yield from _collectives(operation, _tensors(args[counted]), _group_size(group), whole)


def _collectives(operation: Operation, tensors: Iterable[Tensor], ranks: int, whole: bool) -> Iterator[Collective]:
    elements: dict[torch.dtype, int] = {}
    for tensor in tensors:
        elements[tensor.dtype] = elements.get(tensor.dtype, 0) + tensor.numel() * (1 if whole else ranks)
    for dtype, count in elements.items():
        yield Collective(operation=operation, elements=count, dtype=dtype, ranks=ranks)


def _group_size(group: Any) -> int:
    if isinstance(group, str):
        name: Any = group
        group = _resolve_process_group(name)
    elif isinstance(group, torch.ScriptObject):
        group = ProcessGroup.unbox(group)
    return int(group.size())


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists."""
    if isinstance(value, Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors(item)
