"""Which of the strategies that fit to take."""

from collections.abc import Iterable

from lightning_shard.plan.results import StrategyPlan

LEAST_INVASIVE = (
    "ddp",
    "zero1",
    "zero2",
    "fsdp2_grad",
    "fsdp2",
    "zero3",
    "fsdp2_hybrid",
    "pipeline_1f1b",
    "pipeline_zero_bubble",
    "pipeline_zbv",
    "pipeline_dualpipev",
    "pipeline_interleaved",
    "pipeline_gpipe",
    "pipeline_looped_bfs",
    "zero1_offload",
    "zero2_offload",
    "zero3_offload",
    "fsdp2_offload",
    "zero3_offload_params",
    "zero3_nvme",
)
"""Strategies from the one that changes a run least. First those that divide storage, by how much they divide: whole
replicas, then optimizer states, gradients, parameters; the last costs half as much traffic again. Then pipelines, which
divide the computation, and ask for microbatches. Last what moves states off the device, which waits for slower memory:
as few of them as will do."""


def choose(strategies: Iterable[StrategyPlan]) -> StrategyPlan | None:
    """The least invasive strategy that fits.

    Of several of one name, those with fewer settings come first, then those that stand first.

    Args:
        strategies: Strategies; one whose ``fits`` is ``None`` does not count.

    Returns:
        One of them, or None if none is known to fit.

    """
    fitting = [strategy for strategy in strategies if strategy.fits]
    return min(fitting, key=lambda each: (invasiveness(each.name), len(each.settings)), default=None)


def invasiveness(name: str) -> int:
    """Place of a strategy in :data:`LEAST_INVASIVE`; one that is not in it comes after all that are."""
    return LEAST_INVASIVE.index(name) if name in LEAST_INVASIVE else len(LEAST_INVASIVE)
