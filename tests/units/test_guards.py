"""Refusals by arguments alone."""

from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_shard import ClassUnits, FSDP2Strategy, MixedPrecision, SizeUnits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"units": "block"}, "units='block'.*'blocks', SizeUnits"),
        ({"replicas": 0}, "replicas=0.*at least 1"),
        ({"reshard_after_forward": 1}, "reshard_after_forward=1.*at least 2"),
        ({"reshard_after_forward": -2}, "reshard_after_forward=-2"),
        ({"activation_checkpointing": []}, "activation_checkpointing=.*at least one class"),
    ],
)
def test_impossible_arguments_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        FSDP2Strategy(**arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SizeUnits(min_params=0), "min_params=0"),
        (lambda: ClassUnits(classes=[]), "at least one class"),
        (lambda: ClassUnits(classes=["Linear"]), "'Linear'.*import path"),
        (lambda: ClassUnits(classes=["torch.nn. Linear"]), "import path"),
        (lambda: ClassUnits(classes=[int]), "neither a class of modules"),
        (lambda: MixedPrecision(compute=None, reduce=None), "changes nothing"),
    ],
)
def test_impossible_options_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_good_strategy_has_no_side_effect() -> None:
    first = FSDP2Strategy(units=ClassUnits(classes=[nn.Linear, "torch.nn.LSTM"]), reshard_after_forward=2, replicas=3)
    assert first.lightning_module is None
