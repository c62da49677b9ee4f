"""The arithmetic of schedules: which stage runs where, what is possible, and what a schedule costs.

Pure functions of numbers and of action lists; the lists themselves come from torch
(:func:`lightning_shard._compat.schedules.torch_actions`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_shard.plan import arithmetic

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "looped_bfs", "zero_bubble", "zbv", "dualpipev"]
"""The schedules, as users name them."""

ActionKind = Literal["F", "I", "W", "B"]
"""Forward, gradient of the inputs, gradient of the weights, and both gradients at once."""

UNIT_COSTS: dict[ActionKind, int] = {"F": 1, "I": 1, "W": 1, "B": 2}
"""What an action costs where bubbles are compared: each of the three matrix products of a layer is one unit."""


@dataclass(frozen=True, kw_only=True)
class ScheduleKind:
    """What distinguishes a schedule."""

    torch_name: str
    """Its name in ``torch.distributed.pipelining``."""

    stages_per_rank: int | None
    """Stages that a rank runs, or None where the caller chooses."""

    folded: bool
    """Whether a rank's second stage lies mirrored, so that the first rank has the last stage too (a V)."""

    splits_backward: bool
    """Whether it computes the gradients of inputs and of weights at different times."""

    source: str
    """The paper that proposes it."""

    summary: str
    """What it is, in a line."""


@dataclass(frozen=True, kw_only=True)
class Action:
    """One computation of a schedule."""

    stage: int
    """Which stage computes, from 0."""

    kind: ActionKind
    """What it computes."""

    microbatch: int
    """For which microbatch, from 0."""


SCHEDULES: dict[ScheduleName, ScheduleKind] = {
    "gpipe": ScheduleKind(
        torch_name="GPipe",
        stages_per_rank=1,
        folded=False,
        splits_backward=False,
        source="GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism (Huang et al. 2019)",
        summary="all forwards, then all backwards; every microbatch's activations are kept",
    ),
    "1f1b": ScheduleKind(
        torch_name="1F1B",
        stages_per_rank=1,
        folded=False,
        splits_backward=False,
        source="Memory-Efficient Pipeline-Parallel DNN Training (Narayanan et al. 2021; PipeDream-Flush)",
        summary="one forward, one backward in turn; GPipe's bubble, but activations of no more microbatches than ranks",
    ),
    "interleaved": ScheduleKind(
        torch_name="Interleaved1F1B",
        stages_per_rank=None,
        folded=False,
        splits_backward=False,
        source="Efficient Large-Scale Language Model Training on GPU Clusters (Narayanan et al. 2021; Megatron-LM)",
        summary="1F1B over several smaller stages a rank: a smaller bubble for more messages",
    ),
    "looped_bfs": ScheduleKind(
        torch_name="LoopedBFS",
        stages_per_rank=None,
        folded=False,
        splits_backward=False,
        source="Breadth-First Pipeline Parallelism (Lamy-Poirier 2023)",
        summary="all microbatches through one of a rank's stages, then through the next",
    ),
    "zero_bubble": ScheduleKind(
        torch_name="InterleavedZeroBubble",
        stages_per_rank=None,
        folded=False,
        splits_backward=True,
        source="Zero Bubble Pipeline Parallelism (Qi et al. 2024), ZB1P",
        summary="interleaved, with the weights' gradients moved into the bubbles",
    ),
    "zbv": ScheduleKind(
        torch_name="ZBVZeroBubble",
        stages_per_rank=2,
        folded=True,
        splits_backward=True,
        source="Zero Bubble Pipeline Parallelism (Qi et al. 2024), section 6",
        summary="two stages a rank in a V; no bubble between warm-up and end where F, I and W take equally long",
    ),
    "dualpipev": ScheduleKind(
        torch_name="DualPipeV",
        stages_per_rank=2,
        folded=True,
        splits_backward=True,
        source="DeepSeek-V3 Technical Report (DeepSeek-AI 2024), DualPipe",
        summary="two stages a rank in a V; forwards and backwards in pairs that can overlap",
    ),
}
"""Every schedule by its name."""


