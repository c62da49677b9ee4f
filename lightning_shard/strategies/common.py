"""What all strategies of this package have in common."""

from typing import Any

from lightning_shard.checkpoint.host import PortableCheckpoints
from lightning_shard.failing import fails_alone


class CommonStrategy(PortableCheckpoints):
    """Mixed into every strategy, before Lightning's class."""

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, unless this one is on its way out with an error."""
        # Callbacks may save on an exception, and the Trainer waits for all ranks after every save.
        if not fails_alone(self.lightning_module):
            super().barrier(*args, **kwargs)  # type: ignore[safe-super]

    def on_exception(self, exception: BaseException) -> None:
        """Say which rank failed."""
        super().on_exception(exception)
        if self.world_size > 1:
            exception.add_note(f"(raised on rank {self.global_rank} of {self.world_size})")

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: `lightning_shard.registry` holds the names."""
