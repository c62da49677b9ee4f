"""Weights and optimizer states of all stages in one place, as one process would have them, and back."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard.pipeline.absent import AbsentTensor, is_absent
from lightning_shard.sending import sendable


@dataclass(frozen=True, kw_only=True)
class Gatherer:
    """Brings what stages own to other ranks of their pipeline.

    Every method is collective in the pipeline, and in the ranks that share a stage's parameters.
    """

    group: Any
    """Process group of the pipeline."""

    rank_of_stage: Callable[[int], int]
    """The place in the pipeline of a stage's rank."""

    device: torch.device
    """Of messages."""

    everywhere: bool
    """Whether all ranks get the result, or only the first of the pipeline."""

    @property
    def keeps(self) -> bool:
        """Whether this rank gets the result."""
        return self.everywhere or dist.get_rank(self.group) == 0

    def tensor(self, tensor: Tensor, owner: int) -> Tensor | None:
        """``tensor`` of the stage ``owner``, whole and on the CPU, where it is wanted; ``None`` elsewhere.

        Args:
            tensor: On the owner the tensor; elsewhere one of the same shape and dtype, which may be absent.
            owner: The stage.

        """
        source = self.rank_of_stage(owner)
        mine = dist.get_rank(self.group) == source
        if mine:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            data = whole.detach().to(self.device).contiguous()
        else:
            data = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=self.device)
        if self.everywhere:
            dist.broadcast(sendable(data), src=dist.get_global_rank(self.group, source), group=self.group)
        elif source != 0:
            first = dist.get_global_rank(self.group, 0)
            if mine:
                dist.send(sendable(data), dst=first, group=self.group)
            elif self.keeps:
                dist.recv(sendable(data), src=dist.get_global_rank(self.group, source), group=self.group)
        return data.to("cpu", copy=mine) if self.keeps else None

    def objects(self, value: Any) -> list[Any]:
        """What every rank of the pipeline passed, in order."""
        every: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(every, value, group=self.group)
        return every


def gather_weights(
    module: "pl.LightningModule", owners: dict[str, tuple[int, ...]], buffers: dict[str, int], gather: Gatherer
) -> dict[str, Any]:
    """The module's state dict with the tensors of all stages; empty where it is not wanted."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    known: dict[str, Tensor | None] = {}
    state: dict[str, Any] = {}
    for key, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            state[key] = value
            continue
        name = names.get(id(value), key)
        if name not in known:
            owner = owners[name][0] if name in owners else buffers.get(name, 0)
            known[name] = gather.tensor(value, owner)
        state[key] = known[name]
    return state if gather.keeps else {}


def gather_optimizer(
    optimizer: Optimizer, names: dict[int, str], owners: dict[str, tuple[int, ...]], gather: Gatherer
) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter name, of all stages; empty where it is not wanted."""
    mine: dict[str, dict[str, Any]] = {}
    tensors: dict[tuple[str, str], Tensor] = {}
    for parameter, values in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None or is_absent(parameter):
            continue
        mine[name] = {}
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim():
                mine[name][key] = torch.empty(value.shape, dtype=value.dtype, device="meta")
                tensors[name, key] = value
            else:
                mine[name][key] = value.detach().cpu() if isinstance(value, Tensor) else value
    lengths = [len(group["params"]) for group in optimizer.param_groups]
    told = gather.objects((lengths, mine))
    if any(other != lengths for other, _ in told):
        raise RuntimeError(
            f"The optimizer's groups have different numbers of parameters on the ranks: {[other for other, _ in told]}."
            " A callback or hook adds parameters to it by their values, which each rank has for its own stages only."
        )
    described = [states for _, states in told]
    state: dict[str, dict[str, Any]] = {}
    for name in names.values():
        described_here = described[gather.rank_of_stage(owners[name][0])].get(name)
        if described_here is None:
            continue
        state[name] = {}
        for key, value in described_here.items():
            if isinstance(value, Tensor) and value.is_meta:
                value = gather.tensor(tensors.get((name, key), value), owners[name][0])
            state[name][key] = value
    return state if gather.keeps else {}


def plain_optimizer_state(
    optimizer: Optimizer, names: dict[int, str], by_name: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` of one process would be."""
    groups, state, place = [], {}, 0
    for group in optimizer.param_groups:
        packed = {key: value for key, value in group.items() if key != "params"}
        packed["params"] = list(range(place, place + len(group["params"])))
        for parameter in group["params"]:
            values = by_name.get(names.get(id(parameter), ""))
            if values is not None:
                state[place] = values
            place += 1
        groups.append(packed)
    return {"state": state, "param_groups": groups}


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Names of parameters by identity."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def trained_here(optimizers: Sequence[Optimizer]) -> Iterator[nn.Parameter]:
    """The optimizers' parameters that are on this rank."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from (parameter for parameter in group["params"] if not isinstance(parameter, AbsentTensor))
