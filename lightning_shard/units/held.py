"""What a rank of a sharded module holds: rows of parameters and of their optimizer states."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.checkpoint.boxes import Held
from lightning_shard.checkpoint.dtensors import hold_shards, new_like
from lightning_shard.checkpoint.format import WrittenBy, versions
from lightning_shard.checkpoint.reading import Stored
from lightning_shard.checkpoint.states import PlainOptimizers

if TYPE_CHECKING:
    from lightning_shard.strategies.fsdp import FSDP2Strategy


class UnitStates(PlainOptimizers):
    """The states of a module whose units are sharded by ``fully_shard``."""

    def __init__(self, strategy: "FSDP2Strategy") -> None:
        assert strategy.lightning_module is not None
        super().__init__(strategy.lightning_module)
        self._strategy = strategy

    @property
    def own_optimizers(self) -> Sequence[Optimizer]:
        """The strategy's optimizers."""
        return self._strategy.optimizers

    def hold_parameter(self, parameter: Tensor) -> Held:
        """This rank's rows; 0-dim parameters are whole everywhere."""
        return hold_shards(parameter)

    def hold_buffer(self, buffer: Tensor, name: str) -> Held:
        """The whole; rank 0's is saved, since running statistics differ between ranks."""
        return hold_shards(buffer, writes=self._strategy.is_global_zero)

    def hold_state(self, state: Tensor, parameter: Tensor) -> Held:
        """This rank's rows."""
        return hold_shards(state)

    def new_state(self, stored: Stored, parameter: Tensor) -> Tensor:
        """Sharded like the parameter."""
        return new_like(stored, parameter)

    def written_by(self) -> WrittenBy:
        """The run."""
        strategy = self._strategy
        mesh = strategy.device_mesh
        names = mesh.mesh_dim_names or ()
        return WrittenBy(
            strategy=type(strategy).__name__,
            settings={"reshard_after_forward": strategy.reshard_after_forward},
            world_size=strategy.world_size,
            mesh={name: mesh.size(place) for place, name in enumerate(names)},
            precision=str(strategy.precision_plugin.precision),
            versions=versions(),
        )
