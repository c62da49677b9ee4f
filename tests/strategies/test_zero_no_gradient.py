"""A parameter without a gradient in a step has a gradient of zero: the partitions are flat, and none is left out.

A plain optimizer skips such a parameter. Here its momentum goes on and its weight decays, as they would if the loss
held 0 x the parameter.
"""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shard.testing import run_distributed
from tests.strategies.cases import each
from tests.strategies.zero_modules import Trained, numbers, sgd
from tests.strategies.zero_runs import loader, trainer, weights

pytestmark = pytest.mark.ranks


class Idle(Trained):
    """One parameter is used in the first step only, one never."""

    def __init__(self, zero_gradient: bool) -> None:
        super().__init__(sgd(momentum=0.9, weight_decay=0.1))
        torch.manual_seed(0)
        self.used = nn.Linear(4, 3)
        self.once = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(5))
        self.zero_gradient = zero_gradient

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out = self.used(batch)
        loss = (out * self.once if batch_idx == 0 else out).square().mean()
        return loss + 0.0 * (self.once.sum() + self.never.sum()) if self.zero_gradient else loss


class Keep(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights = weights(trainer)


def train(strategy: str, zero_gradient: bool) -> dict[str, Any]:
    keep = Keep()
    trainer(strategy, callbacks=[keep]).fit(Idle(zero_gradient), loader(numbers(4)))
    return keep.weights


NAMES = ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]


def test_no_gradient_is_a_gradient_of_zero() -> None:
    """One process has a gradient of zero for the idle parameters, or none, as it is told."""
    ((zeros, skipped),) = run_distributed(lambda: [train("auto", zero_gradient=given) for given in (True, False)], 1)
    assert torch.equal(skipped["never"], torch.ones(5))
    for rank in run_distributed(each, 2, NAMES, lambda strategy: train(strategy, zero_gradient=False)):
        for name, found in rank.items():
            for key, value in zeros.items():
                torch.testing.assert_close(found[key], value, msg=lambda message, name=name: f"{name}: {message}")
            assert (found["never"] < 0.97).all(), name  # weight decay
            assert (found["once"] - skipped["once"]).abs().max() > 0.01, name  # momentum
