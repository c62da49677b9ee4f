"""From a plain module to a DeepSpeed engine: values, partitions, buffers, and the engine itself."""

import argparse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_shard import _compat
from lightning_shard._compat import partitions
from lightning_shard.materialize import has_meta_tensors, materialize
from lightning_shard.sending import sendable

Config = dict[str, Any]


def prepare_values(module: nn.Module, device: torch.device, config: Config) -> None:
    """Give every parameter a real and contiguous value; at stage 3 meta ones are partitioned as they are made.

    Args:
        module: The user's module.
        device: The training device.
        config: The engine's configuration.

    Raises:
        MisconfigurationException: Naming meta parameters and buffers that nothing fills.

    """
    for parameter in module.parameters():
        # Flat buffers hold values in the plain order (a channels-last weight, for one, has another).
        parameter.data = parameter.data.contiguous()
    if has_meta_tensors(module):
        stage3 = config["zero_optimization"]["stage"] == 3
        materialize(
            module, device, (lambda made: partition(made.parameters(recurse=False), config)) if stage3 else None
        )


def partition(parameters: Iterable[nn.Parameter], config: Config) -> None:
    """Partition parameters for stage 3, one at a time, from rank 0's values and in the engine's dtype. Collective."""
    import deepspeed

    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = next((dtype for section, dtype in halves.items() if section in config), torch.float32)
    whole = [parameter for parameter in parameters if not hasattr(parameter, "ds_id")]
    for parameter in whole:
        parameter.data = parameter.data.to(dtype)
    if whole:
        with _compat.scalars_as_bytes():
            deepspeed.zero.Init(module=nn.ParameterList(whole), config_dict_or_path=config)


def initialize_engine(module: nn.Module, config: Config, optimizer: Optimizer | None, device: torch.device) -> Any:
    """The engine around ``module``. Collective.

    Args:
        module: The user's module; changed in place.
        config: The engine's configuration.
        optimizer: The optimizer to partition, or ``None`` to evaluate only.
        device: The training device.

    """
    import deepspeed

    zero = config.get("zero_optimization", {})
    if zero.get("stage") == 3 and not _is_zero_plus_plus(zero):
        # Left to the engine, the whole model would move to each device first (and fp32 parameters be stored as bf16 on
        # NVMe where the device lacks fp16). One at a time they pass through; the engine then leaves buffers behind.
        partition(module.parameters(), config)
        for buffer in module.buffers():
            buffer.data = buffer.data.to(device)
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with _compat.scalars_as_bytes(), _compat.adagrad_left_alone():
        engine, *_ = deepspeed.initialize(
            # A device rank of None, as a CPU device has it, would be compared with 0.
            args=argparse.Namespace(device_rank=device.index) if device.type == "cuda" else None,
            # The optimizer and scheduler sections have been turned into objects already.
            config={key: value for key, value in config.items() if key not in ("optimizer", "scheduler")},
            model=module,
            model_parameters=trainable if optimizer is not None else [],
            optimizer=optimizer,
            dist_init_required=False,
        )
    if optimizer is not None:
        _compat.keep_gradients_in_memory(engine.optimizer)
        partitions.forget_own_links_only(engine.optimizer)
        _compat.state_for_partitions(engine.optimizer, optimizer)
    return engine


def inference_config(config: Config) -> Config:
    """What of a training configuration an engine without an optimizer needs."""
    keys = ("train_micro_batch_size_per_gpu", "fp16", "bf16")
    needed = {key: config[key] for key in keys if key in config}
    zero = config["zero_optimization"]
    if zero["stage"] == 3:
        needed["zero_optimization"] = {key: value for key, value in zero.items() if key != "offload_optimizer"}
    return needed


@contextmanager
def wide_buffers_kept(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Put float64 and complex buffers back after the engine's and Lightning's casts of whole modules.

    A cast to the run's dtype would take the imaginary part of a rotary table, or the low bits of a counter, silently.
    """
    wide = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if buffer.is_complex() or buffer.dtype == torch.float64
    ]
    yield
    for owner, name, buffer in wide:
        setattr(owner, name, buffer.to(device))


def broadcast_buffers(module: nn.Module) -> None:
    """Rank 0's buffers everywhere: the engine takes care of parameters only. Collective."""
    for buffer in module.buffers():
        if buffer.numel():
            values = buffer.data.contiguous()
            torch.distributed.broadcast(sendable(values), 0)
            buffer.data.copy_(values)


def _is_zero_plus_plus(zero: Config) -> bool:
    """ZeRO++ partitions over groups of its own, which the engine must set up first."""
    return zero.get("zero_hpz_partition_size", 1) > 1 or any(
        zero.get(f"zero_quantized_{what}") for what in ("weights", "gradients", "nontrainable_weights")
    )
