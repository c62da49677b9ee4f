"""What a pipeline runs with: as it was asked for, and as one rank of it sees it."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_shard.mesh import Mesh
from lightning_shard.pipeline.layout import Balance
from lightning_shard.pipeline.schedule import ScheduleName, per_rank, rank_of_stage, stages_of_rank


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """A strategy's arguments, with the numbers of this run."""

    mesh: Mesh
    """Pipelines and replicas."""

    microbatches: int
    """Into how many a batch is split."""

    schedule: ScheduleName
    """The order of forwards and backwards."""

    stages_per_rank: int
    """Stages of a rank in schedules that have several."""

    split: Literal["auto"] | list[str]
    """Where stages end."""

    balance: Balance
    """What an automatic split evens out."""

    activation_checkpointing: bool
    """Whether forwards are run again in backward."""

    @property
    def stages(self) -> int:
        """Stages of a pipeline."""
        return self.mesh.pp * per_rank(self.schedule, self.stages_per_rank)

    def rank_of(self, stage: int) -> int:
        """The place in the pipeline of a stage's rank."""
        return rank_of_stage(self.schedule, stage, self.mesh.pp, self.stages_per_rank)


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
    def own_stages(self) -> list[int]:
        """The stages of this rank."""
        return stages_of_rank(self.schedule, self.rank, self.ranks, self.stages_per_rank)

    @property
    def has_last_stage(self) -> bool:
        """Whether the last stage is on this rank."""
        return self.ranks * per_rank(self.schedule, self.stages_per_rank) - 1 in self.own_stages
