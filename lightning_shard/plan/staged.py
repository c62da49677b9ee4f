"""Pipelines in closed form: each stage's share of one step in one process, as often as its schedule keeps it."""

from dataclasses import dataclass, replace

from lightning_shard._compat.schedules import torch_actions
from lightning_shard.pipeline.schedule import (
    ScheduleName,
    bubble,
    by_stage,
    peak_activations,
    peak_waiting,
    per_rank,
    stages_of_rank,
)
from lightning_shard.plan.costs import Cost, Transfer, by_segments, largest
from lightning_shard.plan.precision import COMPUTED, STORED
from lightning_shard.plan.profile import ModuleProfile
from lightning_shard.plan.replicated import replicated_states
from lightning_shard.plan.results import Memory
from lightning_shard.plan.stage_costs import StageCost

_OUTPUTS = 0.5
"""Bytes of the gradients of layers' outputs, as a share of what forward keeps: a split backward keeps them from the
gradients of inputs to those of weights. About half of what is kept are outputs; an estimate."""


@dataclass(frozen=True, kw_only=True)
class _Load:
    """One stage of a rank, and how often it keeps what."""

    cost: StageCost
    """The stage."""

    kept: int
    """Microbatches whose activations are alive at once."""

    waiting: int
    """Microbatches that wait for the gradients of weights at once."""


def staged_cost(
    profile: ModuleProfile,
    precision: str,
    *,
    schedule: ScheduleName,
    stages: int,
    microbatches: int,
    devices: int,
    fixed_bytes: float,
    checkpointed: bool = False,
    accumulate: int = 1,
) -> Cost:
    """What a pipeline costs on the rank that needs most.

    Args:
        profile: Of the module, with its stages and rows.
        precision: As in ``Trainer(precision=...)``.
        schedule: The order of forwards and backwards.
        stages: Ranks in a pipeline.
        microbatches: Into how many parts a batch is split.
        devices: Ranks in all.
        fixed_bytes: What a forward keeps for backward whatever its batch's size: low-precision copies of weights.
        checkpointed: Whether stages are recomputed.
        accumulate: Batches for an optimizer step.

    Raises:
        MisconfigurationException: If the step cannot be cut into so many stages.

    """
    assert profile.stages is not None
    each = per_rank(schedule, 2)
    divided = profile.stages.divide(stages * each)
    actions = torch_actions(schedule, stages, each, microbatches)
    of_stage = by_stage(actions, stages * each)
    kept, waiting = peak_activations(of_stage), peak_waiting(of_stage)
    ranks = [stages_of_rank(schedule, rank, stages, 2) for rank in range(stages)]
    loads = [[_Load(cost=divided[stage], kept=kept[stage], waiting=waiting[stage]) for stage in own] for own in ranks]
    peaks = [_peak(profile, precision, own, fixed_bytes, microbatches, checkpointed) for own in loads]
    worst = max(range(stages), key=lambda rank: peaks[rank].total)
    names = [frozenset().union(*(divided[stage].parameters for stage in own)) for own in ranks]
    states = [replicated_states(profile, precision, some) for some in names]
    replicas = devices // stages
    settings: dict[str, object] = {"stages": stages} if replicas > 1 else {}
    if microbatches != 2 * stages:
        settings["microbatches"] = microbatches
    if checkpointed:
        settings["activation_checkpointing"] = True
    most = max(states, key=lambda each: each.total)
    busiest = max(sum(divided[stage].flops for stage in own) for own in ranks)
    return Cost(
        name=f"pipeline_{schedule}",
        settings=settings,
        model_states=most,
        memory=peaks[worst] if profile.single is not None else None,
        transfers=_transfers(profile, precision, divided, ranks, names, replicas, stages, accumulate),
        flops_fraction=busiest / profile.flops if profile.flops else 1 / stages,
        recomputed=1 if checkpointed else 0,
        batches=accumulate,
        replicas=replicas,
        bubble=bubble(actions, stages * each),
        worst=worst,
    )


def _peak(
    profile: ModuleProfile,
    precision: str,
    own: list[_Load],
    fixed_bytes: float,
    microbatches: int,
    checkpointed: bool,
) -> Memory:
    """The peak of a rank: its states, what its stages keep in flight, and one microbatch's temporaries."""
    names = frozenset().union(*(load.cost.parameters for load in own))
    states = replicated_states(profile, precision, names)
    of_all = replicated_states(profile, precision)
    share = 1 / microbatches
    segments = by_segments(profile)
    working = max((peak.temporaries for name, peak in segments.items() if name != "optimizer"), default=0.0)
    last = segments.get("optimizer", Memory())
    by_rows = profile.saved_bytes - fixed_bytes
    fixed = fixed_bytes * states.parameters / of_all.parameters / len(own) if of_all.parameters else 0.0
    saved = [load.cost.saved * by_rows * share + fixed for load in own]
    came = [load.cost.crossing_bytes * share for load in own]
    split = max(size * _OUTPUTS * load.waiting for size, load in zip(saved, own, strict=True))
    if checkpointed:
        # Between forward and backward only what came in is kept; then one stage's activations are there again.
        again = max(size * max(1, load.waiting) for size, load in zip(saved, own, strict=True))
        activations = sum(size * load.kept for size, load in zip(came, own, strict=True)) + again + split
    else:
        activations = sum(size * load.kept for size, load in zip(saved, own, strict=True)) + split
    step = Memory(
        parameters=states.parameters,
        gradients=states.gradients,
        optimizer=states.optimizer,
        activations=activations,
        buffers=profile.buffer_bytes + 2 * sum(size * microbatches for size in came),
        temporaries=working * share,
    )
    update = replace(
        step, activations=0, temporaries=last.temporaries * states.total / of_all.total if of_all.total else 0.0
    )
    return largest({"step": step, "optimizer": update})


def _transfers(
    profile: ModuleProfile,
    precision: str,
    divided: tuple[StageCost, ...],
    ranks: list[list[int]],
    names: list[frozenset[str]],
    replicas: int,
    stages: int,
    accumulate: int,
) -> tuple[Transfer, ...]:
    """Messages of the busiest rank in both directions, and the reduction of its gradients between replicas."""
    sent = []
    for own in ranks:
        forward = sum(divided[stage].crossing_elements for stage in own)
        backward = sum(divided[stage - 1].crossing_elements for stage in own if stage)
        sent.append(forward + backward)
    found = [
        Transfer(
            payload=max(sent) * accumulate,
            size=COMPUTED[precision],
            ranks=stages,
            across=replicas,
            phase="step",
            ring=False,
        )
    ]
    if replicas > 1:
        sizes = {each.name: each.numel for each in profile.trained}
        most = max(sum(sizes.get(name, 0) for name in some) for some in names)
        found.append(Transfer(payload=2.0 * most, size=STORED[precision], ranks=replicas, phase="step"))
    return tuple(found)
