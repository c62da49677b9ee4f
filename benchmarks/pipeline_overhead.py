"""What a Trainer step under ``PipelineStrategy`` costs beside a hand-written loop on torch.distributed.pipelining.

The hand-written loop is what one writes without a Trainer: a ``PipelineStage`` around this rank's blocks, the schedule,
the optimizer. It has the same blocks, cuts, microbatches and batches, and in the end the same weights. The loops take
turns step by step in the same processes, as ``benchmarks/turns.py`` says: two Trainers and two hand-written loops, so
that a pair compares two steps of each kind.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.utils.data import DataLoader

from benchmarks.by_hand import hand_written
from benchmarks.turns import (
    NOISE,
    TRAINER,
    AfterStep,
    Batches,
    Loop,
    Module,
    Network,
    Size,
    Times,
    make_network,
    make_optimizer,
    median_ratio,
    over_ranks,
    take_turns,
)
from lightning_shard import PipelineStrategy
from lightning_shard._compat.pipelining import ReplayStage
from lightning_shard.pipeline.schedule import ScheduleName
from lightning_shard.testing import run_distributed

TARGET = 1.05
LEAST_FORWARD_MS = 20.0
LONGEST_FOR_REPLAY_MS = 3.0
SAME = 1e-5
"""How far apart the weights of two loops may be after all steps."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison."""

    schedule: ScheduleName
    """The order of forwards and backwards."""

    ranks: int
    """Ranks of the pipeline, each with one stage."""

    blocks: int
    """Residual blocks of a stage."""

    width: int
    """Width of the activations."""

    rows: int
    """Rows of a microbatch."""

    pairs: int
    """How many steps of each loop are compared."""

    @property
    def microbatches(self) -> int:
        """As many as ``PipelineStrategy`` would choose."""
        return 2 * self.ranks

    @property
    def size(self) -> Size:
        """The network and its batches."""
        return Size(layers=self.ranks * self.blocks, width=self.width, rows=self.rows * self.microbatches)

    @property
    def split(self) -> list[str]:
        """The blocks at whose end a stage ends."""
        return [f"network.blocks.{stage * self.blocks - 1}" for stage in range(1, self.ranks)]

    def mine(self) -> slice:
        """The blocks of this rank's stage."""
        rank = torch.distributed.get_rank()
        return slice(rank * self.blocks, (rank + 1) * self.blocks)


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What one comparison found."""

    schedule: str
    """The schedule."""

    ranks: int
    """Ranks of the pipeline."""

    microbatches: int
    """Microbatches of a step."""

    parameters: int
    """Parameters of the network."""

    pairs: int
    """Pairs of steps that were compared."""

    forward_ms: float
    """Median CPU time of a hand-written stage's forward on one microbatch, on the rank where it is least, in
    milliseconds."""

    bare_ms: float
    """Median step of the hand-written loop, in milliseconds."""

    ours_ms: float
    """Median step of the Trainer, in milliseconds."""

    ratio: float
    """Median of Trainer / hand-written, pair by pair."""

    bare_against_bare: float
    """The same for the two hand-written loops: 1 but for noise."""

    cpu_ratio: float
    """Median of Trainer / hand-written in CPU time of all ranks together."""

    replay_ms: list[float]
    """For each stage, by how much CPU time the median replayed forward of a microbatch is longer than the hand-written
    one, in milliseconds; only where the forward is short enough for that not to drown."""

    verdict: str
    """``pass`` or ``FAIL``, ``no target`` (a forward of less than 20 ms, or more ranks than cores), or
    ``inconclusive``."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one rank measured."""

    times: list[Times]
    """Of every loop, the times of its steps."""

    replayed: list[float]
    """CPU seconds of each forward under the Trainers."""

    bare: list[float]
    """CPU seconds of each forward of the hand-written loops."""


def time_forwards(kind: type) -> list[float]:
    """From now on, keep the CPU seconds of each forward of a class of stages."""
    seconds: list[float] = []
    forward = kind.forward_one_chunk  # type: ignore[attr-defined]

    def timed(*arguments: Any, **keywords: Any) -> Any:
        started = time.thread_time()
        result = forward(*arguments, **keywords)
        seconds.append(time.thread_time() - started)
        return result

    kind.forward_one_chunk = timed  # type: ignore[attr-defined]
    return seconds


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """The loss of :class:`~benchmarks.turns.Network`, which needs no target."""
    return output.square().mean()


