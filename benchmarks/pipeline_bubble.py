"""What schedules do with time and memory, measured on stages that sleep instead of computing.

A stage sleeps one unit in its forward, one for the gradient of its inputs and one for the gradient of its weights, so
that a few cores can stand for many ranks. Everything else is real: a Trainer under ``PipelineStrategy``, the schedule,
the messages, and autograd, which saves activations and frees them again. A hand-written loop of the same stages takes
turns with the Trainer: what it misses, too, the machine misses.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.by_hand import hand_written
from benchmarks.sleeping import WIDTH, Interval, Meter, SleepingModule, Step
from benchmarks.turns import TRAINER, AfterStep, Batches, Loop, Size
from lightning_shard import PipelineStrategy
from lightning_shard._compat.schedules import torch_actions
from lightning_shard.pipeline.schedule import (
    ScheduleName,
    bubble,
    ideal_bubble,
    peak_activations,
    per_rank,
    stages_of_rank,
)
from lightning_shard.testing import run_distributed

ROWS = 4
"""Rows of a microbatch."""

WARM_UP = 2
"""Steps before those that are measured."""

NEAR = 0.10
"""How far from the formula GPipe's and 1F1B's bubble may be, relatively."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One schedule to measure."""

    schedule: ScheduleName
    """The order of forwards and backwards."""

    ranks: int
    """Ranks of the pipeline, p."""

    microbatches: int
    """Microbatches of a step, m."""

    stages_per_rank: int
    """Stages of a rank in the schedules that have several."""

    unit: float
    """Seconds that a stage sleeps for each of its three computations on a microbatch."""

    steps: int
    """Steps that are measured."""

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.ranks * per_rank(self.schedule, self.stages_per_rank)

    @property
    def batches(self) -> Batches:
        """A batch ``[rows, width]`` for each step."""
        return Batches(Size(layers=self.stages, width=WIDTH, rows=ROWS * self.microbatches), WARM_UP + self.steps)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one schedule did."""

    schedule: str
    """The schedule."""

    ranks: int
    """Ranks of the pipeline, p."""

    stages: int
    """Stages of the pipeline."""

    microbatches: int
    """Microbatches of a step, m."""

    bubble: float
    """Measured: idle over total, mean over the ranks; the median of the steps."""

    lowest: float
    """The lowest step's."""

    highest: float
    """The highest step's."""

    by_hand: float
    """The same for a hand-written loop of the same stages, whose steps alternate with the Trainer's."""

    on_paper: float
    """The bubble of the schedule's list of actions at unit costs."""

    formula: float
    """(p - 1) / (m + p - 1)."""

    live: list[float]
    """For each rank, the most bytes that autograd kept of the step at once, in stages' forwards on a microbatch."""

    live_on_paper: list[int]
    """The same, from the schedule's list of actions."""


# --- measuring ---


def trainer_loop(case: Case, meter: Meter, after_step: Callable[[], None]) -> None:
    """The steps of a Trainer."""
    strategy = PipelineStrategy(
        schedule=case.schedule,
        microbatches=case.microbatches,
        stages_per_rank=case.stages_per_rank,
        split=[f"layers.{stage}" for stage in range(case.stages - 1)],
    )
    settings = {**TRAINER, "devices": case.ranks}
    trainer = pl.Trainer(strategy=strategy, callbacks=[AfterStep(after_step)], **settings)
    trainer.fit(SleepingModule(case.stages, meter), DataLoader(case.batches, batch_size=None))


def bare_loop(case: Case, meter: Meter, after_step: Callable[[], None]) -> None:
    """The same stages in a hand-written loop."""
    module = SleepingModule(case.stages, meter)
    mine: dict[int, nn.Module] = {}
    for stage in stages_of_rank(case.schedule, torch.distributed.get_rank(), case.ranks, case.stages_per_rank):
        layer = module.layers[stage]
        mine[stage] = nn.Sequential(module.entry, layer) if stage == 0 else layer
    forward_and_backward = hand_written(
        case.schedule, mine, case.stages, case.microbatches, lambda output, _: output.mean()
    )
    for batch in DataLoader(case.batches, batch_size=None):
        forward_and_backward(batch)
        after_step()


def recorded(case: Case, run: Callable[[Case, Meter, Callable[[], None]], None]) -> tuple[Loop, list[Step]]:
    """A loop that takes turns with others, and the steps that it will have made."""
    meter = Meter(case.unit)
    steps: list[Step] = []

    def main(after_step: Callable[[], None]) -> None:
        def end_step() -> None:
            steps.append(meter.end_step())
            after_step()

        run(case, meter, end_step)

    return Loop(main, WARM_UP + case.steps), steps


