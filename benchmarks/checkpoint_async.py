"""What a save takes from the training loop, with and without ``async_save``, under ``FSDP2Strategy`` on two CPU ranks.

Rounds of some training steps, every other one with a save. What a save takes is the median round with one less the
median round without. A round ends when its checkpoint is whole: what is still being written then is waited for.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl

from benchmarks.checkpoint_against_torch import fit, megabytes, remove
from benchmarks.turns import RANKS, Clock, Size, Times, over_ranks
from lightning_shard import FSDP2Strategy
from lightning_shard.testing import run_distributed

STEPS_OF_A_ROUND = 4


@dataclass(frozen=True, kw_only=True)
class Result:
    """What saves take from a training loop."""

    megabytes: float
    """Weights and moments of all ranks, in 10^6 bytes."""

    saves: int
    """Saves of each kind."""

    step_ms: float
    """Median step of a round without a save, in milliseconds."""

    sync_call_ms: float
    """Median of ``trainer.save_checkpoint``, in milliseconds."""

    async_call_ms: float
    """The same under ``async_save=True``."""

    sync_taken_ms: float
    """What a save takes from the loop in all, in milliseconds."""

    async_taken_ms: float
    """The same under ``async_save=True``: training is slower while threads write."""


class Rounds(pl.Callback):
    """Rounds of steps; every other one begins with a save.

    Args:
        path: The checkpoint; the same on each rank.

    """

    def __init__(self, path: Path) -> None:
        self._path, self._clock, self._call = path, Clock(), Clock()
        self.without: Times = []
        self.with_save: Times = []
        self.calls: Times = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin or end a round."""
        number, step = divmod(batch_idx, STEPS_OF_A_ROUND)
        saves = number % 2 == 1
        # The checkpoint is renamed when it is whole: what is still being written then is waited for.
        if number and step == 0:
            while not saves and not self._path.exists():
                time.sleep(0.001)
            self._clock.end(self.without if saves else self.with_save)
        if step == 0:
            remove(self._path)
            self._clock.begin()
            if saves:
                self._call.begin()
                trainer.save_checkpoint(self._path)
                self._call.end(self.calls)


def run_rounds(size: Size, folder: Path, saves: int) -> list[Times]:
    """This rank's rounds without and with a save, and the calls, of sync saves and then of async ones."""
    found: dict[bool, list[Times]] = {False: [[], [], []], True: [[], [], []]}
    steps = (2 * saves + 2) * STEPS_OF_A_ROUND + 1  # the first of the saves makes the memory for copies
    for turn, in_background in enumerate((False, True, True, False)):
        callback = Rounds(folder / f"{turn}.ckpt")
        fit(FSDP2Strategy(async_save=in_background), size, steps, callback)
        for all_times, times in zip(
            found[in_background], (callback.without, callback.with_save, callback.calls), strict=True
        ):
            all_times.extend(times[1:])
    return [*found[False], *found[True]]


def compare(size: Size, saves: int) -> Result:
    """Run rounds under both kinds of saves, on all ranks."""
    with TemporaryDirectory() as folder:
        by_rank = run_distributed(run_rounds, RANKS, size, Path(folder), saves, timeout=900.0)
    without, with_save, calls, async_without, async_with_save, async_calls = over_ranks(by_rank, 0)
    return Result(
        megabytes=megabytes(size),
        saves=len(calls.wall),
        step_ms=round(without.milliseconds / STEPS_OF_A_ROUND, 1),
        sync_call_ms=round(calls.milliseconds, 1),
        async_call_ms=round(async_calls.milliseconds, 1),
        sync_taken_ms=round(with_save.milliseconds - without.milliseconds, 1),
        async_taken_ms=round(async_with_save.milliseconds - async_without.milliseconds, 1),
    )


COLUMNS: dict[str, Callable[[Result], str]] = {
    "MB": lambda result: f"{result.megabytes:.0f}",
    "saves": lambda result: str(result.saves),
    "step, ms": lambda result: f"{result.step_ms:.0f}",
    "sync call, ms": lambda result: f"{result.sync_call_ms:.0f}",
    "async call, ms": lambda result: f"{result.async_call_ms:.0f}",
    "sync, ms": lambda result: f"{result.sync_taken_ms:.0f}",
    "async, ms": lambda result: f"{result.async_taken_ms:.0f}",
}
