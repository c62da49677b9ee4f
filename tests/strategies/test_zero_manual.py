"""Manual optimization: one optimizer trains as in one process; several are refused before the first step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.testing import RankFailed, assert_same_training
from tests.strategies.zero_modules import Trained, numbers, sgd
from tests.strategies.zero_runs import loader, on_each_rank, trainer

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


@pytest.mark.parametrize("model", [TwoBackwards, Discarded, DiscardedByModule])
def test_several_backwards(model: type[Manual]) -> None:
    assert_same_training(model, ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload_params"], numbers())


@pytest.mark.parametrize("model", [EverySecondStep, Toggled, ByClosure])
def test_other_loops(model: type[Manual]) -> None:
    assert_same_training(model, ["zero1", "zero2", "zero3", "zero3_offload"], numbers())


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


@pytest.mark.parametrize("name", ["zero1", "zero2_offload", "zero3"])
def test_several_optimizers_are_refused_before_the_first_step(name: str) -> None:
    def train(name: str) -> None:
        trainer(name).fit(Adversarial(), loader(numbers(width=1)))

    with pytest.raises(RankFailed, match=r"2 optimizers .*one optimizer.*fsdp2"):
        on_each_rank(train, name)
