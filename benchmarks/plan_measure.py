"""Real runs for the planner to be compared with: a step's peak in the allocator, its model states, its traffic."""

import gc
import logging
import statistics
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from benchmarks.plan_cases import MODELS, Case
from lightning_shard import PipelineStrategy
from lightning_shard._compat.model_states import Kind
from lightning_shard.plan.alone import Repeated
from lightning_shard.telemetry import (
    AllocatorTracker,
    expected_model_state_bytes,
    model_state_bytes,
    track_allocator,
)
from lightning_shard.telemetry.traffic import Traffic, count_traffic
from lightning_shard.testing import RankFailed, run_distributed

WARM_UP = 2
"""Steps before anything is measured: then optimizer states exist, and gradients of the step before."""

MEASURED = 5
"""Steps whose peak is measured, after one whose traffic and model states are counted."""

SETTLING = 0.02
"""Seconds in which gloo's threads let go of what they worked on, before a step whose peak is measured."""

AGREEMENT = 3
"""Elements of the largest message that is no part of the model; no parameter here is as small."""

STATES: tuple[Kind, ...] = ("parameters", "gathered", "master", "gradients", "optimizer", "buckets")


@dataclass(frozen=True, kw_only=True)
class Peak:
    """One step's peaks, in bytes that were alive at once and came after the process groups and before the module."""

    start: int
    """At the step's start."""

    backward: int
    """The most from there to the optimizer's step."""

    optimizer: int
    """The most in the optimizer's step and to the end of the training step."""

    @property
    def bytes(self) -> int:
        """The most of all."""
        return max(self.backward, self.optimizer)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank's figures; bytes, and elements of traffic."""

    rank: int
    """Which."""

    peaks: list[Peak]
    """Of each measured step."""

    states: dict[str, int]
    """Model states by kind between backward and the optimizer's step."""

    states_at_start: dict[str, int]
    """Model states by kind at the step's start: gradients are those of the step before."""

    formula: dict[str, int]
    """What the package's formulas say of parameters, master, gradients and optimizer; nothing for pipelines."""

    buffers: int
    """Buffers of the module."""

    batch: int
    """The batch."""

    used_of_gradients: int
    """Bytes of gradients that are elements of theirs: at stages 1 and 2 of ZeRO the rest of a storage is not used."""

    counters: int
    """Bytes of optimizer states that are one number for a tensor, which ``states`` leaves out."""

    payload: int
    """Elements that the step communicates, an all-reduce of n as 2n; without agreements."""

    sent: float
    """Elements that the rank sends for it on a ring."""

    agreements: int
    """Elements of what ranks agree on beside it: integers, and up to 3 numbers, such as a norm or a loss."""

    @property
    def base(self) -> int:
        """Bytes at a step's start that have a name: model states, buffers, batch."""
        return sum(self.states_at_start.values()) + self.buffers + self.batch

    @property
    def start(self) -> int:
        """Bytes at a step's start, the median of the steps."""
        return round(statistics.median(peak.start for peak in self.peaks))

    @property
    def peak(self) -> int:
        """The peak, the median of the steps."""
        return round(statistics.median(peak.bytes for peak in self.peaks))

    @property
    def spread(self) -> int:
        """How far the peaks of the steps are from each other."""
        return max(peak.bytes for peak in self.peaks) - min(peak.bytes for peak in self.peaks)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of one case."""

    case: Case
    """Which."""

    ranks: list[Rank] = field(default_factory=list)
    """By rank."""

    error: str = ""
    """Why there are no figures."""

    seconds: float = 0
    """How long it took."""


class Measurer(pl.Callback):
    """Counts in one step, and measures the allocator in the next ones."""

    def __init__(self, allocator: AllocatorTracker) -> None:
        self._allocator = allocator
        self._stack = ExitStack()
        self._measures = False
        self.peaks: list[Peak] = []
        self.traffic: Traffic
        self.start: dict[str, int] = {}
        self.held: dict[str, int] = {}
        self.formula: dict[str, int] = {}
        self.used_of_gradients = 0
        self.counters = 0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin."""
        if batch_idx < WARM_UP:
            return
        if batch_idx == WARM_UP:
            self.start = _states(trainer.strategy)
            self._counter = self._stack.enter_context(count_traffic())
            return
        self._measures = True
        torch.distributed.barrier()
        time.sleep(SETTLING)
        self._stack.enter_context(self._allocator.phase("backward"))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        """All gradients are there."""
        if self._measures:
            self._stack.close()
            self._stack.enter_context(self._allocator.phase("optimizer"))
        else:
            self.held = _states(trainer.strategy)
            if not isinstance(trainer.strategy, PipelineStrategy):
                gradients = model_state_bytes(trainer.strategy).gradients
                self.used_of_gradients = sum(part.elements for part in gradients.values())

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End."""
        self._stack.close()
        if self._measures:
            backward, optimizer = self._allocator.phases[-2:]
            assert (backward.name, optimizer.name) == ("backward", "optimizer")
            self.peaks.append(
                Peak(
                    start=backward.start_bytes,
                    backward=backward.start_bytes + backward.peak_bytes,
                    optimizer=optimizer.start_bytes + optimizer.peak_bytes,
                )
            )
        elif batch_idx == WARM_UP:
            self.traffic = self._counter.traffic
            self.formula = _formula(trainer.strategy)
            self.counters = sum(
                _bytes(value)
                for optimizer in trainer.strategy.optimizers
                for state in optimizer.state.values()
                for value in state.values()
                if isinstance(value, Tensor) and value.dim() == 0
            )


def measure_rank(case: Case) -> Rank:
    """Train, and measure this rank."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    strategy = case.make_strategy()
    gc.collect()
    with track_allocator() as allocator:
        module, batch = MODELS[case.model](), MODELS[case.model].batch()
        measurer = Measurer(allocator)
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=case.ranks,
            precision=case.precision,  # type: ignore[arg-type]
            max_epochs=1,
            callbacks=[measurer],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(module, Repeated(batch, WARM_UP + 1 + MEASURED))
        traffic = measurer.traffic.where(lambda call: call.dtype.is_floating_point and call.elements > AGREEMENT)
        return Rank(
            rank=trainer.global_rank,
            peaks=measurer.peaks,
            states=measurer.held,
            states_at_start=measurer.start,
            formula=measurer.formula,
            buffers=sum(_bytes(buffer) for buffer in module.buffers()),
            batch=sum(_bytes(tensor) for tensor in batch),
            used_of_gradients=measurer.used_of_gradients,
            counters=measurer.counters,
            payload=traffic.payload,
            sent=traffic.sent,
            agreements=measurer.traffic.payload - traffic.payload,
        )


def measure(case: Case, timeout: float = 300.0) -> Measured:
    """Measure all ranks of a case, in processes of its own. Where it fails, the result says why."""
    began = time.monotonic()
    try:
        ranks = run_distributed(measure_rank, case.ranks, case, timeout=timeout)
    except RankFailed as error:
        lines = [line for line in str(error).splitlines() if "Error" in line or "Exception" in line]
        reason = (lines or str(error).splitlines())[-1].strip()
        return Measured(case=case, error=reason, seconds=time.monotonic() - began)
    return Measured(case=case, ranks=ranks, seconds=time.monotonic() - began)


def _states(strategy: Strategy) -> dict[str, int]:
    assert strategy.lightning_module is not None
    held = model_state_bytes(strategy)
    return {kind: held.storage(kind) for kind in STATES}


def _formula(strategy: Strategy) -> dict[str, int]:
    states = expected_model_state_bytes(strategy).states
    return {kind: round(getattr(states, kind)) for kind in ("parameters", "master", "gradients", "optimizer")}


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
