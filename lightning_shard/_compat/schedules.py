"""The order in which torch's pipeline schedules compute, read without a process group.

torch computes it where a schedule is constructed, from the stages' numbers alone, but offers it only on a schedule of
real stages, which need a process group. Stand-ins with those numbers take their place here.
"""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_shard.pipeline.schedule import SCHEDULES, Action, ScheduleName, per_rank, stages_of_rank


class _StandIn:
    """What the constructor of a schedule reads of a stage."""

    def __init__(self, stage: int, stages: int, ranks: int) -> None:
        self.stage_index = stage
        self.num_stages = stages
        self.group_size = ranks
        self.group_rank = 0  # whose order is computed does not matter: it is computed for all
        self.is_first = stage == 0
        self.is_last = stage == stages - 1
        self.submod = nn.Identity()  # looked at for whether it is compiled
        self.stage_index_to_group_rank: dict[int, int] = {}  # set by the schedule


def torch_actions(schedule: ScheduleName, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[Action]]:
    """What each rank computes, in order.

    Args:
        schedule: Which schedule.
        ranks: Ranks in a pipeline.
        stages_per_rank: The caller's number; schedules that fix theirs ignore it.
        microbatches: Microbatches in a batch.

    Returns:
        One list per rank; pairs that torch may overlap stand one after the other.

    Raises:
        ValueError: If torch's schedule refuses the numbers.

    """
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    stages = ranks * per_rank(schedule, stages_per_rank)
    stand_ins: list[Any] = [
        _StandIn(stage, stages, ranks) for stage in stages_of_rank(schedule, 0, ranks, stages_per_rank)
    ]
    kind = get_schedule_class(SCHEDULES[schedule].torch_name)
    single = issubclass(kind, PipelineScheduleSingle)
    order = kind(stand_ins[0] if single else stand_ins, microbatches).pipeline_order
    actions = [list(_computations(order[rank])) for rank in range(ranks)]
    return [_numbered(of_rank) for of_rank in actions] if single else actions


def _computations(actions: Iterable[Any]) -> Iterable[Action]:
    """The computations among torch's private actions, which name also idle slots and the reduction of gradients."""
    for action in actions:
        if action is None:
            continue
        if action.sub_actions:
            yield from _computations(action.sub_actions)
        elif (kind := action.computation_type.value) in ("F", "I", "W", "B"):
            yield Action(stage=action.stage_index, kind=kind, microbatch=action.microbatch_index)


def _numbered(actions: list[Action]) -> list[Action]:
    """The microbatches counted in order from 0, as the single-stage schedules run them.

    The list that torch 2.13 gives for 1F1B counts the last rank's forwards from 1; what it runs starts at 0.
    """
    counters = {action.kind: itertools.count() for action in actions}
    return [replace(action, microbatch=next(counters[action.kind])) for action in actions]
