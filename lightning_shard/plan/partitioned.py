"""ZeRO on DeepSpeed, in closed form: its engine cannot run without data.

Model states are those of the ZeRO paper with the engine's padding, to the byte. Activations are those of a step in one
process at the precision in which the engine computes. What the engine adds are buckets and, at stage 3, the parameters
that are whole at once; how far that is from real runs is measured in docs/plan_accuracy.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_shard.config import Offload
from lightning_shard.plan.arithmetic import ModelStates, Stage, exact_model_states, flat_partition, sharded_partition
from lightning_shard.plan.costs import Cost, Transfer
from lightning_shard.plan.ledger import KINDS
from lightning_shard.plan.precision import COMPUTED
from lightning_shard.plan.profile import ModuleProfile, ParameterFacts
from lightning_shard.plan.results import Memory
from lightning_shard.plan.simulate import Simulation
from lightning_shard.zero.sizing import Sizes, sizes_for

_LISTS = 0.9
"""Temporaries per byte of all that is updated, from which on an optimizer is taken to work on lists of tensors."""


@dataclass(frozen=True, kw_only=True)
class _Engine:
    """How an engine lays a module out."""

    stage: Stage
    offload: Offload | None
    ranks: int
    compute: int
    sizes: Sizes
    trained: tuple[ParameterFacts, ...]
    frozen: tuple[ParameterFacts, ...]
    groups: tuple[tuple[int, ...], ...]


def partitioned_cost(
    profile: ModuleProfile,
    single: Simulation | None,
    precision: str,
    *,
    name: str,
    stage: Stage,
    offload: Offload | None,
    devices: int,
    cuda: bool,
    accumulate: int = 1,
) -> Cost:
    """What a form of ZeRO costs.

    Args:
        profile: Of the module.
        single: A step in one process, in the precision in which the engine computes (bf16 throughout for
            ``bf16-mixed``); ``None`` where there is none.
        precision: As in ``Trainer(precision=...)``.
        name: The form's name.
        stage: What is partitioned.
        offload: What lives on the host or on NVMe.
        devices: Ranks.
        cuda: Whether devices have streams, so that two buckets are filled in turn.
        accumulate: Batches for an optimizer step.

    """
    numel = {each.name: each.numel for each in profile.parameters}
    engine = _Engine(
        stage=stage,
        offload=offload,
        ranks=devices,
        compute=COMPUTED[precision],
        sizes=sizes_for(profile.psi),
        trained=profile.trained,
        frozen=tuple(each for each in profile.parameters if not each.trained),
        groups=tuple(tuple(numel[name] for name in group) for group in profile.groups if group),
    )
    states = partitioned_states(engine)
    on_host = _on_host(states, engine)
    memory = together = None
    if single is not None:
        memory = _peak(single, profile, engine, cuda)
        together = _together(memory, on_host, single, profile, engine)
    share = states.master / 4
    return Cost(
        name=name,
        model_states=states,
        host_bytes=on_host,
        memory=memory,
        together=together,
        transfers=_transfers(engine, accumulate),
        # Gradients go to the host and new weights come back; offloaded parameters come for each of their uses.
        host_traffic=_host_traffic(states, share, engine, accumulate),
        host_update=offload is not None and offload.optimizer is not None,
        batches=accumulate,
        replicas=devices,
    )


def partitioned_states(engine: _Engine) -> ModelStates:
    """Model states of one rank to the byte, as the engine's own tensors add up (see ``telemetry.memory``)."""
    optimizer = _optimizer_elements(engine)
    offloaded = engine.offload is not None and engine.offload.optimizer is not None
    gradients = engine.compute if not offloaded else 4 + (engine.compute if engine.stage == 3 else 0)
    per_parameter = ModelStates(parameters=engine.compute, gradients=gradients, master=4, optimizer=4 * optimizer)
    frozen = [each.numel for each in engine.frozen]
    states = exact_model_states(engine.groups, engine.ranks, engine.stage, per_parameter, frozen)
    if offloaded and engine.stage == 1:
        states = replace(
            states, gradients=exact_model_states(engine.groups, engine.ranks, 2, per_parameter, frozen).gradients
        )
    return states


