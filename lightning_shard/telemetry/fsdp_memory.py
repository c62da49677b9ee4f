"""Model states of a module that torch itself trains: sharded with FSDP2, whole on every rank, or some of each.

FSDP2 cuts each parameter at rows and pads its storage to the same number of rows on every rank. A unit's gradients lie
in one buffer that is padded likewise, whatever owns rows of them; optimizer states are made from a rank's own rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from lightning_shard._compat import sharding
from lightning_shard._compat.model_states import Kind
from lightning_shard.pipeline.absent import is_absent
from lightning_shard.plan.arithmetic import ModelStates, optimizer_elements, own_rows, padded_rows

_COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})
"""States that torch.optim's classes keep once a tensor: one number, which has the shape of a 0-dim parameter, too."""


@dataclass(frozen=True, kw_only=True)
class HeldParameter:
    """What this rank should hold of one parameter, in elements."""

    numel: int
    """The whole parameter's."""

    size: int
    """Bytes of an element, of its gradient and its states too."""

    ranks: int
    """Ranks that share it; 0 if every rank holds it whole."""

    stored: int
    """Of its storage, padding included."""

    own: int
    """Those of its storage that are not padding."""

    gradient: int
    """Of its gradient's storage, between backward and step; 0 for one that is not trained."""

    optimizer: int
    """Elements that an optimizer keeps for each of its own."""

    @property
    def trained(self) -> bool:
        """Whether it has a gradient; a rank that owns no row of it stores padding."""
        return self.gradient > 0


def module_tensors(module: nn.Module | None) -> Iterator[tuple[Kind, Tensor]]:
    """Every tensor that is held for a module's parameters and gradients, with its kind."""
    assert module is not None
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            yield from sharding.unit_tensors(unit)
    for parameter in sharding.parameters_in_no_unit(module):
        if is_absent(parameter):
            continue  # of another stage of a pipeline
        yield "parameters", parameter.data
        if parameter.grad is not None:
            yield "gradients", parameter.grad


def is_counted(name: str, value: Any, parameter: Tensor) -> bool:
    """Whether an entry of an optimizer's state grows with its parameter: not a counter, which is one number."""
    if not isinstance(value, Tensor):
        return False
    return value.dim() > 0 or (parameter.dim() == 0 and name not in _COUNTERS)


def held_parameters(strategy: Strategy, optimizer_elements_per_parameter: int | None) -> list[HeldParameter]:
    """What this rank should hold of each parameter of the strategy's module, from shapes alone.

    Args:
        strategy: The Trainer's strategy, during fit.
        optimizer_elements_per_parameter: Elements that optimizers keep per parameter, where a class is not known.

    Raises:
        ValueError: If an optimizer's class is not known and its elements are not given, or a parameter is sharded along
            another dimension than its first.

    """
    module = strategy.model
    assert module is not None
    keeps: dict[int, int] = {}
    for optimizer in strategy.optimizers:
        for group in optimizer.param_groups:
            elements = optimizer_elements_per_parameter
            if elements is None:
                elements = optimizer_elements(type(optimizer).__name__, group)
            keeps.update({id(parameter): elements for parameter in group["params"]})
    held = [
        _sharded(parameter, keeps.get(id(parameter), 0), strategy.root_device)
        for unit in module.modules()
        if isinstance(unit, FSDPModule)
        for parameter in sharding.sharded_parameters(unit)
    ]
    for parameter in sharding.parameters_in_no_unit(module):
        if is_absent(parameter):
            continue
        numel = parameter.numel()
        held.append(
            HeldParameter(
                numel=numel,
                size=parameter.element_size(),
                ranks=0,
                stored=numel,
                own=numel,
                gradient=numel if parameter.requires_grad else 0,
                optimizer=keeps.get(id(parameter), 0),
            )
        )
    return held


def add_up(held: Sequence[HeldParameter]) -> ModelStates:
    """Bytes of each state on this rank."""
    return ModelStates(
        parameters=sum(parameter.size * parameter.stored for parameter in held),
        gradients=sum(parameter.size * parameter.gradient for parameter in held),
        master=0,
        optimizer=sum(parameter.size * parameter.own * parameter.optimizer for parameter in held if parameter.trained),
    )


def average(held: Sequence[HeldParameter]) -> ModelStates:
    """Bytes of each state for a parameter of the whole model: of gradients and optimizer states, for a trained one."""
    trained = [parameter for parameter in held if parameter.trained]
    numel, numel_trained = (max(1, sum(parameter.numel for parameter in some)) for some in (held, trained))
    return ModelStates(
        parameters=sum(parameter.size * parameter.numel for parameter in held) / numel,
        gradients=sum(parameter.size * parameter.numel for parameter in trained) / numel_trained,
        master=0,
        optimizer=sum(parameter.size * parameter.numel * parameter.optimizer for parameter in trained) / numel_trained,
    )


def _sharded(parameter: nn.Parameter, optimizer: int, device: torch.device) -> HeldParameter:
    assert isinstance(parameter, DTensor)
    mesh, shape = parameter.device_mesh, parameter.shape
    *outer, inner = parameter.placements
    if inner != Shard(0) or any(placement.is_shard() for placement in outer):
        raise ValueError(
            f"A parameter of shape {list(shape)} is placed as {parameter.placements}: the formula is known for"
            " parameters that FSDP2 alone shards, along their first dimension."
        )
    ranks, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    stored, own = padded_rows([shape], ranks), own_rows(shape, ranks, rank)
    # Gradients that move to another device than they were reduced on leave the unit's buffer, and its padding, behind.
    moves = parameter.to_local().device.type != device.type
    return HeldParameter(
        numel=shape.numel(),
        size=parameter.element_size(),
        ranks=ranks,
        stored=stored,
        own=own,
        gradient=(own if moves else stored) if parameter.requires_grad else 0,
        optimizer=optimizer,
    )
