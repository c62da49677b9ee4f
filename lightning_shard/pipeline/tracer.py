"""Traces the steps of one module, each as well as it can be."""

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import Precision
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_shard.materialize import has_meta_tensors
from lightning_shard.pipeline.absent import is_absent
from lightning_shard.pipeline.record import NeedsValues, record_step
from lightning_shard.pipeline.trace import Trace


@dataclass(kw_only=True)
class Tracer:
    """Traces steps of one module."""

    module: "pl.LightningModule"
    """The module."""

    device: torch.device
    """Where it runs."""

    precision: Precision
    """In whose context."""

    told: set[str] = field(default_factory=set)
    """Steps of which people know that they are traced on real tensors."""

    running: bool = False
    """Whether a step is being traced."""

    def trace(self, step: str, batch: Any) -> Trace:
        """Trace ``step`` on a microbatch: on fake tensors, else on the real ones, else with made-up values."""
        try:
            return self._record(step, batch, fake=True)
        except NeedsValues as error:
            reason = str(error)
        if any(is_absent(parameter) for parameter in self.module.parameters()):
            try:
                return self._record(step, batch, fake=True, guess=True)
            except NeedsValues as error:
                raise MisconfigurationException(
                    f"{step} must be traced anew for a microbatch of other shapes, which needs fake tensors now that"
                    f" each rank has its own stages only: {error}. Give batches of one shape, or keep values out of the"
                    " step."
                ) from error
        if has_meta_tensors(self.module):
            raise MisconfigurationException(
                f"{step} cannot be traced on fake tensors: {reason}; and the module is on the meta device, so it"
                " cannot run"
                " for real. Build it without the meta device, or keep values out of the step (log tensors instead of"
                " `.item()`, no branches on values)."
            )
        if step not in self.told:
            self.told.add(step)
            rank_zero_info(f"{step} is traced on a real microbatch, not on fake tensors: {reason}.")
        return self._record(step, batch, fake=False)

    def _record(self, step: str, batch: Any, *, fake: bool, guess: bool = False) -> Trace:
        self.running = True
        try:
            return record_step(self.module, step, batch, self.device, self.precision, fake=fake, guess=guess)
        finally:
            self.running = False
