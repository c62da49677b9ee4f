"""Where the bytes of the model states live: counted in live storage, beside what the formula says.

Bytes are counted in *storages*, the blocks of memory behind tensors: a view costs nothing, padding and the unused rest
of a buffer cost what they cost. A storage that several tensors share is counted once, under the first of the kinds in
the order of :class:`ModelStateBytes`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shard._compat.model_states import EngineLayout, Kind, engine_layout, engine_tensors, swapped_bytes
from lightning_shard.plan.arithmetic import ModelStates, exact_model_states, optimizer_elements
from lightning_shard.telemetry.fsdp_memory import add_up, average, held_parameters, is_counted, module_tensors


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of one kind of state on one device."""

    storage: int
    """Bytes of the storages: what the memory is short of."""

    elements: int
    """Bytes of the elements that tensors use of those storages; less than ``storage`` where a buffer is padded, or
    part of it is unused. Overlapping views of one storage count once, up to its size."""


@dataclass(frozen=True, kw_only=True)
class ModelStateBytes:
    """Model states of one rank, each by device (``"cpu"``, ``"cuda:0"``, ``"nvme"``)."""

    rank: int
    """The rank that holds them."""

    parameters: dict[str, Bytes]
    """Parameters, or this rank's partition of them."""

    gathered: dict[str, Bytes]
    """Whole copies of partitioned parameters that are alive at this moment: after a step those that are too small to be
    worth a gather; within a step those of the layers at work."""

    master: dict[str, Bytes]
    """The fp32 copy of the parameters that the optimizer updates."""

    optimizer: dict[str, Bytes]
    """Optimizer states; counters that are one number per tensor are not counted."""

    buckets: dict[str, Bytes]
    """Buffers that gradients and weights pass through."""

    gradients: dict[str, Bytes]
    """Gradients, partitioned or not yet, that lie outside the buckets."""

    def storage(self, kind: Kind) -> int:
        """Bytes of one kind on all devices together."""
        held: dict[str, Bytes] = getattr(self, kind)
        return sum(part.storage for part in held.values())


@dataclass(frozen=True, kw_only=True)
class ExpectedModelStates:
    """Model states of this rank by the formula, to the byte: padding and whole small parameters are part of it."""

    parameters_total: int
    """Number of parameters of the model, Ψ."""

    ranks: int
    """Ranks that share the model states, N. Under HSDP those of one shard group."""

    stage: int
    """ZeRO stage; 0 where every rank holds all of them, 3 under FSDP2."""

    states: ModelStates
    """Bytes of parameters, gradients, master copy and optimizer states. The gradients are those between backward and
    step. Stages 1 and 2 without offload do not hold just that: see :func:`expected_model_state_bytes`."""

    gathered: int
    """Bytes of the small parameters that every rank holds whole, besides its partition, from one step to the next."""

    per_parameter: ModelStates
    """Bytes per parameter of each state."""


def model_state_bytes(strategy: Strategy) -> ModelStateBytes:
    """Count the model states that this rank holds now.

    Gradients are alive between backward and step: count in ``on_before_optimizer_step`` to see them. All else is at
    rest after a step: count in ``on_train_batch_end``.

    Args:
        strategy: The Trainer's strategy, during fit.

    """
    counted: set[int] = set()
    kinds: dict[Kind, list[Tensor]] = {field.name: [] for field in fields(ModelStateBytes) if field.name != "rank"}  # type: ignore[misc]
    for kind, tensor in _tensors(strategy):
        kinds[kind].append(tensor)
    held = {kind: _by_device(tensors, counted) for kind, tensors in kinds.items()}
    if isinstance(strategy, DeepSpeedStrategy):
        for kind, size in swapped_bytes(strategy.model).items():
            if size:
                held[kind]["nvme"] = Bytes(storage=size, elements=size)
    return ModelStateBytes(rank=getattr(strategy, "global_rank", 0), **held)


