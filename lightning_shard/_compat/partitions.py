"""The engine's flat partitions, and the optimizer that updates them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def partition_groups(zero_optimizer: Any) -> list[list[nn.Parameter]]:
    """The optimized parameters, a list for each flat partition. Attribute names differ between the stages."""
    groups = getattr(zero_optimizer, "fp16_groups", None)
    found: list[list[nn.Parameter]] = zero_optimizer.bit16_groups if groups is None else groups
    return found


def own_elements(parameter: Any) -> int:
    """Elements of a stage-3 parameter that this rank holds, padding included."""
    return int(parameter.ds_tensor.ds_numel)


def partition_process_group(parameter: Any) -> Any:
    """The ranks over which a stage-3 parameter is partitioned."""
    return parameter.ds_process_group


def flat_partitions(zero_optimizer: Any) -> list[torch.Tensor]:
    """This rank's flat fp32 slice of each partition group: what the inner optimizer updates."""
    flat = getattr(zero_optimizer, "fp32_partitioned_groups_flat", None)
    found: list[torch.Tensor] = zero_optimizer.single_partition_of_fp32_groups if flat is None else flat
    return found


def inner_optimizer(zero_optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that updates the flat partitions."""
    inner: torch.optim.Optimizer = zero_optimizer.optimizer
    return inner


@contextmanager
def adagrad_left_alone() -> Iterator[None]:
    """Keep the engine from rebuilding the user's Adagrad.

    It would replace it by one from the class's defaults, in a single group: the groups' learning rates would be lost,
    schedulers would steer the old object, and several groups would crash. `state_for_partitions` makes the accumulators
    that the rebuilding was for.
    """
    adagrad = torch.optim.Adagrad
    torch.optim.Adagrad = type("HiddenAdagrad", (), {})  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        torch.optim.Adagrad = adagrad  # type: ignore[misc]


def state_for_partitions(zero_optimizer: Any, optimizer: torch.optim.Optimizer) -> None:
    """Give Adagrad, which makes its state at construction, state for the flat partitions instead."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        return
    start = optimizer.defaults["initial_accumulator_value"]
    steps = next((state["step"] for state in optimizer.state.values()), torch.tensor(0.0))
    optimizer.state.clear()
    for flat in flat_partitions(zero_optimizer):
        optimizer.state[flat] = {"step": steps.clone(), "sum": torch.full_like(flat.detach(), start)}


def pretend_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell torch's schedulers that ``optimizer`` steps, where a copy of it or a replacement does."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def without_step_wrapper(optimizer: torch.optim.Optimizer) -> None:
    """Drop the wrapper that a scheduler put around an instance's ``step``: in a copy it would step the original."""
    vars(optimizer).pop("step", None)


def link_optimizer_states(zero_optimizer: Any) -> None:
    """Map optimizer states to parameters at stages 1 and 2.

    The engine does so once, inside its first step and after the first group only, so that the states of further groups
    stay unknown.
    """
    link = getattr(zero_optimizer, "_lazy_init_hp_params_optimizer_state", None)
    if link is not None:
        zero_optimizer._hp_optimizer_states_linked = False
        link()


def versions(parameters: list[nn.Parameter]) -> list[int]:
    """How often each parameter was changed in place: torch counts for autograd, under a private name."""
    return [parameter._version for parameter in parameters]


def adopt_parameter(parameter: Any) -> None:
    """Copy what a parameter of stage 1 or 2 holds into this rank's part of its master weights."""
    mapping = parameter._hp_mapping
    if mapping is not None:
        mapping.update_hp()


def set_clipping(zero_optimizer: Any, norm: float) -> None:
    """The gradient norm to which the engine clips in its next step; 0 for no clipping."""
    zero_optimizer.clip_grad = norm


def is_empty_partitioned(parameter: Any) -> bool:
    """Whether stage 3 has partitioned a parameter that has elements, and nothing of it is here now."""
    return hasattr(parameter, "ds_id") and parameter.ds_numel > 0 and not parameter.numel()


def partition_rank(parameter: Any) -> int:
    """This rank's place among those over which a stage-3 parameter is partitioned."""
    return int(torch.distributed.get_rank(parameter.ds_process_group))


def own_partition(parameter: Any) -> torch.Tensor:
    """What this rank holds of a stage-3 parameter, flat, in the dtype that it is trained in; padding included."""
    partition: torch.Tensor = parameter.ds_tensor.data
    return partition.flatten()


def master_range(parameter: Any) -> tuple[int, torch.Tensor, int] | None:
    """Where the master weights of a stage-1 or -2 parameter lie, as far as this rank has them.

    Returns:
        The first element in the flattened parameter, the slice of this rank's flat partition that holds it and what
        follows, and the slice's first element in the partition; ``None`` if this rank has nothing.

    """
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None
    return mapping.lp_fragment_address.start, mapping.hp_fragment.data, mapping.hp_fragment_address.start


def take_masters(zero_optimizer: Any) -> None:
    """Copy the flat master weights to the parameters that are trained, whole or partitioned. Collective."""
    if not hasattr(zero_optimizer, "fp32_partitioned_groups_flat"):
        zero_optimizer.update_lp_params()
        return
    for group, flat in zip(partition_groups(zero_optimizer), flat_partitions(zero_optimizer), strict=True):
        start = 0
        for parameter in group:
            elements = own_elements(parameter)
            own_partition(parameter).copy_(flat.data[start : start + elements])
            start += elements
    refresh_persistent(zero_optimizer)


def refresh_persistent(zero_optimizer: Any) -> None:
    """Gather again the parameters that stage 3 keeps whole, after their partitions changed. Collective."""
    persistent = zero_optimizer.persistent_parameters
    if persistent:
        # They count as gathered until they are released; the partitions themselves are kept.
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)


def loss_scaler_numbers(zero_optimizer: Any) -> dict[str, Any]:
    """The numbers that a loss scaler goes on from; it has no state dict."""
    scaler = getattr(zero_optimizer, "loss_scaler", None)
    return {key: value for key, value in vars(scaler).items() if isinstance(value, (int, float))} if scaler else {}


def set_loss_scaler_numbers(zero_optimizer: Any, numbers: dict[str, Any]) -> None:
    """Put back what `loss_scaler_numbers` gave."""
    scaler = getattr(zero_optimizer, "loss_scaler", None)
    if scaler is not None:
        vars(scaler).update({key: value for key, value in numbers.items() if key in vars(scaler)})


def forget_own_links_only(zero_optimizer: Any) -> None:
    """Let an engine of stage 1 or 2 that is freed forget the links of its own parameters to master weights, not others.

    It forgets those of all parameters that it has trained. If the module is trained again, the garbage collector frees
    the first engine at some time in the second run: whole weights would then be zeros, and saved ones incomplete.
    """
    groups = getattr(zero_optimizer, "bit16_groups", None)
    destroy = getattr(zero_optimizer, "destroy", None)
    if groups is None or destroy is None:
        return
    own = [(parameter, parameter._hp_mapping) for group in groups for parameter in group]

    def destroy_own() -> None:
        later = [(parameter, parameter._hp_mapping) for parameter, link in own if parameter._hp_mapping is not link]
        destroy()
        for parameter, link in later:
            parameter._hp_mapping = link

    zero_optimizer.destroy = destroy_own
