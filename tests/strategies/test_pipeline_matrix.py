"""The whole table: every model under every schedule. `make test-full` runs it and writes docs/pipeline_matrix.md."""

import os
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from tests.strategies.pipeline_models import MODELS, STEPS
from tests.strategies.pipeline_parity import ABSOLUTE, RELATIVE, Run, largest_differences
from tests.strategies.test_pipeline_training import SCHEDULES, run

pytestmark = [pytest.mark.ranks, pytest.mark.full]

DOCUMENT = Path(__file__).parents[2] / "docs" / "pipeline_matrix.md"
FOUR_RANKS = ("gpipe", "1f1b")


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, dict[str, float]]]:
    """Filled by the tests; written when the last of them has run, if there is one for every model."""
    rows: dict[str, dict[str, float]] = {}
    yield rows
    if len(rows) == len(MODELS):
        DOCUMENT.write_text(document(rows))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", list(MODELS))
def test_every_schedule_equals_one_process(model: str, table: dict[str, dict[str, float]]) -> None:
    two: dict[str, Run] = {f"{schedule}, 2 ranks": run(model, schedule) for schedule in SCHEDULES}
    four: dict[str, Run] = {f"{schedule}, 4 ranks": run(model, schedule) for schedule in FOUR_RANKS}
    table[model] = {**largest_differences(two, 2), **largest_differences(four, 4)}
    assert {key: factor for key, factor in table[model].items() if not factor <= 1} == {}


def document(rows: dict[str, dict[str, float]]) -> str:
    columns = list(next(iter(rows.values())))
    lines = [
        "# Every model under every schedule",
        "",
        f"{STEPS} optimizer steps (SGD with momentum, dropout off, fp32) of ordinary Lightning code, then validate,",
        "test and predict, against the same in one process on the same global batches. A number is the largest",
        "difference found, in losses, every weight on every rank, logged metrics and predictions, as a share of the",
        "tolerance",
        f"({ABSOLUTE:g} + {RELATIVE:g} · |value|): 1 would be the limit.",
        "",
        "| model | " + " | ".join(columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for model, factors in rows.items():
        lines.append(f"| {model} | " + " | ".join(f"{factors[column]:.2f}" for column in columns) + " |")
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    lines += [
        "",
        f"Written by `make test-full` on {when}: {os.cpu_count()}-core {platform.machine()} CPU, gloo,"
        f" torch {torch.__version__.partition('+')[0]}, Python {platform.python_version()}.",
        "",
    ]
    return "\n".join(lines)
