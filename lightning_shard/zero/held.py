"""What a rank of a ZeRO engine holds: flat slices of master weights and optimizer states."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_shard import _compat
from lightning_shard._compat import partitions
from lightning_shard.checkpoint.boxes import Held
from lightning_shard.checkpoint.format import WrittenBy, hyper_parameters, plain_name, versions
from lightning_shard.checkpoint.states import (
    HeldOptimizer,
    SavedOptimizer,
    TrainingStates,
    restored_group,
)
from lightning_shard.zero.state import full_shape

if TYPE_CHECKING:
    from lightning_shard.strategies.zero import ZeROStrategy


_COUNTERS = frozenset({"step", "mu_product", "mu", "eta"})
"""States of torch's optimizers that a parameter has one number of, whatever its shape."""


@dataclass(frozen=True, kw_only=True)
class UserGroups:
    """The parameter groups as the user made them, before the engine replaced their parameters by flat partitions."""

    kind: str
    """The optimizer's class."""

    groups: list[dict[str, Any]]
    """The groups themselves, whose hyper-parameters the engine uses."""

    names: list[list[str]]
    """The plain names of their parameters, frozen ones too."""

    @classmethod
    def of(cls, module: nn.Module, groups: list[dict[str, Any]], kind: str) -> "UserGroups":
        """Read the names, while the parameters are there."""
        names = {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}
        own = [[names[id(parameter)] for parameter in group["params"]] for group in groups]
        return cls(kind=kind, groups=groups, names=own)


