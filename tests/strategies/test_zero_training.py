"""Every ZeRO name trains as one process does: losses, all weights on every rank, and optimizer states."""

from typing import Any

import pytest
import torch

from lightning_shard.testing import assert_same_training
from tests.strategies.zero_modules import STAGES, ZERO_NAMES, Classifier, Upcast, adamw, classes, sgd

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("optimizer", [adamw(), sgd(momentum=0.9)], ids=["adamw", "sgd"])
def test_five_steps_on_two_ranks(optimizer: Any) -> None:
    assert_same_training(lambda: Classifier(optimizer), ZERO_NAMES, classes(5))


def test_five_steps_on_four_ranks() -> None:
    names = [*STAGES, "zero3_offload_params"]
    assert_same_training(lambda: Classifier(sgd(momentum=0.9)), names, classes(5), world_size=4)


def test_bf16_stays_near_bf16_in_one_process() -> None:
    report = assert_same_training(
        lambda: Upcast(sgd(0.05)), ZERO_NAMES, classes(5), precision="bf16-mixed", atol=2e-2, rtol=2e-2
    )
    for name in ZERO_NAMES:
        assert report.strategies[name].loss_difference <= 1e-3, name
        assert report.strategies[name].weight_difference <= 1e-3, name


def test_accumulation_and_clipping() -> None:
    """Five batches in windows of two: the last window is short, and the Trainer steps at the epoch's end anyway."""
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    assert_same_training(lambda: Classifier(sgd()), ZERO_NAMES, classes(5), trainer_kwargs=settings)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1},
    "Adam": {"amsgrad": True},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"lr": 1e-3, "momentum": 0.5},
    "Rprop": {},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_elementwise_optimizers(optimizer: str) -> None:
    def make() -> Classifier:
        return Classifier(lambda module: getattr(torch.optim, optimizer)(module.parameters(), **OPTIMIZERS[optimizer]))

    assert_same_training(make, ["zero1", "zero3_offload"], classes(4))
