"""Plain data parallelism: a whole replica on every rank, as in one process, and buckets for its gradients."""

from dataclasses import replace

from lightning_shard.plan.arithmetic import ModelStates
from lightning_shard.plan.costs import Cost, Transfer, by_segments, largest, map_segments
from lightning_shard.plan.precision import STORED
from lightning_shard.plan.profile import ModuleProfile
from lightning_shard.plan.sharded import stored_bytes


def replicated_states(profile: ModuleProfile, precision: str, names: frozenset[str] | None = None) -> ModelStates:
    """Model states of one process to the byte: of all parameters, or of some.

    Args:
        profile: Of the module.
        precision: As in ``Trainer(precision=...)``.
        names: Which parameters; ``None`` for all.

    """
    parameters = gradients = optimizer = 0.0
    for each in profile.parameters:
        if names is not None and each.name not in names:
            continue
        size = stored_bytes(each, precision) * each.numel
        parameters += size
        if each.trained:
            gradients += size
            optimizer += size * each.optimizer
    return ModelStates(parameters=parameters, gradients=gradients, master=0, optimizer=optimizer)


def replicated_cost(profile: ModuleProfile, precision: str, devices: int, accumulate: int = 1) -> Cost:
    """What ``ddp`` costs.

    DDP copies gradients into buckets of their own, which stay from step to step (Li et al. 2020, *PyTorch Distributed*,
    section 3.2), so that a rank holds every gradient twice.

    Args:
        profile: Of the module.
        precision: As in ``Trainer(precision=...)``.
        devices: Ranks.
        accumulate: Batches for an optimizer step.

    """
    states = replicated_states(profile, precision)
    memory = None
    if profile.single is not None:
        buckets = states.gradients if devices > 1 else 0
        segments = map_segments(by_segments(profile), lambda _, peak: replace(peak, buffers=peak.buffers + buckets))
        memory = largest(segments)
    trained = float(sum(each.numel for each in profile.trained))
    reduce = Transfer(payload=2 * trained, size=STORED[precision], ranks=devices, phase="backward")
    return Cost(
        name="ddp",
        model_states=states,
        memory=memory,
        transfers=(reduce,) if devices > 1 else (),
        batches=accumulate,
        replicas=devices,
    )
