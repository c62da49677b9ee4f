"""ZeRO on DeepSpeed, in closed form: its engine cannot run without data.

Model states are those of the ZeRO paper with the engine's padding, to the byte. Activations are those of a step in one
process at the precision in which the engine computes. What the engine adds are buckets and, at stage 3, the parameters
that are whole at once; how far that is from real runs is measured in docs/plan_accuracy.md.
"""

from dataclasses import dataclass, replace
from typing import Any

from lightning_shard.config import Offload
from lightning_shard.plan.arithmetic import ModelStates, Stage, exact_model_states, flat_partition, sharded_partition
from lightning_shard.plan.costs import Cost, Transfer, largest, map_segments
from lightning_shard.plan.precision import COMPUTED
from lightning_shard.plan.profile import ModuleProfile, ParameterFacts
from lightning_shard.plan.results import Memory
from lightning_shard.plan.simulate import Simulation
from lightning_shard.zero.sizing import Sizes, sizes_for


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
    memory = None
    if single is not None:
        memory = largest(map_segments(single.segments, lambda segment, peak: _peak(segment, peak, engine, cuda)))
    share = states.master / 4
    return Cost(
        name=name,
        model_states=states,
        host_bytes=on_host,
        memory=memory,
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
    moved = states.master + states.optimizer + 4 * states.master / 4 if engine.offload.optimizer else 0.0
    return moved + (states.parameters if engine.offload.parameters else 0.0)


def _peak(segment: str, peak: Memory, engine: _Engine, cuda: bool) -> Memory:
    """One part of the step: its activations and temporaries, with the engine's states, buckets and gathered parts."""
    states = partitioned_states(engine)
    offloaded = engine.offload is not None and engine.offload.optimizer is not None
    share = states.master / 4
    whole = sum(each.numel for each in engine.trained)
    parameters, master, optimizer = states.parameters, states.master, states.optimizer
    gradients = states.gradients if not offloaded else (engine.compute * share if engine.stage == 3 else 0.0)
    if offloaded:
        master = optimizer = 0.0
    if engine.offload is not None and engine.offload.parameters:
        parameters = 0.0
    gathered = 0.0
    buckets = engine.sizes.bucket * engine.compute * (2 if cuda and engine.stage > 1 else 1)
    temporaries = peak.temporaries
    if engine.stage == 3:
        small = sum(e.numel for e in (*engine.trained, *engine.frozen) if e.numel <= engine.sizes.persistence)
        largest_layer = max((e.numel for e in engine.trained), default=0)
        live = min(max(2 * engine.sizes.prefetch, largest_layer), whole)
        gathered = engine.compute * (small + (live if segment not in ("before", "start", "optimizer") else 0))
    if segment == "optimizer":
        held = whole if engine.stage < 3 else share * engine.ranks
        shrink = share / held if held else 0.0
        # The partition's gradients in fp32, beside those that they are made from.
        temporaries = 0.0 if offloaded else peak.temporaries * shrink + (4 * share if engine.compute < 4 else 0.0)
        gathered += engine.compute * engine.sizes.bucket if engine.stage < 3 else 0.0
    return Memory(
        parameters=parameters + master,
        gradients=gradients,
        optimizer=optimizer,
        activations=peak.activations,
        gathered=gathered,
        buffers=peak.buffers + buckets,
        temporaries=temporaries,
    )


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
    large = float(sum(padded.values()) - sum(padded[each.name] for each in small)) * accumulate
    found = [
        Transfer(payload=large, size=size, ranks=ranks, phase="forward"),
        Transfer(payload=large, size=size, ranks=ranks, phase="backward"),
        Transfer(
            payload=float(sum(padded[each.name] for each in engine.trained)) * times,
            size=size,
            ranks=ranks,
            phase="backward",
        ),
    ]
    if trained_small := sum(padded[each.name] for each in small if each.trained):
        found.append(Transfer(payload=float(trained_small), size=size, ranks=ranks, phase="step"))
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
