"""Private API behind simulated ranks: a process group that talks to nobody, and what tells of fake memory."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# DTensor computes the shapes of its results with tensors of global size, in whatever fake mode is active.
from torch.distributed.tensor._sharding_prop import ShardingPropagator

# A process group whose collectives return at once; torch's own tests and estimators live on it.
from torch.testing._internal.distributed.fake_pg import FakeStore

# Operators are tried on real tensors in the midst of a simulation.
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "in_backward",
    "is_simulated",
    "join_fake_group",
    "on_real_tensors",
    "shapes_computed",
    "storage_of",
    "watch_resizing",
    "when_freed",
]


def join_fake_group(rank: int, world_size: int) -> None:
    """Make this process one rank of many that do not exist.

    Objects that ranks tell each other are then those of this rank, as if all ranks had said the same; tensors that they
    send stay as they are. For a process that ends with the simulation: it is not undone.
    """
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    send = dist.isend

    def isend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _Sending(send(tensor, *args, **kwargs), tensor)

    for module in (dist, dist.distributed_c10d):
        vars(module).update(
            all_gather_object=all_gather_object,
            broadcast_object_list=nothing,
            monitored_barrier=nothing,
            isend=isend,
        )


class _Sending:
    """A message under way, which keeps its tensor as those of gloo and NCCL do; the fake group's does not."""

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work, self._tensor = work, tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def is_simulated() -> bool:
    """Whether the other ranks of the default process group do not exist."""
    return bool(dist.get_backend() == "fake")


def in_backward() -> bool:
    """Whether autograd's engine runs in this thread; there is no public question for it."""
    return bool(torch._C._current_graph_task_id() != -1)


def on_real_tensors() -> AbstractContextManager[Any]:
    """A context in which no mode is active: tensors that are made in it have data."""
    found: AbstractContextManager[Any] = _disable_current_modes()
    return found


def storage_of(tensor: Tensor) -> "tuple[int, torch.UntypedStorage] | None":
    """The tensor's memory with a number that identifies it while it lives; ``None`` where it has none of its own."""
    with torch._C.DisableTorchFunction():
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return None
    return int(storage._cdata), storage


def when_freed(storage: torch.UntypedStorage, then: Callable[[], None]) -> "weakref.ref[torch.UntypedStorage]":
    """Call ``then`` when the memory is given back. The result must be kept.

    A storage's Python object lives exactly as long as the memory, from when it was first asked for.
    """
    return weakref.ref(storage, lambda _: then())


@contextmanager
def watch_resizing(note: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call ``note`` after each resize of a storage: FSDP frees and refills gathered parameters in that way."""
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        note(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


@contextmanager
def shapes_computed(around: Callable[[], Any]) -> Iterator[None]:
    """Open ``around()`` wherever DTensor only computes shapes: what it makes there is no memory of the run."""
    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name)

    def propagate(*args: Any, **kwargs: Any) -> Any:
        with around():
            return original(*args, **kwargs)

    setattr(ShardingPropagator, name, propagate)
    try:
        yield
    finally:
        setattr(ShardingPropagator, name, original)
