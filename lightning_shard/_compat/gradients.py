"""The engine's gradients: which are stale, which are discarded, and when they are reduced."""

from collections.abc import Callable
from typing import Any

import torch


def clear_stale_gradients(zero_optimizer: Any) -> None:
    """Zero the gradients of parameters that no backward since the last step has reached.

    Stage 3 and every offload keep gradients in buffers that are only ever overwritten: a parameter without a gradient
    in this step would be updated with the one of an earlier step. The norm for clipping would count it too.
    """
    if hasattr(zero_optimizer, "fp16_groups"):
        _clear_stale_stage3(zero_optimizer)
    elif zero_optimizer.cpu_offload:
        active = set(zero_optimizer.norm_for_param_grads) | zero_optimizer._offload_accumulated_param_ids
        for group, flat in zip(
            zero_optimizer.params_in_partition, zero_optimizer.single_partition_of_fp32_groups, strict=True
        ):
            for parameter in group:
                key = zero_optimizer.get_param_id(parameter)
                if key not in active:
                    _, _, offset, elements = zero_optimizer.grad_position[key]
                    flat.grad.view(-1).narrow(0, offset, elements).zero_()


def _clear_stale_stage3(zero_optimizer: Any) -> None:
    active = zero_optimizer._offload_boundary_param_ids
    partitions = zero_optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
    gradients: dict[int, list[torch.Tensor]] = {}
    offsets: dict[int, list[int]] = {}
    for group in zero_optimizer.fp16_groups:
        for parameter in group:
            if parameter.ds_id in active:
                continue
            partition = partitions[parameter.ds_id]
            partition.zero_()
            if zero_optimizer.offload_optimizer:
                zero_optimizer._offload_grad_partition_at_boundary(parameter, partition, gradients, offsets)
    zero_optimizer._swap_out_offload_fp32_gradients(gradients, offsets)


def forget_gradients(zero_optimizer: Any) -> None:
    """Start a window of several backwards from nothing.

    Stage 3 copies only the first backward's gradients and adds all later ones, so what a parameter that the first one
    does not reach holds from an earlier window would be added to.
    """
    if hasattr(zero_optimizer, "fp16_groups"):
        zero_optimizer.grad_partitions_flat_buffer.zero_()
        zero_optimizer._offload_boundary_param_ids.clear()
        return
    zero_optimizer.all_grad_tensors.clear()
    zero_optimizer.averaged_gradients.clear()
    if zero_optimizer.cpu_offload:
        zero_optimizer._offload_accumulated_param_ids.clear()
        zero_optimizer.norm_for_param_grads.clear()
        for gradient in zero_optimizer.accumulated_grads_in_cpu.values():
            gradient.zero_()


def discard_at_zero_grad(engine: Any, strategy: Any) -> None:
    """Let ``zero_grad`` between two backwards discard what the engine has accumulated, as it does in one process.

    The engine clears the parameters' own gradients only, but stages 2 and 3 have moved those to their partitions. It
    also calls ``zero_grad`` inside its step, where the partitions still hold what is about to be used.
    """
    zero, module = engine.optimizer, engine.module
    clear_parameters = zero.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        clear_parameters(set_to_none)
        # Without managed accumulation, the boundary is the step itself.
        if not engine.is_gradient_accumulation_boundary():
            forget_gradients(zero)

    # Lightning's wrapper inherits from the optimizer's class, so that it has a `zero_grad` of its own.
    for entry in (zero, module, *strategy._lightning_optimizers):
        entry.zero_grad = zero_grad


def before_reduction(zero_optimizer: Any, check: Callable[[], None]) -> None:
    """Call ``check`` once a backward, before its last gradients are reduced; at stage 1 before all are."""
    # The attribute is there at stages 1 (false) and 2 (true) only.
    stage1 = getattr(zero_optimizer, "partition_gradients", None) is False
    name = "reduce_gradients" if stage1 else "independent_gradient_partition_epilogue"
    reduce = getattr(zero_optimizer, name)

    def checked(*args: Any, **kwargs: Any) -> None:
        check()
        reduce(*args, **kwargs)

    setattr(zero_optimizer, name, checked)


def begin_backward(zero_optimizer: Any) -> None:
    """Tell the engine that another backward begins.

    It counts backwards at forward, and one ``training_step`` is one forward to it: stage 3 would let the second
    backward of a step overwrite the gradients of the first.
    """
    zero_optimizer.clear_backward_seen_flag()


def skipped_step(zero_optimizer: Any) -> bool:
    """Whether the engine left its last step out because a gradient was infinite or not a number."""
    return bool(getattr(zero_optimizer, "overflow", False))
