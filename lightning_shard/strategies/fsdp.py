"""Fully sharded data parallelism on torch's ``fully_shard`` (FSDP2), for CPU and CUDA."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, cast

import lightning.pytorch as pl
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard._compat.lightning import give_mesh
from lightning_shard.checkpoint.host import check_async
from lightning_shard.config import ClassUnits, MixedPrecision, SizeUnits
from lightning_shard.strategies.common import CommonStrategy
from lightning_shard.units import full
from lightning_shard.units.averaging import has_averages, shard_averages, trained_weights
from lightning_shard.units.guards import check_arguments, check_module, no_inference_mode
from lightning_shard.units.held import UnitStates
from lightning_shard.units.mesh import make_mesh
from lightning_shard.units.one_file import save_file, whole_on_rank_zero
from lightning_shard.units.optimizers import check_optimizers
from lightning_shard.units.plan import plan_units
from lightning_shard.units.policy import check_precision, make_policy
from lightning_shard.units.running import RunningUnits, explain_bypass
from lightning_shard.units.shard import ShardOptions, move_rest, shard_module
from lightning_shard.units.table import show_units


class FSDP2Strategy(CommonStrategy, ModelParallelStrategy):
    """Shards parameters, gradients and optimizer states over the ranks, unit by unit, with torch's ``fully_shard``.

    Every rank computes every layer, on its own part of the batch: a unit's parameters are gathered for its forward and
    its backward, and its gradients are reduced to the rank that keeps them. Sources: ZeRO stage 3 (Rajbhandari et al.
    2020), PyTorch FSDP (Zhao et al. 2023).

    Args:
        units: Which modules are gathered and reduced at once: ``"blocks"``, the repeated blocks that the module's
            structure shows (where there are none, ``SizeUnits(min_params=20_000_000)``); by size; or by class. The rest
            belongs to the module itself.
        reshard_after_forward: Release a unit's parameters after forward and gather them again for backward (3Ψ payload
            elements a step), keep them (2Ψ, but all are then whole at once), or shard them over so many ranks, such as
            those of one machine.
        replicas: Groups of ranks that each hold the whole model, sharded within the group (HSDP): gathers stay inside a
            group, gradients are averaged between groups. 1 shards over all ranks.
        cpu_offload: Keep shards of parameters, gradients and optimizer states on the CPU, where the optimizer runs.
        activation_checkpointing: Recompute activations in backward: of every unit, or of the modules of classes given
            by name or import path.
        mixed_precision: Dtypes to compute, reduce and return in. Default: what ``Trainer(precision=...)`` asks for.
        save_distributed_checkpoint: Save a folder to which every rank writes its shards; else rank 0 writes one plain
            Lightning file.
        async_save: Write checkpoints while training goes on, which waits only for a copy to host memory.
        trusted: Load checkpoints that hold more than plain data, which can run any code.
        process_group_backend: ``"gloo"``, ``"nccl"``, ... Default: the one for the device.
        timeout: How long a collective may take.

    Raises:
        MisconfigurationException: If an argument is impossible.

    """

    strategy_name = "fsdp2"

    def __init__(
        self,
        units: Literal["blocks"] | SizeUnits | ClassUnits = "blocks",
        reshard_after_forward: bool | int = True,
        replicas: int = 1,
        cpu_offload: bool = False,
        activation_checkpointing: bool | list[str] = False,
        mixed_precision: MixedPrecision | None = None,
        save_distributed_checkpoint: bool = True,
        async_save: bool = False,
        trusted: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        check_arguments(units, reshard_after_forward, replicas, activation_checkpointing)
        check_async(async_save, save_distributed_checkpoint)
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._units = units
        self._reshard_after_forward = reshard_after_forward
        self._replicas = replicas
        self._cpu_offload = cpu_offload
        self._activation_checkpointing = activation_checkpointing
        self._mixed_precision = mixed_precision
        self._async_save, self._trusted = async_save, trusted
        self._running: RunningUnits | None = None

    # --- processes and devices ---

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            check_precision(str(plugin.precision), self._mixed_precision)
        self._precision_plugin = plugin

    @override
    def setup_environment(self) -> None:
        self._setup_distributed()
        self._device_mesh = make_mesh(self.root_device, self.world_size, self._replicas, self._reshard_after_forward)
        assert self.lightning_module is not None
        give_mesh(self.lightning_module, self._device_mesh)

    @override
    def _get_process_group_backend(self) -> str:
        backend = super()._get_process_group_backend()
        if self._cpu_offload and self.root_device.type == "cuda" and ":" not in backend:
            # Norms of gradients that live on the CPU are summed there.
            return f"cpu:gloo,cuda:{backend}"
        return backend

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # --- the module ---

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        module = self.lightning_module
        assert module is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        self._running = RunningUnits.of(module, self._sharding())
        if self._running is None:
            check_module(module, self.root_device, self._layer_sync is not None)
            if self._layer_sync is not None:
                self._layer_sync.apply(module)
            self.precision_plugin.convert_module(module)
            plan = plan_units(trainer, module, self._units, self._activation_checkpointing, self._reshard_after_forward)
            layout = shard_module(module, plan.plan, self._shard_options())
            self._running = RunningUnits(module, layout, self.root_device, self._sharding())
            show_units(plan, layout, self.device_mesh)
        move_rest(module, self.root_device)
        self.barrier()
        no_inference_mode(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            shard_averages(trainer, module)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _sharding(self) -> dict[str, Any]:
        """The settings that a module which is sharded already must have been sharded with."""
        return {
            "units": self._units,
            "reshard_after_forward": self._reshard_after_forward,
            "replicas": self._replicas,
            "cpu_offload": self._cpu_offload,
            "activation_checkpointing": self._activation_checkpointing,
            "mixed_precision": self._mixed_precision,
            "precision": str(self.precision_plugin.precision),
            "world_size": self.world_size,
        }

    def _shard_options(self) -> ShardOptions:
        return ShardOptions(
            mesh=self.device_mesh,
            device=self.root_device,
            reshard_after_forward=self._reshard_after_forward,
            cpu_offload=self._cpu_offload,
            policy=make_policy(str(self.precision_plugin.precision), self._mixed_precision),
        )

    @property
    def running(self) -> RunningUnits:
        """The sharded module at work."""
        assert self._running is not None
        return self._running

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        check_optimizers(self.optimizers, self.lightning_module, self.device_mesh)
        self.running.prepare_mixed_lists(self.optimizers, self.precision_plugin)

    # --- steps ---

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._call("training_step", args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._call("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._call("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._call("predict_step", args, kwargs)

    def _call(self, step: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with explain_bypass(self.running):
            return self.running.call(getattr(self.lightning_module, step), args, kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate without communication: gradients stay whole on each rank until the batch that steps."""
        with self.running.no_sync():
            yield

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        with explain_bypass(self.running):
            self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        # Before any hook of the user's looks at the gradients.
        self.running.settle()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: "pl.LightningModule | nn.Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        self.running.settle_pending()
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.running.finish_step()
        return output

    # --- checkpoints ---

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole parameters and buffers by name, on every rank, on the CPU. Collective."""
        assert self.lightning_module is not None
        return full.full_state_dict(self.lightning_module)

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Whole optimizer states by parameter and state name, on every rank, on the CPU. Collective."""
        assert self.lightning_module is not None
        return full.full_optimizer_state(self.lightning_module, self.optimizers)

    @override
    def training_states(self) -> UnitStates:
        return UnitStates(self)

    @property
    def reshard_after_forward(self) -> bool | int:
        """Whether, or over how many ranks, units are sharded again after forward."""
        return self._reshard_after_forward

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Shards on every rank, or whole tensors on rank 0, as checkpoints are saved."""
        weights = super().lightning_module_state_dict()
        return weights if self._save_distributed_checkpoint else whole_on_rank_zero(weights, self.is_global_zero)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        return whole_on_rank_zero(optimizer.state_dict(), self.is_global_zero)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            save_file(self, checkpoint, filepath, storage_options)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        if has_averages(checkpoint):
            cast(dict[str, Any], checkpoint).update(trained_weights(checkpoint, self.training_states().state_dict()))
