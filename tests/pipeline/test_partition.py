"""The automatic split against all combinations; the named split and its refusals."""

import ast
import itertools
import random
import time
from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard.pipeline import partition
from lightning_shard.pipeline.partition import CutPoint, StageRow, balance, choose, stage_table


def quality(costs, crossing, chosen):
    """What is minimised, most important first."""
    edges = [0, *(costs[i] for i in chosen), costs[-1]]
    stages = [end - start for start, end in itertools.pairwise(edges)]
    return max(stages), sum(crossing[i] for i in chosen), sum(cost**2 for cost in stages)


def best_of_all(costs, crossing, stages):
    combinations = itertools.combinations(range(len(crossing)), stages - 1)
    return min(quality(costs, crossing, chosen) for chosen in combinations)


def cut_points(*names, crossing=1):
    return [CutPoint(position=3 * i, name=name, crossing_bytes=crossing) for i, name in enumerate(names)]


# --- balanced --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_better_than_the_automatic_split(seed):
    rng = random.Random(seed)
    for _ in range(25):
        cuts = rng.randint(1, 9)
        largest = rng.choice([1, 3, 50])  # 1 and 3 make zero costs and ties
        costs = list(itertools.accumulate(rng.randint(0, largest) for _ in range(cuts + 1)))
        crossing = [rng.randint(1, rng.choice([1, 2, 9])) for _ in range(cuts)]
        for stages in range(1, cuts + 2):
            chosen = balance(costs, crossing, stages)
            assert len(chosen) == stages - 1 and all(a < b for a, b in itertools.pairwise(chosen))
            assert quality(costs, crossing, chosen) == best_of_all(costs, crossing, stages), (costs, crossing, stages)


def test_the_bottleneck_is_exact_in_floating_point():
    rng = random.Random(0)
    for _ in range(100):
        costs = list(itertools.accumulate(rng.random() * 10 ** rng.randint(0, 12) for _ in range(8)))
        crossing = [rng.randint(1, 3) for _ in range(7)]
        for stages in (2, 3, 4):
            found, best = (
                quality(costs, crossing, balance(costs, crossing, stages)),
                best_of_all(costs, crossing, stages),
            )
            assert found[:2] == best[:2]


def test_ties_go_to_fewer_crossing_bytes_then_to_the_most_even():
    # Four blocks of 1 before a head of 4: any place for the first cut leaves the largest stage at 4.
    costs = [1, 2, 3, 4, 8]
    assert balance(costs, [5, 5, 5, 5], 3) == [1, 3]
    assert balance(costs, [5, 5, 4, 5], 3) == [2, 3]
    assert balance(costs, [4, 5, 4, 5], 3) in ([0, 3], [2, 3])


def test_two_thousand_cuts_take_no_time():
    rng = random.Random(0)
    uneven = list(itertools.accumulate(rng.random() for _ in range(2001)))
    even = list(range(1, 2002))
    cases = [
        (uneven, [rng.randint(1, 4) for _ in range(2000)]),
        (even, [8] * 2000),
        ([0] * 2001, [1] * 2000),
        ([*even[:-1], 1_000_000], [8] * 2000),
    ]
    chosen = []
    for costs, crossing in cases:
        start = time.process_time()
        chosen.append(balance(costs, crossing, 16))
        assert time.process_time() - start < 2
        assert len(set(chosen[-1])) == 15
    edges = [0, *(even[i] for i in chosen[1]), 2001]
    assert {end - start for start, end in itertools.pairwise(edges)} == {125, 126}


def test_choose_balances_where_no_names_are_given():
    assert choose(cut_points("a", "b", "c"), [1, 2, 3, 4], 2, None) == [1]
    assert choose(cut_points("a"), [1, 2], 1, None) == []


def test_too_few_cuts_are_refused_with_both_numbers_and_what_there_is():
    with pytest.raises(MisconfigurationException) as refusal:
        choose(cut_points("encoder", "decoder"), [1, 2, 3], 4, None)
    text = str(refusal.value)
    assert all(word in text for word in ("4 stages", "3 cuts", "2 places", "encoder, decoder", "3 stages or fewer"))
    with pytest.raises(MisconfigurationException, match="nowhere"):
        choose([], [1], 2, None)
    with pytest.raises(MisconfigurationException) as refusal:
        choose(cut_points(*(f"blocks.{i}" for i in range(30))), list(range(31)), 32, None)
    assert str(refusal.value).count("blocks.") == 20 and "10 more" in str(refusal.value)


# --- named -----------------------------------------------------------------------------------------------------------


def test_names_choose_their_cuts():
    cuts = cut_points("embed", "blocks.0", "blocks.1", "head")
    assert choose(cuts, [1, 2, 3, 4, 5], 3, ["embed", "blocks.1"]) == [0, 2]


def test_a_module_that_ends_several_times_is_cut_at_the_last_end_that_keeps_the_order():
    cuts = cut_points("act", "a", "act", "b", "act")
    costs = [1, 2, 3, 4, 5, 6]
    assert choose(cuts, costs, 2, ["act"]) == [4]
    assert choose(cuts, costs, 3, ["act", "b"]) == [2, 3]
    assert choose(cuts, costs, 3, ["act", "a"]) == [0, 1]
    assert choose(cuts, costs, 3, ["act", "act"]) == [2, 4]


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (["blocks.1.mlp", "head"], ["'blocks.1.mlp'", "Nearest to it: 'blocks.1'", "embed, blocks.0, blocks.1, head"]),
        (["block.0", "head"], ["'block.0'", "'blocks.0'"]),
        (["blocks", "head"], ["'blocks'", "Nearest to it: 'blocks.1'"]),
        (["embed"], ["3 stages", "2 names", "has 1", "2 stages"]),
        (["head", "embed"], ["'head'", "ends only after 'embed'", "['embed', 'head']"]),
        (["embed", "embed"], ["'embed'", "named twice"]),
    ],
)
def test_names_that_do_not_fit_are_refused(split, words):
    with pytest.raises(MisconfigurationException) as refusal:
        choose(cut_points("embed", "blocks.0", "blocks.1", "head"), [1, 2, 3, 4, 5], 3, split)
    assert [word for word in words if word not in str(refusal.value)] == []


# --- table -----------------------------------------------------------------------------------------------------------


def test_the_table_has_a_line_for_each_stage():
    rows = [
        StageRow(stage=0, rank=0, first="embed", last="blocks.10", parameters=12345, share=0.256, crossing_bytes=4096),
        StageRow(stage=1, rank=1, first="blocks.11", last="head", parameters=7, share=0.744, crossing_bytes=0),
    ]
    head, *lines = stage_table(rows).splitlines()
    assert head.split("  ")[0] == "stage" and len({len(line) for line in (head, *lines)}) == 1
    assert lines[0].split() == ["0", "0", "embed", "blocks.10", "12,345", "25.6%", "4,096"]
    assert lines[1].split() == ["1", "1", "blocks.11", "head", "7", "74.4%", "0"]


def test_needs_no_torch():
    tree = ast.parse(Path(partition.__file__).read_text())
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [name for name in imported if name.split(".")[0] == "torch"] == []
