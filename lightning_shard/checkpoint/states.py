"""What a strategy tells of a training's states, and how they are put back: the one thing that differs between them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.checkpoint.boxes import Held
from lightning_shard.checkpoint.format import WrittenBy, hyper_parameters, plain_name
from lightning_shard.checkpoint.reading import Stored


@dataclass(frozen=True, kw_only=True)
class HeldOptimizer:
    """An optimizer's states, as far as this rank has them."""

    kind: str
    """The optimizer's class."""

    groups: list[dict[str, Any]]
    """Hyper-parameters of each parameter group, with the names of all of its parameters under ``"params"``."""

    tensors: dict[tuple[str, str], Held] = field(default_factory=dict)
    """States with dimensions, by parameter and state name."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    """All other states (step counts, states of 0-dim parameters) by parameter and state name, of all ranks."""


@dataclass(frozen=True, kw_only=True)
class SavedOptimizer:
    """An optimizer's states in a checkpoint."""

    groups: list[dict[str, Any]]
    """Hyper-parameters of each parameter group, with the names of its parameters under ``"params"``."""

    tensors: dict[tuple[str, str], tuple[str, Stored]] = field(default_factory=dict)
    """States with dimensions, by parameter and state name: their keys in the checkpoint."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    """All other states by parameter and state name."""

    def states_of(self, parameter: str) -> dict[str, Stored]:
        """The states with dimensions that a parameter has."""
        return {state: stored for (name, state), (_, stored) in self.tensors.items() if name == parameter}


class TrainingStates(ABC):
    """A training's weights and optimizer states, cut as the strategy cuts them.

    Names are those of the plain model. Tied weights have one `Held` object under all of their names.

    Args:
        module: The user's module, set up.

    """

    def __init__(self, module: "pl.LightningModule") -> None:
        self.module = module

    # --- weights ---

    def weights(self) -> dict[str, Held]:
        """The tensors of the module's state dict, what this rank holds of each. The same names on every rank.

        Raises:
            MisconfigurationException: If the state dict holds a copy of a parameter or buffer in its place.

        """
        buffers = {id(buffer): plain_name(name) for name, buffer in self.module.named_buffers()}
        held: dict[int, Held] = {}
        found = {}
        for raw_name, value in self.state_dict().items():
            name = plain_name(raw_name)
            if id(value) in self.parameter_names or id(value) in buffers:
                if id(value) not in held:
                    is_parameter = id(value) in self.parameter_names
                    held[id(value)] = (
                        self.hold_parameter(value) if is_parameter else self.hold_buffer(value, buffers[id(value)])
                    )
                found[name] = held[id(value)]
            elif name in self._own_names:
                raise MisconfigurationException(
                    f"The module's state dict holds a copy of {name!r}, and not the tensor itself, so that it cannot be"
                    " saved and loaded in parts. Return the module's own tensors from `state_dict` and its hooks."
                )
        return found

    @cached_property
    def _own_names(self) -> set[str]:
        parameters = self.module.named_parameters(remove_duplicate=False)
        buffers = self.module.named_buffers(remove_duplicate=False)
        return {plain_name(name) for named in (parameters, buffers) for name, _ in named}

    def _extra(self) -> dict[str, str]:
        """The plain and the own names of entries of the state dict that are none of the module's own tensors."""
        own = self._own_names
        return {plain_name(name): name for name in self.state_dict() if plain_name(name) not in own}

    def state_dict(self) -> dict[str, Any]:
        """The module's state dict with the module's own tensors, and its own names."""
        return dict(self.module.state_dict(keep_vars=True))

    def extra_state(self) -> dict[str, Any]:
        """Entries of the state dict that are none of the module's own tensors: extra states, metrics' states."""
        values = self.state_dict()
        return {name: values[own] for name, own in self._extra().items()}

    def set_extra_state(self, values: Mapping[str, Any]) -> None:
        """Put back what `extra_state` gave."""
        own = self._extra()
        known = {own[name]: value for name, value in values.items() if name in own}
        if known:
            self.module.load_state_dict(known, strict=False)

    @cached_property
    def parameter_names(self) -> dict[int, str]:
        """Plain names by the parameters' identity; of tied names the first."""
        return {id(parameter): plain_name(name) for name, parameter in self.module.named_parameters()}

    @abstractmethod
    def hold_parameter(self, parameter: Tensor) -> Held:
        """What this rank holds of a parameter."""

    @abstractmethod
    def hold_buffer(self, buffer: Tensor, name: str) -> Held:
        """What this rank holds of a buffer."""

    def weights_loaded(self) -> None:  # noqa: B027 - most strategies train the very tensors that were read into
        """Take what was read into the boxes of `weights` for the training's weights. Collective."""

    def own_state(self) -> dict[str, Any]:
        """Numbers of the strategy's own that training goes on from, such as a loss scale."""
        return {}

    def set_own_state(self, values: Mapping[str, Any]) -> None:  # noqa: B027 - most have none
        """Put back what `own_state` gave, in this strategy or another."""

    # --- optimizers ---

    @abstractmethod
    def optimizers(self) -> list[HeldOptimizer]:
        """The optimizers' states. Collective."""

    def check(self, path: str, number: int, saved: SavedOptimizer) -> None:  # noqa: B027 - most can hold any
        """Refuse states that this strategy cannot hold.

        Raises:
            MisconfigurationException: Naming the parameters and both values.

        """

    @abstractmethod
    def allocate(self, number: int, saved: SavedOptimizer) -> dict[tuple[str, str], Held]:
        """Make room for the states of the optimizer ``number``, which has none or is to lose them.

        Returns:
            By parameter and state name where this rank's part of the state is to be read to.

        """

    @abstractmethod
    def put_in_place(self, number: int, saved: SavedOptimizer) -> None:
        """Give the optimizer the states that were read to where `allocate` said, its groups, and all values."""

    # --- the writer ---

    @abstractmethod
    def written_by(self) -> WrittenBy:
        """The run, for the manifest."""


