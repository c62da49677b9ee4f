"""A part of the table in docs/checkpoint_matrix.md: everything saves, everything resumes, and every model does both."""

from pathlib import Path

import pytest
import torch

from benchmarks.checkpoint_cases import MODELS, STRATEGIES, Ended, Under
from benchmarks.checkpoint_matrix import RESUMED, SAVED, Pair, cell, covering_pairs, document
from benchmarks.checkpoint_runs import Job, Result, compare, measure, result_of

PAIRS = covering_pairs(list(MODELS))


def name(pair: Pair) -> str:
    model, saved, resumed = pair
    return f"{model}: {saved} to {resumed}"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Pair, Result]:
    """Of all pairs: one start of the ranks for each number of them saves, and one resumes."""
    return dict(zip(PAIRS, measure(PAIRS, tmp_path_factory.mktemp("checkpoints")), strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("pair", PAIRS, ids=map(name, PAIRS))
def test_what_resumes_goes_on_as_one_process_would(pair: Pair, results: dict[Pair, Result]) -> None:
    result = results[pair]
    assert result.error is None, result.error
    assert result.steps == [5.0]
    assert result.verdict == "same", result


def test_the_pairs_cover_everything() -> None:
    assert {saved.strategy for _, saved, _ in PAIRS} == {resumed.strategy for _, _, resumed in PAIRS} == set(STRATEGIES)
    both = {saved for _, saved, _ in PAIRS} | {resumed for _, _, resumed in PAIRS}
    assert both == {*SAVED, *RESUMED}
    for model in MODELS:
        saved = {saved.ranks for each, saved, _ in PAIRS if each == model}
        resumed = {resumed.ranks for each, _, resumed in PAIRS if each == model}
        assert saved >= {2, 4} and resumed == {1, 2, 4}
    assert sum(saved.ranks != resumed.ranks for _, saved, resumed in PAIRS) > len(PAIRS) / 2


# --- what is compared can differ ---


def ended(**changes: torch.Tensor) -> Ended:
    """A training's end in which some values are other ones, by name."""
    values = {
        "loss": torch.tensor([3.0, 2.0, 1.0, 1.0, 1.0]),
        "weight": torch.ones(2),
        "buffer": torch.tensor(5.0),
        "exp_avg": torch.zeros(2),
        "step": torch.tensor(5.0),
        **changes,
    }
    return Ended(
        losses=values["loss"].tolist(),
        weights={"weight": values["weight"], "buffer": values["buffer"]},
        optimizer={"weight": {"exp_avg": values["exp_avg"], "step": values["step"]}},
    )


def judged(**changes: torch.Tensor) -> Result:
    """The result of two ranks, the second of which ended otherwise."""
    job = Job(model="plain", under=Under(strategy="fsdp2", ranks=2), path="", saves=False)
    found = [compare(each, ended()) for each in (ended(), ended(**changes))]
    return result_of(job, Under(strategy="ddp", ranks=4), found, ended())


def test_equal_ends_are_the_same() -> None:
    assert judged().verdict == "same"
    assert judged(weight=torch.tensor([1.0, 1 + 1e-5])).verdict == "same"
    early = torch.tensor([9.0, 9.0, 9.0, 1.0, 1.0])  # steps before the checkpoint, which a resumed run has not made
    assert judged(loss=early).verdict == "same"


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("loss", torch.tensor([1.0, 1.0, 1.0, 1.0, 1.1])),
        ("weight", torch.tensor([1.0, 1.00003])),
        ("weight", torch.tensor([1.0, float("nan")])),
        ("buffer", torch.tensor(6.0)),
        ("exp_avg", torch.tensor([0.0, 1e-5])),
        ("step", torch.tensor(2.0)),
    ],
)
def test_one_value_on_one_rank_makes_a_difference(what: str, value: torch.Tensor) -> None:
    result = judged(**{what: value})
    assert result.verdict == "differs"
    assert what == "step" or cell(result).startswith("**")
    assert "## What failed" in document([result])


def test_other_names_and_shapes_are_no_numbers() -> None:
    with pytest.raises(ValueError, match=r"'weight' is \(3,\) instead of \(2,\)"):
        judged(weight=torch.ones(3))
    other = ended()
    other.weights.pop("buffer")
    with pytest.raises(ValueError, match=r"weights: one has \['buffer'\]"):
        compare(other, ended())


@pytest.mark.ranks
def test_a_pair_that_fails_fills_its_own_cell(tmp_path: Path) -> None:
    one, two = Under(strategy="one process", ranks=1), Under(strategy="ddp", ranks=2)
    wrong = Under(strategy="pipeline x shard", ranks=1)  # two stages on one rank are refused
    pairs: list[Pair] = [("LoRA", one, one), ("LoRA", one, wrong), ("LoRA", wrong, one), ("LoRA", two, two)]
    first, second, third, last = measure(pairs, tmp_path)
    assert first.verdict == last.verdict == "same"
    assert cell(second) == cell(third) == "**error**"
    assert second.error is not None and third.error is not None
    assert third.error.startswith("Saving: ")
    page = document([first, second, third, last])
    assert (
        "2 of 4 pairs are the same" in page
        and "LoRA, saved under one process, resumed under pipeline x shard, 1:" in page
    )
