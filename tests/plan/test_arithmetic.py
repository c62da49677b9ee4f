"""The reference values are worked out by hand from the ZeRO paper's formulas."""

import ast
from pathlib import Path

import pytest

from lightning_shard.plan import arithmetic
from lightning_shard.plan.arithmetic import (
    ModelStates,
    bubble,
    flat_partition,
    model_states,
    optimizer_elements,
    own_rows,
    padded_rows,
    payload_elements,
    sent_elements,
    sharded_partition,
)


@pytest.mark.parametrize(
    ("parameters", "ranks", "stage", "gigabytes"),
    [(7e9, 8, 0, 112), (7e9, 8, 1, 38.5), (7e9, 8, 2, 26.25), (7e9, 8, 3, 14), (13e9, 16, 1, 61.75), (13e9, 16, 3, 13)],
)
def test_model_states_of_mixed_precision_adam(parameters, ranks, stage, gigabytes):
    assert model_states(parameters, ranks, stage).total == pytest.approx(gigabytes * 1e9, rel=1e-12)


def test_model_states_follow_precision_and_optimizer():
    sgd_fp32 = ModelStates(parameters=4, gradients=4, master=0, optimizer=0)
    assert model_states(1000, 4, 3, sgd_fp32).total == 2000
    assert model_states(1000, 4, 1, sgd_fp32).total == 8000
    states = model_states(1000, 4, 2, ModelStates(parameters=4, gradients=4, master=4, optimizer=8))
    assert (states.parameters, states.gradients, states.master, states.optimizer) == (4000, 1000, 1000, 2000)


def test_payload_and_sent_elements():
    assert [payload_elements(7e9, stage) for stage in (0, 1, 2)] == [14e9] * 3
    assert payload_elements(7e9, 3, reshard=False) == 14e9
    assert payload_elements(7e9, 3) == 21e9
    assert sent_elements(14e9, 8) == 12.25e9
    assert sent_elements(21e9, 8) == 18.375e9


@pytest.mark.parametrize(("p", "m", "percent"), [(4, 8, 27.3), (4, 32, 8.6), (8, 8, 46.7), (4, 64, 4.5)])
def test_bubble(p, m, percent):
    assert 100 * bubble(p, m) == pytest.approx(percent, abs=0.05)


@pytest.mark.parametrize(
    ("numels", "ranks", "flat", "sharded"),
    [
        ([7], 2, 4, 4),  # 7 -> 8 elements; ceil(7 / 2)
        ([6, 1], 4, 2, 3),  # 7 -> 8 elements in all; ceil(6 / 4) + ceil(1 / 4)
        ([5, 5, 5], 2, 8, 9),  # 15 -> 16 elements in all; 3 times ceil(5 / 2)
        ([8], 4, 2, 2),  # nothing to pad
        ([1], 4, 2, 1),
    ],
)
def test_padding(numels, ranks, flat, sharded):
    assert flat_partition(numels, ranks) == flat
    assert sharded_partition(numels, ranks) == sharded


@pytest.mark.parametrize(
    ("shape", "ranks", "stored", "own"),
    [
        ((6, 5), 2, 15, [15, 15]),  # nothing to pad
        ((5, 7), 2, 21, [21, 14]),  # 3 rows and 2
        ((9, 1), 4, 3, [3, 3, 3, 0]),  # ceil(9 / 4) = 3 rows each, so that nothing is left for the last
        ((3,), 4, 1, [1, 1, 1, 0]),
        ((1, 2, 3), 4, 6, [6, 0, 0, 0]),  # one row cannot be cut
        ((0, 3), 2, 0, [0, 0]),
        ((5, 7), 1, 35, [35]),
    ],
)
def test_rows_of_a_sharded_parameter(shape, ranks, stored, own):
    assert padded_rows([shape], ranks) == stored
    assert padded_rows([shape, shape, (4 * ranks,)], ranks) == 2 * stored + 4
    assert [own_rows(shape, ranks, rank) for rank in range(ranks)] == own


def test_optimizer_elements():
    assert optimizer_elements("SGD", {"momentum": 0.0}) == 0
    assert optimizer_elements("SGD", {"momentum": 0.9}) == 1
    assert optimizer_elements("ASGD", {"lambd": 1e-4}) == 1
    assert optimizer_elements("AdamW", {"amsgrad": False}) == 2
    assert optimizer_elements("AdamW", {"amsgrad": True}) == 3
    with pytest.raises(ValueError, match="Mystery"):
        optimizer_elements("Mystery", {})


def test_needs_no_process_group():
    modules = {
        name
        for node in ast.walk(ast.parse(Path(arithmetic.__file__).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)])
    }
    assert modules <= {"collections.abc", "dataclasses", "math", "typing"}
