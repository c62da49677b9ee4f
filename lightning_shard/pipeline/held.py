"""What a rank of a pipeline holds: its own stages' parameters, whole or in rows, and their optimizer states."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.checkpoint.boxes import Held
from lightning_shard.checkpoint.dtensors import hold_shards, new_like
from lightning_shard.checkpoint.format import WrittenBy, plain_name, versions
from lightning_shard.checkpoint.reading import Stored
from lightning_shard.checkpoint.states import PlainOptimizers
from lightning_shard.pipeline.absent import is_absent

if TYPE_CHECKING:
    from lightning_shard.strategies.pipeline import PipelineStrategy


class StageStates(PlainOptimizers):
    """The states of a module that is divided into stages."""

    def __init__(self, strategy: "PipelineStrategy") -> None:
        assert strategy.lightning_module is not None
        super().__init__(strategy.lightning_module)
        self._strategy = strategy
        layout = strategy.job.layout
        self._owners = {plain_name(name): stages for name, stages in layout.owners.items()}
        self._buffers = {plain_name(name): stage for name, stage in layout.buffers.items()}
        self._mine = set(strategy.job.pipeline.setting.own_stages)
        mesh = strategy.mesh
        self._first_replica = mesh.data_parallel_rank(strategy.global_rank) == 0

    @property
    def own_optimizers(self) -> Sequence[Optimizer]:
        """The strategy's optimizers."""
        return self._strategy.optimizers

    def is_here(self, parameter: Tensor) -> bool:
        """Whether a stage of this rank uses it."""
        return not is_absent(parameter)

    def hold_parameter(self, parameter: Tensor) -> Held:
        """All of it, its rows, or nothing; of a tied one the first stage's is saved."""
        if is_absent(parameter):
            return Held(shape=tuple(parameter.shape), dtype=parameter.dtype)
        owners = self._owners.get(self.parameter_names[id(parameter)]) or (0,)
        return hold_shards(parameter, writes=owners[0] in self._mine)

    def hold_buffer(self, buffer: Tensor, name: str) -> Held:
        """The whole; that of the stage which uses it is saved, in the first pipeline."""
        if is_absent(buffer):
            return Held(shape=tuple(buffer.shape), dtype=buffer.dtype)
        return hold_shards(buffer, writes=self._first_replica and self._buffers.get(name, 0) in self._mine)

    def hold_state(self, state: Tensor, parameter: Tensor) -> Held:
        """Like the parameter."""
        return hold_shards(state, writes=self.hold_parameter(parameter).writes)

    def new_state(self, stored: Stored, parameter: Tensor) -> Tensor:
        """Cut like the parameter."""
        return new_like(stored, parameter)

    def values_of_all_ranks(self, values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """With those of the pipeline's other stages. Collective in the pipeline."""
        every: list[Any] = [None] * self._strategy.mesh.pp
        dist.all_gather_object(every, values, group=self._strategy.job.pipeline.setting.group)
        return {name: states for part in every for name, states in part.items()}

    def written_by(self) -> WrittenBy:
        """The run."""
        strategy, mesh = self._strategy, self._strategy.mesh
        return WrittenBy(
            strategy=type(strategy).__name__,
            settings=strategy.written_settings,
            world_size=strategy.world_size,
            mesh={"pp": mesh.pp, "dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard},
            precision=str(strategy.precision_plugin.precision),
            versions=versions(),
        )
