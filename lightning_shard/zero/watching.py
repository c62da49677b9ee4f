"""Everything that is watched while the engine trains, behind one door."""

import lightning.pytorch as pl
import torch

from lightning_shard import _compat
from lightning_shard.zero.agreement import GradientAgreement
from lightning_shard.zero.changes import InPlaceChanges
from lightning_shard.zero.clipping import clip_by_hand
from lightning_shard.zero.guards import RequiresGradWatch


class Watch:
    """Notices what the engine would get wrong silently in the middle of a run.

    Args:
        module: The user's module, inside an engine that is set up for training.
        engine: The engine.
        device: The training device.

    """

    def __init__(self, module: "pl.LightningModule", engine: object, device: torch.device) -> None:
        self._zero = engine.optimizer  # type: ignore[attr-defined]
        self._requires_grad = RequiresGradWatch(module)
        self._changes = InPlaceChanges(module, self._zero)
        self._agreement = None
        if torch.distributed.get_world_size() > 1:
            self._agreement = GradientAgreement(engine, module, device)
        clip_by_hand(module.trainer.precision_plugin, self._zero)

    def batch_starts(self) -> None:
        """Refuse frozen, unfrozen and added parameters; take over what was changed in place."""
        self._requires_grad.check()
        self._changes.take_over()

    def backward_done(self) -> None:
        """Take over what was changed in place, and forget gradients that no backward has reached."""
        self._changes.take_over()
        _compat.clear_stale_gradients(self._zero)

    def weights_loaded(self) -> None:
        """Take the present weights for the engine's own."""
        self._changes.accept()

    def remove(self) -> None:
        """Take the hooks off the module."""
        if self._agreement is not None:
            self._agreement.remove()