def _optimizer_elements(engine: _Engine) -> float:
    total = sum(each.numel for each in engine.trained)
    return sum(each.numel * each.optimizer for each in engine.trained) / total if total else 0.0


def _on_host(states: ModelStates, engine: _Engine) -> float:
    if engine.offload is None:
        return 0.0
    moved = states.master + states.optimizer + states.gradients if engine.offload.optimizer else 0.0
    return moved + (states.parameters if engine.offload.parameters else 0.0)


def _peak(single: Simulation, profile: ModuleProfile, engine: _Engine, cuda: bool) -> Memory:
    """The most of all moments of a step in one process, with the engine's states in the place of that process's."""
    rest = _at_rest(engine, profile)
    whole = sum(each.numel for each in engine.trained)
    gradient_bytes = single.held.gradients or 1.0
    most = rest
    for segment, moments in single.moments.items():
        backward = segment == "loss" or segment.startswith("backward")
        for moment in moments:
            was = Memory(**dict(zip(KINDS, moment, strict=True)))
            if segment == "optimizer":
                now = _while_updating(rest, single, engine)
            else:
                done = was.gradients / gradient_bytes if backward else 0.0
                now = replace(
                    rest,
                    gradients=rest.gradients + _gradients(engine, whole * done),
                    activations=was.activations,
                    gathered=rest.gathered + _live(engine, whole),
                    buffers=rest.buffers + (_buckets(engine, cuda) if backward else 0.0),
                    temporaries=was.temporaries,
                )
            most = max(most, now, key=lambda memory: memory.total)
    return most


def _at_rest(engine: _Engine, profile: ModuleProfile) -> Memory:
    """What the device holds from step to step."""
    states = partitioned_states(engine)
    share, offload = states.master / 4, engine.offload
    optimizer_moved = offload is not None and offload.optimizer is not None
    parameters = 0.0 if offload is not None and offload.parameters else states.parameters
    buffers = float(profile.buffer_bytes)
    gathered = gradients = 0.0
    if engine.stage == 3:
        small = sum(e.numel for e in (*engine.trained, *engine.frozen) if e.numel <= engine.sizes.persistence)
        gathered = float(engine.compute * small)
        buffers += engine.compute * engine.sizes.bucket
        gradients = 0.0 if optimizer_moved else engine.compute * share
    elif optimizer_moved:
        # A largest gradient on its way to the host; the new weights on their way back are on the host.
        buffers += engine.compute * max((each.numel for each in engine.trained), default=0)
    return Memory(
        parameters=parameters + (0.0 if optimizer_moved else states.master),
        gradients=gradients,
        optimizer=0.0 if optimizer_moved else states.optimizer,
        gathered=gathered,
        buffers=buffers,
    )


def _gradients(engine: _Engine, elements: float) -> float:
    """Bytes of the gradients that backward has made so far: whole ones until the step at stage 1, else partitions."""
    if engine.offload is not None and engine.offload.optimizer is not None:
        return 0.0  # they are on the host by then
    if engine.stage == 3:
        return 0.0  # their place is there from step to step
    return engine.compute * elements / (1 if engine.stage == 1 else engine.ranks)


def _buckets(engine: _Engine, cuda: bool) -> float:
    """Bytes that gradients take on their way to be reduced, beside those that are there from step to step.

    That is a bucket (at stage 3 it is there already), or two in turn where one is filled while the other is sent. At
    stage 3 the gradient at work has no other place until it is in the bucket; and one that is larger than the bucket
    is reduced by itself, in a copy.
    """
    largest_one = max((each.numel for each in engine.trained), default=0)
    alone = 2 * largest_one if largest_one > engine.sizes.bucket else largest_one if engine.stage == 3 else 0
    buckets = 0 if engine.stage == 3 else engine.sizes.bucket * (2 if cuda and engine.stage > 1 else 1)
    return float(engine.compute * (buckets + alone))


def _live(engine: _Engine, whole: int) -> float:
    """Bytes of the parameters that are whole at once at stage 3: two windows, or the largest."""
    if engine.stage < 3:
        return 0.0
    largest_one = max((each.numel for each in engine.trained), default=0)
    return float(engine.compute * min(max(2 * engine.sizes.prefetch, largest_one), whole))


