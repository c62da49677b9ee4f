"""Where DeepSpeed's engine keeps model states.

The engine has no public way to list the tensors that it holds, so their attribute names are collected here, and only
here, with what each holds. Written for deepspeed 0.19.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["parameters", "gathered", "master", "optimizer", "buckets", "gradients"]


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """What the engine was given, and how it lays that out: the input of the formulas."""

    stage: Literal[1, 2, 3]
    """ZeRO stage."""

    ranks: int
    """Ranks that share the model states."""

    groups: list[list[int]]
    """Elements of each trained parameter, by flat group (at stage 3: sub-group)."""

    frozen: list[int]
    """Elements of each parameter that is not trained."""

    persistence_elements: int
    """At stage 3, parameters up to this size stay whole on every rank; -1 at stages 1 and 2."""

    parameter_bytes: int
    """Bytes of a parameter's element."""

    gradient_bytes: int
    """Bytes per element of a partition that its gradient takes between backward and step. With the optimizer offloaded
    the optimizer's own gradient, in its precision, is allocated for good; at stage 3 it comes in addition."""

    master_bytes: int
    """Bytes of an element of the master copy, and of the optimizer's states."""

    partitions_gradients: bool
    """Whether a rank holds no more than its partition of the gradients between backward and step."""

    optimizer: torch.optim.Optimizer
    """The optimizer that runs on the partitions."""


def engine_tensors(engine: Any) -> Iterator[tuple[Kind, Tensor]]:
    """Every tensor that the engine holds for model states, with its kind. Several may share one storage.

    Args:
        engine: A ``DeepSpeedEngine`` at stage 1, 2 or 3, for training or for inference.

    """
    zero = engine.optimizer
    for parameter in engine.module.parameters():
        # ds_tensor: this rank's partition at stage 3. The parameter itself then holds data only while it is gathered.
        shard = getattr(parameter, "ds_tensor", None)
        yield "parameters" if shard is None else "gathered", parameter.data
        if shard is not None:
            yield "parameters", shard.data
        if (secondary := getattr(parameter, "ds_secondary_tensor", None)) is not None:  # ZeRO++ hpZ
            yield "gathered", secondary.data
        for gradient in (parameter.grad, getattr(parameter, "grad_accum", None)):
            if gradient is not None:
                yield "gradients", gradient
    if not hasattr(zero, "optimizer"):  # an engine for inference has partitions but no optimizer
        return

    for master in _master(zero):
        yield "master", master.data
        if master.grad is not None:  # the optimizer's own gradient: always there with offload, else only within a step
            yield "gradients", master.grad
    for state in zero.optimizer.state.values():
        yield from (("optimizer", value) for value in state.values() if isinstance(value, Tensor) and value.dim())

    # Buckets that gradients pass through on their way to be reduced: a tensor at stage 3, a list of them below.
    yield from (("buckets", tensor) for bucket in zero.ipg_buckets.values() for tensor in _flat(bucket.buffer))
    for name in (
        "temp_grad_buffer_for_cpu_offload",  # stages 1 and 2 with offload: one largest gradient on each side
        "temp_grad_buffer_for_gpu_offload",
        "param_buffer_of_bit16_for_cpu_offload_groups",  # stages 1 and 2 with offload: weights on their way back
    ):
        yield from (("buckets", tensor) for tensor in _flat(getattr(zero, name, None)))
    for name in (
        "grad_partitions_flat_buffer",  # stage 3: this rank's gradients, one flat tensor
        "averaged_gradients",  # this rank's gradients by group, ready for the step
        "all_grad_tensors",  # stages 1 and 2: gradients being accumulated
        "grads_in_partition",  # stages 1 and 2: the gradients of every parameter that touches this rank's partition
        "accumulated_grads_in_cpu",  # stages 1 and 2 with offload: accumulated gradients
    ):
        yield from (("gradients", tensor) for tensor in _flat(getattr(zero, name, None)))


def swapped_bytes(engine: Any) -> dict[Kind, int]:
    """Bytes of model states that live in swap files on NVMe."""
    held: dict[Kind, int] = {"parameters": 0, "master": 0, "optimizer": 0}
    for parameter in engine.module.parameters():
        shard = getattr(parameter, "ds_tensor", None)
        if shard is not None and not shard.numel():  # a partition on NVMe is emptied, but keeps its size in ds_numel
            held["parameters"] += shard.ds_numel * shard.element_size()
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    if swapper is not None:
        for info in swapper.swap_params_info.values():  # its first tensor is the master copy, the others are states
            size = info.numel() * info.dtype().itemsize
            held["master"] += size
            held["optimizer"] += size * (info.num_tensors() - 1)
    return held


def engine_layout(engine: Any) -> EngineLayout:
    """Read how a training engine lays the model states out.

    Raises:
        ValueError: If the engine has no optimizer (it validates, tests or predicts).

    """
    zero = engine.optimizer
    if not hasattr(zero, "optimizer"):
        raise ValueError("This engine holds no optimizer, so only its parameters can be told: ask during fit.")
    stage = engine.zero_optimization_stage()
    partitioned = stage == 3
    groups = zero.fp16_groups if partitioned else zero.bit16_groups
    trained = {id(parameter) for group in groups for parameter in group}

    def numel(parameter: Any) -> int:
        return int(parameter.ds_numel if partitioned else parameter.numel())

    master_bytes = zero.master_weights_and_grads_dtype.itemsize
    gradient_bytes = zero.gradient_accumulation_dtype.itemsize
    offloaded = zero.offload_optimizer if partitioned else zero.cpu_offload
    if offloaded:
        gradient_bytes = master_bytes + (gradient_bytes if partitioned else 0)
    return EngineLayout(
        stage=stage,
        ranks=torch.distributed.get_world_size(zero.dp_process_group),
        groups=[[numel(parameter) for parameter in group] for group in groups],
        frozen=[numel(parameter) for parameter in engine.module.parameters() if id(parameter) not in trained],
        persistence_elements=zero.parameter_offload.param_numel_persistence_threshold if partitioned else -1,
        parameter_bytes=zero.dtype.itemsize,
        gradient_bytes=gradient_bytes,
        master_bytes=master_bytes,
        partitions_gradients=stage >= 2 or offloaded,
        optimizer=zero.optimizer,
    )


def _master(zero: Any) -> list[Tensor]:
    """The flat fp32 partitions that the optimizer updates."""
    stage3 = hasattr(zero, "fp32_partitioned_groups_flat")
    return list(zero.fp32_partitioned_groups_flat if stage3 else zero.single_partition_of_fp32_groups)


def _flat(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _flat(value.values())
    elif isinstance(value, Iterable):
        for item in value:
            yield from _flat(item)
