import pytest

from benchmarks import plan_time
from benchmarks.plan_time import Shape, plan


@pytest.mark.full
def test_a_llama_of_any_size_is_planned() -> None:
    plan_time.SHAPES["tiny"] = Shape(width=32, blocks=8, heads=4, groups=2, inner=64, words=64, tokens=8)
    plan_time.CASES["tiny"] = ("tiny", 2, 1)
    try:
        cells = [cell.strip() for cell in plan("tiny").strip("|").split("|")]
    finally:
        del plan_time.SHAPES["tiny"], plan_time.CASES["tiny"]
    assert cells[:3] == ["0.0 billion", "2", "1 x 8"]
    forms, simulated = int(cells[3]), int(cells[4])
    assert forms > 10 and simulated == 3
    assert float(cells[6]) < 1.5
