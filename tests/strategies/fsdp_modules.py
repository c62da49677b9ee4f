"""Modules and runs for tests of FSDP2: repeated blocks of uneven sizes, and a fit that hands whole states back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_shard import FSDP2Strategy, SizeUnits
from lightning_shard.testing import run_distributed
from tests.strategies.cases import Case as Case
from tests.strategies.cases import assert_all_same as assert_all_same
from tests.strategies.zero_modules import Classifying, MakeOptimizer
from tests.strategies.zero_runs import loader, trainer

NAMES = ["fsdp2", "fsdp2_grad", "fsdp2_offload"]
"""Every registered name that two ranks can run."""


def smallest_units() -> FSDP2Strategy:
    """Every module that may be a unit is one: as many gathers as there can be."""
    return FSDP2Strategy(units=SizeUnits(min_params=1))


class Block(nn.Module):
    """A residual block; no size in it is a multiple of 2 or 4."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(Classifying):
    """Three blocks between two linear layers, and a 0-dimensional scale beside them."""

    def __init__(self, optimizer: MakeOptimizer | None = None) -> None:
        super().__init__(optimizer)
        self.first = nn.Linear(13, 7)
        self.blocks = nn.ModuleList([Block(7) for _ in range(3)])
        self.last = nn.Linear(7, 3)
        self.log_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.log_scale.exp()


class Pair(nn.Module):
    """A block of two layers of width 4."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank has after a fit."""

    losses: list[float]
    """The loss of each batch on this rank's rows."""

    weights: dict[str, Tensor]
    """Whole parameters and buffers."""

    optimizer: dict[str, dict[str, Tensor]]
    """Whole optimizer states; empty where the strategy is none of ours."""


class Keep(pl.Callback):
    """Collects an `Outcome` while the strategy is still set up."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self.outcome: Outcome | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._losses.append(loss.item())

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        ours = isinstance(strategy, FSDP2Strategy)
        state = strategy.full_state_dict() if ours else module.state_dict()
        self.outcome = Outcome(
            losses=self._losses,
            weights={name: value.detach().clone() for name, value in state.items()},
            optimizer=strategy.full_optimizer_state() if ours else {},
        )


def fit(
    strategy: Any,
    module: pl.LightningModule,
    batches: Sequence[Any],
    *,
    callbacks: Sequence[pl.Callback] = (),
    validate: Sequence[Any] | None = None,
    ckpt_path: Any = None,
    save: Any = None,
    **settings: Any,
) -> Outcome:
    """Train ``module`` on this rank's rows of the global ``batches``; then write a checkpoint to ``save``."""
    keep = Keep()
    run = trainer(strategy, callbacks=[*callbacks, keep], **settings)
    run.fit(module, loader(batches), None if validate is None else loader(validate), ckpt_path=ckpt_path)
    if save is not None:
        run.save_checkpoint(save)
    assert keep.outcome is not None
    return keep.outcome


def seeded(make: Callable[[], pl.LightningModule], seed: int = 11) -> pl.LightningModule:
    torch.manual_seed(seed)
    return make()


def reference(fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)`` in a fresh process of its own."""
    return run_distributed(fn, 1, *args, timeout=60.0)[0]


def on_ranks(fn: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 60.0) -> list[Any]:
    """``fn(*args)`` on every rank."""
    return run_distributed(fn, ranks, *args, timeout=timeout)


def assert_same_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], atol: float = 5e-6) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        difference = (found[name] - value).abs() - 1e-5 * value.abs()
        assert difference.numel() == 0 or difference.max().item() <= atol, name
