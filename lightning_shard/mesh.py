"""Ranks and their coordinates: which ranks are one pipeline, and which run the same stage. Needs no process group."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning.fabric.utilities.exceptions import MisconfigurationException


class Coordinates(NamedTuple):
    """Where a rank lies in a mesh."""

    pp: int
    """Its place in its pipeline."""

    dp_replicate: int
    """Which whole copy of the model it belongs to."""

    dp_shard: int
    """Which shard of that copy it holds."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """All ranks in three dimensions. ``pp`` is outermost and ``dp_shard`` innermost.

    Neighbouring ranks, which tend to share a machine, so exchange shards, the most traffic; pipelines, whose ranks
    exchange only what crosses a cut, reach furthest. With ``pp=2`` and two replicas the pipelines are {0, 2} and
    {1, 3}.
    """

    pp: int = 1
    """Ranks in a pipeline."""

    dp_replicate: int = 1
    """Copies of the model whose gradients are averaged."""

    dp_shard: int = 1
    """Ranks that share one copy of a stage."""

    def __post_init__(self) -> None:
        for name in ("pp", "dp_replicate", "dp_shard"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MisconfigurationException(f"Mesh({name}={size!r}) must be a whole number of ranks, 1 or more.")

    @classmethod
    def of(cls, world_size: int, stages: int | Literal["auto"], data_parallel: Literal["replicate", "shard"]) -> "Mesh":
        """The mesh of a pipeline strategy.

        Args:
            world_size: Ranks in all.
            stages: Ranks in a pipeline; ``"auto"`` makes all ranks one pipeline.
            data_parallel: What the ranks that run the same stage do: hold it whole each, or share it.

        Raises:
            MisconfigurationException: If pipelines of that many ranks do not use all ranks.

        """
        pp = world_size if stages == "auto" else stages
        mesh = cls(pp=pp)
        if world_size % pp:
            divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
            raise MisconfigurationException(
                f"Pipelines of {pp} ranks (stages={pp}) cannot use all of the {world_size} ranks. Use a number of"
                f" devices that is a multiple of {pp}, or stages={' or '.join(map(str, divisors))}."
            )
        replicas = world_size // mesh.pp
        match data_parallel:
            case "replicate":
                return cls(pp=pp, dp_replicate=replicas)
            case "shard":
                return cls(pp=pp, dp_shard=replicas)
        raise MisconfigurationException(f'data_parallel={data_parallel!r} must be "replicate" or "shard".')

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pp * self.data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Ranks that run the same stage, each on batches of its own."""
        return self.dp_replicate * self.dp_shard

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank lies."""
        assert 0 <= rank < self.world_size, (rank, self)
        outer, dp_shard = divmod(rank, self.dp_shard)
        pp, dp_replicate = divmod(outer, self.dp_replicate)
        return Coordinates(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard)

    def rank(self, *, pp: int = 0, dp_replicate: int = 0, dp_shard: int = 0) -> int:
        """The rank that lies there; the inverse of :meth:`coordinates`."""
        assert 0 <= pp < self.pp and 0 <= dp_replicate < self.dp_replicate and 0 <= dp_shard < self.dp_shard
        return (pp * self.dp_replicate + dp_replicate) * self.dp_shard + dp_shard

    def data_parallel_rank(self, rank: int) -> int:
        """Which of the pipelines a rank belongs to: the rank that its sampler must use."""
        assert 0 <= rank < self.world_size, (rank, self)
        return rank % self.data_parallel_size

    def pipelines(self) -> list[list[int]]:
        """The ranks of each pipeline, first stage first; by data-parallel rank."""
        return [
            list(range(first, self.world_size, self.data_parallel_size)) for first in range(self.data_parallel_size)
        ]

    def data_parallel_groups(self) -> list[list[int]]:
        """The ranks that run the same stages; by place in the pipeline."""
        size = self.data_parallel_size
        return [list(range(pp * size, (pp + 1) * size)) for pp in range(self.pp)]
