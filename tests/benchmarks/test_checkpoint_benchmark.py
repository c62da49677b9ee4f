import json

import pytest

from benchmarks.checkpoint import main
from benchmarks.checkpoint_against_torch import judged
from benchmarks.turns import Size, Steps

PARAMETERS = 2 * (2 * 32 + 2 * 32 * 128 + 128 + 32)
"""Of the quick network: two blocks, each a norm, and two linear layers with their biases."""


@pytest.mark.ranks
def test_quick_run_compares_saves_and_loads_of_the_same_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick", "--parts", "save", "async", "--json"])
    found = json.loads(capsys.readouterr().out)
    save, load = found["save"]
    assert (save["what"], load["what"]) == ("save", "load")
    for result in (save, load):
        assert (result["pairs"], result["tensors"]) == (5, 12)
        assert result["megabytes"] == round(PARAMETERS * 12 / 1e6, 1)
        assert min(result["bare_ms"], result["ours_ms"], result["cpu_ratio"]) > 0
        low, high = result["quartiles"]
        assert low <= result["ratio"] <= high
    (waited,) = found["async"]
    assert waited["saves"] == 2 * 2
    assert min(waited["step_ms"], waited["sync_call_ms"], waited["async_call_ms"]) > 0


@pytest.mark.ranks
def test_quick_run_converts_in_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick", "--parts", "convert", "--json"])
    results = json.loads(capsys.readouterr().out)["convert"]
    assert [(result["source"], result["target"], result["tensors"]) for result in results] == [
        ("portable", "lightning", 3 * 12),
        ("portable", "safetensors", 12),
        ("lightning", "portable", 3 * 12),
    ]
    for result in results:
        assert result["limit_mb"] == pytest.approx(100 + 1.3 * 4 * 32 * 128 / 1e6, abs=0.1)
        # A second conversion of the same few bytes.
        assert 0 <= result["memory_mb"] < 10
        assert result["verdict"] == "met"


def test_a_result_is_the_median_of_ratios_of_neighbours() -> None:
    bare = Steps(wall=[1.0, 2.0, 4.0, 1.0, 1.0], cpu=[1.0] * 5)
    size = Size(layers=1, width=8, rows=1)

    def verdict(factors: list[float], control: float = 1.0) -> str:
        ours = Steps(wall=[factor * time for factor, time in zip(factors, bare.wall, strict=True)], cpu=[1.5] * 5)
        again = Steps(wall=[control * time for time in bare.wall], cpu=[1.0] * 5)
        result = judged("save", size, [ours, bare, again])
        assert (result.ratio, result.quartiles) == (sorted(factors)[2], [sorted(factors)[1], sorted(factors)[3]])
        assert (result.cpu_ratio, result.bare_against_bare) == (1.5, control)
        return result.verdict

    assert verdict([1.0, 9.0, 1.1, 0.5, 3.0]) == "met"
    assert verdict([1.0, 9.0, 1.11, 0.5, 3.0]) == "missed"
    assert verdict([1.0, 9.0, 1.0, 0.5, 3.0], control=1.06) == "inconclusive"
