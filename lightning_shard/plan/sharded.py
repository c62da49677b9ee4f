"""FSDP2 on any number of ranks, from its simulation on two.

A rank's shards shrink with the number of ranks, padded to whole rows; what is gathered, activations and temporaries do
not. So each part of the simulated step is scaled by the ratio of what is held, to the byte.
"""

from dataclasses import replace
from typing import Any

from lightning_shard.plan.arithmetic import ModelStates, own_rows, padded_rows
from lightning_shard.plan.costs import Cost, Transfer, largest, map_segments, scaled
from lightning_shard.plan.precision import COMPUTED, STORED
from lightning_shard.plan.profile import TWO, ModuleProfile, ParameterFacts
from lightning_shard.plan.results import Memory
from lightning_shard.plan.simulate import Simulation
from lightning_shard.units.policy import make_policy, stays_fp32


def sharded_cost(
    profile: ModuleProfile,
    simulated: Simulation | None,
    precision: str,
    *,
    name: str,
    settings: dict[str, Any],
    devices: int,
    replicas: int = 1,
    keeps: bool = False,
    offload: bool = False,
    accumulate: int = 1,
) -> Cost:
    """What a form of FSDP2 costs.

    Args:
        profile: Of the module.
        simulated: A step of that form on two ranks; ``None`` where there is none.
        precision: As in ``Trainer(precision=...)``.
        name: The form's name.
        settings: Constructor arguments beyond those that the name stands for.
        devices: Ranks.
        replicas: Groups that share the model states each.
        keeps: Whether parameters are whole from forward to backward.
        offload: Whether shards live on the host.
        accumulate: Batches for an optimizer step.

    """
    ranks = devices // replicas
    whole = whole_parameters(profile, precision)
    states = sharded_states(profile, ranks, precision, whole)
    memory: Memory | None = None
    if simulated is not None:
        was = sharded_states(profile, TWO, precision, whole)
        shrink = states.total / was.total if was.total else 1.0
        padding = _gathered(profile, whole, ranks) / (_gathered(profile, whole, TWO) or 1.0)

        def at_scale(segment: str, peak: Memory) -> Memory:
            peak = replace(scaled(peak, states, was), gathered=peak.gathered * padding)
            # An optimizer's temporaries are as large as what it updates.
            return replace(peak, temporaries=peak.temporaries * shrink) if segment == "optimizer" else peak

        segments = map_segments(simulated.segments, at_scale)
        if offload:
            segments = map_segments(
                {key: peak for key, peak in segments.items() if key != "optimizer"},
                lambda _, peak: replace(peak, parameters=0, gradients=0, optimizer=0),
            )
        memory = largest(segments)
    return Cost(
        name=name,
        settings=settings,
        model_states=states,
        host_bytes=states.total if offload else 0,
        memory=memory,
        transfers=_transfers(profile, precision, whole, ranks, replicas, keeps, accumulate),
        # The shards come to the device for each gather, and reduced gradients go back.
        host_traffic=(states.parameters * (1 if keeps else 2) + states.gradients) * accumulate if offload else 0,
        host_update=offload,
        recomputed=1 if settings.get("activation_checkpointing") else 0,
        batches=accumulate,
        replicas=devices,
    )


def whole_parameters(profile: ModuleProfile, precision: str) -> frozenset[str]:
    """Names of the parameters that FSDP2 leaves whole on every rank: scalars, and norms in mixed precision."""
    kept = {id(parameter) for parameter in stays_fp32(profile.module, make_policy(precision, None))}
    by_kind = {name for name, parameter in profile.module.named_parameters() if id(parameter) in kept}
    return frozenset(by_kind | {each.name for each in profile.parameters if not each.shape or not each.numel})


def sharded_states(
    profile: ModuleProfile, ranks: int, precision: str, whole: frozenset[str], rank: int = 0
) -> ModelStates:
    """Model states of one rank to the byte, between backward and step."""
    parameters = gradients = optimizer = 0.0
    for each in profile.parameters:
        size = stored_bytes(each, precision)
        held = each.numel if each.name in whole else padded_rows([each.shape], ranks)
        own = each.numel if each.name in whole else own_rows(each.shape, ranks, rank)
        parameters += size * held
        if each.trained:
            gradients += size * held
            optimizer += size * own * each.optimizer
    return ModelStates(parameters=parameters, gradients=gradients, master=0, optimizer=optimizer)


def stored_bytes(parameter: ParameterFacts, precision: str) -> int:
    """Bytes of an element where torch itself trains: the module's own, unless the precision converts it."""
    return STORED[precision] if precision in ("bf16-true", "16-true", "64-true") else parameter.size


def _gathered(profile: ModuleProfile, whole: frozenset[str], ranks: int) -> float:
    """Elements of everything that is sharded, gathered: with the padding of so many ranks."""
    return float(ranks * padded_rows([each.shape for each in profile.parameters if each.name not in whole], ranks))


def _transfers(
    profile: ModuleProfile,
    precision: str,
    whole: frozenset[str],
    ranks: int,
    replicas: int,
    keeps: bool,
    accumulate: int,
) -> tuple[Transfer, ...]:
    shapes = [each for each in profile.parameters if each.name not in whole]
    gathered = _gathered(profile, whole, ranks)
    share = padded_rows([each.shape for each in shapes if each.trained], ranks)
    rest = sum(each.numel for each in profile.parameters if each.name in whole and each.trained)
    used, kept = COMPUTED[precision], STORED[precision]
    found = []
    if ranks > 1:
        gather = Transfer(payload=gathered * accumulate, size=used, ranks=ranks, phase="forward")
        found = [gather] if keeps else [gather, replace(gather, phase="backward")]
        found.append(Transfer(payload=float(ranks * share), size=kept, ranks=ranks, phase="backward"))
    if replicas > 1:
        found.append(Transfer(payload=2.0 * share, size=kept, ranks=replicas, across=ranks, phase="backward"))
    if rest and ranks * replicas > 1:
        found.append(Transfer(payload=2.0 * rest, size=kept, ranks=ranks * replicas, phase="backward"))
    return tuple(found)
