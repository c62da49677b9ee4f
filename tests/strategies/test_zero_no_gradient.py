"""A parameter without a gradient in a step has a gradient of zero: the partitions are flat, and none is left out.

A plain optimizer skips such a parameter. Here its momentum goes on and its weight decays, as they would if the loss
held 0 x the parameter.
"""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.strategies.zero_modules import Trained, numbers, sgd
from tests.strategies.zero_runs import in_one_process, loader, on_each_rank, trainer, weights

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


@pytest.fixture(scope="module")
def references() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of one process where the idle parameters have gradients of zero, and where they have none."""
    with_zeros = in_one_process(lambda strategy: train(strategy, zero_gradient=True))
    return with_zeros, in_one_process(lambda strategy: train(strategy, zero_gradient=False))


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"])
def test_no_gradient_is_a_gradient_of_zero(name: str, references: tuple[dict[str, Tensor], ...]) -> None:
    zeros, skipped = references
    assert torch.equal(skipped["never"], torch.ones(5))
    for rank in on_each_rank(lambda strategy: train(strategy, zero_gradient=False), name):
        for key, value in zeros.items():
            torch.testing.assert_close(rank[key], value)
        assert (rank["never"] < 0.97).all()  # weight decay
        assert (rank["once"] - skipped["once"]).abs().max() > 0.01  # momentum
