"""ZeRO on the DeepSpeed engine (first sketch, being replaced)."""
import os, sys
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies.ddp import DDPStrategy

from lightning_shard.config import ActivationCheckpointing, Offload, ZeroPlusPlus


class ZeROStrategy(DeepSpeedStrategy):
    strategy_name = "zero"

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 3,
        offload: Offload | None = None,
        zero_plus_plus: ZeroPlusPlus | None = None,
        bucket_elements: int | None = None,
        overlap_comm: bool | None = None,
        contiguous_gradients: bool = True,
        prefetch_elements: int | None = None,
        persistence_elements: int | None = None,
        activation_checkpointing: ActivationCheckpointing | None = None,
        config: dict[str, Any] | str | Path | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(seconds=1800),
    ) -> None:
        super().__init__(accelerator=accelerator, stage=stage, offload_optimizer=bool(offload and offload.optimizer),
            offload_parameters=bool(offload and offload.parameters), parallel_devices=parallel_devices,
            cluster_environment=cluster_environment, precision_plugin=precision_plugin,
            process_group_backend=process_group_backend, timeout=timeout)
        self.config["zero_force_ds_cpu_optimizer"] = False
        self.config["zero_optimization"]["reduce_bucket_size"] = int(1e6)

    def setup_environment(self):
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self):
        import deepspeed
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
        os.environ.setdefault("LOCAL_SIZE", str(self.num_processes))
        reset_seed(); self.set_world_ranks(); self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model, optimizer, lr_scheduler=None):
        with self._no_rank():
            return super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)

    def _initialize_deepspeed_inference(self, model):
        with self._no_rank():
            return super()._initialize_deepspeed_inference(model)

    @contextmanager
    def _no_rank(self):
        import deepspeed
        orig = deepspeed.initialize
        deepspeed.initialize = lambda args=None, **k: orig(args=None, **k)
        try:
            yield
        finally:
            deepspeed.initialize = orig

    @classmethod
    def register_strategies(cls, strategy_registry):
        pass
