"""Parameters that several stages use: kept on each, with the sum of their gradients."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard._compat.simulating import is_simulated


@dataclass(frozen=True, kw_only=True)
class TiedGroup:
    """Parameters that the same ranks share."""

    names: tuple[str, ...]
    """Their names."""

    ranks: tuple[int, ...]
    """The ranks within a pipeline that keep them, the owner first."""

    group: Any
    """Their process group."""


def tied_groups(ranks_of: dict[str, tuple[int, ...]], pipelines: Sequence[Sequence[int]], rank: int) -> list[TiedGroup]:
    """The groups that this rank is in. Collective: every rank makes every group.

    Args:
        ranks_of: For each parameter the ranks, within a pipeline, that keep it.
        pipelines: Global ranks of all pipelines.
        rank: This rank.

    """
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, ranks in ranks_of.items():
        if len(ranks) > 1:
            by_ranks.setdefault(ranks, []).append(name)
    groups = []
    for ranks, names in sorted(by_ranks.items()):
        for pipeline in pipelines:
            members = [pipeline[place] for place in ranks]
            group = dist.new_group(members)
            if rank in members:
                groups.append(TiedGroup(names=tuple(names), ranks=tuple(members), group=group))
    return groups


def sum_gradients(groups: Iterable[TiedGroup], parameters: dict[str, nn.Parameter]) -> None:
    """Sum the gradients of tied parameters over the ranks that keep them. Collective.

    A parameter that no rank has a gradient for keeps none.
    """
    for tied in groups:
        reduce_gradients([parameters[name] for name in tied.names], tied.group, average=False)


def reduce_gradients(parameters: Sequence[nn.Parameter], group: Any, *, average: bool) -> None:
    """Sum or average gradients over ``group``, each dtype in one message. Collective.

    Args:
        parameters: The same ones on every rank, in the same order.
        group: The ranks.
        average: Divide by their number.

    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for dtype in sorted({parameter.dtype for parameter in trained}, key=str):
        chosen = [parameter for parameter in trained if parameter.dtype == dtype]
        _reduce(chosen, group, average)


def _reduce(parameters: list[nn.Parameter], group: Any, average: bool) -> None:
    locals_ = [_local_gradient(parameter) for parameter in parameters]
    reached = [place for place, is_reached in enumerate(reached_anywhere(parameters, group)) if is_reached]
    if not reached:
        return
    pieces: list[Tensor] = []
    for place in reached:
        gradient = locals_[place]
        if gradient is None:
            parameters[place].grad = torch.zeros_like(parameters[place])
            gradient = _local_gradient(parameters[place])
        assert gradient is not None
        pieces.append(gradient)
    flat = torch.cat([piece.reshape(-1) for piece in pieces])
    dist.all_reduce(flat, group=group)
    if average:
        flat.div_(dist.get_world_size(group))
    start = 0
    for piece in pieces:
        piece.copy_(flat[start : start + piece.numel()].view_as(piece))
        start += piece.numel()


def reached_anywhere(parameters: Sequence[nn.Parameter], group: Any) -> list[bool]:
    """For each parameter whether any rank of ``group`` has a gradient for it. Collective."""
    mine = [parameter.grad is not None for parameter in parameters]
    if not parameters or is_simulated():  # others are taken to be like this rank
        return mine
    there = torch.tensor(mine, dtype=torch.float32, device=_device(parameters))
    dist.all_reduce(there, group=group)
    return [bool(count) for count in there.tolist()]


def _local_gradient(parameter: nn.Parameter) -> Tensor | None:
    return None if parameter.grad is None else local_part(parameter.grad)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its memory; any other tensor itself."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _device(parameters: Sequence[nn.Parameter]) -> torch.device:
    return local_part(parameters[0]).device
