"""One use of a pipeline by a Trainer: everything from the traces to the gradients of an optimizer step."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_shard.pipeline import state
from lightning_shard.pipeline.absent import is_absent
from lightning_shard.pipeline.clipping import PipelineClipping
from lightning_shard.pipeline.cuts import parameter_stages
from lightning_shard.pipeline.guards import check_changes, check_loss, check_recomputation, warn_about_state
from lightning_shard.pipeline.layout import ATTRIBUTE, Layout, agree, lay_out, matching_cuts
from lightning_shard.pipeline.metrics import replica_group
from lightning_shard.pipeline.microbatch import Microbatch
from lightning_shard.pipeline.ownership import keep_own, make_equal, move_own, take_over
from lightning_shard.pipeline.plans import Plans
from lightning_shard.pipeline.replay import Replay
from lightning_shard.pipeline.runtime import Pipeline
from lightning_shard.pipeline.schedule import per_rank, stages_of_rank
from lightning_shard.pipeline.seeds import mix, run_seed
from lightning_shard.pipeline.setting import JobOptions, Setting
from lightning_shard.pipeline.shards import StageShards
from lightning_shard.pipeline.tied import reduce_gradients, sum_gradients, tied_groups
from lightning_shard.pipeline.trace import Trace
from lightning_shard.pipeline.tracer import Tracer

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class Job:
    """Lays a module out over the stages and runs it. Collective in all ranks.

    Args:
        trainer: The Trainer.
        module: Its module; a module that an earlier job laid out stays as it is.
        options: The strategy's.
        mesh: All ranks, in the dimensions ``pp``, ``dp_replicate`` and ``dp_shard``.
        device: Where this rank runs.
        samples: For each step to come a microbatch.

    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        module: "pl.LightningModule",
        options: JobOptions,
        mesh: DeviceMesh,
        device: torch.device,
        samples: Sequence[tuple[str, Microbatch]],
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._options = options
        self._device = device
        self._rank = dist.get_rank()
        self._place = options.mesh.coordinates(self._rank)
        self._group = mesh["pp"].get_group()
        self._sharded = mesh["dp_shard"] if options.mesh.dp_shard > 1 else None
        axis = "dp_shard" if options.mesh.dp_shard > 1 else "dp_replicate"
        self.replicas = mesh[axis].get_group()
        self._mine = stages_of_rank(options.schedule, self._place.pp, options.mesh.pp, options.stages_per_rank)
        self._clipping: PipelineClipping | None = None
        self._own_now: dict[int, list[nn.Parameter]] = {}
        self._tracer = tracer = Tracer(module=module, device=device, precision=trainer.precision_plugin)
        traces = [(step, sample.batch, tracer.trace(step, sample.batch)) for step, sample in samples]
        for _, _, trace in traces:
            if trace.step == "training_step":
                check_changes(trace.changed, type(module).__name__)
                check_loss(trace, type(module).__name__)
                if options.activation_checkpointing:
                    check_recomputation(trace)
                warn_about_state(trace, type(module).__name__)
        known: tuple[Layout, dict[str, Any]] | None = vars(module).get(ATTRIBUTE)
        if known is None:
            self.layout = lay_out(
                module, [trace for *_, trace in traces], options.stages, options.split, options.balance, options.rank_of
            )
            agree(self.layout)
            keep_own(module, self.layout, self._mine, device)
            vars(module)[ATTRIBUTE] = (self.layout, self._described())
            rank_zero_info(self.layout.table)
        else:
            self.layout = self._checked(*known)
            self._extend(traces)
            move_own(module, device)
        self._tied = tied_groups(
            {name: self._ranks(stages) for name, stages in self.layout.owners.items()},
            options.mesh.pipelines(),
            self._rank,
        )
        if known is None:
            self._make_equal()
        self._shards = StageShards(module, self.layout, self._sharded) if self._sharded is not None else None
        replay = Replay(module)
        plans = Plans(self.layout, tracer, replay)
        for step, microbatch, trace in traces:
            plans.add(step, microbatch, trace)
        del traces
        self._replay = replay
        self.pipeline = Pipeline(module, self._setting(), plans, replay, trainer.precision_plugin, self._owned)
        self._metrics = self.pipeline.watch_metrics(replica_group(self.replicas))

    @property
    def traces_now(self) -> bool:
        """Whether a step is being traced, all of it, on this rank."""
        return self._tracer.running

    def _described(self) -> dict[str, Any]:
        """The settings that a module which is laid out already must have been laid out with."""
        return {
            "stages": self._options.mesh.pp,
            "world_size": self._options.mesh.world_size,
            "schedule": self._options.schedule,
            "stages_per_rank": per_rank(self._options.schedule, self._options.stages_per_rank),
            "split": self._options.split,
            "data_parallel": "shard" if self._options.mesh.dp_shard > 1 else "replicate",
        }

    def _checked(self, layout: Layout, described: dict[str, Any]) -> Layout:
        for name, value in self._described().items():
            if described[name] != value:
                raise MisconfigurationException(
                    f"The module was laid out with {name}={described[name]!r} by an earlier Trainer, and each rank has"
                    f" its own stages' weights only; now PipelineStrategy has {name}={value!r}. Use the same settings,"
                    " or make a new module and load a checkpoint."
                )
        return layout

    def _extend(self, traces: Sequence[tuple[str, Any, Trace]]) -> None:
        """Bring parameters to stages that need them in steps which came after the module was laid out."""
        missing: dict[str, set[int]] = {}
        for *_, trace in traces:
            for name, stages in parameter_stages(trace, matching_cuts(trace, self.layout)).items():
                if lacking := stages - set(self.layout.owners[name]):
                    missing.setdefault(name, set()).update(lacking)
        if not missing:
            return
        if self._sharded is not None:
            name, stages = next(iter(missing.items()))
            raise MisconfigurationException(
                f"{traces[0][0]} uses parameter {name!r} on stage {min(stages)}, which shares other parameters with the"
                " ranks that run it (data_parallel='shard') and was not seen to need this one when the module was laid"
                " out. Run the step with a new module that has loaded a checkpoint."
            )
        take_over(
            module=self._module,
            layout=self.layout,
            missing=missing,
            mine=self._mine,
            rank_of=self._options.rank_of,
            group=self._group,
            device=self._device,
        )

    def _setting(self) -> Setting:
        mesh = self._options.mesh
        pipeline = mesh.pipelines()[mesh.data_parallel_rank(self._rank)]
        return Setting(
            schedule=self._options.schedule,
            ranks=mesh.pp,
            stages_per_rank=self._options.stages_per_rank,
            microbatches=self._options.microbatches,
            activation_checkpointing=self._options.activation_checkpointing,
            rank=self._place.pp,
            replica=mesh.data_parallel_rank(self._rank),
            last_rank=pipeline[self._options.rank_of(self.layout.stages - 1)],
            device=self._device,
            group=self._group,
            seed=run_seed(self._device),
        )

    def _ranks(self, stages: Sequence[int]) -> tuple[int, ...]:
        """The places of the ranks that keep what these stages use, the owner's first."""
        return tuple(dict.fromkeys(self._options.rank_of(stage) for stage in stages))

    def _owned(self, stage: int) -> list[nn.Parameter]:
        """The parameters of a stage as they are now: shards, or whole while a step runs."""
        if not self._own_now:
            for name, parameter in self._module.named_parameters():
                for each in self._mine:
                    if each in self.layout.owners[name]:
                        self._own_now.setdefault(each, []).append(parameter)
        return self._own_now.get(stage, [])

    def _make_equal(self) -> None:
        """Values that were made on each rank by itself: those of the owner, in the first pipeline, are everyone's."""
        parameters = dict(self._module.named_parameters())
        for tied in self._tied:
            make_equal([parameters[name] for name in tied.names], tied.ranks[0], tied.group)
        here = [parameter for parameter in parameters.values() if not is_absent(parameter)]
        make_equal([*here, *self._module.buffers()], dist.get_global_rank(self.replicas, 0), self.replicas)

    # --- steps ---

    def train(
        self,
        batch: Any,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        batch_idx: int,
        scale: float,
        steps: bool,
    ) -> Any:
        """Forward and backward of a batch; gradients are added to this rank's parameters.

        ``steps``: the optimizer steps after it, so that gradients are to be summed over ranks.
        """
        if self._shards is not None:
            self._shards.gather()
            self._own_now.clear()
        result = self.pipeline.train(batch, arguments, keywords, self._seed("training_step", batch_idx), scale)
        if self._shards is not None:
            self._shards.after_training()
        if steps:
            self._reduce_gradients()
        return result

    def evaluate(
        self, step: str, batch: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], batch_idx: int
    ) -> Any:
        """Forward of a batch."""
        if self._shards is not None:
            self._shards.gather()
        result = self.pipeline.evaluate(step, batch, arguments, keywords, self._seed(step, batch_idx))
        if self._shards is not None:
            self._shards.after_evaluation()
        return result

    def _seed(self, step: str, batch_idx: int) -> int:
        setting, trainer = self.pipeline.setting, self._trainer
        place = (trainer.current_epoch, trainer.global_step, batch_idx)
        return mix(setting.seed, _STEPS.index(step), *place, setting.replica)

    def train_with(self, optimizers: Sequence[Optimizer]) -> None:
        """Clip as one process would."""
        names = state.parameter_names(self._module)
        place = self._place.pp

        def counts(parameter: nn.Parameter) -> bool:
            name = names.get(id(parameter))
            return name is not None and self._ranks(self.layout.owners[name])[0] == place

        shards = self.replicas if self._sharded is not None else None
        self._clipping = PipelineClipping(self._trainer.precision_plugin, self._group, shards, counts, self._device)

    def _reduce_gradients(self) -> None:
        """Sum the gradients of tied parameters over stages, and average over pipelines. Collective."""
        if self._shards is not None:
            self._shards.reduce()
        parameters = dict(self._module.named_parameters())
        sum_gradients(self._tied, parameters)
        if self._options.mesh.dp_replicate > 1:
            here = [parameter for parameter in parameters.values() if not is_absent(parameter)]
            reduce_gradients(here, self.replicas, average=True)

    def gradient_norm(self, optimizers: Sequence[Optimizer]) -> Tensor:
        """The 2-norm of all stages' gradients. Collective."""
        assert self._clipping is not None
        return self._clipping.norm(state.trained_here(optimizers))

    def decide(self, decision: bool, all_of_them: bool) -> bool:
        """Whether all ranks decided so, or any. Collective."""
        votes = torch.tensor(int(decision), device=self._device)
        dist.all_reduce(votes)
        return int(votes) == dist.get_world_size() if all_of_them else bool(votes)

    # --- states ---

    def _gatherer(self, everywhere: bool) -> state.Gatherer:
        return state.Gatherer(
            group=self._group, rank_of_stage=self._options.rank_of, device=self._device, everywhere=everywhere
        )

    def weights(self, everywhere: bool) -> dict[str, Any]:
        """The weights of all stages."""
        return state.gather_weights(self._module, self.layout.owners, self.layout.buffers, self._gatherer(everywhere))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What one process would save of the optimizer, on the first rank."""
        names = state.parameter_names(self._module)
        gatherer = self._gatherer(everywhere=False)
        by_name = state.gather_optimizer(_bare(optimizer), names, self.layout.owners, gatherer)
        return state.plain_optimizer_state(_bare(optimizer), names, by_name) if gatherer.keeps else {}

    def optimizer_tensors(self, optimizers: Sequence[Optimizer]) -> dict[str, dict[str, Tensor]]:
        """Optimizer states by parameter name, on every rank."""
        names = state.parameter_names(self._module)
        found: dict[str, dict[str, Tensor]] = {}
        for optimizer in optimizers:
            by_name = state.gather_optimizer(
                _bare(optimizer), names, self.layout.owners, self._gatherer(everywhere=True)
            )
            for name, values in by_name.items():
                kept = {key: torch.as_tensor(value).cpu() for key, value in values.items() if value is not None}
                if kept:
                    found[name] = kept
        return found

    def stop(self) -> None:
        """Take everything off the module and the Trainer that only a running pipeline needs."""
        self._replay.unwrap()
        self._metrics.stop()
        if self._clipping is not None:
            self._clipping.remove()


def _bare(optimizer: Any) -> Optimizer:
    inner: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return inner
