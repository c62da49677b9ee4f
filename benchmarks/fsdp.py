"""A Trainer step under ``FSDP2Strategy`` against a hand-written ``fully_shard`` loop, and against Lightning's Trainer.

Four loops live in the same two CPU processes and take turns, a step each: a Trainer under ``FSDP2Strategy``, a Trainer
under Lightning's ``ModelParallelStrategy`` whose module calls ``fully_shard`` in ``configure_model``, and two bare
loops of the same calls. All have the same units, module, batches and optimizer.

A Trainer gives nobody else a turn before its ``fit`` ends, so each of the four loops, the bare ones too, has a thread
of its own: all run under the same conditions. Only one of them is awake at any time, the same one on both ranks, and
each times itself between two turns; the handing over is in nobody's time. ``benchmarks/turns.py`` holds this, and says
how steps are compared.

    python benchmarks/fsdp.py                             # all: some minutes
    python benchmarks/fsdp.py --names fsdp2_grad --json   # one name, as JSON
    python benchmarks/fsdp.py --quick                     # only to see that it runs: a few seconds
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_shard import FSDP2Strategy
from lightning_shard.testing import run_distributed

# As a script this file is in no package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.turns import (
    NOISE,
    RANKS,
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
    parse_options,
    show,
    take_turns,
)

RESHARD = {"fsdp2": True, "fsdp2_grad": False}
"""The names that are compared, and whether a unit is sharded again after its forward."""

SIZES = {"100 ms": Size(layers=6, width=192, rows=176), "200 ms": Size(layers=8, width=256, rows=240)}
QUICK = {"quick": Size(layers=2, width=32, rows=8)}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one comparison found."""

    name: str
    """Name of the strategy."""

    size: str
    """Name of the size."""

    parameters: int
    """Parameters of the network."""

    pairs: int
    """Steps of each loop that were compared."""

    bare_ms: float
    """Median step of the bare loop, in milliseconds."""

    ours_ms: float
    """Median step of the Trainer under ``FSDP2Strategy``, in milliseconds."""

    lightning_ms: float
    """Median step of the Trainer under ``ModelParallelStrategy``, in milliseconds."""

    ratio: float
    """Median of ours / bare, step by step."""

    ratio_to_lightning: float
    """The same of ours / Lightning's."""

    bare_against_bare: float
    """The same for the second bare loop: 1 but for noise."""

    cpu_ratio: float
    """Median of ours / bare in CPU time of both ranks together."""

    cpu_ratio_to_lightning: float
    """The same of ours / Lightning's."""

    verdict: str
    """Against the bare loop: ``met`` or ``missed`` (the target), ``no target`` (a step below 80 ms), or
    ``inconclusive``."""

    verdict_to_lightning: str
    """The same against Lightning's strategy."""


def shard_by_hand(network: Network, mesh: DeviceMesh, reshard_after_forward: bool) -> None:
    """The units that ``FSDP2Strategy`` finds: each block, and the rest."""
    for block in network.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(network, mesh=mesh, reshard_after_forward=reshard_after_forward)


class ShardedByHand(Module):
    """The module as ``ModelParallelStrategy`` wants it."""

    def __init__(self, network: Network, reshard_after_forward: bool) -> None:
        super().__init__(network)
        self.reshard_after_forward = reshard_after_forward

    def configure_model(self) -> None:
        """Shard the network."""
        assert self.device_mesh is not None
        shard_by_hand(self.network, self.device_mesh["data_parallel"], self.reshard_after_forward)


def bare_loop(size: Size, batches: Batches, reshard_after_forward: bool, after_step: Callable[[], None]) -> None:
    """A loop on torch alone."""
    network = make_network(size)
    shard_by_hand(network, init_device_mesh("cpu", (RANKS,)), reshard_after_forward)
    optimizer = make_optimizer(network)
    for batch in DataLoader(batches, batch_size=None):
        optimizer.zero_grad()
        network(batch).backward()
        optimizer.step()
        after_step()


def trainer_loop(module: Module, strategy: Strategy, batches: Batches, after_step: Callable[[], None]) -> None:
    """A loop of Lightning's."""
    trainer = pl.Trainer(strategy=strategy, callbacks=[AfterStep(after_step)], **TRAINER)
    trainer.fit(module, DataLoader(batches, batch_size=None))


