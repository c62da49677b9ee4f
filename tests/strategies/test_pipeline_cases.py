"""Known ways for a pipeline to train wrongly, and steps of many kinds: each has the weights of one process."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategies.pipeline_modules import (
    SCHEDULES,
    Case,
    Checkpointed,
    Compiled,
    Experts,
    Frozen,
    Ignoring,
    Keywords,
    Layers,
    Masked,
    Product,
    Skipping,
    Unused,
    assert_all_same,
    fit,
    on_ranks,
    pipeline,
    same_on_all_ranks,
    seeded,
)
from tests.strategies.zero_modules import numbers, sgd

pytestmark = pytest.mark.ranks


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers)


def factors(weights: dict[str, Tensor]) -> list[float]:
    return [value.item() for name, value in weights.items() if name.endswith("factor")]


# --- values by hand ---


MASKED = {"x": column(2, 9, 4, 6), "mask": column(1, 0, 1, 1)}
IGNORED = {"x": column(2, 9, 4, 6), "y": torch.tensor([0, -100, 1, 0])}


def by_hand(key: str) -> dict[str, list[float]]:
    two = key if key == "auto" else pipeline(key, microbatches=2)
    return {
        "clipped": factors(
            fit(two, Product(4, 3, optimizer=sgd(1.0)), [torch.ones(2)], gradient_clip_val=1.0)  # norm 5
        ),
        "clipped by value": factors(
            fit(
                two,
                Product(4, 3, optimizer=sgd(1.0)),
                [torch.ones(2)],
                gradient_clip_val=3.5,
                gradient_clip_algorithm="value",
            )
        ),
        "accumulated": factors(fit(two, Product(1, 1), [column(1, 3), column(5, 7)], accumulate_grad_batches=2)),
        "masked": factors(fit(two, Masked(1, 1), [MASKED])),
        "ignored": factors(fit(two, Ignoring(1, 1), [IGNORED])),
    }


def test_values_computed_by_hand() -> None:
    expected = same_on_all_ranks(by_hand, ["gpipe", "1f1b"])
    assert expected["clipped"] == pytest.approx([3.4, 2.2])
    assert expected["clipped by value"] == pytest.approx([1.0, -0.5])
    assert expected["accumulated"] == pytest.approx([0.6, 0.6])
    assert expected["masked"] == pytest.approx([0.6, 0.6])


def test_clipping_and_few_microbatches_on_four_ranks() -> None:
    def clipped(replicas: str) -> list[float]:
        strategy = pipeline(stages=2, microbatches=2, data_parallel=replicas)
        return factors(fit(strategy, Product(4, 3, optimizer=sgd(1.0)), [torch.ones(4)], gradient_clip_val=1.0))

    def few(key: tuple[str, int]) -> list[float]:
        schedule, microbatches = key
        made = Product(1, 2, 1, 2, optimizer=sgd(0.01))
        try:
            return factors(fit(pipeline(schedule, microbatches=microbatches), made, numbers(2, rows=4, width=1)))
        except Exception as error:
            return [str(error)]  # type: ignore[list-item]

    def run(key: Any) -> Any:
        return clipped(key) if isinstance(key, str) else few(key)

    expected = seeded(lambda: factors(fit("auto", Product(1, 2, 1, 2, optimizer=sgd(0.01)), numbers(2, 4, 1))))
    keys = ["replicate", "shard", ("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("1f1b", 2)]
    for found in on_ranks(run, keys, ranks=4):
        for key, value in found.items():
            if isinstance(key, str):
                assert value == pytest.approx([3.4, 2.2]), key
            elif isinstance(value[0], str):
                assert key[0] == "1f1b" and "4" in value[0] and str(key[1]) in value[0], (key, value)
            else:
                assert value == pytest.approx(expected), key


def test_numbers_of_microbatches_and_of_stages_per_rank() -> None:
    keys = [(name, m, s) for name in ("interleaved", "looped_bfs", "zero_bubble") for m in (2, 3, 4) for s in (1, 2)]

    def run(key: Any) -> Any:
        name, microbatches, per_rank = key
        strategy = pipeline(name, microbatches=microbatches, stages_per_rank=per_rank)
        try:
            return factors(fit(strategy, Product(1, 1, 1, 1), [torch.arange(12.0)]))
        except Exception as error:
            return str(error)

    expected = factors(fit("auto", Product(1, 1, 1, 1), [torch.arange(12.0)]))
    for found in on_ranks(run, keys):
        for (name, microbatches, per_rank), value in found.items():
            if microbatches == 3 and isinstance(value, str):
                assert "multiple" in value and "3" in value, value
            else:
                assert value == pytest.approx(expected), (name, microbatches, per_rank)


# --- what crosses, and what is called ---


IDS = torch.arange(24).view(8, 3) % 7
WORDS = [{"ids": IDS, "mask": torch.arange(8) % 2 + 0.5}, {"ids": IDS.flip(0), "mask": None}] * 2
SKIPS = [{"x": batch, "uses": place % 2 == 0} for place, batch in enumerate(numbers(4))]
LENGTHS = [torch.ones(4, length, 4) * length / 4 for length in (3, 5, 2, 5)]
SHAPES = [*numbers(2), *numbers(1, rows=6), *numbers(1, rows=1), *numbers(2, rows=3), *numbers(1, rows=5)]


def training_cases() -> dict[str, Case]:
    cases = {}
    for name in SCHEDULES:
        way = pipeline(name)
        cases[f"uneven, {name}"] = Case(make=Layers, batches=SHAPES, strategy=way)
        cases[f"skips, {name}"] = Case(make=Skipping, batches=SKIPS, strategy=way)
        cases[f"frozen, {name}"] = Case(make=Frozen, batches=numbers(3), strategy=way)
        cases[f"experts, {name}"] = Case(make=Experts, batches=numbers(3), strategy=way)
    for name in ("1f1b", "zbv"):
        way = pipeline(name)
        cases[f"lengths, {name}"] = Case(make=Layers, batches=LENGTHS, strategy=way)
        cases[f"keywords, {name}"] = Case(make=Keywords, batches=WORDS, strategy=way)
        cases[f"unused, {name}"] = Case(make=Unused, batches=numbers(4), strategy=way)
        cases[f"compiled, {name}"] = Case(make=Compiled, batches=numbers(2), strategy=way)
        cases[f"checkpoints, {name}"] = Case(make=Checkpointed, batches=numbers(2), strategy=way)
        cases[f"recomputed, {name}"] = Case(
            make=Layers, batches=SHAPES, strategy=pipeline(name, activation_checkpointing=True)
        )
        cases[f"clipped, {name}"] = Case(
            make=Layers,
            batches=numbers(4),
            strategy=way,
            settings={"gradient_clip_val": 0.01, "accumulate_grad_batches": 2},
        )
        cases[f"64-true, {name}"] = Case(
            make=Layers,
            batches=[batch.double() for batch in numbers(2)],
            strategy=way,
            settings={"precision": "64-true"},
        )
    return cases


def test_training_equals_one_process() -> None:
    assert_all_same(training_cases())
