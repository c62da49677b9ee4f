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
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_shard import Offload, ZeROStrategy
from lightning_shard.testing import run_distributed

RANKS = 2
Times = list[tuple[float, float]]
"""Seconds of each step on one rank: on the clock, and of CPU time."""

NOISE = 0.03
"""How far bare against bare may be from 1."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the network and its batches are."""

    layers: int
    """Residual blocks."""

    width: int
    """Width of the activations; a block has 8 times its square in parameters."""

    rows: int
    """Rows of a batch on one rank."""


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
        self.ours: Times = []
        self.bare: tuple[Times, Times] = ([], [])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the bare engines from the strategy's configuration."""
        assert isinstance(trainer.strategy, ZeROStrategy)
        config = trainer.strategy.config
        self.loops = [bare_steps(config, self.size, self.batches) for _ in self.bare]
        self.begin()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stop the clock of the Trainer's step (everything in its loop is in it), and run each bare loop's step."""
        self.end(self.ours)
        # Taking turns at being first, so that neither bare engine always follows the Trainer.
        order = (0, 1) if trainer.global_step % 2 else (1, 0)
        for index in order:
            self.begin()
            next(self.loops[index])
            self.end(self.bare[index])
        self.begin()

    def begin(self) -> None:
        """Start the clocks on all ranks together."""
        torch.distributed.barrier()
        self.started = time.perf_counter(), time.process_time()

    def end(self, times: Times) -> None:
        """Stop the clocks."""
        times.append((time.perf_counter() - self.started[0], time.process_time() - self.started[1]))


def take_turns(stage: int, offload: bool, size: Size, steps: int) -> tuple[Times, Times, Times]:
    """The times of each step on this rank: the Trainer's, the first bare loop's, the second's."""
    batches = Batches(size, steps)
    turns = Turns(size, batches)
    trainer = pl.Trainer(
        strategy=ZeROStrategy(stage=stage, offload=Offload(optimizer="cpu") if offload else None),  # type: ignore[arg-type]
        accelerator="cpu",
        devices=RANKS,
        max_epochs=1,
        callbacks=[turns],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(make_network(size)), DataLoader(batches, batch_size=None))
    return turns.ours, *turns.bare


def compare(stage: int, offload: bool, name: str, size: Size, warm_up: int, pairs: int) -> Result:
    """Run one comparison on all ranks; a step takes as long as on the rank where it takes longest."""
    by_rank = run_distributed(take_turns, RANKS, stage, offload, size, warm_up + pairs, timeout=600.0)
    # For each engine the steps, for each step a pair of times from every rank.
    steps = [list(zip(*(times[engine][warm_up:] for times in by_rank), strict=True)) for engine in range(3)]
    ours, bare, again = ([max(wall for wall, _ in step) for step in engine] for engine in steps)
    cpu_ours, cpu_bare, _ = ([sum(cpu for _, cpu in step) for step in engine] for engine in steps)
    bare_ms = 1000 * statistics.median(bare)
    ratio, control, cpu_ratio = (
        statistics.median(x / y for x, y in zip(times, reference, strict=True))
        for times, reference in ((ours, bare), (again, bare), (cpu_ours, cpu_bare))
    )
    return Result(
        stage=stage,
        offload=offload,
        size=name,
        parameters=sum(parameter.numel() for parameter in make_network(size).parameters()),
        pairs=len(bare),
        bare_ms=round(bare_ms, 2),
        ours_ms=round(1000 * statistics.median(ours), 2),
        ratio=round(ratio, 4),
        bare_against_bare=round(control, 4),
        cpu_ratio=round(cpu_ratio, 4),
        verdict=judge(bare_ms, ratio, control),
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


def row(cells: Iterator[str]) -> str:
    """One line of the table, in Markdown."""
    return "| " + " | ".join(f"{cell:>12}" for cell in cells) + " |"


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", choices=[1, 2, 3], default=[1, 2, 3], help="stages to compare")
    parser.add_argument("--pairs", type=int, default=30, help="steps of each engine that are compared, at least 5")
    parser.add_argument("--quick", action="store_true", help="a tiny network and 5 pairs: shows that it runs, no more")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if options.pairs < 5:
        parser.error(f"--pairs {options.pairs}: at least 5 are needed for a median.")
    sizes, warm_up, pairs = (QUICK, 3, 5) if options.quick else (SIZES, 5, options.pairs)
    if not options.json:
        print(row(iter(COLUMNS)), row(iter("---" for _ in COLUMNS)), sep="\n", flush=True)
    results = []
    for stage, offload, (name, size) in itertools.product(options.stages, (False, True), sizes.items()):
        results.append(compare(stage, offload, name, size, warm_up, pairs))
        if not options.json:
            print(row(cell(results[-1]) for cell in COLUMNS.values()), flush=True)
    if options.json:
        json.dump([asdict(result) for result in results], sys.stdout, indent=2)
        print()


if __name__ == "__main__":
    main()
