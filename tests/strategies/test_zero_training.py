"""Every ZeRO name trains as one process does: losses, all weights on every rank, and optimizer states."""

from typing import Any

import pytest
import torch

from tests.strategies.cases import assert_all_same, under
from tests.strategies.zero_modules import STAGES, ZERO_NAMES, Classifier, Upcast, adamw, classes, sgd

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("optimizer", [adamw(), sgd(momentum=0.9)], ids=["adamw", "sgd"])
def test_five_steps_on_two_ranks(optimizer: Any) -> None:
    assert_all_same(under(ZERO_NAMES, lambda: Classifier(optimizer), classes(5)))


def test_five_steps_on_four_ranks() -> None:
    names = [*STAGES, "zero3_offload_params"]
    assert_all_same(under(names, lambda: Classifier(sgd(momentum=0.9)), classes(5)), ranks=4)


def test_bf16_stays_near_bf16_in_one_process() -> None:
    cases = under(ZERO_NAMES, lambda: Upcast(sgd(0.05)), classes(5), precision="bf16-mixed")
    for key, comparison in assert_all_same(cases, atol=2e-2, rtol=2e-2).items():
        assert comparison.loss <= 1e-3, key
        assert comparison.weight <= 1e-3, key


def test_accumulation_and_clipping() -> None:
    """Five batches in windows of two: the last window is short, and the Trainer steps at the epoch's end anyway."""
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    assert_all_same(under(ZERO_NAMES, lambda: Classifier(sgd()), classes(5), **settings))


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


def test_elementwise_optimizers() -> None:
    cases = {}
    for name, settings in OPTIMIZERS.items():
        kind = getattr(torch.optim, name)

        def make(kind: Any = kind, settings: dict[str, Any] = settings) -> Classifier:
            return Classifier(lambda module: kind(module.parameters(), **settings))

        for key, case in under(["zero1", "zero3_offload"], make, classes(4)).items():
            cases[f"{name} under {key}"] = case
    assert_all_same(cases)
