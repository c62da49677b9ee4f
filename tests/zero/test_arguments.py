"""Arguments that contradict each other, the stage or the device."""

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard.config import ActivationCheckpointing, Offload, ZeroPlusPlus
from lightning_shard.strategies.zero import ZeROStrategy
from lightning_shard.zero.arguments import check_arguments, check_device, check_effective
from tests.zero.test_engine_config import options

NVME = Offload(optimizer="nvme", nvme_path="/swap")
PLUS = ZeroPlusPlus(quantized_weights=True)

REFUSED = [
    ({"stage": 0}, "stage=0"),
    ({"stage": 4}, "stage=4"),
    ({"stage": "3"}, "stage='3'"),
    ({"bucket_elements": 1}, "bucket_elements=1"),
    ({"prefetch_elements": -1}, "prefetch_elements=-1"),
    ({"persistence_elements": -5}, "persistence_elements=-5"),
    ({"stage": 2, "zero_plus_plus": PLUS}, "zero_plus_plus="),
    ({"stage": 2, "prefetch_elements": 0}, "prefetch_elements=0"),
    ({"stage": 1, "persistence_elements": 7}, "persistence_elements=7"),
    ({"stage": 1, "reshard_after_forward": False}, "reshard_after_forward=False"),
    ({"stage": 2, "offload": Offload(parameters="cpu")}, "parameters='cpu'"),
    ({"stage": 1, "offload": NVME}, "optimizer='nvme'"),
    ({"stage": 2, "offload": Offload(ratio=0.5)}, "ratio=0.5"),
]


@pytest.mark.parametrize(("arguments", "named"), REFUSED, ids=lambda value: str(value)[:50])
def test_the_strategy_refuses_at_once(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        ZeROStrategy(**arguments)
    message = str(caught.value)
    assert named in message
    if arguments.get("stage") in (1, 2):
        assert f"stage={arguments['stage']}" in message and "stage=3" in message


@pytest.mark.parametrize(
    "arguments",
    [
        {"stage": 1, "offload": Offload(optimizer="cpu"), "bucket_elements": 2},
        {"stage": 2, "offload": Offload(optimizer="cpu", pin_memory=True), "overlap_comm": True},
        {"stage": 3, "offload": Offload(optimizer="nvme", parameters="nvme", nvme_path="/swap")},
        {"stage": 3, "prefetch_elements": 0, "persistence_elements": 0, "reshard_after_forward": True},
        {"stage": 3, "zero_plus_plus": PLUS, "activation_checkpointing": ActivationCheckpointing()},
    ],
    ids=str,
)
def test_arguments_that_fit_pass(arguments: dict[str, Any]) -> None:
    check_arguments(options(**arguments))


def test_devices() -> None:
    check_device(options(), torch.device("cpu"))
    check_device(options(zero_plus_plus=PLUS, offload=Offload(ratio=0.5)), torch.device("cuda", 0))
    with pytest.raises(MisconfigurationException, match="not on 'mps'"):
        check_device(options(), torch.device("mps"))
    with pytest.raises(MisconfigurationException, match=r"quantized_weights=True.*needs CUDA.*'cpu'"):
        check_device(options(zero_plus_plus=PLUS), torch.device("cpu"))
    with pytest.raises(MisconfigurationException, match=r"ratio=0\.5.*'cpu'"):
        check_device(options(offload=Offload(ratio=0.5)), torch.device("cpu"))


def test_a_section_that_says_no_offload_passes_everywhere() -> None:
    for section in ({}, {"offload_param": None}, {"offload_param": {"device": "none"}}, {"zero_hpz_partition_size": 1}):
        check_effective(section, 1, "cpu")
    check_effective({"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "zero_quantized_weights": True}, 3, "cuda")
    with pytest.raises(MisconfigurationException, match=r"zero_quantized_weights=True.*stage=2.*'cuda'"):
        check_effective({"zero_quantized_weights": True}, 2, "cuda")
