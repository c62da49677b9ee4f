"""Placement, limits and costs of the schedules, against torch's own classes and the papers' formulas."""

import ast
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed

from lightning_shard._compat.schedules import torch_actions
from lightning_shard.pipeline import schedule
from lightning_shard.pipeline.schedule import (
    SCHEDULES,
    UNIT_COSTS,
    Action,
    bubble,
    ideal_bubble,
    peak_activations,
    per_rank,
    rank_of_stage,
    stages_of_rank,
    why_impossible,
)


def numbers(name):
    """The numbers of stages per rank to try a schedule with."""
    fixed = SCHEDULES[name].stages_per_rank
    return [fixed] if fixed else [1, 2, 3]


def run_on_paper(name, ranks, stages_per_rank, microbatches):
    """The bubble of torch's action list."""
    actions = torch_actions(name, ranks, stages_per_rank, microbatches)
    return bubble(actions, ranks * per_rank(name, stages_per_rank))


def refusal(name, ranks, stages_per_rank, microbatches):
    """What torch's class says, or where its order never ends; None if it runs."""
    try:
        run_on_paper(name, ranks, stages_per_rank, microbatches)
    except ValueError as error:
        return str(error)
    return None


# --- placement -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "placed"),
    [
        ("gpipe", [[0], [1], [2]]),
        ("1f1b", [[0], [1], [2]]),
        ("interleaved", [[0, 3], [1, 4], [2, 5]]),
        ("looped_bfs", [[0, 3], [1, 4], [2, 5]]),
        ("zero_bubble", [[0, 3], [1, 4], [2, 5]]),
        ("zbv", [[0, 5], [1, 4], [2, 3]]),
        ("dualpipev", [[0, 5], [1, 4], [2, 3]]),
    ],
)
def test_stages_lie_on_their_ranks(name, placed):
    assert [stages_of_rank(name, rank, 3, 2) for rank in range(3)] == placed
    assert all(rank_of_stage(name, stage, 3, 2) == rank for rank in range(3) for stage in placed[rank])


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_runs_every_stage_where_we_place_it_and_every_microbatch_once(name):
    for stages_per_rank in numbers(name):
        actions = torch_actions(name, 4, stages_per_rank, 8)
        for rank, of_rank in enumerate(actions):
            stages = stages_of_rank(name, rank, 4, stages_per_rank)
            forwards = Counter((a.stage, a.microbatch) for a in of_rank if a.kind == "F")
            inputs = Counter((a.stage, a.microbatch) for a in of_rank if a.kind in "IB")
            weights = Counter((a.stage, a.microbatch) for a in of_rank if a.kind in "WB")
            once = Counter((stage, microbatch) for stage in stages for microbatch in range(8))
            assert forwards == inputs == weights == once
        split = any(action.kind == "I" for of_rank in actions for action in of_rank)
        assert split == SCHEDULES[name].splits_backward


# --- what is possible ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_possible_is_what_torch_accepts_and_what_ends(name):
    refused = 0
    for ranks in range(1, 6):
        for stages_per_rank in numbers(name):
            for microbatches in range(1, 14):
                why = why_impossible(name, ranks, stages_per_rank, microbatches)
                theirs = refusal(name, ranks, stages_per_rank, microbatches)
                assert (why is None) == (theirs is None), f"ours: {why}; theirs: {theirs}"
                refused += theirs is not None
    assert (refused > 0) == (name in ("1f1b", "interleaved", "zero_bubble", "dualpipev"))


@pytest.mark.parametrize(
    ("name", "ranks", "stages_per_rank", "microbatches", "words"),
    [
        ("1f1b", 4, 2, 3, ["1f1b", "4 for 4 ranks", "are 3"]),
        ("dualpipev", 2, 2, 3, ["4 for 2 ranks", "are 3"]),
        ("zbv", 2, 3, 8, ["2 stages", "not 3"]),
        ("interleaved", 2, 2, 7, ["7 // 2 = 3 rounds", "6 or 8"]),
        ("zero_bubble", 4, 2, 9, ["9 microbatches", "8 or 10"]),
    ],
)
def test_the_reason_has_the_numbers(name, ranks, stages_per_rank, microbatches, words):
    why = why_impossible(name, ranks, stages_per_rank, microbatches)
    assert why is not None and "\n" not in why
    assert [word for word in words if word not in why] == []


