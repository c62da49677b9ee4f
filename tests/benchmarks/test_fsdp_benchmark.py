import json
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from benchmarks.fsdp import judge, main
from benchmarks.turns import Loop, median_ratio, over_ranks, take_turns
from lightning_shard.testing import run_distributed


@pytest.mark.ranks
def test_quick_run_compares_the_same_work(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick", "--names", "fsdp2", "--json"])
    (result,) = json.loads(capsys.readouterr().out)
    assert (result["name"], result["pairs"]) == ("fsdp2", 5)
    # Two blocks: a norm, and two linear layers with their biases.
    assert result["parameters"] == 2 * (2 * 32 + 2 * 32 * 128 + 128 + 32)
    assert min(result[key] for key in ("bare_ms", "ours_ms", "lightning_ms")) > 0
    # A Trainer's step computes all that the bare one does.
    assert result["cpu_ratio"] > 0.5
    assert result["cpu_ratio_to_lightning"] > 0.5
    control = result["bare_against_bare"]
    assert result["verdict"] == judge(result["bare_ms"], result["ratio"], control, 1.08)
    assert result["verdict_to_lightning"] == judge(result["bare_ms"], result["ratio_to_lightning"], control, 1.02)


def log_turns(steps: int) -> tuple[list[str], list[int]]:
    """Which of four loops ran when, on this rank; and how many times each was timed."""
    torch.distributed.init_process_group("gloo")
    log: list[str] = []

    def named(name: str) -> Callable[[Callable[[], None]], None]:
        def run(after_step: Callable[[], None]) -> None:
            for _ in range(steps):
                log.append(name)
                after_step()
            log.append(name.upper())

        return run

    loops = [Loop(named(name), steps) for name in "abcd"]
    take_turns(loops, steps)
    return log, [len(loop.times) for loop in loops]


@pytest.mark.ranks
def test_one_loop_at_a_time_runs_and_each_follows_each_other_one_equally_often() -> None:
    (log, times), other = run_distributed(log_turns, 2, 4)
    assert other == (log, times)
    assert times == [4, 4, 4, 4]
    steps = [name for name in log if name.islower()]
    rounds = [steps[start : start + 4] for start in range(0, 16, 4)]
    assert all(sorted(names) == ["a", "b", "c", "d"] for names in rounds)
    followed = [pair for names in rounds for pair in pairwise(names)]
    assert len(set(followed)) == len(followed) == 12
    assert sorted(name for name in log if name.isupper()) == ["A", "B", "C", "D"]  # each came to its end


def fail_in_a_step() -> None:
    torch.distributed.init_process_group("gloo")

    def run(after_step: Callable[[], None]) -> None:
        after_step()
        raise RuntimeError("in the second step")

    loop = Loop(run, 3)
    loop.step()
    with pytest.raises(RuntimeError, match="in the second step"):
        loop.step()


@pytest.mark.ranks
def test_an_error_in_a_loop_is_raised_where_it_is_given_its_turn() -> None:
    run_distributed(fail_in_a_step, 2)


def test_a_step_takes_as_long_as_on_its_slowest_rank() -> None:
    first = [[(9.0, 9.0), (1.0, 0.5), (2.0, 0.5)], [(9.0, 9.0), (2.0, 1.0), (2.0, 1.0)]]
    second = [[(9.0, 9.0), (3.0, 0.5), (1.0, 0.5)], [(9.0, 9.0), (1.0, 1.0), (4.0, 1.0)]]
    ours, bare = over_ranks([first, second], warm_up=1)
    assert (ours.wall, bare.wall) == ([3.0, 2.0], [2.0, 4.0])
    assert (ours.cpu, bare.cpu) == ([1.0, 1.0], [2.0, 2.0])
    assert ours.milliseconds == 2500
    assert median_ratio(ours.wall, bare.wall) == (1.5 + 0.5) / 2


def test_noise_gives_no_verdict() -> None:
    assert judge(110, 1.08, 1.0, 1.08) == "met"
    assert judge(110, 1.09, 1.0, 1.08) == "missed"
    assert judge(110, 1.03, 0.98, 1.02) == "missed"
    assert judge(110, 1.0, 1.04, 1.02) == judge(110, 1.0, 0.96, 1.02) == "inconclusive"
    assert judge(20, 1.5, 1.0, 1.08) == "no target"


def test_too_few_pairs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--pairs", "4"])
    assert ended.value.code == 2
    assert "--pairs 4: at least 5" in capsys.readouterr().err