class PartitionStates(TrainingStates):
    """The states of a module inside a ZeRO engine, at any stage, on the device or offloaded to the CPU.

    Args:
        strategy: The strategy, set up.

    """

    def __init__(self, strategy: "ZeROStrategy") -> None:
        module, self._zero = strategy.module_and_optimizer()
        super().__init__(module)
        self._strategy = strategy
        self._ranges: dict[int, tuple[int, int, int]] = {}
        """Of each trained parameter of which this rank has a part: its flat group, the part's place there, and the
        first element's place in the parameter."""
        self._flats: list[Tensor] = [] if self._zero is None else _compat.flat_partitions(self._zero)
        self._lengths: dict[int, int] = {}
        if self._zero is not None:
            for group, parameters in enumerate(_compat.partition_groups(self._zero)):
                self._place(group, parameters)

    def _place(self, group: int, parameters: list[nn.Parameter]) -> None:
        offset = 0
        for parameter in parameters:
            if hasattr(parameter, "ds_id"):
                elements = _compat.own_elements(parameter)
                start = partitions.partition_rank(parameter) * elements
                length = max(0, min(elements, torch.Size(full_shape(parameter)).numel() - start))
                self._ranges[id(parameter)] = (group, offset, start)
                offset += elements
            elif (found := partitions.master_range(parameter)) is not None:
                start, length = found[0], found[1].numel()
                self._ranges[id(parameter)] = (group, found[2], start)
            else:
                continue
            self._lengths[id(parameter)] = length

    def _part(self, parameter: Tensor, flat: Tensor) -> Held:
        """What this rank has of a parameter, or of a state of it, whose flat partition is ``flat``."""
        _, offset, start = self._ranges[id(parameter)]
        return Held.of_range(full_shape(parameter), flat.data[offset : offset + self._lengths[id(parameter)]], start)

    # --- weights ---

    def state_dict(self) -> dict[str, Any]:
        """The module's own, also when the run is over and its parameters are empty."""
        with self._strategy.empty_weights.paused():
            return super().state_dict()

    def hold_parameter(self, parameter: Tensor) -> Held:
        """This rank's slice of the fp32 master weights; of a parameter that is not trained, of the parameter."""
        shape = full_shape(parameter)
        if id(parameter) in self._ranges:
            return self._part(parameter, self._flats[self._ranges[id(parameter)][0]])
        if self._is_trained(parameter):
            return Held(shape=shape, dtype=torch.float32)
        if hasattr(parameter, "ds_id"):
            own = partitions.own_partition(parameter)
            start = partitions.partition_rank(parameter) * own.numel()
            length = max(0, min(own.numel(), torch.Size(shape).numel() - start))
            return Held.of_range(shape, own[:length], start)
        return Held.whole(parameter)

    def _is_trained(self, parameter: Tensor) -> bool:
        return id(parameter) in self._trained

    @property
    def _trained(self) -> set[int]:
        if not hasattr(self, "_trained_ids"):
            groups = [] if self._zero is None else _compat.partition_groups(self._zero)
            self._trained_ids = {id(parameter) for group in groups for parameter in group}
        return self._trained_ids

    def hold_buffer(self, buffer: Tensor, name: str) -> Held:
        """The whole; rank 0's is saved."""
        return Held.whole(buffer, writes=self._strategy.is_global_zero)

    def weights_loaded(self) -> None:
        """Copy the master weights to the parameters. Collective."""
        if self._zero is not None:
            partitions.take_masters(self._zero)
        self._strategy.accept_weights()

    # --- the optimizer ---

    def optimizers(self) -> list[HeldOptimizer]:
        """The one optimizer that the engine has."""
        if self._zero is None:
            return []
        inner = _compat.inner_optimizer(self._zero)
        tensors: dict[tuple[str, str], Held] = {}
        values: dict[str, dict[str, Any]] = {}
        for name, parameter, flat in self._trained_parameters():
            for key, state in inner.state.get(flat, {}).items():
                if not isinstance(state, Tensor) or not state.dim():
                    values.setdefault(name, {})[key] = _counted(state)
                elif id(parameter) in self._ranges and full_shape(parameter):
                    tensors[name, key] = self._part(parameter, state)
        self._scalar_states(values)
        user = self._user
        groups = [
            {**hyper_parameters(group), "params": names} for group, names in zip(user.groups, user.names, strict=True)
        ]
        return [HeldOptimizer(kind=user.kind, groups=groups, tensors=tensors, values=values)]

    @property
    def _user(self) -> UserGroups:
        assert self._strategy.user_groups is not None
        return self._strategy.user_groups

    def _trained_parameters(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        assert self._zero is not None
        for group, flat in zip(_compat.partition_groups(self._zero), self._flats, strict=True):
            for parameter in group:
                yield self.parameter_names[id(parameter)], parameter, flat

    def _scalar_states(self, values: dict[str, dict[str, Any]]) -> None:
        """Add the states of 0-dim parameters, of which one rank has each: they are values too. Collective."""
        inner = _compat.inner_optimizer(self._zero)
        mine = {
            name: {
                key: self._part(parameter, state).boxes[0].tensor.cpu().clone()
                for key, state in inner.state.get(flat, {}).items()
                if isinstance(state, Tensor) and state.dim()
            }
            for name, parameter, flat in self._trained_parameters()
            if not full_shape(parameter) and self._lengths.get(id(parameter), 0)
        }
        if any(not full_shape(parameter) for _, parameter, _ in self._trained_parameters()):
            every: list[Any] = [None] * self._strategy.world_size
            torch.distributed.all_gather_object(every, mine)
            for part in every:
                for name, states in part.items():
                    values.setdefault(name, {}).update(states)

    def check(self, path: str, number: int, saved: SavedOptimizer) -> None:
        """A flat partition has one step count, and states in the shape of its parameters."""
        shapes = {name: full_shape(parameter) for name, parameter, _ in self._trained_parameters()}
        for (name, state), (_, stored) in saved.tensors.items():
            if name in shapes and stored.shape != shapes[name]:
                raise MisconfigurationException(
                    f"{path}: the state {state!r} of {name!r} has shape {stored.shape}, the parameter {shapes[name]}."
                    " ZeRO keeps states in flat partitions, which have one entry for each element. Use a strategy that"
                    " keeps whole tensors with this optimizer, or start a new run from the weights alone."
                )
        for group in _compat.partition_groups(self._zero):
            first: dict[str, tuple[str, Any]] = {}
            for name in (self.parameter_names[id(parameter)] for parameter in group):
                for key in _COUNTERS & saved.values.get(name, {}).keys():
                    value = saved.values[name][key]
                    known, other = first.setdefault(key, (name, value))
                    if float(other) != float(value):
                        raise MisconfigurationException(
                            f"{path}: {key!r} is {float(other):g} for {known!r} and {float(value):g} for {name!r}, but"
                            " ZeRO counts once for all parameters of a group. Resume under another strategy (fsdp2,"
                            " ddp, a pipeline), or start a new run from the weights alone."
                        )

    def allocate(self, number: int, saved: SavedOptimizer) -> dict[tuple[str, str], Held]:
        """Flat states of zeros, beside the master weights."""
        names = {id(parameter): name for name, parameter, _ in self._trained_parameters()}
        self._new: list[dict[str, Any]] = []
        places: dict[tuple[str, str], Held] = {}
        for group, flat in zip(_compat.partition_groups(self._zero), self._flats, strict=True):
            states: dict[str, Any] = {}
            for parameter in group:
                name = names[id(parameter)]
                for key in self._flat_states(name, parameter, saved):
                    if key not in states:
                        states[key] = torch.zeros_like(flat.data)
                    if id(parameter) in self._ranges and (name, key) in saved.tensors:
                        places[name, key] = self._part(parameter, states[key])
            self._new.append(states)
        return places

    @staticmethod
    def _flat_states(name: str, parameter: Tensor, saved: SavedOptimizer) -> list[str]:
        """The names of a parameter's states that have an entry for each of its elements."""
        if full_shape(parameter):
            return [state for owner, state in saved.tensors if owner == name]
        return [key for key in saved.values.get(name, {}) if key not in _COUNTERS]

    def put_in_place(self, number: int, saved: SavedOptimizer) -> None:
        """Give the inner optimizer the flat states, the values of its groups' parameters, and the hyper-parameters."""
        inner = _compat.inner_optimizer(self._zero)
        native = type(inner).__module__.startswith("deepspeed.")
        for parameters, flat, states in zip(_compat.partition_groups(self._zero), self._flats, self._new, strict=True):
            for parameter in parameters:
                for key, value in saved.values.get(self.parameter_names[id(parameter)], {}).items():
                    if key in states and isinstance(states[key], Tensor) and states[key].dim():
                        if self._lengths.get(id(parameter), 0):
                            self._part(parameter, states[key]).boxes[0].tensor.copy_(torch.as_tensor(value))
                    else:
                        states[key] = int(value) if native and key == "step" else value
            inner.state.pop(flat, None)
            if states:
                inner.state[flat] = {
                    key: value.clone() if isinstance(value, Tensor) and not value.dim() else value
                    for key, value in states.items()
                }
        del self._new
        for own, group in zip(self._user.groups, saved.groups, strict=True):
            own.update({key: value for key, value in restored_group(own, group).items() if key != "params"})
        if inner.state:
            _compat.link_optimizer_states(self._zero)

    def own_state(self) -> dict[str, Any]:
        """The loss scale, in fp16."""
        numbers = {} if self._zero is None else partitions.loss_scaler_numbers(self._zero)
        return {"loss_scaler": numbers} if numbers else {}

    def set_own_state(self, values: Mapping[str, Any]) -> None:
        """Put the loss scale back."""
        if self._zero is not None:
            partitions.set_loss_scaler_numbers(self._zero, values.get("loss_scaler", {}))

    def written_by(self) -> WrittenBy:
        """The run."""
        strategy = self._strategy
        return WrittenBy(
            strategy=type(strategy).__name__,
            settings={"stage": strategy.stage},
            world_size=strategy.world_size,
            mesh={"dp_shard": strategy.world_size},
            precision=str(strategy.precision_plugin.precision),
            versions=versions(),
        )


def _counted(value: Any) -> Any:
    """A step count as torch's optimizers keep it."""
    return torch.tensor(float(value)) if isinstance(value, int) and not isinstance(value, bool) else value