# --- placement -------------------------------------------------------------------------------------------------------


def per_rank(schedule: ScheduleName, stages_per_rank: int) -> int:
    """Stages that a rank runs: the schedule's own number where it has one, else the caller's."""
    return SCHEDULES[schedule].stages_per_rank or stages_per_rank


def stages_of_rank(schedule: ScheduleName, rank: int, ranks: int, stages_per_rank: int) -> list[int]:
    """The stages that a rank runs, in the order in which a microbatch reaches them.

    Args:
        schedule: Which schedule.
        rank: The rank within its pipeline.
        ranks: Ranks in a pipeline.
        stages_per_rank: The caller's number; schedules that fix theirs ignore it.

    """
    assert 0 <= rank < ranks, (rank, ranks)
    if SCHEDULES[schedule].folded:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + loop * ranks for loop in range(per_rank(schedule, stages_per_rank))]


def rank_of_stage(schedule: ScheduleName, stage: int, ranks: int, stages_per_rank: int) -> int:
    """The rank that runs a stage; the inverse of :func:`stages_of_rank`."""
    assert 0 <= stage < ranks * per_rank(schedule, stages_per_rank), (stage, ranks, stages_per_rank)
    loop, rank = divmod(stage, ranks)
    return ranks - 1 - rank if SCHEDULES[schedule].folded and loop == 1 else rank


# --- what is possible ------------------------------------------------------------------------------------------------


def why_impossible(schedule: ScheduleName, ranks: int, stages_per_rank: int, microbatches: int) -> str | None:
    """Why a schedule cannot run so, as one line with the numbers, the rule, and numbers that would do.

    Args:
        schedule: Which schedule.
        ranks: Ranks in a pipeline.
        stages_per_rank: The caller's number; ``gpipe`` and ``1f1b`` run one stage a rank whatever it is.
        microbatches: Microbatches in a batch.

    Returns:
        None if it can.

    """
    kind = SCHEDULES[schedule]
    if kind.folded and stages_per_rank != kind.stages_per_rank:
        return f"{schedule} runs {kind.stages_per_rank} stages on a rank, not {stages_per_rank}."
    if schedule in ("1f1b", "dualpipev"):
        stages = ranks * per_rank(schedule, stages_per_rank)
        if microbatches < stages:
            return (
                f"{schedule} needs at least as many microbatches as stages: {stages} for {ranks} ranks, but there are"
                f" {microbatches}."
            )
    if schedule in ("interleaved", "zero_bubble") and not _in_equal_rounds(microbatches, ranks):
        fewer = next(m for m in range(microbatches, 0, -1) if _in_equal_rounds(m, ranks))
        more = next(m for m in itertools.count(microbatches) if _in_equal_rounds(m, ranks))
        rounds = microbatches // ranks
        return (
            f"{schedule} runs {microbatches} microbatches on {ranks} ranks in {microbatches} // {ranks} = {rounds}"
            f" rounds of one size, but {microbatches} is no multiple of {rounds}. Use {fewer} or {more} microbatches."
        )
    return None


