"""The user's settings, from wherever they are; and no key of theirs is ignored."""

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard.config import ActivationCheckpointing
from lightning_shard.zero.merge import Merge
from lightning_shard.zero.user_config import CONFIG_VARIABLE, check_with_engine, read_config
from tests.zero.test_engine_config import built, refusal

SETTINGS = {"zero_optimization": {"stage": 3, "sub_group_size": 1e9}, "gradient_clipping": 0.5}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a folder" / "my config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(SETTINGS))
    return path


def test_a_mapping_and_a_path_say_the_same(path: Path) -> None:
    assert read_config(SETTINGS) == read_config(path) == read_config(str(path)) == SETTINGS


def test_the_environment_serves_only_where_nothing_is_given(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    assert read_config(None) == {}
    monkeypatch.setenv(CONFIG_VARIABLE, str(path))
    assert read_config(None) == SETTINGS
    assert read_config({"gradient_clipping": 1.0}) == {"gradient_clipping": 1.0}
    assert read_config({}) == {}
    monkeypatch.setenv(CONFIG_VARIABLE, str(path) + "x")
    with pytest.raises(MisconfigurationException, match=f"config.jsonx' does not exist.*{CONFIG_VARIABLE}"):
        read_config(None)


def test_a_callers_mapping_is_not_the_result() -> None:
    mine = {"gradient_clipping": 0.5}
    read_config(mine)["steps_per_print"] = 3
    assert mine == {"gradient_clipping": 0.5}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1, 2]", "holds a list, not a mapping"),
        ('"stage3"', "holds a str, not a mapping"),
        ("null", "holds a NoneType, not a mapping"),
        ('{"zero_optimization": {"stage": 3,}}', "is not valid JSON.*line 1 column"),
        ("", "is not valid JSON"),
        ('{"gradient_clipping": 1.0, "gradient_clipping": 2.0}', "'gradient_clipping' is there twice"),
        (b"\xff\xfe\x00", "is not valid JSON"),
    ],
    ids=str,
)
def test_a_file_that_holds_no_settings_is_named(path: Path, text: str | bytes, reason: str) -> None:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(MisconfigurationException, match=reason) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_a_path_without_a_file_is_named(path: Path) -> None:
    missing = path.with_name("no such.json")
    with pytest.raises(MisconfigurationException, match="does not exist") as caught:
        read_config(missing)
    assert str(missing) in str(caught.value)
    with pytest.raises(MisconfigurationException, match="is a folder"):
        read_config(path.parent)


@pytest.mark.parametrize("source", [3, ["a"], True], ids=str)
def test_what_is_neither_mapping_nor_path_is_refused(source: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"mapping of DeepSpeed settings or the path"):
        read_config(source)


def test_what_the_engine_would_ignore_is_refused() -> None:
    known = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    check_with_engine(known)
    with pytest.raises(MisconfigurationException, match="Did you mean 'wall_clock_breakdown'"):
        check_with_engine({**known, "wall_clock_breakdwon": True})


def test_what_the_engine_refuses_comes_as_our_error() -> None:
    with pytest.raises(MisconfigurationException, match=r"refuses its config: .*Apex"):
        check_with_engine({"train_micro_batch_size_per_gpu": 1, "amp": {"enabled": False}})


def test_dotted_keys_reach_into_sections_without_touching_the_users() -> None:
    user: dict[str, Any] = {"a": {"b": 1}, "list": [1]}
    merged = Merge(user)
    merged.set("a.c.d", 2)
    merged.default("a.b", 5)
    merged.default("a.e", 6)
    assert (merged.get("a.b"), merged.get("a.c.d"), merged.get("a.x", "none"), merged.get("a.b.c")) == (
        1,
        2,
        "none",
        None,
    )
    assert (merged.pop("a.b"), merged.pop("a.b"), merged.pop("nowhere.at.all")) == (1, None, None)
    assert merged.config == {"a": {"c": {"d": 2}, "e": 6}, "list": [1]}
    assert user == {"a": {"b": 1}, "list": [1]}
    with pytest.raises(MisconfigurationException, match=r"'list' must be a mapping of settings, got \[1\]"):
        merged.set("list.x", 1)


