"""What the stages of a pipeline would cost, for any number of them, from one recorded step."""

from collections.abc import Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import MixedPrecision, Precision

from lightning_shard.pipeline.cuts import Cut, parameter_stages, spans
from lightning_shard.pipeline.find_cuts import CutFinder
from lightning_shard.pipeline.layout import costs_before
from lightning_shard.pipeline.partition import CutPoint, choose
from lightning_shard.pipeline.record import record_step
from lightning_shard.pipeline.trace import Trace


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One stage."""

    parameters: frozenset[str]
    """Names of the parameters that it uses."""

    flops: float
    """Floating-point operations of its forward, of the whole batch."""

    saved: float
    """Share of the bytes that the step's forward keeps for backward, in [0, 1]."""

    crossing_elements: float
    """Elements that it sends to the next stage for the whole batch; as many gradients come back."""

    crossing_bytes: float
    """Their bytes."""


class Stages:
    """Divides a recorded step.

    Args:
        module: Whose step it is.
        trace: The step.

    """

    def __init__(self, module: "pl.LightningModule", trace: Trace) -> None:
        self._module, self._trace = module, trace
        self.flops = float(sum(operation.flops for operation in trace.operations))
        self._saved = float(sum(operation.saved for operation in trace.operations)) or 1.0
        self._cuts, _ = CutFinder(trace).find()
        self._costs = costs_before(module, trace, self._cuts, "flops")
        self._known: dict[int, tuple[StageCost, ...] | str] = {}

    @property
    def most(self) -> int:
        """The largest number of stages."""
        return len(self._cuts) + 1

    def divide(self, stages: int) -> tuple[StageCost, ...]:
        """The stages of a balanced choice.

        Raises:
            MisconfigurationException: If there are too few places to cut.

        """
        if stages not in self._known:
            points = [
                CutPoint(position=cut.time, name=cut.call.name, crossing_bytes=cut.crossing_bytes) for cut in self._cuts
            ]
            try:
                chosen = [self._cuts[place] for place in choose(points, self._costs, stages, None)]
                self._known[stages] = self._divide(chosen)
            except MisconfigurationException as error:
                self._known[stages] = str(error)
        found = self._known[stages]
        if isinstance(found, str):
            raise MisconfigurationException(found)
        return found

    def _divide(self, cuts: Sequence[Cut]) -> tuple[StageCost, ...]:
        uses = parameter_stages(self._trace, list(cuts))
        return tuple(
            StageCost(
                parameters=frozenset(name for name, stages in uses.items() if stage in stages),
                flops=float(sum(each.flops for each in self._trace.operations if start < each.time <= end)),
                saved=sum(each.saved for each in self._trace.operations if start < each.time <= end) / self._saved,
                crossing_elements=sum(relay.value.tensor.numel() for relay in cuts[stage].relays)
                if stage < len(cuts)
                else 0,
                crossing_bytes=cuts[stage].crossing_bytes if stage < len(cuts) else 0,
            )
            for stage, (start, end) in enumerate(spans(self._trace, list(cuts)))
        )


def record_stages(module: "pl.LightningModule", batch: object, precision: str) -> Stages:
    """Record a step of a module without data.

    Raises:
        NeedsValues: If it reads values of tensors.

    """
    plugin = MixedPrecision("bf16-mixed", "cpu") if precision == "bf16-mixed" else Precision()
    trace = record_step(module, "training_step", batch, torch.device("cpu"), plugin, fake=True)
    return Stages(module, trace)
