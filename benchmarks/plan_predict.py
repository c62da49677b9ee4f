"""What the planner says of a case: simulated where the strategy's code can be, else in closed form."""

import time
from dataclasses import dataclass, field
from functools import cache

from benchmarks.plan_cases import CLOSED, MODELS, PIPELINES, Case
from lightning_shard.plan.costs import Cost, total_payload, total_sent
from lightning_shard.plan.forms import Forms
from lightning_shard.plan.profile import ModuleProfile, profile_module
from lightning_shard.plan.simulate import SINGLE, SimulationOptions, simulate

ADAMW = 2
"""Elements that AdamW keeps for a parameter."""


@dataclass(frozen=True, kw_only=True)
class PredictedRank:
    """What is said of a rank; bytes, and elements of traffic."""

    rank: int
    """Which."""

    peak: float
    """The peak, on device and host together: here they are one memory."""

    states: dict[str, float]
    """Model states by kind; simulated optimizer states with their counters."""

    payload: float
    """Elements that the step communicates."""

    sent: float
    """Elements that the rank sends."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What is said of a case."""

    ranks: list[PredictedRank] = field(default_factory=list)
    """The ranks that were looked at: all of a pipeline, else the first, which holds most."""

    how: str
    """``simulated`` or ``closed form``."""

    error: str = ""
    """Why there is no prediction."""

    seconds: float = 0
    """How long it took."""


def predict(case: Case) -> Predicted:
    """Ask the planner. Where it fails, the result says why."""
    began = time.monotonic()
    how = "closed form" if case.strategy in CLOSED else "simulated"
    try:
        ranks = [_closed_form(case)] if case.strategy in CLOSED else _simulated(case)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        return Predicted(how=how, error=f"{type(error).__name__}: {reason}", seconds=time.monotonic() - began)
    return Predicted(ranks=ranks, how=how, seconds=time.monotonic() - began)


def _simulated(case: Case) -> list[PredictedRank]:
    found = []
    for rank in range(case.ranks if case.strategy in PIPELINES else 1):
        simulation = simulate(
            MODELS[case.model](),
            MODELS[case.model].batch(),
            SimulationOptions(
                strategy=case.strategy,
                settings=case.settings,
                world_size=case.ranks,
                rank=rank,
                precision=case.precision,
            ),
        )
        states: dict[str, float] = {
            "parameters": simulation.held.parameters,
            "gradients": simulation.held.gradients,
            "optimizer": simulation.held.optimizer,
        }
        found.append(
            PredictedRank(
                rank=rank,
                peak=simulation.peak.total,
                states=states,
                payload=simulation.payload_elements,
                sent=simulation.sent_elements,
            )
        )
    return found


def _closed_form(case: Case) -> PredictedRank:
    cost = _costs(case.model, case.precision, case.ranks)[case.strategy]
    assert cost.memory is not None
    states = cost.model_states
    return PredictedRank(
        rank=0,
        peak=cost.memory.total + cost.host_bytes if cost.together is None else cost.together,
        states={kind: getattr(states, kind) for kind in ("parameters", "master", "gradients", "optimizer")},
        payload=total_payload(cost.transfers),
        sent=total_sent(cost.transfers),
    )


@cache
def _costs(model: str, precision: str, ranks: int) -> dict[str, Cost]:
    options = SimulationOptions(strategy=SINGLE, world_size=1, precision=precision)
    forms = Forms(profile=_profile(model, precision), options=options, devices=ranks, nodes=1, cuda=False)
    costs = {cost.name: cost for cost in forms.costs(CLOSED)}
    if forms.left_out:
        raise ValueError(f"left out: {forms.left_out}")
    return costs


@cache
def _profile(model: str, precision: str) -> ModuleProfile:
    options = SimulationOptions(strategy=SINGLE, world_size=1, precision=precision)
    return profile_module(MODELS[model](), MODELS[model].batch(), options, ADAMW)