# --- what the config says alone, and the engine would ignore or fail on late ---

IMPOSSIBLE = [
    (1, {"offload_param": {"device": "cpu"}}, "needs stage 3"),
    (2, {"offload_param": {"device": "cpu"}}, "needs stage 3"),
    (2, {"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, "needs stage 3"),
    (3, {"offload_optimizer": {"device": "nvme"}}, "nvme_path"),
    (3, {"offload_param": {"device": "nvme"}}, "nvme_path"),
    (3, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "ratio=0.5"),
    (3, {"zero_hpz_partition_size": 2}, "'cpu'"),
    (3, {"zero_quantized_weights": True}, "'cpu'"),
    (3, {"offload_optimizer": "cpu"}, "{'device': 'cpu'}"),
    (3, {"offload_optimizer": {"device": "gpu"}}, "offload_optimizer.device='gpu'"),
    (3, {"sub_group_size": -1}, "sub_group_size=-1"),
    (3, {"mics_shard_size": 2}, "removed"),
]


@pytest.mark.parametrize(("stage", "section", "reason"), IMPOSSIBLE, ids=str)
def test_an_impossible_section_is_refused(stage: int, section: dict[str, Any], reason: str) -> None:
    message = refusal({"zero_optimization": section}, stage=stage)
    assert next(iter(section)) in message and reason in message, message


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cpu_offload", "offload_optimizer"),
        ("cpu_offload_param", "offload_param"),
        ("cpu_offload_use_pin_memory", "offload_param"),
        ("stage3_gather_fp16_weights_on_model_save", "gather_16bit_weights_on_model_save"),
    ],
)
def test_a_deprecated_key_names_its_successor(old: str, new: str) -> None:
    message = refusal({"zero_optimization": {old: True}})
    assert f"zero_optimization.{old}=True" in message and new in message


@pytest.mark.parametrize("section", ["zero_optimization", "fp16", "bf16", "activation_checkpointing"])
def test_a_section_that_is_no_mapping_is_named(section: str) -> None:
    message = refusal(
        {section: True},
        precision="16-mixed" if section == "fp16" else "32-true",
        arguments={"activation_checkpointing": ActivationCheckpointing()},
    )
    assert f"'{section}' must be a mapping" in message and "True" in message


@pytest.mark.parametrize(
    ("user", "nearest"),
    [
        ({"gradient_cliping": 1.0}, "gradient_clipping"),
        ({"zero_optimisation": {"stage": 3}}, "zero_optimization"),
        ({"zero_optimization": {"overlap_com": True}}, "zero_optimization.overlap_comm"),
        (
            {"zero_optimization": {"stage3_prefetch_buckets_size": 5}},
            "zero_optimization.stage3_prefetch_bucket_size",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memmory": True}}},
            "zero_optimization.offload_optimizer.pin_memory",
        ),
        ({"wholly_unknown_thing": 1}, None),
    ],
    ids=str,
)
def test_a_misspelt_key_names_the_nearest(user: dict[str, Any], nearest: str | None) -> None:
    wrong: Any = user
    place = []
    while isinstance(wrong, dict):
        place.append(list(wrong)[-1])
        wrong = wrong[place[-1]]
        if place == ["zero_optimisation"]:
            break
    message = refusal(user)
    assert f"{'.'.join(place)!r} is no setting" in message, message
    assert (f"Did you mean {nearest!r}?" if nearest else "Take it out") in message


def test_known_keys_that_change_nothing_here_pass() -> None:
    user = {
        "comms_logger": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "prescale_gradients": False,
        "tensorboard": {"enabled": False},
        "flops_profiler": {"enabled": False},
        "aio": {"block_size": 1048576},
    }
    config = built(user)
    assert {key: config[key] for key in user} == user