@pytest.mark.parametrize("name", ["interleaved", "zero_bubble"])
def test_the_numbers_that_are_proposed_are_possible(name):
    for ranks in range(2, 9):
        for microbatches in range(1, 40):
            why = why_impossible(name, ranks, 2, microbatches)
            if why is not None:
                fewer, more = (int(text) for text in why.split("Use ")[1].removesuffix(" microbatches.").split(" or "))
                assert fewer < microbatches < more
                assert why_impossible(name, ranks, 2, fewer) is None and why_impossible(name, ranks, 2, more) is None


# --- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m", "percent"), [(4, 8, 27.3), (4, 32, 8.6), (8, 8, 46.7), (4, 64, 4.5)])
def test_ideal_bubble(p, m, percent):
    assert round(100 * ideal_bubble(p, m), 1) == percent


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (2, 8), (3, 7), (4, 4), (4, 8), (4, 32), (8, 8)])
def test_bubble_of_gpipe_and_1f1b_is_the_formula(name, p, m):
    assert run_on_paper(name, p, 1, m) == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16)])
def test_interleaving_shrinks_the_bubble_and_zero_bubble_schedules_halve_it(p, m):
    plain = run_on_paper("1f1b", p, 1, m)
    interleaved = [run_on_paper("interleaved", p, v, m) for v in (2, 3)]
    assert interleaved[1] < interleaved[0] < plain
    # v stages a rank make the warm-up v times shorter (Megatron-LM, section 2.2): (p - 1) / (v m + p - 1).
    assert interleaved == pytest.approx([(p - 1) / (v * m + p - 1) for v in (2, 3)])
    assert run_on_paper("zero_bubble", p, 2, m) <= plain / 2
    assert run_on_paper("zbv", p, 2, m) <= plain / 2


def test_bubble_of_a_schedule_worked_out_by_hand():
    f, b, i, w = (lambda s, m, kind=kind: Action(stage=s, kind=kind, microbatch=m) for kind in "FBIW")
    assert bubble([[f(0, 0), b(0, 0)], [f(1, 0), b(1, 0)]], 2) == 0.5  # one of two ranks works at any time
    # Rank 1 sends its input gradient at 3, not at 4: the end is at 5, 6 units of work on 2 ranks.
    assert bubble([[f(0, 0), b(0, 0)], [f(1, 0), i(1, 0), w(1, 0)]], 2) == pytest.approx(1 - 6 / 10)
    assert UNIT_COSTS["B"] == UNIT_COSTS["I"] + UNIT_COSTS["W"]


def test_an_order_that_never_ends_is_refused():
    f, b = (lambda s, m, kind=kind: Action(stage=s, kind=kind, microbatch=m) for kind in "FB")
    with pytest.raises(ValueError, match=r"never ends: rank 0 at .*stage=0.*rank 1 at .*stage=1"):
        bubble([[b(0, 0), f(0, 0)], [f(1, 0), b(1, 0)]], 2)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 4)])
def test_live_activations(p, m):
    assert peak_activations(torch_actions("gpipe", p, 1, m)) == [m] * p
    assert peak_activations(torch_actions("1f1b", p, 1, m)) == [p - rank for rank in range(p)]
    # ZB-V holds no more than 1F1B's worst rank: 2p stages' worth, each half as large.
    assert max(peak_activations(torch_actions("zbv", p, 2, m))) <= 2 * p


def test_activations_live_until_the_weights_gradients():
    f, i, w = (lambda m, kind=kind: Action(stage=0, kind=kind, microbatch=m) for kind in "FIW")
    assert peak_activations([[f(0), i(0), f(1), w(0), i(1), w(1)], [f(0), i(0), w(0), f(1), i(1), w(1)]]) == [2, 1]


# --- where it is read ------------------------------------------------------------------------------------------------


def test_the_arithmetic_needs_no_torch():
    tree = ast.parse(Path(schedule.__file__).read_text())
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [name for name in imported if name.split(".")[0] == "torch"] == []


@pytest.mark.parametrize("name", SCHEDULES)
def test_torchs_lists_are_read_without_a_process_group(name):
    assert not torch.distributed.is_initialized()
    assert len(torch_actions(name, 2, 2, 4)) == 2
    assert not torch.distributed.is_initialized()
