"""``LightningModule.clip_gradients`` under an engine that clips in its own step."""

from functools import partial
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim import Optimizer

from lightning_shard import _compat


def clip_by_hand(precision_plugin: Precision, zero_optimizer: Any) -> None:
    """Let ``LightningModule.clip_gradients`` reach the engine: Lightning's plugin for it ignores the call."""
    precision_plugin.clip_gradients = partial(clip_gradients, zero_optimizer)  # type: ignore[method-assign]


def clip_gradients(
    zero_optimizer: Any,
    optimizer: Optimizer,
    clip_val: int | float | None = 0.0,
    gradient_clip_algorithm: GradClipAlgorithmType | str | None = GradClipAlgorithmType.NORM,
) -> None:
    """Have the engine clip the norm of all gradients to ``clip_val`` in its next step.

    Args:
        zero_optimizer: The engine's optimizer.
        optimizer: The same, as Lightning wraps it.
        clip_val: The largest norm; ``None`` or 0 leaves it to the engine's configuration.
        gradient_clip_algorithm: ``"norm"``.

    Raises:
        MisconfigurationException: For clipping by value, which needs every gradient whole.

    """
    if not clip_val:
        return
    if gradient_clip_algorithm not in (GradClipAlgorithmType.NORM, "norm", None):
        raise MisconfigurationException(
            f"clip_gradients(gradient_clip_val={clip_val}, gradient_clip_algorithm={gradient_clip_algorithm!r}) does"
            " not work under ZeRO: the engine clips the norm of all gradients. Use 'norm'."
        )
    _compat.set_clipping(zero_optimizer, float(clip_val))
