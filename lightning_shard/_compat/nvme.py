"""The engine's swapping to NVMe."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def swapped_in(zero_optimizer: Any, group: int, write_back: bool) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """One partition group's flat fp32 slice and its optimizer state in memory, whether or not it lives on NVMe.

    With ``write_back`` the changed values go to NVMe and to the parameters. The engine has public getters and setters
    for single states that exist already, but none for a whole group or a state that is new.
    """
    swappable = zero_optimizer._swappable_optimizer_subgroup(group)
    flat = zero_optimizer.fp32_partitioned_groups_flat[group]
    if swappable:
        zero_optimizer._optimizer_states_and_gradient_swap_in(group)
    try:
        yield flat, zero_optimizer.optimizer.state[flat]
        if write_back:
            zero_optimizer._reassign_or_swap_out_partitioned_parameters(group)
    finally:
        if swappable and write_back:
            # What the swapper knew about earlier state tensors does not hold for the new ones.
            info = zero_optimizer.optimizer_swapper.swap_params_info[flat.ds_id]
            del info.tensors[1:]
            info.has_state_tensors = False
            zero_optimizer._optimizer_states_and_gradient_swap_out(group)
        elif swappable:
            zero_optimizer._release_swap_buffers(group)


def gather_persistent(zero_optimizer: Any) -> None:
    """Refresh the parameters that stage 3 keeps whole, as the engine does at the end of a step."""
    if zero_optimizer.persistent_parameters:
        zero_optimizer.persistent_parameters[0].all_gather(zero_optimizer.persistent_parameters)


def keep_gradients_in_memory(zero_optimizer: Any) -> None:
    """Leave gradients in the CPU buffer that holds them anyway, instead of writing them to NVMe and reading them back.

    The engine reads a parameter's gradient to its place in the flat gradient by direct I/O. Where that place is no
    multiple of a disk block (any parameter behind one of odd size), the read goes wrong without an error and the run
    trains on other gradients.
    """
    swapper = getattr(zero_optimizer, "optimizer_swapper", None)
    if swapper is None:
        return

    def keep(parameter: Any, gradient_offsets: list[int], gradient_tensors: list[torch.Tensor]) -> None:
        info = swapper.swap_params_info.get(parameter.ds_id)
        if info is not None:
            info.unswapped_gradients.update(zip(gradient_offsets, gradient_tensors, strict=True))

    swapper.swap_out_gradients = keep
