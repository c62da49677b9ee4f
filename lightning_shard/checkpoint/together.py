"""What all ranks do together: each does its part, and if one fails, all of them fail and say why."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


def together(what: str, do: Callable[[], Result], group: Any = None) -> Result:
    """Do something on every rank. Collective, whatever happens.

    Args:
        what: What is done, for the message on ranks that did not fail.
        do: The work, which must not wait for other ranks.
        group: The ranks; ``None`` for all.

    Raises:
        Exception: This rank's own.
        RuntimeError: If another rank failed, with its cause.

    """
    failure: Exception | None = None
    result: Any = None
    try:
        result = do()
    except Exception as error:
        failure = error
    reasons = everyones(None if failure is None else f"{type(failure).__name__}: {failure}", group)
    if failure is not None:
        raise failure
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise RuntimeError(f"{what} failed on rank {rank} with {reason}")
    done: Result = result
    return done


def everyones(value: Any, group: Any = None) -> list[Any]:
    """What every rank passed, in order. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_first(value: Any, group: Any = None) -> Any:
    """What the group's first rank passed. Collective."""
    if not dist.is_initialized():
        return value
    first = dist.get_global_rank(group, 0) if group is not None else 0
    values = [value]
    dist.broadcast_object_list(values, src=first, group=group)
    return values[0]
