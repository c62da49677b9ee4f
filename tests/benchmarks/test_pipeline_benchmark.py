import json
from dataclasses import replace

import pytest
import torch

from benchmarks import pipeline_overhead
from benchmarks.pipeline import judged, main
from benchmarks.pipeline_bubble import Case, Measured, bubble_of, judge_bubble, judge_memory, run_steps
from benchmarks.sleeping import Meter, SleepingLayer, SleepingModule
from lightning_shard._compat.schedules import torch_actions
from lightning_shard.pipeline.schedule import bubble
from lightning_shard.testing import RankFailed, run_distributed


@pytest.mark.ranks
def test_quick_run_compares_the_same_work_and_measures_time_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick", "--schedules", "1f1b", "zbv", "--json"])
    found = json.loads(capsys.readouterr().out)
    (overhead,) = found["overhead"]
    assert (overhead["schedule"], overhead["ranks"], overhead["microbatches"], overhead["pairs"]) == ("1f1b", 2, 4, 5)
    # Two blocks: a norm, and two linear layers with their biases.
    assert overhead["parameters"] == 2 * (2 * 32 + 2 * 32 * 128 + 128 + 32)
    assert min(overhead[key] for key in ("forward_ms", "bare_ms", "ours_ms")) > 0
    assert overhead["cpu_ratio"] > 0.5  # the Trainer's step computes all that the other does
    assert overhead["verdict"] == "no target"
    assert len(overhead["replay_ms"]) == 2
    one, zero = found["schedules"]
    assert [row["schedule"] for row in (one, zero)] == ["1f1b", "zbv"]
    assert (one["stages"], zero["stages"], one["formula"]) == (2, 4, 0.2)
    for row in (one, zero):
        # Nobody is faster than on paper; a busy machine makes everyone wait longer.
        assert row["on_paper"] <= row["bubble"] + 0.01
        assert row["on_paper"] <= row["by_hand"] + 0.01
        assert row["lowest"] <= row["bubble"] <= row["highest"]
    # Not the medians: two steps are few on a machine that is busy with other tests.
    assert zero["lowest"] < one["highest"]
    assert (one["live"], one["memory_verdict"]) == ([2, 1], "pass")
    assert zero["live"] == zero["live_on_paper"] == [4, 4]


def test_a_sleeping_layer_computes_either_gradient_without_the_other() -> None:
    meter = Meter(0.0)
    layer = SleepingLayer(meter)
    x = torch.ones(2, 64, requires_grad=True)
    y = layer(x)
    slept = [len(meter.sleeps)]
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    slept.append(len(meter.sleeps))
    torch.autograd.grad(y.sum(), layer.weight, retain_graph=True)
    slept.append(len(meter.sleeps))
    y.sum().backward()
    slept.append(len(meter.sleeps))
    assert slept == [1, 2, 3, 5]


def test_the_meter_counts_what_autograd_keeps_until_it_is_freed() -> None:
    meter = Meter(0.0)
    module = SleepingModule(3, meter)
    batch = torch.ones(2, 64)
    first = module.training_step(batch, 0)
    one = meter.live_bytes
    # Each layer keeps its input and its weight.
    assert one == 3 * (2 * 64 + 64) * 4
    second = module.training_step(batch, 1)
    first.backward()
    assert meter.live_bytes == one
    second.backward()
    assert meter.live_bytes == 0
    step = meter.end_step()
    assert (step.live, len(step.sleeps)) == (2, 2 * 9)
    assert meter.end_step().live == 0


def test_bubble_is_idle_over_total() -> None:
    # GPipe with two ranks and one microbatch: half of the time each rank waits for the other.
    first = [(10.0, 11.0), (13.0, 14.0)]
    second = [(11.0, 12.0), (12.0, 13.0)]
    assert bubble_of([first, second]) == 0.5
    assert bubble_of([[(0.0, 1.0)], [(0.0, 1.0)]]) == 0
    # By its list of actions, as time goes by.
    actions = torch_actions("gpipe", 2, 1, 1)
    forward, backward = (0.0, 1.0), (2.0, 4.0)
    assert bubble_of([[forward, (4.0, 6.0)], [(1.0, 2.0), backward]]) == bubble(actions, 2)


def row(schedule: str, measured: float, by_hand: float = 0.25, live: tuple[float, ...] = (4, 3, 2, 1)) -> Measured:
    return Measured(
        schedule=schedule,
        ranks=4,
        stages=4,
        microbatches=8,
        bubble=measured,
        lowest=measured,
        highest=measured,
        by_hand=by_hand,
        on_paper=0.25,
        formula=0.25,
        live=list(live),
        live_on_paper=[4, 3, 2, 1],
    )


