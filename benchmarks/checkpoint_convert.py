"""Host memory that ``convert`` takes for a checkpoint of 1 GB in many tensors, beside the largest of them.

Each conversion runs in a process of its own, which first converts a tiny checkpoint in the same way: what it imports is
loaded then. What the process's peak memory (``VmHWM`` of Linux) grows by after that is the conversion's.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from benchmarks.turns import TRAINER, Batches, Module, Size, make_network
from lightning_shard.testing import run_distributed

LARGE = Size(layers=24, width=656, rows=1)
TINY = Size(layers=2, width=32, rows=1)

WAYS = (("portable", "lightning"), ("portable", "safetensors"), ("lightning", "portable"))
"""What is converted, and to what."""

CHILD = """
import sys, time
from lightning_shard import convert_checkpoint

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:"))

_, tiny, source, folder, to = sys.argv
convert_checkpoint(tiny, f"{folder}/tiny", to=to, progress=False)
before, started = peak(), time.perf_counter()
convert_checkpoint(source, f"{folder}/converted", to=to, progress=False)
print(peak() - before, time.perf_counter() - started)
"""
"""Prints the KiB that the peak grows by, and the seconds."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one conversion took."""

    source: str
    """What was converted."""

    target: str
    """Into what."""

    tensors: int
    """Weights and moments."""

    megabytes: float
    """Of all of them, in 10^6 bytes."""

    largest_mb: float
    """The largest one."""

    memory_mb: float
    """Peak host memory beyond what the imports take."""

    limit_mb: float
    """What that may be: 1.3 times the largest tensor, and 100 MB."""

    seconds: float
    """How long it took."""

    verdict: str
    """``met`` or ``missed``."""


def save(size: Size, folder: Path) -> None:
    """The same training under FSDP2 and in one process, saved after a step."""
    for strategy, name in (("fsdp2", "portable"), ("auto", "lightning")):
        trainer = pl.Trainer(strategy=strategy, **{**TRAINER, "devices": 1})
        trainer.fit(Module(make_network(size)), DataLoader(Batches(size, 1), batch_size=None))
        trainer.save_checkpoint(folder / name)


def measure(quick: bool) -> Iterator[Result]:
    """Convert in every way, each in a process of its own."""
    size = TINY if quick else LARGE
    with TemporaryDirectory() as folder:
        folders = {"tiny": TINY, "source": size}
        for name, each in folders.items():
            Path(folder, name).mkdir()
            run_distributed(save, 1, each, Path(folder, name), timeout=300.0)
        for source, target in WAYS:
            with TemporaryDirectory(dir=folder) as converted:
                paths = [str(Path(folder, name, source)) for name in folders]
                command = [sys.executable, "-c", CHILD, *paths, converted, target]
                printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            kibibytes, seconds = map(float, printed.split()[-2:])
            yield _judged(source, target, size, kibibytes * 1024 / 1e6, seconds)


def _judged(source: str, target: str, size: Size, memory: float, seconds: float) -> Result:
    bytes_of = [parameter.numel() * 4 for parameter in make_network(size).parameters()]
    states = 1 if target == "safetensors" else 3  # that has weights alone
    limit = 1.3 * max(bytes_of) / 1e6 + 100
    return Result(
        source=source,
        target=target,
        tensors=states * len(bytes_of),
        megabytes=round(states * sum(bytes_of) / 1e6, 1),
        largest_mb=round(max(bytes_of) / 1e6, 1),
        memory_mb=round(memory, 1),
        limit_mb=round(limit, 1),
        seconds=round(seconds, 2),
        verdict="met" if memory <= limit else "missed",
    )


COLUMNS: dict[str, Callable[[Result], str]] = {
    "from": lambda result: result.source,
    "to": lambda result: result.target,
    "tensors": lambda result: str(result.tensors),
    "MB": lambda result: f"{result.megabytes:.0f}",
    "largest, MB": lambda result: f"{result.largest_mb:.1f}",
    "memory, MB": lambda result: f"{result.memory_mb:.1f}",
    "limit, MB": lambda result: f"{result.limit_mb:.1f}",
    "seconds": lambda result: f"{result.seconds:.1f}",
    "verdict": lambda result: result.verdict,
}