def run_steps(case: Case) -> tuple[list[Step], list[Step]]:
    """On this rank the steps of a Trainer and of a hand-written loop, which take turns, after the warm-up of each."""
    torch.distributed.init_process_group("gloo")
    (ours, our_steps), (bare, bare_steps) = recorded(case, trainer_loop), recorded(case, bare_loop)
    for _ in range(WARM_UP + case.steps):
        ours.step()
        bare.step()
    return our_steps[WARM_UP:], bare_steps[WARM_UP:]


def bubble_of(sleeps_by_rank: Sequence[Sequence[Interval]]) -> float:
    """Idle over total, mean over the ranks, from the first rank's first sleep to the last rank's last."""
    intervals = list(itertools.chain.from_iterable(sleeps_by_rank))
    busy = sum(end - start for start, end in intervals)
    wall = max(end for _, end in intervals) - min(start for start, _ in intervals)
    return 1 - busy / (wall * len(sleeps_by_rank))


def measure(case: Case) -> Measured:
    """Run one schedule on all its ranks.

    Raises:
        RuntimeError: If a rank slept otherwise than three times per stage and microbatch.

    """
    by_rank = run_distributed(run_steps, case.ranks, case, timeout=600.0)
    expected = 3 * case.microbatches * case.stages // case.ranks
    for rank, loops in enumerate(by_rank):
        found = sorted({len(step.sleeps) for steps in loops for step in steps})
        if found != [expected]:
            raise RuntimeError(f"Rank {rank} slept {found} times in a step under {case.schedule}, not {expected}.")
    ours, bare = (
        [bubble_of([step.sleeps for step in ranks]) for ranks in zip(*steps_by_rank, strict=True)]
        for steps_by_rank in zip(*by_rank, strict=True)
    )
    actions = torch_actions(case.schedule, case.ranks, case.stages_per_rank, case.microbatches)
    return Measured(
        schedule=case.schedule,
        ranks=case.ranks,
        stages=case.stages,
        microbatches=case.microbatches,
        bubble=round(statistics.median(ours), 4),
        lowest=round(min(ours), 4),
        highest=round(max(ours), 4),
        by_hand=round(statistics.median(bare), 4),
        on_paper=round(bubble(actions, case.stages), 4),
        formula=round(ideal_bubble(case.ranks, case.microbatches), 4),
        live=[round(max(step.live for step in steps), 2) for steps, _ in by_rank],
        live_on_paper=peak_activations(actions),
    )


def judge_bubble(row: Measured, one_f_one_b: Measured | None) -> str:
    """Whether a schedule's bubble is what it should be.

    GPipe's and 1F1B's must be near the formula, interleaved 1F1B's below it, and those of the schedules that move the
    weights' gradients at most half of 1F1B's.

    Args:
        row: The schedule.
        one_f_one_b: What 1F1B did in the same run, if it was measured.

    Returns:
        ``pass`` or ``FAIL``; ``no target``; or ``inconclusive``, where the hand-written loop misses it, too.

    """
    reference = (one_f_one_b.bubble, one_f_one_b.by_hand) if one_f_one_b is not None else (None, None)
    ours, by_hand = (
        _is_met(row.schedule, measured, row.formula, of_1f1b)
        for measured, of_1f1b in zip((row.bubble, row.by_hand), reference, strict=True)
    )
    if ours is None:
        return "no target"
    if ours:
        return "pass"
    return "FAIL" if by_hand else "inconclusive"


def _is_met(schedule: str, measured: float, formula: float, of_1f1b: float | None) -> bool | None:
    match schedule:
        case "gpipe" | "1f1b":
            return abs(measured / formula - 1) <= NEAR
        case "interleaved":
            return measured < formula
        case "zero_bubble" | "zbv":
            return measured <= of_1f1b / 2 if of_1f1b is not None else None
    return None


def judge_memory(row: Measured) -> str:
    """Whether the rank that keeps most keeps what it should: m microbatches under GPipe, p under 1F1B."""
    wanted = {"gpipe": row.microbatches, "1f1b": row.ranks}.get(row.schedule)
    if wanted is None:
        return "no target"
    return "pass" if abs(max(row.live) - wanted) <= 0.5 else "FAIL"
