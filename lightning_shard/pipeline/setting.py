"""What a pipeline runs with, as one rank of it sees it."""

from dataclasses import dataclass
from typing import Any

import torch

from lightning_shard.pipeline.schedule import ScheduleName, per_rank, stages_of_rank


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a pipeline runs with."""

    schedule: ScheduleName
    """The order of forwards and backwards."""

    ranks: int
    """Ranks in a pipeline."""

    stages_per_rank: int
    """Stages of a rank in schedules that have several."""

    microbatches: int
    """Into how many a batch is split."""

    activation_checkpointing: bool
    """Whether forwards are run again in backward."""

    rank: int
    """This rank's place in its pipeline."""

    replica: int
    """Which of the pipelines it is in."""

    last_rank: int
    """Global rank of the last stage of this pipeline."""

    device: torch.device
    """Where this rank runs."""

    group: Any
    """Process group of the pipeline."""

    seed: int
    """Seed of the run."""

    @property
    def has_last_stage(self) -> bool:
        """Whether the last stage is on this rank."""
        last = self.ranks * per_rank(self.schedule, self.stages_per_rank) - 1
        return last in stages_of_rank(self.schedule, self.rank, self.ranks, self.stages_per_rank)
