"""The stages' plans for each kind of microbatch, traced when a kind is first seen."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard.pipeline.cuts import parameter_stages
from lightning_shard.pipeline.layout import Layout, matching_cuts
from lightning_shard.pipeline.microbatch import signature
from lightning_shard.pipeline.replay import Replay
from lightning_shard.pipeline.stages import StagePlan, plan_stages
from lightning_shard.pipeline.trace import Trace
from lightning_shard.pipeline.tracer import Tracer

_MOST = 256
"""Kinds of microbatches that are remembered: texts of any length have as many kinds as lengths."""


class Plans:
    """Plans by step and by structure, shapes and dtypes of a microbatch.

    Args:
        layout: Where steps are cut.
        tracer: Traces what was not seen before.
        replay: Gets wrappers around the modules that plans name.

    """

    def __init__(self, layout: Layout, tracer: Tracer, replay: Replay) -> None:
        self._layout = layout
        self._tracer = tracer
        self._replay = replay
        self._known: OrderedDict[Hashable, list[StagePlan]] = OrderedDict()

    def add(self, step: str, microbatch: Any, trace: Trace) -> None:
        """Keep the plans of a trace that was made already."""
        self._keep((step, signature(microbatch), self._trained()), trace)

    def find(self, step: str, microbatches: Sequence[Any]) -> list[list[StagePlan]]:
        """The plans of all stages for each of a batch's microbatches.

        Raises:
            MisconfigurationException: If the step, on such a microbatch, uses a parameter on a stage that has it not.

        """
        trained = self._trained()
        return [self._find((step, signature(each), trained), step, each) for each in microbatches]

    def _find(self, kind: Hashable, step: str, microbatch: Any) -> list[StagePlan]:
        if kind in self._known:
            self._known.move_to_end(kind)
            return self._known[kind]
        return self._keep(kind, self._tracer.trace(step, microbatch))

    def _trained(self) -> bytes:
        """Which gradients travel depends on what is frozen, which may change between epochs."""
        return bytes(parameter.requires_grad for parameter in self._tracer.module.parameters())

    def _keep(self, kind: Hashable, trace: Trace) -> list[StagePlan]:
        cuts = matching_cuts(trace, self._layout)
        for name, stages in parameter_stages(trace, cuts).items():
            missing = sorted(stages - set(self._layout.owners[name]))
            if missing:
                raise MisconfigurationException(
                    f"{trace.step} uses parameter {name!r} on stage {missing[0]}, which was not seen to need it when"
                    f" the pipeline was laid out; it is on stage {self._layout.owners[name][0]}. The step calls other"
                    " modules for this batch than for the first one. Let the first batch of each loader be like the"
                    " others."
                )
        plans = plan_stages(trace, cuts)
        self._replay.wrap(set().union(*(plan.modules for plan in plans)))
        self._known[kind] = plans
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        return plans
