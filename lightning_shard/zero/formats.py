"""Which format checkpoints of ZeRO runs are in: the portable one, or the engine's own."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_shard.checkpoint.host import PortableCheckpoints
from lightning_shard.checkpoint.kinds import kind_of
from lightning_shard.checkpoint.places import place_of
from lightning_shard.zero.engine_checkpoints import EngineCheckpoints
from lightning_shard.zero.held import PartitionStates
from lightning_shard.zero.leftover import EmptyWeights
from lightning_shard.zero.nvme import uses_nvme

if TYPE_CHECKING:
    from lightning_shard.strategies.zero import ZeROStrategy


class BothFormats(PortableCheckpoints):
    """The part of :class:`~lightning_shard.ZeROStrategy` that saves and loads."""

    _checkpoint_format: str | None = None
    _from_engine = False
    config: Any
    empty_weights: EmptyWeights
    load_full_weights: bool

    @property
    def _zero_strategy(self) -> "ZeROStrategy":
        return cast("ZeROStrategy", self)

    def training_states(self) -> PartitionStates:
        """This rank's flat partitions."""
        return PartitionStates(self._zero_strategy)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint in the chosen format."""
        if not saves_engine_format(self._checkpoint_format, self.config):
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        with self.empty_weights.paused():
            EngineCheckpoints(self._zero_strategy).save(checkpoint, filepath, storage_options)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Unless the engine has loaded its own states already."""
        return not self._from_engine

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a checkpoint of any kind."""
        path = self.broadcast(checkpoint_path)
        self._from_engine = kind_of(place_of(path)) == "engine"
        if self._from_engine:
            return EngineCheckpoints(self._zero_strategy).load(path)
        check_can_load_portable(path, self.config)
        return self._open(path, self._fitting and not self.load_full_weights, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights, unless the engine has done so."""
        if not self._from_engine:
            super().load_model_state_dict(checkpoint, strict)
        else:
            EngineCheckpoints(self._zero_strategy).load_weights(checkpoint, strict)


def saves_engine_format(wanted: str | None, config: Mapping[str, Any]) -> bool:
    """Whether checkpoints are saved in the engine's own format: where that is asked for, or states lie on NVMe."""
    return wanted == "engine" or (wanted is None and uses_nvme(config))


def check_format(wanted: str | None, async_save: bool, config: Mapping[str, Any]) -> None:
    """Refuse to save states that lie on NVMe in the portable format, and say what format they are saved in.

    Raises:
        MisconfigurationException: If that is asked for.

    """
    if not uses_nvme(config):
        return
    if wanted == "portable" or async_save:
        raise MisconfigurationException(
            "States that are offloaded to NVMe can be saved in the engine's own format only: leave out"
            " checkpoint_format='portable' and async_save=True. `lightning-shard convert` makes a portable checkpoint"
            " of the weights."
        )
    rank_zero_info("With states on NVMe checkpoints are saved in the DeepSpeed engine's own format.")


def check_can_load_portable(path: Any, config: Mapping[str, Any]) -> None:
    """Refuse to read a checkpoint into states that lie on NVMe.

    Raises:
        MisconfigurationException: If they do.

    """
    if uses_nvme(config):
        raise MisconfigurationException(
            f"{path} cannot be loaded into states that lie on NVMe: these take only what the same run saved in the"
            " engine's own format. Load the weights into the module before `fit`"
            " (lightning_shard.load_from_checkpoint), or offload to the CPU."
        )
