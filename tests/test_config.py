"""Options judge themselves when they are made."""

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from lightning_shard.config import ActivationCheckpointing, Offload, ZeroPlusPlus

REFUSED = [
    (Offload, {"optimizer": "gpu"}, "optimizer='gpu'"),
    (Offload, {"parameters": True}, "parameters=True"),
    (Offload, {"optimizer": None}, "offloads nothing"),
    (Offload, {"optimizer": "nvme"}, "nvme_path="),
    (Offload, {"parameters": "nvme", "nvme_path": ""}, "nvme_path="),
    (Offload, {"nvme_path": "/swap"}, "nvme_path='/swap'"),
    (Offload, {"ratio": 0.0}, "ratio=0.0"),
    (Offload, {"ratio": 1.5}, "ratio=1.5"),
    (Offload, {"ratio": float("nan")}, "ratio=nan"),
    (Offload, {"ratio": 0.5, "optimizer": None, "parameters": "cpu"}, "optimizer=None"),
    (Offload, {"ratio": 0.5, "optimizer": "nvme", "nvme_path": "/swap"}, "optimizer='nvme'"),
    (Offload, {"ratio": 0.5, "cpu_adam": False}, "cpu_adam=False"),
    (Offload, {"cpu_adam": True, "optimizer": None, "parameters": "cpu"}, "cpu_adam=True"),
    (ZeroPlusPlus, {}, "switches nothing on"),
    (ZeroPlusPlus, {"hpz_partition_size": 0}, "hpz_partition_size=0"),
    (ActivationCheckpointing, {"contiguous_memory": True}, "partition=True"),
]


@pytest.mark.parametrize(("option", "settings", "named"), REFUSED, ids=lambda value: str(value)[:50])
def test_an_impossible_option_names_the_value(option: type, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError) as caught:
        option(**settings)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("option", "settings"),
    [
        (Offload, {}),
        (Offload, {"optimizer": "cpu", "parameters": "nvme", "nvme_path": "a folder/swap"}),
        (Offload, {"optimizer": None, "parameters": "cpu"}),
        (Offload, {"ratio": 0.25, "cpu_adam": True}),
        (Offload, {"ratio": 0.25}),
        (ZeroPlusPlus, {"quantized_gradients": True}),
        (ZeroPlusPlus, {"hpz_partition_size": 8}),
        (ActivationCheckpointing, {"partition": True, "contiguous_memory": True}),
    ],
    ids=str,
)
def test_a_possible_option_is_kept(option: type, settings: dict[str, Any]) -> None:
    made = option(**settings)
    assert {key: getattr(made, key) for key in settings} == settings


@pytest.mark.parametrize("made", [Offload(), ZeroPlusPlus(quantized_weights=True), ActivationCheckpointing()])
def test_options_are_frozen_and_named(made: Any) -> None:
    first = fields(made)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(made, first, None)
    with pytest.raises(TypeError):
        type(made)("cpu")
    assert made == type(made)(**{field.name: getattr(made, field.name) for field in fields(made)})
