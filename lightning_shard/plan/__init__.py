"""What each strategy costs before the run: model states, activations, traffic, bubbles, time.

The package can be called: ``lightning_shard.plan(module, batch, devices=8, device="h100")``.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning.pytorch import LightningModule

    from lightning_shard.plan.hardware import Device
    from lightning_shard.plan.results import Plan


class _Callable(ModuleType):
    """A module that is a function, too: ``lightning_shard.plan`` is the name of both."""

    def __call__(
        self,
        module: "LightningModule",
        batch: Any = None,
        *,
        devices: int,
        device: "Device | str",
        nodes: int = 1,
        precision: str = "32-true",
        simulate: int = 3,
        margin: float = 0.1,
        strategies: "Sequence[str] | None" = None,
        gradient_clip_val: float | None = None,
        accumulate_grad_batches: int = 1,
    ) -> "Plan":
        """Plan a module; see :func:`lightning_shard.plan.search.plan_module`."""
        from lightning_shard.plan.search import plan_module

        return plan_module(
            module,
            batch,
            devices=devices,
            device=device,
            nodes=nodes,
            precision=precision,
            simulate=simulate,
            margin=margin,
            strategies=strategies,
            gradient_clip_val=gradient_clip_val,
            accumulate_grad_batches=accumulate_grad_batches,
        )


sys.modules[__name__].__class__ = _Callable