def _while_updating(rest: Memory, single: Simulation, engine: _Engine) -> Memory:
    """The optimizer's step: on one flat tensor, with its gradients in fp32 beside those that they are made from."""
    if engine.offload is not None and engine.offload.optimizer is not None:
        return rest
    share = partitioned_states(engine).master / 4
    return replace(rest, temporaries=4 * share * (1 + update_temporaries(single, engine.trained)))


def _together(peak: Memory, on_host: float, single: Simulation, profile: ModuleProfile, engine: _Engine) -> float:
    """The peak of device and host as one memory: in backward, or while the host updates."""
    if engine.offload is None or engine.offload.optimizer is None:
        return peak.total + on_host
    share = partitioned_states(engine).master / 4
    # At stages 1 and 2 a largest gradient arrives there, and new weights wait to leave.
    buffers = engine.compute * (max(e.numel for e in engine.trained) + share) if engine.stage < 3 else 0.0
    updating = _at_rest(engine, profile).total + 4 * share * update_temporaries(single, engine.trained)
    return on_host + buffers + max(peak.total, updating)


def update_temporaries(single: Simulation, trained: Sequence[ParameterFacts]) -> float:
    """What an optimizer takes for itself per byte of a tensor that it updates.

    One that goes from tensor to tensor takes it for the largest at most, one that takes lists for all of them.
    """
    largest_one = max((each.numel * each.size for each in trained), default=0)
    taken = single.segments["optimizer"].temporaries if "optimizer" in single.segments else 0.0
    every = single.held.gradients
    of_all = taken / every if every else 0.0
    scale = largest_one * (every / sum(each.numel * each.size for each in trained)) if trained else 0.0
    of_largest = taken / scale if scale else 0.0
    return of_all if of_all > _LISTS else of_largest


def _transfers(engine: _Engine, accumulate: int) -> tuple[Transfer, ...]:
    """Source: ZeRO (Rajbhandari et al. 2020), section 7; the engine's padding and its exceptions: docs/zero.md."""
    if engine.ranks == 1:
        return ()
    ranks, size = engine.ranks, engine.compute
    offloaded = engine.offload is not None and engine.offload.optimizer is not None
    times = accumulate if engine.stage > 1 or offloaded else 1
    if engine.stage < 3:
        flat = sum(flat_partition(group, ranks) for group in engine.groups) * ranks
        reduced = sum(each.numel for each in engine.trained) * times
        return (
            Transfer(payload=float(reduced), size=size, ranks=ranks, phase="backward" if engine.stage == 2 else "step"),
            Transfer(payload=float(flat), size=size, ranks=ranks, phase="step"),
        )
    padded = {each.name: ranks * sharded_partition([each.numel], ranks) for each in (*engine.trained, *engine.frozen)}
    small = [each for each in (*engine.trained, *engine.frozen) if each.numel <= engine.sizes.persistence]
    every = float(sum(padded.values()))
    few = float(sum(padded[each.name] for each in small))
    gradients = float(sum(padded[each.name] for each in engine.trained))
    found = [
        Transfer(payload=(every - few) * accumulate, size=size, ranks=ranks, phase="forward"),
        # The backward gathers a layer's small parameters with its large ones, although they are there.
        Transfer(payload=every * accumulate, size=size, ranks=ranks, phase="backward"),
        Transfer(payload=gradients * times, size=size, ranks=ranks, phase="backward"),
    ]
    if changed := sum(padded[e.name] for e in small if e.trained):
        found.append(Transfer(payload=float(changed), size=size, ranks=ranks, phase="step"))
    return tuple(found)


def _host_traffic(states: ModelStates, share: float, engine: _Engine, accumulate: int) -> float:
    if engine.offload is None:
        return 0.0
    moved = engine.compute * share * (accumulate + 1) if engine.offload.optimizer else 0.0
    if engine.offload.optimizer == "nvme":  # the states are read and written once a step
        moved += 2 * (states.master + states.optimizer)
    return moved + (2 * states.parameters * accumulate if engine.offload.parameters else 0.0)


def settings_of(name: str) -> dict[str, Any]:
    """What a registered ZeRO name stands for."""
    from lightning_shard.registry import NAMES

    return dict(NAMES[name].settings)
