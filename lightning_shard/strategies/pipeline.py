"""Pipeline parallelism for any LightningModule, on torch.distributed.pipelining, for CPU and CUDA."""

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard._compat.lightning import (
    WholeModuleLauncher,
    call_hooks,
    give_mesh,
    leave_backward_to_strategy,
    zero_gradients,
)
from lightning_shard.checkpoint.host import PortableCheckpoints, check_async
from lightning_shard.failing import fails_alone
from lightning_shard.mesh import Mesh
from lightning_shard.pipeline import guards
from lightning_shard.pipeline.held import StageStates
from lightning_shard.pipeline.job import Job
from lightning_shard.pipeline.layout import Balance
from lightning_shard.pipeline.samples import sample_microbatches
from lightning_shard.pipeline.schedule import ScheduleName
from lightning_shard.pipeline.setting import JobOptions
from lightning_shard.strategies.common import CommonStrategy
from lightning_shard.units.guards import no_inference_mode


class PipelineStrategy(CommonStrategy, DDPStrategy):
    """Divides the computation: each rank runs some layers of the unchanged step, on all microbatches of its batch.

    The step is traced once and cut at the ends of module calls; each rank runs the whole step with the calls before its
    stage left out, and ends it with its last call. Sources: GPipe (Huang et al. 2019), PipeDream-flush / Megatron-LM
    (Narayanan et al. 2021), zero bubble (Qi et al. 2024), DualPipe (DeepSeek-AI 2024).

    Args:
        stages: Ranks in one pipeline; ``"auto"`` makes all ranks one. More ranks than that are further pipelines.
        microbatches: Into how many parts, along dimension 0, a batch is split; ``"auto"`` for twice the stages.
        schedule: The order of forwards and backwards: ``gpipe``, ``1f1b``, ``interleaved``, ``looped_bfs``,
            ``zero_bubble``, ``zbv`` or ``dualpipev``.
        stages_per_rank: Stages of a rank in the schedules that have several; zbv and dualpipev always have 2.
        split: Names of modules at whose end a stage ends, or ``"auto"`` for a balanced choice.
        balance: What the automatic split evens out.
        activation_checkpointing: Keep only what stages exchange, and run each stage's forward again in backward.
        data_parallel: What pipelines do with each other: hold each stage whole and average gradients, or share each
            stage's parameters with ``fully_shard``.
        save_distributed_checkpoint: Save a folder to which every rank writes its stages; else rank 0 writes one plain
            Lightning file.
        async_save: Write checkpoints while training goes on, which waits only for a copy to host memory.
        trusted: Load checkpoints that hold more than plain data, which can run any code.
        accelerator: Lightning's, given by the Trainer.
        parallel_devices: Lightning's, given by the Trainer.
        cluster_environment: Lightning's, given by the Trainer.
        checkpoint_io: How checkpoint files are written and read.
        precision_plugin: Lightning's, given by the Trainer.
        process_group_backend: ``"gloo"``, ``"nccl"``, ... Default: the one for the device.
        timeout: How long a message may take.
        start_method: How ranks are started.

    Raises:
        MisconfigurationException: If an argument is impossible.

    """

    strategy_name = "pipeline"

    def __init__(
        self,
        stages: int | Literal["auto"] = "auto",
        microbatches: int | Literal["auto"] = "auto",
        schedule: ScheduleName = "1f1b",
        stages_per_rank: int = 2,
        split: Literal["auto"] | list[str] = "auto",
        balance: Balance = "flops",
        activation_checkpointing: bool = False,
        data_parallel: Literal["replicate", "shard"] = "replicate",
        save_distributed_checkpoint: bool = True,
        async_save: bool = False,
        trusted: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[Any] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        guards.check_arguments(stages, microbatches, schedule, stages_per_rank, split, balance, data_parallel)
        check_async(async_save, save_distributed_checkpoint)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._stages, self._microbatches, self._schedule = stages, microbatches, schedule
        self._stages_per_rank, self._split, self._balance = stages_per_rank, split, balance
        self._activation_checkpointing, self._data_parallel = activation_checkpointing, data_parallel
        self._save_distributed_checkpoint = save_distributed_checkpoint
        self._async_save, self._trusted = async_save, trusted
        self._job: Job | None = None
        self._steps_now = False

    # --- processes and devices ---

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            guards.check_precision(str(plugin.precision))
        self._precision_plugin = plugin

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = WholeModuleLauncher(self, start_method=self._start_method)

    @override
    def setup_environment(self) -> None:
        mesh = self._options().mesh  # refuse wrong numbers of ranks before any group is made
        super().setup_environment()
        shape, names = (mesh.pp, mesh.dp_replicate, mesh.dp_shard), ("pp", "dp_replicate", "dp_shard")
        self._device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        assert self.lightning_module is not None
        give_mesh(self.lightning_module, self._device_mesh)

    @override
    def _get_process_group_backend(self) -> str:
        backend = super()._get_process_group_backend()
        if self.root_device.type == "cuda" and ":" not in backend:
            # The module is on the CPU until it is known which rank keeps what.
            return f"cpu:gloo,cuda:{backend}"
        return backend

    def _options(self) -> JobOptions:
        mesh = Mesh.of(self.world_size, self._stages, self._data_parallel)
        microbatches = 2 * mesh.pp if self._microbatches == "auto" else self._microbatches
        guards.check_schedule(self._schedule, mesh.pp, self._stages_per_rank, microbatches, self._split)
        return JobOptions(
            mesh=mesh,
            microbatches=microbatches,
            schedule=self._schedule,
            stages_per_rank=self._stages_per_rank,
            split=self._split,
            balance=self._balance,
            activation_checkpointing=self._activation_checkpointing,
        )

    @property
    def mesh(self) -> Mesh:
        """Where ranks lie in pipelines and replicas."""
        return Mesh.of(self.world_size, self._stages, self._data_parallel)

    @property
    def _replicas(self) -> Any:
        """Process group of the ranks that run the same stages as this one."""
        axis = "dp_shard" if self._data_parallel == "shard" else "dp_replicate"
        return self._device_mesh[axis].get_group()

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = self.mesh
        return {"num_replicas": mesh.data_parallel_size, "rank": mesh.data_parallel_rank(self.global_rank)}

    # --- the module ---

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        module = self.lightning_module
        assert module is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        guards.check_module(trainer, module)
        self.precision_plugin.convert_module(module)
        no_inference_mode(trainer)
        if self.mesh.data_parallel_size == 1:
            # All ranks log the same values: there is nothing to reduce.
            warnings.filterwarnings(
                "ignore", message=".*sync_dist=True.*when logging on epoch level", module="lightning"
            )
        options = self._options()
        if samples := list(sample_microbatches(trainer, module, options.microbatches)):  # else no batch will run
            self._job = Job(trainer, module, options, self._device_mesh, self.root_device, samples)
        if trainer.state.fn == TrainerFn.FITTING:
            leave_backward_to_strategy(trainer)
            self.setup_optimizers(trainer)
            self.job.train_with(self.optimizers)
        self.setup_precision_plugin()

    @property
    def job(self) -> Job:
        """The pipeline at work."""
        assert self._job is not None, "the Trainer has not set the strategy up"
        return self._job

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        guards.check_optimizers(self.optimizers, self._schedule, self.lightning_module)

    # --- steps ---

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        batch_idx = _batch_idx(args, kwargs)
        zero_gradients(trainer, batch_idx)
        self.job.pipeline.on_backward = lambda loss: call_hooks(trainer, "on_before_backward", loss)
        result = self.job.train(batch, args, kwargs, batch_idx, 1.0 / trainer.accumulate_grad_batches, self._steps_now)
        call_hooks(trainer, "on_after_backward")
        return result

    @override
    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self.job.evaluate("validation_step", batch, args, kwargs, _batch_idx(args, kwargs))

    @override
    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self.job.evaluate("test_step", batch, args, kwargs, _batch_idx(args, kwargs))

    @override
    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self.job.evaluate("predict_step", batch, args, kwargs, _batch_idx(args, kwargs))

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: "pl.LightningModule | nn.Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        # The closure runs the batch after which parameters change: only then gradients are summed over ranks.
        self._steps_now = True
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._steps_now = False

    # --- values of several ranks ---

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank runs the end of steps: it has the loss, the outputs, and what steps computed."""
        # A step is traced as a whole, on every rank, before there are stages and whenever a batch has new shapes.
        return self._job is None or self._job.traces_now or self._job.pipeline.setting.has_last_stage

    def broadcast_from_last(self, value: Any) -> Any:
        """``value`` of this pipeline's last stage, on every rank of the pipeline. Collective in the pipeline."""
        return self.job.pipeline.broadcast_from_last("user", value)

    def gradient_norm(self) -> Tensor:
        """The 2-norm of the gradients of all stages, before the optimizer steps. Collective in the pipeline."""
        return self.job.gradient_norm(self.optimizers)

    @override
    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Reduce over the pipelines: the ranks of one pipeline have the same value already."""
        return super().reduce(tensor, group if group is not None else self._replicas, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self.job.decide(decision, all)

    # --- checkpoints ---

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole parameters and buffers by name, on every rank, on the CPU. Collective."""
        return self.job.weights(everywhere=True)

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Whole optimizer states by parameter and state name, on every rank, on the CPU. Collective."""
        return self.job.optimizer_tensors(self.optimizers)

    @override
    def training_states(self) -> StageStates:
        return StageStates(self)

    @property
    def written_settings(self) -> dict[str, Any]:
        """What a checkpoint tells of how the states were cut."""
        return {"schedule": self._schedule, "data_parallel": self._data_parallel, "stages": self.job.layout.stages}

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Stand-ins on every rank, or the weights of all stages on rank 0, as checkpoints are saved."""
        if fails_alone(self.lightning_module):
            return {}  # others may be in the middle of a step, and would not meet this rank
        return (
            super().lightning_module_state_dict()
            if self._save_distributed_checkpoint
            else self.job.weights(everywhere=False)
        )

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._save_distributed_checkpoint or fails_alone(self.lightning_module):
            return super().optimizer_state(optimizer)
        return self.job.optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif not fails_alone(self.lightning_module):
            super(PortableCheckpoints, self).save_checkpoint(checkpoint, filepath, storage_options)

    # --- the end ---

    @override
    def teardown(self) -> None:
        if self._job is not None:
            self._job.stop()
        super().teardown()


def _batch_idx(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return int(kwargs.get("batch_idx", args[0] if args else 0))
