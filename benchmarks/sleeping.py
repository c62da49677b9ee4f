"""A LightningModule whose stages sleep instead of computing, and a meter of their time and of what autograd keeps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

WIDTH = 64
"""Width of activations."""

Interval = tuple[float, float]
"""When a sleep began and ended, by a clock that all processes of a machine share, in seconds."""


class Meter:
    """Sleeps for the stages of this rank, and keeps what happened in the current step.

    Args:
        unit: Seconds of a sleep.

    """

    def __init__(self, unit: float) -> None:
        self._unit = unit
        self.sleeps: list[Interval] = []
        self.forward_bytes = 0
        self.live_bytes = 0
        self.peak_bytes = 0

    def work(self) -> None:
        """Sleep one unit."""
        started = time.perf_counter()
        time.sleep(self._unit)
        self.sleeps.append((started, time.perf_counter()))

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count the bytes that autograd saves within, for as long as it keeps them."""
        before = self.live_bytes
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Kept(self, tensor), lambda kept: kept.tensor):
            try:
                yield
            finally:  # a stage leaves the step with an exception
                self.forward_bytes = max(self.forward_bytes, self.live_bytes - before)

    def keep(self, size: int) -> None:
        """So many more bytes are kept, or fewer."""
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def end_step(self) -> "Step":
        """What happened since the step before ended."""
        step = Step(sleeps=self.sleeps, live=self.peak_bytes / max(self.forward_bytes, 1))
        self.sleeps = []
        self.peak_bytes = self.live_bytes
        return step


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step on one rank."""

    sleeps: list[Interval]
    """Its sleeps, in order."""

    live: float
    """The most bytes that were kept at once, over those of one forward; 0 where nobody watched."""


class _Kept:
    """A tensor that autograd saved."""

    def __init__(self, meter: Meter, tensor: Tensor) -> None:
        self.tensor = tensor
        self._meter = meter
        self._size = tensor.numel() * tensor.element_size()
        meter.keep(self._size)

    def __del__(self) -> None:
        self._meter.keep(-self._size)


class _SleepsInBackward(torch.autograd.Function):
    """The identity, whose gradient takes one unit."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, meter: Meter) -> Tensor:
        ctx.meter = meter
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.meter.work()
        return gradients[0], None


class SleepingLayer(nn.Module):
    """A stage: its forward, its input's gradient and its weight's gradient take one unit each.

    Input and weight have a function of their own each, so that either gradient can be computed without the other.
    """

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self._meter = meter

    def forward(self, x: Tensor) -> Tensor:
        """Scale activations ``[rows, width]``."""
        self._meter.work()
        scaled: Tensor = self._slow(x) * self._slow(self.weight)
        return scaled

    def _slow(self, tensor: Tensor) -> Tensor:
        result: Tensor = _SleepsInBackward.apply(tensor, self._meter)  # type: ignore[no-untyped-call]
        return result


class Entry(nn.Module):
    """Adds a parameter, which saves nothing: the first stage has an input's gradient to compute, as others have."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Shift activations ``[rows, width]``."""
        return x + self.shift


class SleepingModule(pl.LightningModule):
    """As many layers as there are stages."""

    def __init__(self, stages: int, meter: Meter) -> None:
        super().__init__()
        self.entry = Entry(meter)
        self.layers = nn.ModuleList(SleepingLayer(meter) for _ in range(stages))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Mean of all outputs."""
        # Each rank has a meter of its own: as an attribute of the LightningModule, which a step changes, it would be
        # made equal on all ranks.
        with self.entry.meter.watch():
            x: Tensor = self.entry(batch)
            for layer in self.layers:
                x = layer(x)
            loss: Tensor = x.mean()
            return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)