def gather_model_state_bytes(mine: ModelStateBytes) -> list[ModelStateBytes]:
    """Collect what every rank counted. Every rank must call it; each gets the whole list, by rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [mine]
    everyone: list[ModelStateBytes] = [mine] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return everyone


def expected_model_state_bytes(
    strategy: Strategy, optimizer_elements_per_parameter: int | None = None
) -> ExpectedModelStates:
    """What this rank's model states should be, from the formula alone: sizes, ranks, stage, precision and optimizer.

    Parameters, master copy and optimizer states are exact. Gradients are exact at stage 3, and with offload; at stages
    1 and 2 without it, a rank holds the whole gradient of every parameter that its partition touches, thus up to one
    parameter more at each end of the partition. Under FSDP2 everything is exact; ranks differ in their optimizer
    states, because shards are cut at rows and padded, and optimizers keep no states for padding. The gradients are
    those of a backward that has reached every unit and was synchronized.

    Args:
        strategy: The Trainer's strategy, during fit; a ZeRO strategy, FSDP2, or one that keeps whole replicas.
        optimizer_elements_per_parameter: Elements that optimizers keep per parameter, where a class is not known.

    Raises:
        ValueError: If an optimizer's class is not known and its elements are not given, or if a module was sharded by
            other hands in a way that the formula does not cover.

    """
    if isinstance(strategy, DeepSpeedStrategy):
        return _expected_of_engine(engine_layout(strategy.model), optimizer_elements_per_parameter)
    held = held_parameters(strategy, optimizer_elements_per_parameter)
    shared_by = [parameter.ranks for parameter in held if parameter.ranks]
    return ExpectedModelStates(
        parameters_total=sum(parameter.numel for parameter in held),
        ranks=max(shared_by, default=getattr(strategy, "world_size", 1)),
        stage=3 if shared_by else 0,
        states=add_up(held),
        gathered=0,
        per_parameter=average(held),
    )


def _expected_of_engine(layout: EngineLayout, elements: int | None) -> ExpectedModelStates:
    if elements is None:
        elements = optimizer_elements(type(layout.optimizer).__name__, layout.optimizer.defaults)
    per_parameter = ModelStates(
        parameters=layout.parameter_bytes,
        gradients=layout.gradient_bytes,
        master=layout.master_bytes,
        optimizer=elements * layout.master_bytes,
    )
    states = exact_model_states(layout.groups, layout.ranks, layout.stage, per_parameter, layout.frozen)
    if layout.partitions_gradients and layout.stage == 1:  # offloaded, so that only this rank's share is copied
        partitioned = exact_model_states(layout.groups, layout.ranks, 2, per_parameter, layout.frozen)
        states = replace(states, gradients=partitioned.gradients)
    numels = [numel for group in layout.groups for numel in group] + layout.frozen
    whole = [numel for numel in numels if numel <= layout.persistence_elements]
    return ExpectedModelStates(
        parameters_total=sum(numels),
        ranks=layout.ranks,
        stage=layout.stage,
        states=states,
        gathered=sum(whole) * layout.parameter_bytes,
        per_parameter=per_parameter,
    )


def _tensors(strategy: Strategy) -> Iterator[tuple[Kind, Tensor]]:
    if isinstance(strategy, DeepSpeedStrategy):
        yield from engine_tensors(strategy.model)
        return
    yield from module_tensors(strategy.model)
    for optimizer in strategy.optimizers:
        for parameter, state in optimizer.state.items():
            yield from (("optimizer", value) for name, value in state.items() if is_counted(name, value, parameter))


def _by_device(tensors: Iterable[Tensor], counted: set[int]) -> dict[str, Bytes]:
    """Add tensors up by device; a storage in ``counted`` is left out, and what is counted is added to it."""
    storages: dict[int, tuple[str, int]] = {}
    used: dict[int, set[tuple[int, int]]] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key = storage.data_ptr()
        if not storage.nbytes() or key in counted:
            continue
        storages[key] = (str(local.device), storage.nbytes())
        # A set, because the same view may be listed twice.
        used.setdefault(key, set()).add((int(local.storage_offset()), local.numel() * local.element_size()))
    held: dict[str, Bytes] = {}
    for key, (device, size) in storages.items():
        before = held.get(device, Bytes(storage=0, elements=0))
        elements = min(size, sum(view for _, view in used[key]))
        held[device] = Bytes(storage=before.storage + size, elements=before.elements + elements)
    counted.update(storages)
    return held
