"""What every pipeline schedule costs with so many ranks and microbatches: bubble, activations alive, timeline."""

from collections.abc import Sequence

from lightning_shard._compat.schedules import torch_actions
from lightning_shard.pipeline.schedule import (
    SCHEDULES,
    UNIT_COSTS,
    Action,
    ScheduleName,
    bubble,
    by_stage,
    ideal_bubble,
    peak_activations,
    per_rank,
    why_impossible,
)
from lightning_shard.plan.checking import whole_number
from lightning_shard.plan.results import SchedulePlan

MARKS = {"F": "0123456789", "I": "abcdefghij", "W": "ABCDEFGHIJ"}
"""How timelines show forward, gradient of inputs and gradient of weights of the microbatches that end in 0 to 9."""

IDLE, CUT = ".", "~"
"""How timelines show a unit in which a rank waits, and where columns were left out."""

LEGEND = (
    "0-9 forward, a-j gradients of inputs, A-J gradients of weights, of the microbatch whose number ends in 0 to 9"
    " (from 0); a backward that computes both takes two units; . idle; ~ columns left out"
)
"""What the marks of a timeline mean."""

_MOST_STEPS = 2**21
"""Ranks times squared microbatches up to which schedules are written out: torch needs seconds for that many."""

_MOST = 10**6
"""Ranks, or microbatches, that are taken for a slip of the keyboard."""


def plan_schedules(
    stages: int, microbatches: int, stages_per_rank: int = 2, *, timeline_width: int = 100
) -> tuple[SchedulePlan, ...]:
    """What every schedule does with so many ranks and microbatches.

    Times are in units: forward, gradient of inputs, and gradient of weights take one each, sending nothing.

    Args:
        stages: Ranks in a pipeline, as in ``PipelineStrategy(stages=...)``.
        microbatches: Microbatches in a batch.
        stages_per_rank: Stages that a rank runs where the schedule does not fix it.
        timeline_width: Columns of a timeline, at least 3; of a longer one the middle is left out.

    Returns:
        A plan for each schedule; without numbers, but with the reason, where the schedule cannot run so.

    Raises:
        ValueError: If a number is not whole, less than 1 or absurdly large.

    """
    whole_number("stages", stages, most=_MOST)
    whole_number("microbatches", microbatches, most=_MOST)
    whole_number("stages_per_rank", stages_per_rank, most=1000)
    whole_number("timeline_width", timeline_width, least=3)
    return tuple(_plan(schedule, stages, microbatches, stages_per_rank, timeline_width) for schedule in SCHEDULES)


def _plan(schedule: ScheduleName, ranks: int, microbatches: int, stages_per_rank: int, width: int) -> SchedulePlan:
    each = per_rank(schedule, stages_per_rank)
    reason = why_impossible(schedule, ranks, each, microbatches)
    if reason is not None:
        return SchedulePlan(schedule=schedule, bubble_fraction=None, reason=reason)
    if ranks * microbatches**2 > _MOST_STEPS:
        return _too_many(schedule, ranks, microbatches)
    stages = ranks * each
    try:
        actions = torch_actions(schedule, ranks, each, microbatches)
    except ValueError as error:
        return SchedulePlan(schedule=schedule, bubble_fraction=None, reason=f"torch refuses: {error}")
    return SchedulePlan(
        schedule=schedule,
        bubble_fraction=bubble(actions, stages),
        in_flight_microbatches=tuple(peak_activations(by_stage(actions, stages))),
        timeline=_shortened(timeline(actions, stages), width),
    )


def _too_many(schedule: ScheduleName, ranks: int, microbatches: int) -> SchedulePlan:
    """The closed forms of GPipe (Huang et al. 2019) and 1F1B (Narayanan et al. 2021), which need no list of actions."""
    if schedule not in ("gpipe", "1f1b"):
        reason = f"not computed: {ranks} ranks and {microbatches} microbatches are too many to write the schedule out"
        return SchedulePlan(schedule=schedule, bubble_fraction=None, reason=reason)
    alive = [microbatches if schedule == "gpipe" else min(microbatches, ranks - stage) for stage in range(ranks)]
    return SchedulePlan(
        schedule=schedule, bubble_fraction=ideal_bubble(ranks, microbatches), in_flight_microbatches=tuple(alive)
    )


def timeline(actions_by_rank: Sequence[Sequence[Action]], stages: int) -> list[str]:
    """Draw a schedule: each rank runs its actions in their order, each as soon as its inputs are there.

    Args:
        actions_by_rank: Each rank's actions, in order; they must not wait for each other.
        stages: Stages in the pipeline.

    Returns:
        For each rank a line with a mark a unit of time, all of one length.

    """
    finished: dict[tuple[int, str, int], int] = {}
    lines = [""] * len(actions_by_rank)
    following = [0] * len(actions_by_rank)
    while any(done < len(actions) for done, actions in zip(following, actions_by_rank, strict=True)):
        before = sum(following)
        for rank, actions in enumerate(actions_by_rank):
            while following[rank] < len(actions):
                action = actions[following[rank]]
                needed = _inputs(action, stages)
                if any(key not in finished for key in needed):
                    break
                start = max((finished[key] for key in needed), default=0)
                marks = "".join(MARKS[part][action.microbatch % 10] for part in _parts(action))
                lines[rank] = lines[rank].ljust(start, IDLE) + marks
                for part in _parts(action):  # a whole backward sends when it ends, as torch's stages do
                    finished[action.stage, part, action.microbatch] = len(lines[rank])
                following[rank] += 1
        assert sum(following) > before, "the schedule never ends"
    assert sum(len(line) - line.count(IDLE) for line in lines) == sum(
        UNIT_COSTS[action.kind] for actions in actions_by_rank for action in actions
    )
    return [line.ljust(max(map(len, lines)), IDLE) for line in lines]


def _parts(action: Action) -> str:
    return "IW" if action.kind == "B" else action.kind


def _inputs(action: Action, stages: int) -> list[tuple[int, str, int]]:
    """What must be computed before: stage, part and microbatch."""
    if action.kind == "F":
        return [(action.stage - 1, "F", action.microbatch)] if action.stage else []
    if action.kind == "W":
        return [(action.stage, "I", action.microbatch)]
    later = [(action.stage + 1, "I", action.microbatch)] if action.stage < stages - 1 else []
    return [(action.stage, "F", action.microbatch), *later]


def _shortened(lines: list[str], width: int) -> tuple[str, ...]:
    """The lines, or their beginnings and ends where they are longer than so many columns."""
    if len(lines[0]) <= width:
        return tuple(lines)
    left = width // 2
    right = width - 1 - left
    return tuple(line[:left] + CUT + line[len(line) - right :] for line in lines)
