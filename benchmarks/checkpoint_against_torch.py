"""Saves and loads of a Trainer under ``FSDP2Strategy`` against bare ``torch.distributed.checkpoint``, on two CPU ranks.

The Trainer stands still after its first step. There its own ``trainer.save_checkpoint`` and the strategy's loading take
turns with torch on the state dicts of the very same module and optimizer; bare torch takes part twice, and the second
against the first shows what the comparison is worth. All flush their files to the disk.
"""

import itertools
import os
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import DataLoader

from benchmarks.turns import (
    RANKS,
    TRAINER,
    Batches,
    Clock,
    Module,
    Size,
    Steps,
    Times,
    make_network,
    median_ratio,
    over_ranks,
)
from lightning_shard import FSDP2Strategy
from lightning_shard.testing import run_distributed

TARGET = 1.1
"""What a save or load may take, as a share of bare torch's."""

NOISE = 0.05
"""How far bare against bare may be from 1: a disk is noisier than a processor."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one comparison found."""

    what: str
    """``save`` or ``load``."""

    tensors: int
    """Weights; each has two moments."""

    megabytes: float
    """Weights and moments of all ranks, in 10^6 bytes."""

    pairs: int
    """Saves or loads of each way that were compared."""

    bare_ms: float
    """Median of bare torch, in milliseconds."""

    ours_ms: float
    """Median of the Trainer's, in milliseconds."""

    ratio: float
    """Median of ours / bare, pair by pair."""

    quartiles: list[float]
    """The middle half of these ratios lies between them."""

    bare_against_bare: float
    """The median ratio for the second bare one: 1 but for noise."""

    cpu_ratio: float
    """Median of ours / bare in CPU time of both ranks together."""

    verdict: str
    """``met`` or ``missed`` (the target), or ``inconclusive``."""


class StandStill(pl.Callback):
    """Saves and loads in turns after the first step.

    Args:
        folder: For the checkpoints; the same on each rank.
        rounds: How often each way saves and loads.

    """

    def __init__(self, folder: Path, rounds: int) -> None:
        self._folder, self._rounds = folder, rounds
        self.saves: list[Times] = [[], [], []]
        self.loads: list[Times] = [[], [], []]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Compare ours, bare torch, and bare torch again."""
        strategy, clock = trainer.strategy, Clock()
        (optimizer,) = strategy.optimizers
        names = ("ours", "bare", "again")

        def bare_states() -> dict[str, Any]:
            return {
                "model": get_model_state_dict(pl_module),
                "optimizer": get_optimizer_state_dict(pl_module, optimizer),
            }

        def bare_save(path: Path) -> None:
            save(bare_states(), checkpoint_id=path)

        def bare_load(path: Path) -> None:
            states = bare_states()
            load(states, checkpoint_id=path)
            set_model_state_dict(pl_module, states["model"])
            set_optimizer_state_dict(pl_module, optimizer, states["optimizer"])

        def our_load(path: Path) -> None:
            checkpoint = strategy.load_checkpoint(path)
            strategy.load_model_state_dict(checkpoint)
            strategy.load_optimizer_state_dict(checkpoint)

        saving: list[Callable[[Path], None]] = [trainer.save_checkpoint, bare_save, bare_save]
        loading = [our_load, bare_load, bare_load]
        for order in itertools.islice(itertools.cycle(itertools.permutations(range(3))), self._rounds):
            for way in order:
                path = self._folder / names[way]
                remove(path)
                clock.begin()
                saving[way](path)
                clock.end(self.saves[way])
            for way in order:
                clock.begin()
                loading[way](self._folder / names[way])
                clock.end(self.loads[way])


def remove(path: Path) -> None:
    """Remove a checkpoint, if it is there, and let the disk come to rest. Collective."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
    torch.distributed.barrier()


def fit(strategy: FSDP2Strategy, size: Size, steps: int, callback: pl.Callback) -> None:
    """A training of some steps."""
    trainer = pl.Trainer(strategy=strategy, callbacks=[callback], **TRAINER)
    trainer.fit(Module(make_network(size)), DataLoader(Batches(size, steps), batch_size=None))


def megabytes(size: Size) -> float:
    """Weights and moments, in 10^6 bytes."""
    return round(sum(parameter.numel() for parameter in make_network(size).parameters()) * 3 * 4 / 1e6, 1)


def run_saves_and_loads(size: Size, folder: Path, rounds: int) -> list[Times]:
    """This rank's times of the three ways to save, and of the three to load."""
    callback = StandStill(folder, rounds)
    fit(FSDP2Strategy(), size, 1, callback)
    return [*callback.saves, *callback.loads]


def compare(size: Size, warm_up: int, pairs: int) -> Iterator[Result]:
    """Run one comparison on all ranks."""
    with TemporaryDirectory() as folder:
        by_rank = run_distributed(run_saves_and_loads, RANKS, size, Path(folder), warm_up + pairs, timeout=900.0)
    times = over_ranks(by_rank, warm_up)
    yield judged("save", size, times[:3])
    yield judged("load", size, times[3:])


def judged(what: str, size: Size, times: Sequence[Steps]) -> Result:
    """The result of one of the two halves.

    Args:
        what: ``save`` or ``load``.
        size: What was saved.
        times: Of ours, bare torch, and bare torch again.

    """
    ours, bare, again = times
    ratios = [our / torchs for our, torchs in zip(ours.wall, bare.wall, strict=True)]
    first, _, third = statistics.quantiles(ratios, n=4, method="inclusive")
    ratio, control = statistics.median(ratios), median_ratio(again.wall, bare.wall)
    return Result(
        what=what,
        tensors=len(list(make_network(size).parameters())),
        megabytes=megabytes(size),
        pairs=len(ratios),
        bare_ms=round(bare.milliseconds, 1),
        ours_ms=round(ours.milliseconds, 1),
        ratio=round(ratio, 4),
        quartiles=[round(first, 4), round(third, 4)],
        bare_against_bare=round(control, 4),
        cpu_ratio=round(median_ratio(ours.cpu, bare.cpu), 4),
        verdict="inconclusive" if abs(control - 1) > NOISE else "met" if ratio <= TARGET else "missed",
    )


COLUMNS: dict[str, Callable[[Result], str]] = {
    "what": lambda result: result.what,
    "tensors": lambda result: f"3 x {result.tensors}",
    "MB": lambda result: f"{result.megabytes:.0f}",
    "pairs": lambda result: str(result.pairs),
    "bare, ms": lambda result: f"{result.bare_ms:.0f}",
    "ours, ms": lambda result: f"{result.ours_ms:.0f}",
    "ratio": lambda result: f"{result.ratio:.3f}",
    "its quartiles": lambda result: " - ".join(f"{value:.3f}" for value in result.quartiles),
    "bare : bare": lambda result: f"{result.bare_against_bare:.3f}",
    "CPU ratio": lambda result: f"{result.cpu_ratio:.3f}",
    "verdict": lambda result: result.verdict,
}
