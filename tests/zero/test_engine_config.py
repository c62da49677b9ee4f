"""One engine configuration from the strategy's arguments, the Trainer and the user's settings; no rank is needed."""

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard.config import ActivationCheckpointing, Offload, ZeroPlusPlus
from lightning_shard.zero.engine_config import TrainerFacts, ZeROOptions, build_engine_config
from lightning_shard.zero.sizing import sizes_for

SIZES = sizes_for(20_000_000)

GUIDE = {
    "train_batch_size": 16,
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_clipping": 1.0,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
"""As DeepSpeed's own guides write it."""

AUTO_EVERYWHERE = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": "auto",
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": "auto",
        "contiguous_gradients": "auto",
        "reduce_bucket_size": "auto",
        "allgather_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": "auto",
        "stage3_max_reuse_distance": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
"""As configs for Hugging Face's trainer write it."""


def options(stage: Any = 3, **settings: Any) -> ZeROOptions:
    names = ZeROOptions.__dataclass_fields__
    return ZeROOptions(**{**dict.fromkeys(names), "stage": stage, **settings})


def facts(**settings: Any) -> TrainerFacts:
    plain = {
        "world_size": 2,
        "precision": "32-true",
        "accumulate_grad_batches": 1,
        "gradient_clip_val": None,
        "batch_size": None,
        "automatic_optimization": True,
        "device_type": "cpu",
    }
    return TrainerFacts(**{**plain, **settings})


def built(user: Any = None, *, stage: Any = 3, arguments: Any = None, **trainer: Any) -> dict[str, Any]:
    return build_engine_config(options(stage, **(arguments or {})), facts(**trainer), SIZES, user or {})


def refusal(user: Any = None, **settings: Any) -> str:
    with pytest.raises(MisconfigurationException) as caught:
        built(user, **settings)
    return str(caught.value)


# --- configs as others write them ---


def test_a_guides_config_is_taken_as_it_is() -> None:
    before = copy.deepcopy(GUIDE)
    config = built(GUIDE, precision="16-mixed", batch_size=8, device_type="cuda")
    assert before == GUIDE
    assert config["fp16"] == GUIDE["fp16"]
    assert config["gradient_clipping"] == 1.0
    assert config["train_micro_batch_size_per_gpu"] == 8
    for key, value in GUIDE["zero_optimization"].items():
        assert config["zero_optimization"][key] == value


def test_every_auto_is_filled() -> None:
    config = built(
        AUTO_EVERYWHERE,
        precision="bf16-mixed",
        batch_size=3,
        accumulate_grad_batches=4,
        gradient_clip_val=0.5,
    )
    assert "auto" not in json.dumps(config)
    zero = config["zero_optimization"]
    assert (config["gradient_clipping"], config["train_micro_batch_size_per_gpu"]) == (0.5, 3)
    assert config["bf16"] == {"enabled": True}
    assert "fp16" not in config
    assert zero["stage"] == 3
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == SIZES.bucket
    assert zero["stage3_prefetch_bucket_size"] == SIZES.prefetch
    assert zero["stage3_param_persistence_threshold"] == SIZES.persistence
    assert (zero["stage3_max_reuse_distance"], zero["overlap_comm"], zero["contiguous_gradients"]) == (0, False, True)


@pytest.mark.parametrize(
    "key", ["optimizer.params.lr", "scheduler.params.warmup_max_lr", "zero_optimization.sub_group_size"]
)
def test_an_auto_that_nobody_knows_is_named(key: str) -> None:
    first, *middle, last = key.split(".")
    section: dict[str, Any] = {last: "auto"}
    for part in reversed(middle):
        section = {part: section}
    message = refusal({first: section})
    assert f"{key}='auto'" in message and "Write the value" in message
    assert ("configure_optimizers" in message) == (first in ("optimizer", "scheduler"))


def test_the_trainers_steps_fill_the_schedulers() -> None:
    section = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": "auto"}}
    assert built({"scheduler": section}, total_steps=37)["scheduler"]["params"]["total_num_steps"] == 37
    assert "scheduler.params.total_num_steps='auto'" in refusal({"scheduler": section})
    section["params"]["total_num_steps"] = 9
    assert built({"scheduler": section}, total_steps=37)["scheduler"]["params"]["total_num_steps"] == 9


def test_nothing_of_the_users_settings_changes() -> None:
    user = copy.deepcopy(AUTO_EVERYWHERE)
    config = built(user)
    assert user == AUTO_EVERYWHERE
    config["zero_optimization"]["offload_param"]["device"] = "none"
    assert user == AUTO_EVERYWHERE


# --- batch sizes and accumulation ---


def test_equal_accumulation_passes() -> None:
    config = built({"gradient_accumulation_steps": 2}, accumulate_grad_batches=2)
    # The Trainer counts; the engine must not divide the loss a second time.
    assert config["gradient_accumulation_steps"] == 1
    assert config["managed_gradient_accumulation"] is False


def test_other_accumulation_names_both() -> None:
    message = refusal({"gradient_accumulation_steps": 4}, accumulate_grad_batches=2)
    assert "gradient_accumulation_steps=4" in message and "accumulate_grad_batches=2" in message


def test_a_batch_size_that_does_not_multiply_shows_the_product() -> None:
    user = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    message = refusal(user, accumulate_grad_batches=2)
    assert "train_batch_size=12" in message and "2*2*2=8" in message
    assert built({**user, "train_batch_size": 8}, accumulate_grad_batches=2)["train_micro_batch_size_per_gpu"] == 2
    assert "train_batch_size=12" in refusal({"train_batch_size": 12}, batch_size=2, accumulate_grad_batches=2)
    assert "2*1*4=8" in refusal({"train_batch_size": 9}, world_size=4)


def test_the_loaders_batch_size_counts() -> None:
    message = refusal({"train_micro_batch_size_per_gpu": 4}, batch_size=8)
    assert "train_micro_batch_size_per_gpu=4" in message and "8" in message and "loader" in message
    assert built({"train_micro_batch_size_per_gpu": 8}, batch_size=8)["train_micro_batch_size_per_gpu"] == 8
    assert built({"train_batch_size": 12})["train_micro_batch_size_per_gpu"] == 6
    assert built()["train_micro_batch_size_per_gpu"] == 1


@pytest.mark.parametrize("value", ["16", 0, 2.5, [4]])
@pytest.mark.parametrize("key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
def test_a_batch_size_that_is_no_number_is_named(key: str, value: Any) -> None:
    assert f"{key}={value!r}" in refusal({key: value})


# --- clipping and precision ---


def test_clipping_has_one_owner() -> None:
    assert built()["gradient_clipping"] == 0.0
    assert built({"gradient_clipping": 0.7})["gradient_clipping"] == 0.7
    assert built(gradient_clip_val=2)["gradient_clipping"] == 2.0
    assert built({"gradient_clipping": 2}, gradient_clip_val=2.0)["gradient_clipping"] == 2.0
    message = refusal({"gradient_clipping": 1.0}, gradient_clip_val=0.5)
    assert "gradient_clipping=1.0" in message and "gradient_clip_val=0.5" in message


@pytest.mark.parametrize("section", ["fp16", "bf16", "bfloat16"])
def test_precision_of_the_config_and_of_the_trainer_must_agree(section: str) -> None:
    ours = "fp16" if section == "fp16" else "bf16"
    message = refusal({section: {"enabled": True}}, precision="32-true")
    assert f"{ours}.enabled=True" in message and "precision='32-true'" in message
    right = "16-mixed" if ours == "fp16" else "bf16-mixed"
    assert built({section: {"enabled": True}}, precision=right, device_type="cuda")[ours] == {"enabled": True}
    message = refusal({section: {"enabled": False}}, precision=right)
    assert f"{ours}.enabled=False" in message and right in message
    assert not {"fp16", "bf16", "bfloat16"} & built({section: {"enabled": False}}, precision="32-true").keys()


@pytest.mark.parametrize("section", ["amp", "torch_autocast"])
def test_other_mixed_precision_is_the_trainers_too(section: str) -> None:
    message = refusal({section: {"enabled": True}}, precision="bf16-mixed")
    assert f"{section}.enabled=True" in message and "precision='bf16-mixed'" in message


def test_two_names_of_one_section_are_refused() -> None:
    message = refusal({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, precision="bf16-mixed")
    assert "'bfloat16'" in message and "'bf16'" in message


# --- arguments against the config ---

CONTRADICTIONS = [
    ({"overlap_comm": True}, {"overlap_comm": False}, "overlap_comm"),
    ({"contiguous_gradients": False}, {"contiguous_gradients": True}, "contiguous_gradients"),
    ({"bucket_elements": 100}, {"reduce_bucket_size": 200}, "bucket_elements"),
    ({"prefetch_elements": 100}, {"stage3_prefetch_bucket_size": 200}, "prefetch_elements"),
    ({"prefetch_elements": 100}, {"prefetch_bucket_size": 200}, "prefetch_elements"),
    ({"persistence_elements": 1}, {"stage3_param_persistence_threshold": 2}, "persistence_elements"),
    ({"reshard_after_forward": True}, {"stage3_max_reuse_distance": 10}, "reshard_after_forward=True"),
    ({"offload": Offload(optimizer="cpu")}, {"offload_optimizer": {"device": "none"}}, "optimizer='cpu'"),
    ({"offload": Offload(optimizer="cpu")}, {"offload_param": {"device": "cpu"}}, "parameters=None"),
    (
        {"offload": Offload(optimizer=None, parameters="cpu")},
        {"offload_optimizer": {"device": "cpu"}},
        "optimizer=None",
    ),
    ({"offload": Offload(pin_memory=True)}, {"offload_optimizer": {"pin_memory": False}}, "pin_memory=True"),
    (
        {"offload": Offload(optimizer="nvme", nvme_path="/a")},
        {"offload_optimizer": {"nvme_path": "/b"}},
        "nvme_path='/a'",
    ),
    ({"offload": Offload(ratio=0.3)}, {"offload_optimizer": {"ratio": 0.4}}, "ratio=0.3"),
    ({"zero_plus_plus": ZeroPlusPlus(hpz_partition_size=2)}, {"zero_hpz_partition_size": 4}, "ZeroPlusPlus"),
]


@pytest.mark.parametrize(("arguments", "section", "owner"), CONTRADICTIONS, ids=lambda value: str(value)[:40])
def test_an_argument_and_the_config_that_differ_name_both(arguments: Any, section: Any, owner: str) -> None:
    message = refusal({"zero_optimization": section}, arguments=arguments, device_type="cuda")
    (key, value) = next(iter(section.items()))
    value = next(iter(value.values())) if isinstance(value, dict) else value
    assert key in message and f"={value!r}" in message and owner in message, message


@pytest.mark.parametrize(("arguments", "section", "owner"), CONTRADICTIONS[:5], ids=lambda value: str(value)[:40])
def test_an_argument_and_the_config_that_agree_pass(arguments: Any, section: Any, owner: str) -> None:
    zero = built({"zero_optimization": {key: next(iter(arguments.values())) for key in section}}, arguments=arguments)
    assert next(iter(arguments.values())) in zero["zero_optimization"].values()


def test_the_stage_of_the_config_must_be_the_arguments() -> None:
    message = refusal({"zero_optimization": {"stage": 2}}, stage=3)
    assert "zero_optimization.stage=2" in message and "ZeROStrategy(stage=3)" in message


def test_offload_that_agrees_with_the_config_passes() -> None:
    arguments = {"offload": Offload(optimizer="cpu", parameters="cpu", pin_memory=True)}
    section = {"device": "cpu", "pin_memory": True, "buffer_count": 7}
    zero = built({"zero_optimization": {"offload_optimizer": section}}, arguments=arguments)["zero_optimization"]
    assert zero["offload_optimizer"] == section
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": True}


def test_offload_arguments_reach_the_engine() -> None:
    nvme = Offload(optimizer="nvme", parameters="nvme", nvme_path="/fast disk")
    zero = built(arguments={"offload": nvme})["zero_optimization"]
    expected = {"device": "nvme", "pin_memory": False, "nvme_path": "/fast disk"}
    for section in ("offload_optimizer", "offload_param"):
        assert expected.items() <= zero[section].items()
    zero = built(arguments={"offload": Offload(ratio=0.25)}, device_type="cuda")["zero_optimization"]
    assert zero["offload_optimizer"]["ratio"] == 0.25
    assert "offload_param" not in zero
    assert "offload_optimizer" not in built()["zero_optimization"]


def test_resharding_is_two_engine_settings() -> None:
    def live(reshard: bool | None) -> tuple[int, int]:
        zero = built(arguments={"reshard_after_forward": reshard})["zero_optimization"]
        return zero["stage3_max_reuse_distance"], zero["stage3_max_live_parameters"]

    assert live(True) == live(None) == (0, 2 * SIZES.prefetch)
    assert live(False) == (SIZES.all_live, SIZES.all_live)
    # Two prefetch windows, also of the user's own size.
    zero = built({"zero_optimization": {"stage3_prefetch_bucket_size": 7e6}})["zero_optimization"]
    assert zero["stage3_max_live_parameters"] == 14_000_000


def test_arguments_reach_the_engine() -> None:
    plus = ZeroPlusPlus(hpz_partition_size=2, quantized_weights=True, quantized_gradients=True)
    checkpointing = ActivationCheckpointing(partition=True, cpu=True, contiguous_memory=True)
    arguments = {"zero_plus_plus": plus, "activation_checkpointing": checkpointing, "bucket_elements": 101}
    config = built(arguments=arguments, device_type="cuda")
    zero = config["zero_optimization"]
    assert (zero["zero_hpz_partition_size"], zero["zero_quantized_weights"], zero["zero_quantized_gradients"]) == (
        2,
        True,
        True,
    )
    # The engine aligns all-gather buffers to two elements.
    assert (zero["reduce_bucket_size"], zero["allgather_bucket_size"]) == (101, 102)
    assert set(config["activation_checkpointing"].values()) == {True}
    assert "partition_activations=False" in refusal(
        {"activation_checkpointing": {"partition_activations": False}}, arguments=arguments, device_type="cuda"
    )


@pytest.mark.parametrize(
    ("stage", "device", "overlaps"),
    [(1, "cuda", False), (2, "cuda", True), (3, "cuda", True), (2, "cpu", False), (3, "cpu", False)],
)
def test_communication_overlaps_where_there_is_something_to_overlap(stage: int, device: str, overlaps: bool) -> None:
    zero = built(stage=stage, device_type=device)["zero_optimization"]
    assert zero["overlap_comm"] is overlaps
    assert zero["use_multi_rank_bucket_allreduce"] is False
    assert ("stage3_prefetch_bucket_size" in zero) == (stage == 3)


def test_the_engine_leaves_accumulation_to_manual_steps() -> None:
    assert built(automatic_optimization=False)["managed_gradient_accumulation"] is False
    assert "managed_gradient_accumulation" not in built()
    assert "managed_gradient_accumulation=True" in refusal(
        {"managed_gradient_accumulation": True}, automatic_optimization=False
    )


def test_facts_and_options_are_frozen() -> None:
    with pytest.raises(AttributeError):
        facts().world_size = 3  # type: ignore[misc]
    assert replace(facts(), world_size=3).world_size == 3
