"""Averages of weights that callbacks keep: sharded like the weights themselves."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shard._compat.averaging import averaged_module
from lightning_shard.checkpoint.dtensors import shard_like
from lightning_shard.checkpoint.format import WEIGHTS

CURRENT_MODEL = "current_model_state"
"""Where an averaging callback puts the weights that are trained, when it saves the averages as the module's."""


def shard_averages(trainer: "pl.Trainer", module: nn.Module) -> None:
    """Replace the whole copies of the module that averaging callbacks made before it was sharded.

    Args:
        trainer: The Trainer, whose callbacks are looked through.
        module: The sharded module. The average starts from its present values, the same on every rank.

    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging) and (average := averaged_module(callback)) is not None:
            _shard_like(average, module)


def _shard_like(average: nn.Module, module: nn.Module) -> None:
    owners = dict(average.named_modules(remove_duplicate=False))
    replaced: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            owner, _, key = name.rpartition(".")
            if isinstance(getattr(owners[owner], key), DTensor):
                continue  # a second fit: the average goes on from where it was
            copy = replaced.get(id(parameter))
            if copy is None:
                copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                replaced[id(parameter)] = copy
            owners[owner].register_parameter(key, copy)
        for mine, theirs in zip(average.buffers(), module.buffers(), strict=True):
            mine.data = theirs.detach().clone()


def has_averages(checkpoint: Mapping[str, Any]) -> bool:
    """Whether an averaging callback had a part in saving a checkpoint."""
    return CURRENT_MODEL in checkpoint


def trained_weights(checkpoint: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """What an averaging callback looks for in a checkpoint: the averages, and the weights that are trained.

    Args:
        checkpoint: The checkpoint, after the averages in it were loaded as the module's weights.
        weights: The module's weights.

    """
    trained = {
        name: shard_like(value, weights[name]) if name in weights else value
        for name, value in checkpoint[CURRENT_MODEL].items()
        if isinstance(value, torch.Tensor)
    }
    averages = {name: value.detach().clone() for name, value in weights.items() if isinstance(value, torch.Tensor)}
    return {CURRENT_MODEL: trained, WEIGHTS: averages}
