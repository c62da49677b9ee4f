"""Which modules become FSDP units: found by structure, checked by a dry run of a step on fake tensors."""

from lightning_shard.units.find import Units, find_units
from lightning_shard.units.peek import NO_BATCH, peek_batch
from lightning_shard.units.usage import Usage, merge, watch_step

__all__ = ["NO_BATCH", "Units", "Usage", "find_units", "merge", "peek_batch", "watch_step"]
