"""ZeRO stages 1, 2 and 3 on the DeepSpeed engine, for CPU and CUDA."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard import _compat
from lightning_shard.checkpoint.host import check_async
from lightning_shard.config import ActivationCheckpointing, Offload, ZeroPlusPlus
from lightning_shard.materialize import has_meta_tensors
from lightning_shard.strategies.common import CommonStrategy
from lightning_shard.zero import ops
from lightning_shard.zero.arguments import check_arguments, check_device
from lightning_shard.zero.engine import (
    broadcast_buffers,
    inference_config,
    initialize_engine,
    prepare_values,
    wide_buffers_kept,
)
from lightning_shard.zero.engine_config import ZeROOptions, build_engine_config
from lightning_shard.zero.facts import read_trainer
from lightning_shard.zero.formats import BothFormats, check_format
from lightning_shard.zero.guards import check_run, warn_of_skipped_step
from lightning_shard.zero.held import UserGroups
from lightning_shard.zero.leftover import EmptyWeights
from lightning_shard.zero.nvme import NVMeStates, uses_nvme
from lightning_shard.zero.setup_optimizer import configure_optimizer, promise_optimizer
from lightning_shard.zero.sizing import count_elements, sizes_for
from lightning_shard.zero.user_config import read_config
from lightning_shard.zero.watching import Watch
from lightning_shard.zero.whole_tensors import WholeTensors


class ZeROStrategy(WholeTensors, BothFormats, CommonStrategy, DeepSpeedStrategy):
    """Partitions model states over the ranks: optimizer states (stage 1), gradients (2), parameters (3).

    Every rank computes every layer, on its own part of the batch. The engine is DeepSpeed's; the Trainer owns
    accumulation, precision and clipping, and hands them to it. Source: ZeRO (Rajbhandari et al. 2020).

    Args:
        stage: What is partitioned: 1 the optimizer states, 2 the gradients too, 3 the parameters too.
        offload: Which model states live on CPU or NVMe instead of the training device.
        zero_plus_plus: Less traffic between nodes by quantisation and secondary partitions. Stage 3, CUDA only.
        bucket_elements: Elements that are reduced, and at stages 1 and 2 gathered, in one collective. Default: sized to
            the model.
        overlap_comm: Reduce gradients while backward goes on. Default: on CUDA at stages 2 and 3.
        contiguous_gradients: Copy gradients to one buffer as they appear, against fragmentation. Default: true.
        prefetch_elements: Stage 3: parameters gathered ahead of their use. Default: sized to the model.
        persistence_elements: Stage 3: parameters up to this size stay whole on every rank. Default: sized to the model.
        reshard_after_forward: Stage 3: release gathered parameters after forward and gather them again for backward
            (3Ψ payload elements a step) or keep them (2Ψ, but all parameters are then whole at once). Default: true.
        activation_checkpointing: Where ``deepspeed.checkpointing.checkpoint`` keeps activations.
        config: Any other DeepSpeed setting, as a mapping or the path of a JSON file, merged on top. A key that says
            otherwise than an argument or the Trainer is an error. ``"auto"`` values come from the Trainer. Its
            ``optimizer`` and ``scheduler`` sections serve a module without ``configure_optimizers``.
        load_full_weights: Load only weights from ``ckpt_path`` also for training; optimizer states start afresh.
        exclude_frozen_parameters: Leave frozen parameters out of checkpoints.
        checkpoint_format: ``"portable"``, which every strategy loads at any world size, or ``"engine"``, which only the
            same stage and number of ranks can load. Default: portable, but the engine's where states lie on NVMe.
        async_save: Write checkpoints while training goes on, which waits only for a copy to host memory.
        trusted: Load checkpoints that hold more than plain data, which can run any code.
        accelerator: The accelerator; the Trainer sets it.
        parallel_devices: The devices of this machine; the Trainer sets them.
        cluster_environment: How ranks find each other; the Trainer sets it.
        precision_plugin: The precision plugin; the Trainer sets it.
        process_group_backend: ``"gloo"``, ``"nccl"``, ... Default: the one for the device.
        timeout: How long a collective may take.

    Raises:
        MisconfigurationException: If arguments contradict each other, or the config file does not exist.

    """

    strategy_name = "zero"

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 3,
        offload: Offload | None = None,
        zero_plus_plus: ZeroPlusPlus | None = None,
        bucket_elements: int | None = None,
        overlap_comm: bool | None = None,
        contiguous_gradients: bool | None = None,
        prefetch_elements: int | None = None,
        persistence_elements: int | None = None,
        reshard_after_forward: bool | None = None,
        activation_checkpointing: ActivationCheckpointing | None = None,
        config: dict[str, Any] | str | Path | None = None,
        load_full_weights: bool = False,
        exclude_frozen_parameters: bool = False,
        checkpoint_format: Literal["portable", "engine"] | None = None,
        async_save: bool = False,
        trusted: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = _compat.default_pg_timeout,
    ) -> None:
        options = ZeROOptions(
            stage=stage,
            offload=offload,
            zero_plus_plus=zero_plus_plus,
            bucket_elements=bucket_elements,
            overlap_comm=overlap_comm,
            contiguous_gradients=contiguous_gradients,
            prefetch_elements=prefetch_elements,
            persistence_elements=persistence_elements,
            reshard_after_forward=reshard_after_forward,
            activation_checkpointing=activation_checkpointing,
        )
        check_arguments(options)
        check_async(async_save, checkpoint_format != "engine")
        with _compat.quiet_engine_import():
            super().__init__(
                accelerator=accelerator,
                stage=stage,
                config={},
                parallel_devices=parallel_devices,
                cluster_environment=cluster_environment,
                load_full_weights=load_full_weights,
                exclude_frozen_parameters=exclude_frozen_parameters,
                precision_plugin=precision_plugin,
                process_group_backend=process_group_backend,
                timeout=timeout,
            )
        self._options = options
        self._user_config = read_config(config)
        self._checkpoint_format = checkpoint_format
        self._async_save, self._trusted, self._leaves_out_frozen = async_save, trusted, exclude_frozen_parameters
        self.user_groups: UserGroups | None = None
        # Lightning's guards ask for the stage before the Trainer is there to complete the configuration.
        self.config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
        self._watch: Watch | None = None
        self.empty_weights = EmptyWeights()

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self._options.stage

    # --- processes and devices ---

    @override
    def setup_environment(self) -> None:
        # Lightning's own refuses every accelerator but CUDA here.
        check_device(self._options, self.root_device)
        super(DeepSpeedStrategy, self).setup_environment()

    @override
    def setup_distributed(self) -> None:
        assert self.parallel_devices is not None
        if self.root_device.type == "cuda":
            _compat.validate_device_index_selection(self.parallel_devices)
        _compat.set_engine_device(self.root_device)
        reset_seed()
        self.set_world_ranks()
        # The engine's CPU accelerator counts this machine's ranks by this variable.
        os.environ["LOCAL_SIZE"] = str(self.num_processes)
        with _compat.without_shm_op():
            self._init_deepspeed_distributed()

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """The Trainer counts: it knows where an epoch ends."""
        return False

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Nothing: an engine that accumulates communicates, or waits for the step, by itself."""
        yield

    # --- the module ---

    @override
    def connect(self, model: "pl.LightningModule") -> None:
        super().connect(model)
        promise_optimizer(model, self._user_config)

    @override
    def _init_config_if_needed(self) -> None:
        assert self.lightning_module is not None
        elements = count_elements(self.lightning_module.parameters())
        self.config = build_engine_config(
            self._options, read_trainer(self, self._user_config), sizes_for(elements), self._user_config
        )
        _compat.format_precision_config(
            config=self.config,
            precision=self.precision_plugin.precision,
            loss_scale=self.loss_scale,
            loss_scale_window=self.loss_scale_window,
            min_loss_scale=self.min_loss_scale,
            initial_scale_power=self.initial_scale_power,
            hysteresis=self.hysteresis,
        )

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        with _compat.scalars_as_bytes(), super().model_sharded_context():
            yield

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.lightning_module is not None
        _compat.remove_engine_hooks(self.lightning_module)
        self.empty_weights.release(self.lightning_module)
        check_run(trainer, self.lightning_module, str(self.precision_plugin.precision), self.stage)
        self._init_config_if_needed()
        check_format(self._checkpoint_format, self._async_save, self.config)
        prepare_values(self.lightning_module, self.root_device, self.config)
        with wide_buffers_kept(self.lightning_module, self.root_device):
            super().setup(trainer)
        broadcast_buffers(self.lightning_module)

    @override
    def _initialize_deepspeed_train(self, model: nn.Module) -> None:
        assert isinstance(model, pl.LightningModule)
        ensure_op = partial(ops.ensure_op, local_rank=self.local_rank)
        chosen = configure_optimizer(model, self.config, self._options.offload, self.root_device, ensure_op)
        self.user_groups = UserGroups.of(model, chosen.groups, chosen.kind)
        self._initialize(model, self.config, chosen.optimizer)
        self._set_deepspeed_activation_checkpointing()
        self.optimizers = [self.deepspeed_engine.optimizer]
        if not self.config.get("managed_gradient_accumulation", True):
            _compat.discard_at_zero_grad(self.deepspeed_engine, self)
        self.lr_scheduler_configs = chosen.schedulers
        self._watch = Watch(model, self.deepspeed_engine, self.root_device)

    @override
    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        self._initialize(model, inference_config(self.config), None)

    def _initialize(self, model: nn.Module, config: dict[str, Any], optimizer: Optimizer | None) -> None:
        if uses_nvme(config):
            ops.ensure_op("async_io", self.local_rank)
        self.model = initialize_engine(model, config, optimizer, self.root_device)

    # --- training ---

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        assert self._watch is not None
        self._watch.batch_starts()

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        _compat.begin_backward(self.deepspeed_engine.optimizer)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Any, model: "pl.LightningModule | nn.Module | None" = None, **kwargs: Any
    ) -> Any:
        def backward_done() -> Any:
            result = closure()
            assert self._watch is not None
            self._watch.backward_done()
            return result

        output = super().optimizer_step(optimizer, backward_done, model, **kwargs)
        _compat.set_clipping(self.deepspeed_engine.optimizer, self.config["gradient_clipping"])
        if not self.config.get("managed_gradient_accumulation", True):
            _compat.forget_gradients(self.deepspeed_engine.optimizer)
        if "fp16" not in self.config and _compat.skipped_step(self.deepspeed_engine.optimizer):
            warn_of_skipped_step(self.lightning_module)
        return output

    # --- checkpoints ---

    def nvme_states(self) -> NVMeStates:
        """The optimizer states that live on NVMe; inactive without such an offload."""
        module, optimizer = self.module_and_optimizer()
        return NVMeStates(module, optimizer, self.global_rank)

    def accept_weights(self) -> None:
        """Take the module's present weights for the engine's own."""
        if self._watch is not None:
            self._watch.weights_loaded()

    # --- the end ---

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        if module is not None and has_meta_tensors(module):
            # A refused module has nothing to move to the CPU, and the attempt would hide the refusal.
            self._lightning_module = None
        super().teardown()
        self._lightning_module = module
        if self.model is not self.lightning_module:
            # The engine stays: `trainer.save_checkpoint` and, at stage 3, a forward of the module work after the run.
            _compat.end_training(self.deepspeed_engine)
            _compat.restore_linear()
            if module is not None and self.zero_stage_3:
                self.empty_weights.guard(module)
        if self._watch is not None:
            self._watch.remove()
        self._watch = None
