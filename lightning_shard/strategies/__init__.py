"""The strategies: Lightning's hooks, each a call into a room of the package."""

from lightning_shard.strategies.zero import ZeROStrategy

__all__ = ["ZeROStrategy"]
