"""What a rank needs in order to be simulated without the others: surroundings that ask nobody and want no values."""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard._compat.dry_run import stand_in_metric
from lightning_shard.pipeline.runtime import Pipeline


class Alone(LightningEnvironment):
    """One rank of many that do not exist."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank, self._ranks = rank, world_size

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @override
    def world_size(self) -> int:
        return self._ranks

    @override
    def set_world_size(self, size: int) -> None:
        pass

    @override
    def global_rank(self) -> int:
        return self._rank

    @override
    def set_global_rank(self, rank: int) -> None:
        pass

    @override
    def local_rank(self) -> int:
        return self._rank


class Repeated:
    """A loader that gives one batch again and again."""

    def __init__(self, batch: Any, times: int) -> None:
        self._batch, self._times = batch, times

    def __len__(self) -> int:
        return self._times

    def __iter__(self) -> Iterator[Any]:
        return (self._batch for _ in range(self._times))


def quieten(clone: "pl.LightningModule") -> None:
    """Take from a copied module what would want values: logs and metrics are no part of a step's memory."""
    for submodule in clone.modules():
        if isinstance(submodule, pl.LightningModule):
            vars(submodule).update(log=_nothing, log_dict=_nothing, print=_nothing)
        elif not any(True for _ in submodule.parameters()):
            stand_in_metric(submodule)


def convert(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``module.to(dtype)`` for tensors without data, which cannot take each other's places as real ones can."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the old ones, so that none of their ids is used again

    def converted(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        if id(tensor) not in made:
            new = tensor.detach().to(dtype)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            made[id(tensor)] = (tensor, new)
        return made[id(tensor)][1]

    for submodule in module.modules():
        for held in (submodule._parameters, submodule._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = converted(tensor)  # type: ignore[assignment]
    return module


def wait_for_nobody() -> None:
    """End a pipeline's batch without the last stage's message: who reads it would read numbers that nobody sent."""
    Pipeline._finish = _without_message  # type: ignore[method-assign, assignment]


def _without_message(pipeline: Pipeline, batch: Any) -> Tensor:
    pipeline._batch = None
    return torch.zeros(())


def _nothing(*_: Any, **__: Any) -> None:
    return None
