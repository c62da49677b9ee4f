"""What the benchmarks share: a network, loops that take turns, and the comparison of their steps.

A machine's speed changes within seconds, so that two runs, one after the other, compare the machine with itself. Here
all loops live in the same processes and take turns, a step each; neighbouring steps are compared, and the median of
these ratios is quoted. A bare loop takes part twice: the second against the first shows what the comparison is worth.
The same ratio of CPU time, which leaves waiting out, stands beside it.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

RANKS = 2
Times = list[tuple[float, float]]
"""Seconds of each step on one rank: on the clock, and of CPU time."""

NOISE = 0.03
"""How far bare against bare may be from 1."""

TRAINER: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": RANKS,
    "max_epochs": 1,
    "use_distributed_sampler": False,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""What every Trainer is given."""

# --- what is trained ---


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the network and its batches are."""

    layers: int
    """Residual blocks."""

    width: int
    """Width of the activations; a block has 8 times its square in parameters."""

    rows: int
    """Rows of a batch on one rank."""


class Block(nn.Module):
    """A pre-norm residual feed-forward block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map activations ``[rows, width]`` to the same shape."""
        change: Tensor = self.net(x)
        return x + change


class Network(nn.Module):
    """Blocks and a loss, as a bare loop would use it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(size.width) for _ in range(size.layers)))

    def forward(self, batch: Tensor) -> Tensor:
        """Loss of a batch ``[rows, width]``."""
        loss: Tensor = self.blocks(batch).square().mean()
        return loss


class Module(pl.LightningModule):
    """The same network as a LightningModule."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Loss of a batch."""
        loss: Tensor = self.network(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer that the bare loop has, too."""
        return make_optimizer(self)


class Batches(Dataset[Tensor]):
    """A few batches, over and over."""

    def __init__(self, size: Size, steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._batches = [torch.randn(size.rows, size.width, generator=generator) for _ in range(4)]
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Tensor:
        return self._batches[index % len(self._batches)]


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW over all parameters."""
    return torch.optim.AdamW(module.parameters(), lr=1e-4)


def make_network(size: Size) -> Network:
    """The network, with the same weights on each call."""
    torch.manual_seed(0)
    return Network(size)


# --- turns ---


class Clock:
    """Times the steps of one loop on this rank."""

    def begin(self) -> None:
        """Start the clocks on all ranks together."""
        torch.distributed.barrier()
        self._started = time.perf_counter(), time.process_time()

    def end(self, times: Times) -> None:
        """Stop the clocks."""
        times.append((time.perf_counter() - self._started[0], time.process_time() - self._started[1]))


class Loop:
    """A training loop in a thread of its own, which stands still but for one step at a time.

    A Trainer does not give the word back between two steps, so that a second one needs a thread. Only one thread is
    ever at work, and each takes its own times, from its waking up to the end of its step: handing over is in none.

    Args:
        run: The loop; it must call its argument after every step.
        steps: How many it makes.

    """

    def __init__(self, run: Callable[[Callable[[], None]], None], steps: int) -> None:
        self.times: Times = []
        self._steps = steps
        self._run = run
        self._clock = Clock()
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def step(self) -> None:
        """Let the loop make one step; the first one makes all that it needs, too; the last one lets it end."""
        self._go.release()
        self._stopped.acquire()
        if len(self.times) == self._steps:
            self._go.release()
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _main(self) -> None:
        try:
            self._wait()
            self._run(self._after_step)
        except BaseException as error:
            self._error = error
        self._stopped.release()

    def _after_step(self) -> None:
        self._clock.end(self.times)
        self._stopped.release()
        self._wait()

    def _wait(self) -> None:
        self._go.acquire()
        if len(self.times) < self._steps:
            self._clock.begin()


def take_turns(loops: Sequence[Loop], steps: int) -> None:
    """Let four loops make their steps, each following each other one equally often."""
    orders = ((0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1))
    for step in range(steps):
        for index in orders[step % len(orders)]:
            loops[index].step()


class AfterStep(pl.Callback):
    """Calls a function after each step of a Trainer: everything in its loop lies between two calls."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def on_train_batch_end(self, *_: Any) -> None:
        """Call it."""
        self.function()


# --- comparison ---


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of one loop, over all ranks."""

    wall: list[float]
    """Seconds of each step on the rank where it took longest."""

    cpu: list[float]
    """Seconds of CPU time of each step, all ranks together: what is computed, whatever else the machine does."""

    @property
    def milliseconds(self) -> float:
        """The median step."""
        return 1000 * statistics.median(self.wall)


def over_ranks(by_rank: Sequence[Sequence[Times]], warm_up: int) -> list[Steps]:
    """Each loop's steps after the first ``warm_up``, from every rank's times of every loop."""
    found = []
    for times in zip(*by_rank, strict=True):
        # For each step a pair of times from every rank.
        steps = list(zip(*(rank[warm_up:] for rank in times), strict=True))
        found.append(
            Steps(wall=[max(wall for wall, _ in step) for step in steps], cpu=[sum(cpu for _, cpu in s) for s in steps])
        )
    return found


def median_ratio(times: Sequence[float], reference: Sequence[float]) -> float:
    """Median of ``times / reference``, step by step."""
    return statistics.median(x / y for x, y in zip(times, reference, strict=True))


# --- the command line ---

R = TypeVar("R")


def parse_options(
    parser: argparse.ArgumentParser, arguments: list[str] | None, pairs: int = 100
) -> tuple[argparse.Namespace, int]:
    """Read the command line, with the options that all benchmarks have.

    Returns:
        The options, and the number of steps before those that are compared.

    """
    parser.add_argument("--pairs", type=int, default=pairs, help="steps of each engine that are compared, at least 5")
    parser.add_argument("--quick", action="store_true", help="a tiny network and 5 pairs: shows that it runs, no more")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if options.pairs < 5:
        parser.error(f"--pairs {options.pairs}: at least 5 are needed for a median.")
    if options.quick:
        options.pairs = 5
    return options, 3 if options.quick else 5


def show(results: Iterator[R], columns: Mapping[str, Callable[[R], str]], as_json: bool) -> None:
    """Print results (dataclasses) as they come, as a table in Markdown, or all at once as JSON."""
    if as_json:
        json.dump([asdict(result) for result in results], sys.stdout, indent=2)  # type: ignore[call-overload]
        print()
        return
    print(_row(iter(columns)), _row(iter("---" for _ in columns)), sep="\n", flush=True)
    for result in results:
        print(_row(cell(result) for cell in columns.values()), flush=True)


def _row(cells: Iterator[str]) -> str:
    return "| " + " | ".join(f"{cell:>12}" for cell in cells) + " |"
