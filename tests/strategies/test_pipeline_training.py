"""Pipelines train, validate, test and predict as one process does: every schedule, every kind of model."""

from dataclasses import replace
from functools import partial
from typing import get_args

import pytest

from lightning_shard import PipelineStrategy
from lightning_shard.pipeline.schedule import ScheduleName
from tests.strategies.pipeline_models import MODELS
from tests.strategies.pipeline_parity import Run, largest_differences

pytestmark = pytest.mark.ranks

SCHEDULES = get_args(ScheduleName)


def run(model: str, schedule: str, **arguments: object) -> Run:
    return Run(model=model, strategy=partial(PipelineStrategy, schedule=schedule, **arguments))  # type: ignore[arg-type]


def assert_all_equal(runs: dict[str, Run], ranks: int, replicas: int = 1) -> None:
    excess = largest_differences(runs, ranks, replicas)
    wrong = {key: factor for key, factor in excess.items() if not factor <= 1}
    assert not wrong, f"largest differences, as factors of the tolerance: {wrong}"


def test_every_schedule_and_every_model_trains() -> None:
    runs = {}
    for place, model in enumerate(MODELS):
        schedule = SCHEDULES[place % len(SCHEDULES)]
        runs[f"{schedule}, {model}"] = run(model, schedule)
    # The stages of this one meet in the middle of an encoder and a decoder, with values that cross both.
    runs["zbv, T5"] = run("HF T5 (tied)", "zbv")
    runs["zero_bubble, GPT"] = run("GPT, tied embeddings", "zero_bubble")
    assert_all_equal(runs, ranks=2)


def test_four_stages_train() -> None:
    runs = {
        "1f1b, T5": run("HF T5 (tied)", "1f1b"),
        "gpipe, GPT": run("GPT, tied embeddings", "gpipe"),
        "1f1b, U-Net": run("U-Net with skips", "1f1b"),
    }
    assert_all_equal(runs, ranks=4)


def test_two_pipelines_beside_each_other_train() -> None:
    runs = {
        f"{schedule}, {mode}": run("GPT, tied embeddings", schedule, stages=2, microbatches=2, data_parallel=mode)
        for schedule, mode in [
            ("1f1b", "replicate"),
            ("1f1b", "shard"),
            ("interleaved", "shard"),
            ("zbv", "shard"),
            ("zbv", "replicate"),
        ]
    }
    assert_all_equal(runs, ranks=4, replicas=2)


def test_two_pipelines_accumulate_and_clip_by_the_norm_of_all() -> None:
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    runs = {
        mode: replace(
            run("GPT, tied embeddings", "1f1b", stages=2, microbatches=2, data_parallel=mode), settings=settings
        )
        for mode in ("replicate", "shard")
    }
    assert_all_equal(runs, ranks=4, replicas=2)


def test_recomputed_activations_train_the_same() -> None:
    runs = {
        f"{schedule}, {model}": run(model, schedule, activation_checkpointing=True)
        for schedule, model in [("gpipe", "HF GPT-2 (tied)"), ("zbv", "U-Net with skips")]
    }
    assert_all_equal(runs, ranks=2)