def _in_equal_rounds(microbatches: int, ranks: int) -> bool:
    """Whether torch's interleaved schedules can divide the microbatches; multiples of the ranks always can be."""
    return microbatches % max(1, microbatches // ranks) == 0


# --- what it costs ---------------------------------------------------------------------------------------------------


def ideal_bubble(ranks: int, microbatches: int) -> float:
    """The bubble of GPipe and 1F1B: (p - 1) / (m + p - 1).

    Source: GPipe (Huang et al. 2019), section 2.3, and Megatron-LM (Narayanan et al. 2021), section 2.2, which states
    it over the busy time instead: (p - 1) / m.

    Args:
        ranks: Ranks in a pipeline, p.
        microbatches: Microbatches in a batch, m.

    Returns:
        Idle over total, in [0, 1).

    """
    return arithmetic.bubble(ranks, microbatches)


def bubble(actions_by_rank: Sequence[Sequence[Action]], stages: int) -> float:
    """The bubble of any schedule at unit costs, by running it on paper.

    Each rank runs its actions in their order, each as soon as its inputs are there; sending takes no time.

    Args:
        actions_by_rank: Each rank's actions, in order.
        stages: Stages in the pipeline.

    Returns:
        Idle over total, mean over the ranks.

    Raises:
        ValueError: If a rank would wait forever; with the ranks and the actions that they wait at.

    """
    finished: dict[Action, int] = {}
    clocks = [0] * len(actions_by_rank)
    following = [0] * len(actions_by_rank)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(actions_by_rank):
            while following[rank] < len(actions):
                action = actions[following[rank]]
                inputs = _input_times(action, stages, finished)
                if inputs is None:
                    break
                clocks[rank] = max(clocks[rank], inputs) + UNIT_COSTS[action.kind]
                finished[action] = clocks[rank]
                following[rank] += 1
                progress = True
    waiting = [
        f"rank {rank} at {actions[done]}"
        for rank, (actions, done) in enumerate(zip(actions_by_rank, following, strict=True))
        if done < len(actions)
    ]
    if waiting:
        raise ValueError(f"The schedule never ends: {', '.join(waiting)}.")
    busy = sum(UNIT_COSTS[action.kind] for actions in actions_by_rank for action in actions)
    return 1 - busy / (max(clocks) * len(actions_by_rank))


def _input_times(action: Action, stages: int, finished: dict[Action, int]) -> int | None:
    """When the last input of an action is there; None if one is not yet computed."""

    def when(stage: int, *kinds: ActionKind) -> int | None:
        done = (finished.get(Action(stage=stage, kind=kind, microbatch=action.microbatch)) for kind in kinds)
        return next((time for time in done if time is not None), None)

    match action.kind:
        case "F":
            needed = [when(action.stage - 1, "F")] if action.stage > 0 else []
        case "I" | "B":
            needed = [when(action.stage, "F")]
            if action.stage < stages - 1:
                needed.append(when(action.stage + 1, "I", "B"))
        case "W":
            needed = [when(action.stage, "I")]
    times = [time for time in needed if time is not None]
    return max(times, default=0) if len(times) == len(needed) else None


def by_stage(actions_by_rank: Sequence[Sequence[Action]], stages: int) -> list[list[Action]]:
    """Each stage's actions, in order."""
    found: list[list[Action]] = [[] for _ in range(stages)]
    for actions in actions_by_rank:
        for action in actions:
            found[action.stage].append(action)
    return found


def peak_waiting(actions_by_stage: Sequence[Sequence[Action]]) -> list[int]:
    """The most microbatches for which a stage has computed the gradients of its inputs, but not yet of its weights."""
    peaks = []
    for actions in actions_by_stage:
        waiting = peak = 0
        for action in actions:
            waiting += {"F": 0, "I": 1, "W": -1, "B": 0}[action.kind]
            peak = max(peak, waiting)
        peaks.append(peak)
    return peaks


def peak_activations(actions_by_rank: Sequence[Sequence[Action]]) -> list[int]:
    """The most forwards of a rank whose activations are kept at once.

    A forward's activations are kept until the gradients of its weights are computed.

    Args:
        actions_by_rank: Each rank's actions, in order.

    Returns:
        For each rank, a number of (stage, microbatch) pairs; a stage is smaller where a rank has several.

    """
    peaks = []
    for actions in actions_by_rank:
        kept = peak = 0
        for action in actions:
            kept += {"F": 1, "I": 0, "W": -1, "B": -1}[action.kind]
            peak = max(peak, kept)
        peaks.append(peak)
    return peaks
