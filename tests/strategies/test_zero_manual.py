"""Manual optimization: one optimizer trains as in one process; several are refused before the first step."""

import re
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_shard.testing import run_distributed
from tests.strategies.cases import assert_all_same, each, under
from tests.strategies.zero_modules import Trained, numbers, sgd
from tests.strategies.zero_runs import loader, trainer

pytestmark = pytest.mark.ranks


class Manual(Trained):
    def __init__(self) -> None:
        super().__init__(sgd(0.1, momentum=0.9))
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()


class TwoBackwards(Manual):
    """Two forwards, then two backwards, as contrastive losses have them."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        first, second = self.loss(batch), self.loss(2 * batch + 1)
        self.manual_backward(first)
        self.manual_backward(second)
        optimizer.step()
        return (first + second).detach()


class Discarded(Manual):
    """A backward whose gradients are thrown away before the step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.zero_grad()
        loss = self.loss(2 * batch + 1)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


class DiscardedByModule(Manual):
    """The same through the module's own zero_grad."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.manual_backward(self.loss(batch))
        self.zero_grad()
        loss = self.loss(2 * batch + 1)
        self.manual_backward(loss)
        self.optimizers().step()
        self.zero_grad()
        return loss.detach()


class EverySecondStep(Manual):
    """Accumulation over two batches, counted by the module."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()


class Toggled(Manual):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        with optimizer.toggle_model():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss.detach()


class ByClosure(Manual):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        losses = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            losses.append(self.loss(batch))
            self.manual_backward(losses[-1])
            return losses[-1]

        optimizer.step(closure=closure)
        return losses[-1].detach()


def test_loops_of_the_modules_own() -> None:
    """Several backwards in a step, none in some, toggled parameters, closures."""
    cases = {}
    for model in (TwoBackwards, Discarded, DiscardedByModule):
        names = ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload_params"]
        cases |= under(names, model, numbers())
    for model in (EverySecondStep, Toggled, ByClosure):
        cases |= under(["zero1", "zero2", "zero3", "zero3_offload"], model, numbers())
    assert_all_same(cases)


class Adversarial(Trained):
    """Two optimizers, as adversarial networks have them."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Linear(1, 1)
        self.critic = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        raise AssertionError("a step was made")

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.critic)]


def test_several_optimizers_are_refused_before_the_first_step() -> None:
    def refusal(name: str) -> str:
        with pytest.raises(MisconfigurationException) as refused:
            trainer(name).fit(Adversarial(), loader(numbers(width=1)))
        return str(refused.value)

    for found in run_distributed(each, 2, ["zero1", "zero2_offload", "zero3"], refusal):
        for name, message in found.items():
            assert re.search(r"2 optimizers .*one optimizer.*fsdp2", message), (name, message)
