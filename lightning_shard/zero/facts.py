"""What the engine's configuration needs to know about the run, read from the Trainer."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_shard import _compat
from lightning_shard.zero.engine_config import TrainerFacts

if TYPE_CHECKING:
    from lightning_shard.strategies.zero import ZeROStrategy

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu")


def read_trainer(strategy: "ZeROStrategy", user_config: Mapping[str, Any]) -> TrainerFacts:
    """The Trainer's settings.

    Args:
        strategy: The strategy, connected to its module.
        user_config: The user's DeepSpeed settings, which decide what has to be looked up.

    """
    module = strategy.lightning_module
    assert module is not None
    trainer = module.trainer
    # Asking for the loader runs the user's hook once more, so only when there is something to compare.
    compared = any(key in user_config for key in _BATCH_KEYS)
    scheduler = user_config.get("scheduler") or {}
    steps = trainer.estimated_stepping_batches if "auto" in (scheduler.get("params") or {}).values() else math.inf
    return TrainerFacts(
        world_size=strategy.world_size,
        precision=str(strategy.precision_plugin.precision),
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        gradient_clip_val=trainer.gradient_clip_val,
        batch_size=_compat.train_batch_size_per_rank(trainer) if compared else None,
        automatic_optimization=module.automatic_optimization,
        device_type=strategy.root_device.type,
        total_steps=int(steps) if math.isfinite(steps) else None,
    )