def run_loops(name: str, size: Size, steps: int) -> list[Times]:
    """The times of each step on this rank: of ours, Lightning's, the first bare loop, and the second."""
    torch.distributed.init_process_group("gloo")
    reshard = RESHARD[name]
    batches = Batches(size, steps)

    def ours(after_step: Callable[[], None]) -> None:
        strategy = FSDP2Strategy(reshard_after_forward=reshard)
        trainer_loop(Module(make_network(size)), strategy, batches, after_step)

    def lightning(after_step: Callable[[], None]) -> None:
        strategy = ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
        trainer_loop(ShardedByHand(make_network(size), reshard), strategy, batches, after_step)

    def bare(after_step: Callable[[], None]) -> None:
        bare_loop(size, batches, reshard, after_step)

    loops = [Loop(run, steps) for run in (ours, lightning, bare, bare)]
    take_turns(loops, steps)
    return [loop.times for loop in loops]


def compare(name: str, size_name: str, size: Size, warm_up: int, pairs: int) -> Result:
    """Run one comparison on all ranks."""
    by_rank = run_distributed(run_loops, RANKS, name, size, warm_up + pairs, timeout=600.0)
    ours, lightning, bare, again = over_ranks(by_rank, warm_up)
    ratio, to_lightning = median_ratio(ours.wall, bare.wall), median_ratio(ours.wall, lightning.wall)
    control = median_ratio(again.wall, bare.wall)
    return Result(
        name=name,
        size=size_name,
        parameters=sum(parameter.numel() for parameter in make_network(size).parameters()),
        pairs=len(bare.wall),
        bare_ms=round(bare.milliseconds, 2),
        ours_ms=round(ours.milliseconds, 2),
        lightning_ms=round(lightning.milliseconds, 2),
        ratio=round(ratio, 4),
        ratio_to_lightning=round(to_lightning, 4),
        bare_against_bare=round(control, 4),
        cpu_ratio=round(median_ratio(ours.cpu, bare.cpu), 4),
        cpu_ratio_to_lightning=round(median_ratio(ours.cpu, lightning.cpu), 4),
        verdict=judge(bare.milliseconds, ratio, control, 1.05 if bare.milliseconds >= 200 else 1.08),
        verdict_to_lightning=judge(bare.milliseconds, to_lightning, control, 1.02),
    )


def judge(bare_ms: float, ratio: float, control: float, target: float) -> str:
    """The verdict of :class:`Result`.

    Args:
        bare_ms: A bare step, in milliseconds.
        ratio: What is judged.
        control: Bare against bare.
        target: What the ratio may be at most.

    """
    if abs(control - 1) > NOISE:
        return "inconclusive"
    if bare_ms < 80:
        return "no target"
    return "met" if ratio <= target else "missed"


COLUMNS: dict[str, Callable[[Result], str]] = {
    "name": lambda result: result.name,
    "parameters": lambda result: f"{result.parameters:,}",
    "pairs": lambda result: str(result.pairs),
    "bare, ms": lambda result: f"{result.bare_ms:.1f}",
    "Trainer, ms": lambda result: f"{result.ours_ms:.1f}",
    "ratio": lambda result: f"{result.ratio:.3f}",
    "bare : bare": lambda result: f"{result.bare_against_bare:.3f}",
    "CPU ratio": lambda result: f"{result.cpu_ratio:.3f}",
    "verdict": lambda result: result.verdict,
    "Lightning's": lambda result: f"{result.lightning_ms:.1f}",
    "ratio to it": lambda result: f"{result.ratio_to_lightning:.3f}",
    "CPU ratio ": lambda result: f"{result.cpu_ratio_to_lightning:.3f}",
    "verdict ": lambda result: result.verdict_to_lightning,
}


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", choices=list(RESHARD), default=list(RESHARD), help="names to compare")
    options, warm_up = parse_options(parser, arguments)
    sizes = QUICK if options.quick else SIZES
    results = (
        compare(name, size_name, size, warm_up, options.pairs)
        for name, (size_name, size) in itertools.product(options.names, sizes.items())
    )
    show(results, COLUMNS, options.json)


if __name__ == "__main__":
    main()
