"""Weights that user code changes in place while the engine holds the ones that count.

The engine trains fp32 master weights and overwrites the module's parameters from them after every step, so a change
made to a parameter itself (clamping, re-initialising, loading a state dict, moving a teacher) would last for one
forward at stages 1 and 2. At stage 3 the parameter is empty between its uses, and the change would do nothing.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_shard import _compat
from lightning_shard.zero.state import set_master


class InPlaceChanges:
    """Takes changes over into the master weights where they are whole, and refuses them where they are empty.

    Changes through ``parameter.data`` leave no trace and are not seen.
    """

    def __init__(self, module: nn.Module, zero_optimizer: Any) -> None:
        self._module = module
        self._stage3 = hasattr(zero_optimizer, "fp16_groups")
        self._optimized = {id(p) for group in _compat.partition_groups(zero_optimizer) for p in group}
        self._parameters = list(module.parameters())
        self._versions: list[int] = []
        self.accept()

    def accept(self) -> None:
        """Take the present values for the engine's own."""
        self._versions = _compat.versions(self._parameters)

    def take_over(self) -> None:
        """Carry changes since the last call into the master weights.

        Raises:
            MisconfigurationException: At stage 3, naming the parameter and how to change it.

        """
        versions = _compat.versions(self._parameters)
        if versions == self._versions:
            return
        changed = {id(p) for p, old, new in zip(self._parameters, self._versions, versions, strict=True) if old != new}
        for name, parameter in self._module.named_parameters():
            if id(parameter) not in changed:
                continue
            if self._stage3:
                raise MisconfigurationException(
                    f"Parameter {name!r} was changed in place, but at stage 3 it is empty there: the change would be"
                    " lost. Change it inside `with trainer.strategy.whole_parameters([parameter]):`, on every rank, or"
                    " use stage 1 or 2."
                )
            if id(parameter) in self._optimized:
                _compat.adopt_parameter(parameter)
        self._versions = versions


@contextmanager
def whole_parameters(parameters: Iterable[nn.Parameter], zero_optimizer: Any | None) -> Iterator[None]:
    """Parameters whole inside, and what is written to them there by rank 0 kept. Collective.

    Args:
        parameters: Parameters of the module; at stages 1 and 2 they are whole anyway.
        zero_optimizer: The engine's optimizer, or ``None`` outside ``fit``.

    """
    import deepspeed

    parameters = list(parameters)
    partitioned = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    with _compat.scalars_as_bytes(), torch.no_grad():
        with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0, enabled=bool(partitioned)):
            yield
        if zero_optimizer is None:
            return
        optimized = {id(p) for group in _compat.partition_groups(zero_optimizer) for p in group}
        for parameter in parameters:
            if id(parameter) not in optimized:
                continue
            if not hasattr(parameter, "ds_id"):
                _compat.adopt_parameter(parameter)
                continue
            with deepspeed.zero.GatheredParameters([parameter]):
                value = parameter.detach().float().clone()
            set_master(parameter, value)