KEPT = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Entries of a parameter group that say how an optimizer computes, not what: a resumed run has its own."""


def restored_group(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group with saved hyper-parameters."""
    kept = {key: value for key, value in own.items() if key in KEPT or key not in saved}
    return {**{key: value for key, value in saved.items() if key not in KEPT}, **kept}


class PlainOptimizers(TrainingStates):
    """Training states whose optimizers hold the module's own parameters."""

    @property
    @abstractmethod
    def own_optimizers(self) -> Sequence[Optimizer]:
        """The optimizers themselves."""

    @abstractmethod
    def hold_state(self, state: Tensor, parameter: Tensor) -> Held:
        """What this rank holds of an optimizer's state."""

    @abstractmethod
    def new_state(self, stored: Stored, parameter: Tensor) -> Tensor:
        """An uninitialised state that is cut like its parameter."""

    def is_here(self, parameter: Tensor) -> bool:
        """Whether this rank has a part in training ``parameter``."""
        return True

    def values_of_all_ranks(self, values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """``values`` with those of ranks that train other parameters."""
        return values

    def optimizers(self) -> list[HeldOptimizer]:
        """The optimizers' states."""
        names = self.parameter_names
        return [self._optimizer(optimizer, names) for optimizer in self.own_optimizers]

    def _optimizer(self, optimizer: Optimizer, names: dict[int, str]) -> HeldOptimizer:
        tensors: dict[tuple[str, str], Held] = {}
        values: dict[str, dict[str, Any]] = {}
        for parameter, states in optimizer.state.items():
            if not self.is_here(parameter):
                continue
            name = names[id(parameter)]
            for key, state in states.items():
                if isinstance(state, Tensor) and state.dim():
                    tensors[name, key] = self.hold_state(state, parameter)
                elif state is not None:
                    values.setdefault(name, {})[key] = state
        groups = [
            {**hyper_parameters(group), "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        values = self.values_of_all_ranks(values)
        return HeldOptimizer(kind=type(optimizer).__name__, groups=groups, tensors=tensors, values=values)

    def _parameters(self, number: int) -> dict[str, Tensor]:
        names = self.parameter_names
        groups = self.own_optimizers[number].param_groups
        return {names[id(parameter)]: parameter for group in groups for parameter in group["params"]}

    def allocate(self, number: int, saved: SavedOptimizer) -> dict[tuple[str, str], Held]:
        """Make room for states; see `TrainingStates.allocate`."""
        self._new: dict[tuple[str, str], Tensor] = {}
        parameters = self._parameters(number)
        places = {}
        for (name, key), (_, stored) in saved.tensors.items():
            if name in parameters and self.is_here(parameters[name]):
                state = self.new_state(stored, parameters[name])
                self._new[name, key] = state
                places[name, key] = self.hold_state(state, parameters[name])
        return places

    def put_in_place(self, number: int, saved: SavedOptimizer) -> None:
        """Load by the optimizer's own way, with tensors that are cut already."""
        optimizer = self.own_optimizers[number]
        names = self.parameter_names
        numbers: dict[str, int] = {}
        groups = []
        for own, group in zip(optimizer.param_groups, saved.groups, strict=True):
            packed = []
            for parameter in own["params"]:
                packed.append(numbers.setdefault(names[id(parameter)], len(numbers)))
            groups.append({**restored_group(own, group), "params": packed})
        state: dict[int, dict[str, Any]] = {}
        for (name, key), tensor in self._new.items():
            state.setdefault(numbers[name], {})[key] = tensor
        parameters = self._parameters(number)
        for name, values in saved.values.items():
            if name in numbers and self.is_here(parameters[name]):
                state.setdefault(numbers[name], {}).update(copied(values))
        del self._new
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values whose tensors are no other parameter's: optimizers count up in place."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()}


def like(stored: Stored, parameter: Tensor) -> Any:
    """Dtype of a state, as torch's own loading chooses it: the parameter's, if both are floating-point."""
    return parameter.dtype if parameter.is_floating_point() and stored.dtype.is_floating_point else stored.dtype


def empty_like(stored: Stored, parameter: Tensor) -> Tensor:
    """An uninitialised state on the parameter's device, in the stored shape."""
    return torch.empty(stored.shape, dtype=like(stored, parameter), device=parameter.device)
