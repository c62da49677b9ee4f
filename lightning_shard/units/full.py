"""Whole tensors out of shards, for tests, exports and comparisons."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def full_tensor(value: Tensor) -> Tensor:
    """The whole of a tensor, on the CPU. Collective for a sharded one."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().cpu()


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Whole parameters and buffers by name, on every rank, on the CPU. Collective."""
    return {name: full_tensor(value) for name, value in module.state_dict().items() if isinstance(value, Tensor)}


def full_optimizer_state(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, dict[str, Tensor]]:
    """Whole optimizer states by parameter and state name, on every rank, on the CPU. Collective."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    states: dict[str, dict[str, Tensor]] = {}
    for optimizer in optimizers:
        for parameter, values in optimizer.state.items():
            kept = {key: full_tensor(torch.as_tensor(value)) for key, value in values.items() if value is not None}
            if kept:
                states.setdefault(names[id(parameter)], {}).update(kept)
    return states


def has_sharded_tensors(value: Any) -> bool:
    """Whether a nested structure of dicts, lists and tuples has a sharded tensor in it."""
    if isinstance(value, dict):
        return any(map(has_sharded_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(has_sharded_tensors, value))
    return isinstance(value, DTensor)