def bare_loop(case: Case, network: Network, batches: Batches, after_step: Callable[[], None]) -> None:
    """The hand-written loop on this rank."""
    module = network.blocks[case.mine()]
    rank = torch.distributed.get_rank()
    forward_and_backward = hand_written(case.schedule, {rank: module}, case.ranks, case.microbatches, loss_of)
    optimizer = make_optimizer(module)
    for batch in DataLoader(batches, batch_size=None):
        optimizer.zero_grad()
        forward_and_backward(batch)
        optimizer.step()
        after_step()


def trainer_loop(case: Case, network: Network, batches: Batches, after_step: Callable[[], None]) -> None:
    """The Trainer's loop."""
    strategy = PipelineStrategy(schedule=case.schedule, microbatches=case.microbatches, split=case.split)
    settings = {**TRAINER, "devices": case.ranks}
    trainer = pl.Trainer(strategy=strategy, callbacks=[AfterStep(after_step)], **settings)
    trainer.fit(Module(network), DataLoader(batches, batch_size=None))


def run_loops(case: Case, steps: int) -> Measured:
    """Run two Trainers and two hand-written loops on this rank.

    Raises:
        RuntimeError: If they end with different weights, so that the comparison would be of different work.

    """
    torch.distributed.init_process_group("gloo")
    replayed, bare = time_forwards(ReplayStage), time_forwards(PipelineStage)
    batches = Batches(case.size, steps)
    networks = [make_network(case.size) for _ in range(4)]
    runs = (trainer_loop, trainer_loop, bare_loop, bare_loop)

    def loop(place: int) -> Loop:
        return Loop(lambda after_step: runs[place](case, networks[place], batches, after_step), steps)

    loops = [loop(place) for place in range(4)]
    take_turns(loops, steps)
    difference = largest_difference(networks[0], networks[2], case)
    if difference > SAME:
        raise RuntimeError(f"The weights of the Trainer and of the hand-written loop differ by {difference:.1e}.")
    return Measured(times=[each.times for each in loops], replayed=replayed, bare=bare)


def largest_difference(ours: Network, bare: Network, case: Case) -> float:
    """The largest difference between two networks' weights of this rank's stage."""
    pairs = zip(ours.blocks[case.mine()].parameters(), bare.blocks[case.mine()].parameters(), strict=True)
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


def compare(case: Case, warm_up: int) -> Overhead:
    """Run one comparison on all ranks; a step takes as long as on the rank where it takes longest."""
    by_rank = run_distributed(run_loops, case.ranks, case, warm_up + case.pairs, timeout=3000.0)
    ours, again, bare, control = over_ranks([rank.times for rank in by_rank], warm_up)
    forward_ms = 1000 * min(statistics.median(rank.bare) for rank in by_rank)
    ratio = median_ratio(_sums(ours.wall, again.wall), _sums(bare.wall, control.wall))
    noise = median_ratio(control.wall, bare.wall)
    replay_ms = [1000 * (statistics.median(rank.replayed) - statistics.median(rank.bare)) for rank in by_rank]
    return Overhead(
        schedule=case.schedule,
        ranks=case.ranks,
        microbatches=case.microbatches,
        parameters=sum(parameter.numel() for parameter in make_network(case.size).parameters()),
        pairs=case.pairs,
        forward_ms=round(forward_ms, 2),
        bare_ms=round(statistics.median([bare.milliseconds, control.milliseconds]), 2),
        ours_ms=round(statistics.median([ours.milliseconds, again.milliseconds]), 2),
        ratio=round(ratio, 4),
        bare_against_bare=round(noise, 4),
        cpu_ratio=round(median_ratio(_sums(ours.cpu, again.cpu), _sums(bare.cpu, control.cpu)), 4),
        replay_ms=[] if forward_ms > LONGEST_FOR_REPLAY_MS else [round(cost, 3) for cost in replay_ms],
        verdict=judge(forward_ms, ratio, noise, has_cores=enough_cores(case)),
    )


def enough_cores(case: Case) -> bool:
    """Whether each rank has a core of its own."""
    return case.ranks <= len(os.sched_getaffinity(0))


def judge(forward_ms: float, ratio: float, control: float, *, has_cores: bool) -> str:
    """The verdict of :class:`Overhead`.

    Args:
        forward_ms: A stage's forward on a microbatch, in milliseconds.
        ratio: What is judged.
        control: The hand-written loop against itself.
        has_cores: Whether each rank has a core.

    """
    if forward_ms < LEAST_FORWARD_MS or not has_cores:
        return "no target"
    if abs(control - 1) > NOISE:
        return "inconclusive"
    return "pass" if ratio <= TARGET else "FAIL"


def _sums(one: list[float], other: list[float]) -> list[float]:
    return [first + second for first, second in zip(one, other, strict=True)]
