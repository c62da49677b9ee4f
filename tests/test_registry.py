"""The names, and what a Trainer makes of each."""

import importlib

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry

import lightning_shard
from lightning_shard import registry
from lightning_shard.config import Offload
from lightning_shard.pipeline.schedule import SCHEDULES
from lightning_shard.registry import NAMES, available_names, nearest_name
from lightning_shard.strategies.pipeline import PipelineStrategy
from lightning_shard.strategies.zero import ZeROStrategy

EXPECTED = {
    "zero1": (1, None, None),
    "zero2": (2, None, None),
    "zero3": (3, None, None),
    "zero1_offload": (1, "cpu", None),
    "zero2_offload": (2, "cpu", None),
    "zero3_offload": (3, "cpu", None),
    "zero3_offload_params": (3, "cpu", "cpu"),
    "zero3_nvme": (3, "nvme", "nvme"),
}


def trainer(name: str) -> pl.Trainer:
    return pl.Trainer(
        strategy=name, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )


def chosen(strategy: ZeROStrategy) -> tuple[int, str | None, str | None]:
    offload = strategy._options.offload
    return strategy.stage, offload and offload.optimizer, offload and offload.parameters


@pytest.mark.parametrize("name", EXPECTED)
def test_a_trainer_gets_the_stage_and_the_offload_of_the_name(name: str) -> None:
    strategy = trainer(name).strategy
    assert type(strategy) is ZeROStrategy
    assert chosen(strategy) == EXPECTED[name]
    # Lightning's own guards ask these.
    assert isinstance(strategy, DeepSpeedStrategy)
    assert strategy.zero_stage_3 is (EXPECTED[name][0] == 3)


def test_every_zero_name_is_tested_here() -> None:
    assert set(EXPECTED) == {name for name, entry in NAMES.items() if entry.strategy_class() is ZeROStrategy}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_of_pipelines_has_a_name(schedule: str) -> None:
    strategy = trainer(f"pipeline_{schedule}").strategy
    assert type(strategy) is PipelineStrategy
    assert strategy._schedule == schedule


def test_every_pipeline_name_is_tested_here() -> None:
    named = {name for name, entry in NAMES.items() if entry.strategy_class() is PipelineStrategy}
    assert named == {f"pipeline_{schedule}" for schedule in SCHEDULES}


def test_names_are_found_in_any_case() -> None:
    assert chosen(trainer("ZERO2_Offload").strategy) == EXPECTED["zero2_offload"]


@pytest.mark.parametrize("name", NAMES)
def test_each_name_has_one_line_that_tells_it_from_the_others(name: str) -> None:
    description = NAMES[name].description
    assert description and "\n" not in description
    assert [other for other, entry in NAMES.items() if entry.description == description] == [name]
    assert StrategyRegistry[name]["description"] == description


def test_each_trainer_gets_an_object_of_its_own() -> None:
    first, second = StrategyRegistry.get("zero3_offload"), StrategyRegistry.get("zero3_offload")
    assert first is not second
    assert first.config is not second.config
    first.config["zero_optimization"]["stage"] = 7
    assert second.config["zero_optimization"]["stage"] == 3
    # The options are shared, and nobody can change them.
    with pytest.raises(AttributeError):
        first._options.offload.optimizer = None
    assert second._options.offload == Offload(optimizer="cpu")


def test_registering_again_changes_nothing() -> None:
    before = {name: dict(StrategyRegistry[name]) for name in NAMES}
    registry.register_strategies()
    importlib.reload(lightning_shard)
    assert {name: dict(StrategyRegistry[name]) for name in NAMES} == before


def test_a_name_that_somebody_else_has_taken_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {"strategy": DeepSpeedStrategy, "init_params": {"stage": 1}, "description": "theirs"}
    monkeypatch.setitem(StrategyRegistry, "zero1", theirs)
    registry.register_strategies()
    assert StrategyRegistry["zero1"] is theirs


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("zero3_ofload", "zero3_offload"),
        ("zer03", "zero3"),
        ("ZERO_3", "zero3"),
        ("zero3-offload-params", "zero3_offload_params"),
        ("zero3_nmve", "zero3_nvme"),
        ("deepspeed_stage3", "deepspeed_stage_3"),
        ("my own thing", None),
        ("", None),
    ],
)
def test_the_nearest_name(typed: str, meant: str | None) -> None:
    assert nearest_name(typed) == meant


def test_all_names_of_the_trainer_are_listed() -> None:
    names = available_names()
    assert names == sorted(names)
    assert set(NAMES) | {"ddp", "fsdp"} <= set(names)


def test_a_misspelt_name_is_lightnings_error() -> None:
    with pytest.raises((ValueError, MisconfigurationException), match="zero3_ofload"):
        trainer("zero3_ofload")
