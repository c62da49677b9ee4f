"""The planner's figures beside real runs, for a few cases: states and traffic exact, peaks near."""

import json
from pathlib import Path

import pytest

from benchmarks.plan_accuracy import AIM, LIMIT, Row, main
from benchmarks.plan_cases import TABLE, ZERO, Case, all_cases
from benchmarks.plan_measure import measure
from benchmarks.plan_predict import predict

pytestmark = pytest.mark.ranks


def compare(case: Case) -> Row:
    row = Row(measured=measure(case), predicted=predict(case))
    assert not row.measured.error and not row.predicted.error, (row.measured.error, row.predicted.error)
    return row


@pytest.mark.parametrize(
    ("model", "strategy", "checkpointing"),
    [
        ("mlp", "zero2", False),
        ("mlp", "zero3_offload", False),
        ("cnn", "fsdp2", True),
        ("gpt", "pipeline_interleaved", True),
    ],
)
def test_states_and_payload_are_exact_and_peaks_are_near(model: str, strategy: str, checkpointing: bool) -> None:
    row = compare(Case(model=model, strategy=strategy, ranks=2, precision="bf16-mixed", checkpointing=checkpointing))
    assert not row.wrong_states and not row.wrong_payload
    assert row.error is not None and abs(row.error) <= (AIM if strategy in ZERO else LIMIT)


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "ranks"), [("zero3", 2), ("zero3", 4), ("fsdp2", 2), ("fsdp2", 4)])
def test_small_tensors_whole_units_and_buckets_are_in_the_peak(strategy: str, ranks: int) -> None:
    """Where they outweigh what is divided, a plan of total over ranks would be far off."""
    row = compare(Case(model="many", strategy=strategy, ranks=ranks, precision="32-true"))
    assert row.error is not None and 0.8 <= 1 + row.error <= 1.25


def test_the_table_has_every_strategy_that_a_rank_can_run() -> None:
    cases = list(all_cases())
    assert {case.model for case in cases} == set(TABLE)
    assert {case.ranks for case in cases} == {2, 4}
    assert {case.precision for case in cases} >= {"32-true", "bf16-mixed"}
    checkpointed = {case.strategy for case in cases if case.checkpointing}
    assert {"fsdp2", "fsdp2_grad", "pipeline_gpipe", "pipeline_1f1b", "pipeline_interleaved"} <= checkpointed


def test_measurements_are_kept_and_the_document_is_written(tmp_path: Path) -> None:
    kept, document = tmp_path / "measured.json", tmp_path / "table.md"
    few = ["--models", "mlp", "--strategies", "fsdp2", "--ranks", "2", "--precisions", "32-true"]
    main([*few, "--json", str(kept), "--write", str(document)])
    assert len(json.loads(kept.read_text())) == 2
    text = document.read_text()
    assert "| mlp | fsdp2 |" in text and "2 cases" in text
