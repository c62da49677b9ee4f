"""What is planned in the place of a module that has no layers yet, or no batch: copies of it without data."""

from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_shard._compat.dry_run import fake_mode
from lightning_shard.units.dry_copy import DryCopier, cuda_in_use


def with_layers(module: "pl.LightningModule", precision: Precision) -> "pl.LightningModule":
    """The module itself, or, if it has a `configure_model`, a copy without data on which that was run.

    Args:
        module: The module, attached to its Trainer; neither it nor the random state is changed.
        precision: In whose dtype layers are made.

    Raises:
        MisconfigurationException: If `configure_model` does not run on the meta device.

    """
    if not is_overridden("configure_model", module):
        return module
    copy = _copy(module)
    try:
        with isolate_rng(include_cuda=cuda_in_use()), precision.module_init_context(), torch.device("meta"):
            copy.configure_model()
    except Exception as error:
        raise MisconfigurationException(
            f"To choose a strategy, {type(module).__name__}.configure_model is run on a copy on the meta device first,"
            f" where it failed with {type(error).__name__}: {error}. Make the layers there without reading values of"
            " tensors, or in `__init__` or `setup`, or name a strategy instead of 'auto_shard'."
        ) from error
    vars(copy)["configure_model"] = lambda: None  # done, though it may not say so itself
    return copy


def with_forward_as_step(module: "pl.LightningModule") -> "pl.LightningModule":
    """A copy without data whose `training_step` is a forward of `example_input_array`, which is no training batch.

    As Lightning reads it, a tuple is several arguments, and a dict is arguments by name.
    """
    copy = _copy(module)

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        match batch:
            case tuple():
                outputs = copy(*batch)
            case dict():
                outputs = copy(**batch)
            case _:
                outputs = copy(batch)
        tensors = [value for value in _leaves(outputs) if value.is_floating_point() and value.requires_grad]
        return torch.stack([tensor.sum() for tensor in tensors]).sum()

    vars(copy)["training_step"] = training_step
    copy.automatic_optimization = True
    return copy


def _copy(module: "pl.LightningModule") -> "pl.LightningModule":
    copy: pl.LightningModule = DryCopier(fake_mode(), torch.device("cpu"), [])(module)
    return copy


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)
