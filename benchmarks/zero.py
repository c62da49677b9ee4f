"""A Trainer step under ``ZeROStrategy`` against a step of a bare DeepSpeed loop, on two CPU ranks.

Three engines live in the same two processes and take turns, a step each: ours, driven by a Trainer, and two bare ones
of ``deepspeed.initialize`` with the very configuration that the strategy made. Module, batches and optimizer are the
same. A machine's speed changes within seconds, so neighbouring steps are compared, and the median of these ratios is
quoted; the second bare engine against the first shows what that is worth. Where it is not within 3 % of 1, the result
is inconclusive. The same ratio of CPU time, which leaves waiting out, stands beside it.

    python benchmarks/zero.py                       # all: some minutes
    python benchmarks/zero.py --stages 3 --json     # one stage, as JSON
    python benchmarks/zero.py --quick               # only to see that it runs: a few seconds
"""

import argparse
import copy
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_shard import Offload, ZeROStrategy
from lightning_shard.testing import run_distributed

# As a script this file is in no package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.turns import (
    NOISE,
    RANKS,
    TRAINER,
    Batches,
    Clock,
    Module,
    Size,
    Times,
    make_network,
    make_optimizer,
    median_ratio,
    over_ranks,
    parse_options,
    show,
)

SIZES = {"50 ms": Size(layers=4, width=192, rows=224), "200 ms": Size(layers=8, width=256, rows=320)}
QUICK = {"quick": Size(layers=2, width=32, rows=8)}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one comparison found."""

    stage: int
    """ZeRO stage."""

    offload: bool
    """Whether optimizer states were offloaded to the CPU."""

    size: str
    """Name of the size."""

    parameters: int
    """Parameters of the network."""

    pairs: int
    """Steps of each engine that were compared."""

    bare_ms: float
    """Median step of the bare loop, in milliseconds."""

    ours_ms: float
    """Median step of the Trainer, in milliseconds."""

    ratio: float
    """Median of ours / bare, step by step."""

    bare_against_bare: float
    """The same for the second bare engine: 1 but for noise."""

    cpu_ratio: float
    """Median of ours / bare in CPU time of both ranks together: what is computed, whatever else the machine does."""

    verdict: str
    """``met`` or ``missed`` (the target), ``no target`` (a step below 40 ms), or ``inconclusive``."""


def bare_steps(config: dict[str, Any], size: Size, batches: Dataset[Tensor]) -> Iterator[None]:
    """A bare DeepSpeed loop; each ``next`` is a step."""
    import deepspeed

    network = make_network(size)
    engine, *_ = deepspeed.initialize(
        model=network, optimizer=make_optimizer(network), config=copy.deepcopy(config), dist_init_required=False
    )
    for batch in DataLoader(batches, batch_size=None):
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        yield


class Turns(pl.Callback):
    """Gives the bare loops their turns between the Trainer's steps, and keeps the times of every step."""

    def __init__(self, size: Size, batches: Dataset[Tensor]) -> None:
        self.size = size
        self.batches = batches
        self.clock = Clock()
        self.ours: Times = []
        self.bare: tuple[Times, Times] = ([], [])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the bare engines from the strategy's configuration."""
        assert isinstance(trainer.strategy, ZeROStrategy)
        config = trainer.strategy.config
        self.loops = [bare_steps(config, self.size, self.batches) for _ in self.bare]
        self.clock.begin()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stop the clock of the Trainer's step (everything in its loop is in it), and run each bare loop's step."""
        self.clock.end(self.ours)
        # Taking turns at being first, so that neither bare engine always follows the Trainer.
        order = (0, 1) if trainer.global_step % 2 else (1, 0)
        for index in order:
            self.clock.begin()
            next(self.loops[index])
            self.clock.end(self.bare[index])
        self.clock.begin()


def take_turns(stage: int, offload: bool, size: Size, steps: int) -> tuple[Times, Times, Times]:
    """The times of each step on this rank: the Trainer's, the first bare loop's, the second's."""
    batches = Batches(size, steps)
    turns = Turns(size, batches)
    trainer = pl.Trainer(
        strategy=ZeROStrategy(stage=stage, offload=Offload(optimizer="cpu") if offload else None),  # type: ignore[arg-type]
        callbacks=[turns],
        **TRAINER,
    )
    trainer.fit(Module(make_network(size)), DataLoader(batches, batch_size=None))
    return turns.ours, *turns.bare


def compare(stage: int, offload: bool, name: str, size: Size, warm_up: int, pairs: int) -> Result:
    """Run one comparison on all ranks; a step takes as long as on the rank where it takes longest."""
    by_rank = run_distributed(take_turns, RANKS, stage, offload, size, warm_up + pairs, timeout=600.0)
    ours, bare, again = over_ranks(by_rank, warm_up)
    ratio, control = median_ratio(ours.wall, bare.wall), median_ratio(again.wall, bare.wall)
    return Result(
        stage=stage,
        offload=offload,
        size=name,
        parameters=sum(parameter.numel() for parameter in make_network(size).parameters()),
        pairs=len(bare.wall),
        bare_ms=round(bare.milliseconds, 2),
        ours_ms=round(ours.milliseconds, 2),
        ratio=round(ratio, 4),
        bare_against_bare=round(control, 4),
        cpu_ratio=round(median_ratio(ours.cpu, bare.cpu), 4),
        verdict=judge(bare.milliseconds, ratio, control),
    )


def judge(bare_ms: float, ratio: float, control: float) -> str:
    """The verdict of :class:`Result`: at most 1.10 from about 50 ms on, at most 1.05 from 200 ms on."""
    if abs(control - 1) > NOISE:
        return "inconclusive"
    if bare_ms < 40:
        return "no target"
    return "met" if ratio <= (1.05 if bare_ms >= 200 else 1.10) else "missed"


COLUMNS: dict[str, Callable[[Result], str]] = {
    "stage": lambda result: f"{result.stage}{' + offload' if result.offload else ''}",
    "parameters": lambda result: f"{result.parameters:,}",
    "pairs": lambda result: str(result.pairs),
    "bare, ms": lambda result: f"{result.bare_ms:.1f}",
    "Trainer, ms": lambda result: f"{result.ours_ms:.1f}",
    "ratio": lambda result: f"{result.ratio:.3f}",
    "bare : bare": lambda result: f"{result.bare_against_bare:.3f}",
    "CPU ratio": lambda result: f"{result.cpu_ratio:.3f}",
    "verdict": lambda result: result.verdict,
}


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", choices=[1, 2, 3], default=[1, 2, 3], help="stages to compare")
    options, warm_up = parse_options(parser, arguments)
    sizes = QUICK if options.quick else SIZES
    results = (
        compare(stage, offload, name, size, warm_up, options.pairs)
        for stage, offload, (name, size) in itertools.product(options.stages, (False, True), sizes.items())
    )
    show(results, COLUMNS, options.json)


if __name__ == "__main__":
    main()