def test_verdicts_of_bubbles() -> None:
    one = row("1f1b", 0.26)
    for schedule in ("gpipe", "1f1b"):
        assert judge_bubble(row(schedule, 0.27), one) == "pass"
        assert judge_bubble(row(schedule, 0.28), one) == judge_bubble(row(schedule, 0.22), one) == "FAIL"
        assert judge_bubble(row(schedule, 0.28, by_hand=0.29), one) == "inconclusive"
    assert judge_bubble(row("interleaved", 0.24), one) == "pass"
    assert judge_bubble(row("interleaved", 0.25, by_hand=0.20), one) == "FAIL"
    for schedule in ("zero_bubble", "zbv"):
        assert judge_bubble(row(schedule, 0.13), one) == "pass"
        assert judge_bubble(row(schedule, 0.14, by_hand=0.125), one) == "FAIL"
        assert judge_bubble(row(schedule, 0.14, by_hand=0.126), one) == "inconclusive"
        assert judge_bubble(row(schedule, 0.01), None) == "no target"
    assert judge_bubble(row("looped_bfs", 0.5), one) == "no target"


def test_zero_bubble_schedules_are_compared_with_1f1b_of_the_same_run() -> None:
    rows = [row("gpipe", 0.25), row("1f1b", 0.26), row("zbv", 0.13)]
    assert [verdict for _, verdict in judged(rows)] == ["pass", "pass", "pass"]
    assert [verdict for _, verdict in judged(rows[::2])] == ["pass", "no target"]


def test_verdicts_of_memory() -> None:
    assert judge_memory(row("1f1b", 0.25)) == "pass"
    assert judge_memory(row("1f1b", 0.25, live=(8, 8, 8, 8))) == "FAIL"
    assert judge_memory(row("gpipe", 0.25, live=(8, 8, 8, 8))) == "pass"
    assert judge_memory(row("gpipe", 0.25)) == "FAIL"
    assert judge_memory(row("zbv", 0.25)) == "no target"


def test_verdicts_of_overhead() -> None:
    judge = pipeline_overhead.judge
    assert judge(21, 1.05, 1.0, has_cores=True) == "pass"
    assert judge(21, 1.06, 0.98, has_cores=True) == "FAIL"
    assert judge(21, 1.0, 1.04, has_cores=True) == judge(21, 1.0, 0.96, has_cores=True) == "inconclusive"
    assert judge(19, 1.0, 1.0, has_cores=True) == judge(21, 1.0, 1.0, has_cores=False) == "no target"


def test_each_stage_has_the_same_blocks_by_hand_and_under_the_trainer() -> None:
    case = pipeline_overhead.Case(schedule="1f1b", ranks=4, blocks=3, width=8, rows=2, pairs=5)
    assert case.split == ["network.blocks.2", "network.blocks.5", "network.blocks.8"]
    assert (case.size.layers, case.size.rows, case.microbatches) == (12, 16, 8)


def other_weights() -> None:
    def changed(*arguments: object) -> None:
        network = arguments[1]
        assert isinstance(network, torch.nn.Module)
        bare(*arguments)  # type: ignore[arg-type]
        with torch.no_grad():
            next(network.parameters()).add_(0.1)

    bare, pipeline_overhead.bare_loop = pipeline_overhead.bare_loop, changed
    case = pipeline_overhead.Case(schedule="gpipe", ranks=2, blocks=1, width=8, rows=2, pairs=5)
    pipeline_overhead.run_loops(case, 4)


@pytest.mark.ranks
def test_other_work_is_not_compared() -> None:
    with pytest.raises(RankFailed, match=r"differ by 1\.0e-01"):
        run_distributed(other_weights, 2)


@pytest.mark.ranks
def test_the_trainer_and_the_hand_written_loop_sleep_equally_often() -> None:
    case = Case(schedule="zero_bubble", ranks=2, microbatches=4, stages_per_rank=2, unit=0.0, steps=2)
    for ours, bare in run_distributed(run_steps, 2, case):
        assert [len(step.sleeps) for step in (*ours, *bare)] == [3 * 2 * 4] * 4


def test_tables_in_plain_text_and_markdown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    measured = row("1f1b", 0.26)
    monkeypatch.setattr("benchmarks.pipeline_bubble.measure", lambda case: replace(measured, schedule=case.schedule))
    arguments = ["--parts", "bubble", "--schedules", "gpipe", "1f1b"]
    main(arguments)
    plain = capsys.readouterr().out
    lines = [line.split() for line in plain.splitlines()]
    assert ["gpipe", "4", "26.0", "26.0", "-", "26.0", "25.0", "25.0", "25.0", "pass"] in lines
    assert ["gpipe", "4", "4", "3", "2", "1", "4", "3", "2", "1", "FAIL"] in lines
    assert ["1f1b", "4", "4", "3", "2", "1", "4", "3", "2", "1", "pass"] in lines
    main([*arguments, "--markdown"])
    marked = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(marked) == 8
    assert all(line.endswith(" |") for line in marked)


def test_too_few_pairs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--pairs", "4"])
    assert ended.value.code == 2
    assert "--pairs 4: at least 5" in capsys.readouterr().err
