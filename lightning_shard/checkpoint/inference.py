"""A module with the weights of a checkpoint of any kind, without a Trainer."""

from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_shard._compat.building import build_module, own_strictness
from lightning_shard.checkpoint.boxes import Held
from lightning_shard.checkpoint.convert import open_any, without_training
from lightning_shard.checkpoint.format import WrittenBy
from lightning_shard.checkpoint.load import Loading
from lightning_shard.checkpoint.places import place_of
from lightning_shard.checkpoint.states import HeldOptimizer, SavedOptimizer, TrainingStates

Module = TypeVar("Module", bound="pl.LightningModule")


class WholeStates(TrainingStates):
    """A module in one process, that is not trained."""

    def hold_parameter(self, parameter: Tensor) -> Held:
        """The whole."""
        return Held.whole(parameter)

    def hold_buffer(self, buffer: Tensor, name: str) -> Held:
        """The whole."""
        return Held.whole(buffer)

    def optimizers(self) -> list[HeldOptimizer]:
        """None."""
        return []

    def allocate(self, number: int, saved: SavedOptimizer) -> dict[tuple[str, str], Held]:
        """Nothing: there is no optimizer."""
        return {}

    def put_in_place(self, number: int, saved: SavedOptimizer) -> None:
        """Nothing: there is no optimizer."""

    def written_by(self) -> WrittenBy:
        """No run."""
        return WrittenBy(strategy="")


def load_from_checkpoint(
    module_class: type[Module],
    path: str | Path,
    *,
    map_location: str | torch.device = "cpu",
    strict: bool | None = None,
    trusted: bool = False,
    **hyper_parameters: Any,
) -> Module:
    """Make a module and load its weights from a checkpoint of any kind, whatever strategy and number of ranks wrote it.

    As `LightningModule.load_from_checkpoint`, but weights are read straight into the module: host memory holds the
    module and one stored block. As there, the module's mode is not changed; call ``eval()`` for inference.

    Args:
        module_class: The LightningModule's class.
        path: A checkpoint's folder or file; a URL too, but for the DeepSpeed engine's own format.
        map_location: The device that the module is to be on.
        strict: Whether the checkpoint must hold the module's weights and no others; ``None`` for the module's own
            ``strict_loading``.
        trusted: Whether the checkpoint may hold more than plain data, which can run any code when it is read.
        hyper_parameters: Arguments of the module's constructor, before those that `save_hyperparameters` stored.

    Returns:
        The module. Tied weights are tied as its constructor ties them.

    Raises:
        FileNotFoundError: If there is no checkpoint, or files of it are missing.
        ValueError: If it is damaged, or ``strict`` is not what the module says itself.
        MisconfigurationException: If its weights are another module's, or it holds more than plain data and is not
            trusted. Frozen weights that were left out of it on purpose are warned of.

    """
    source = without_training(open_any(place_of(path), trusted))
    module = build_module(module_class, dict(source.lightning), hyper_parameters)
    own = own_strictness(module)
    if own is not None and strict is not None and strict != own:
        raise ValueError(
            f"strict={strict} was asked for, but {module_class.__name__}.strict_loading is {own}. Say"
            " the same in both places."
        )
    module.to(map_location)
    loading = Loading(source, WholeStates(module), with_optimizers=False, groups_later=False, shown=True)
    checkpoint = loading.checkpoint()
    module.on_load_checkpoint(checkpoint)
    loading.weights(checkpoint, module.strict_loading if strict is None else strict)
    return module
