"""Full tensors by parameter name, gathered from a ZeRO engine's partitions, and put back into them.

Every function is collective: all ranks call it with the same module, in the same order.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_shard import _compat


def full_state_dict(module: nn.Module, zero_optimizer: Any | None, keep: bool = True) -> dict[str, Tensor]:
    """All parameters and persistent buffers of ``module`` with whole tensors.

    Parameters that the engine optimizes come from its fp32 master weights, all others as they are. Tied names all
    appear. What a module's own ``state_dict`` adds or drops is honoured.

    Args:
        module: The module inside the engine.
        zero_optimizer: The engine's optimizer, or ``None`` for an engine that only evaluates.
        keep: Whether this rank keeps the tensors. With ``False`` it takes part, and gets an empty dict.

    Returns:
        Name to tensor in its full shape, on the CPU, not aliased with the model.

    """
    optimized = _optimized_ids(zero_optimizer)
    gathered: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            if id(value) not in gathered:
                full = _gather(value, id(value) in optimized)
                gathered[id(value)] = full.detach().to("cpu", copy=True) if keep else torch.empty(0)
            state[name] = gathered[id(value)]
        elif isinstance(value, Tensor):
            state[name] = value.detach().to("cpu", copy=True)
        else:
            state[name] = value
    return state if keep else {}


def full_optimizer_state(module: nn.Module, zero_optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state by parameter name, with tensors in the parameter's full shape.

    Args:
        module: The module inside the engine.
        zero_optimizer: The engine's optimizer.

    Returns:
        Parameter name (the first of tied names) to state name to CPU tensor; scalars such as ``step`` as they are.
        Parameters that the optimizer has no state for (frozen, or a stateless optimizer) are left out.

    """
    from deepspeed.utils import safe_get_full_optimizer_state

    _compat.link_optimizer_states(zero_optimizer)
    inner = _compat.inner_optimizer(zero_optimizer)
    state_of: dict[int, Mapping[str, Any]] = {}
    for group, flat in zip(
        _compat.partition_groups(zero_optimizer), _compat.flat_partitions(zero_optimizer), strict=True
    ):
        for parameter in group:
            state_of[id(parameter)] = inner.state.get(flat, {})
    result: dict[str, dict[str, Tensor]] = {}
    for name, parameter in module.named_parameters():
        entries: dict[str, Tensor] = {}
        for key, value in state_of.get(id(parameter), {}).items():
            if isinstance(value, Tensor) and value.dim() > 0:
                full = safe_get_full_optimizer_state(parameter, key)
                entries[key] = full.detach().to("cpu", copy=True)
            elif value is not None:
                entries[key] = torch.as_tensor(value).detach().to("cpu", copy=True)
        if entries:
            result[name] = entries
    return result


def load_full_state_dict(module: nn.Module, zero_optimizer: Any | None, state: Mapping[str, Any], strict: bool) -> None:
    """Put whole tensors into an engine's module and into its fp32 master weights.

    Args:
        module: The module inside the engine.
        zero_optimizer: The engine's optimizer, or ``None`` for an engine that only evaluates.
        state: Name to tensor, the same on every rank.
        strict: Whether missing and unexpected names are errors.

    Raises:
        MisconfigurationException: Naming the keys that are missing, unexpected or of another shape.

    """
    targets = module.state_dict(keep_vars=True)
    _check_keys(targets, state, strict)
    optimized = _optimized_ids(zero_optimizer)
    with torch.no_grad(), _compat.scalars_as_bytes():
        for name, target in targets.items():
            if name not in state or not isinstance(target, Tensor):
                continue
            # Values of a large checkpoint are only read here, one at a time.
            value = state[name].contiguous()
            with _gathered(target, write=True):
                if target.numel() or not value.numel():
                    target.data.copy_(value)
            if id(target) in optimized:
                set_master(target, value.to(target.device, torch.float32))


def set_master(parameter: Tensor, value: Tensor) -> None:
    """Write the fp32 master weights of ``parameter``, of which this rank holds a part, from its whole ``value``."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    if not hasattr(parameter, "ds_id"):
        safe_set_full_fp32_param(parameter, value)
        return
    # The engine's own way for whole values fails where the last partition is padded.
    group = _compat.partition_process_group(parameter)
    elements = _compat.own_elements(parameter)
    padded = value.new_zeros(elements * torch.distributed.get_world_size(group))
    padded[: value.numel()] = value.flatten()
    safe_set_local_fp32_param(parameter, padded[elements * torch.distributed.get_rank(group) :][:elements])


def _check_keys(targets: Mapping[str, Any], state: Mapping[str, Any], strict: bool) -> None:
    problems = []
    missing, unexpected = sorted(targets.keys() - state.keys()), sorted(state.keys() - targets.keys())
    if strict and missing:
        problems.append(f"missing: {', '.join(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected: {', '.join(unexpected)}")
    for name in targets.keys() & state.keys():
        if isinstance(targets[name], Tensor) and hasattr(state[name], "shape"):
            here, there = full_shape(targets[name]), tuple(state[name].shape)
            if here != there:
                problems.append(f"{name} has shape {there} in the checkpoint and {here} in the module")
    if problems:
        raise MisconfigurationException("The checkpoint's weights do not fit the module: " + "; ".join(problems) + ".")


def full_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of ``tensor``, also when stage 3 has partitioned it."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _optimized_ids(zero_optimizer: Any | None) -> set[int]:
    if zero_optimizer is None:
        return set()
    return {id(parameter) for group in _compat.partition_groups(zero_optimizer) for parameter in group}


def _gather(parameter: nn.Parameter, optimized: bool) -> Tensor:
    from deepspeed.utils import safe_get_full_fp32_param

    if optimized:
        full: Tensor | None = safe_get_full_fp32_param(parameter)
        assert full is not None
        return full
    with _gathered(parameter, write=False):
        return parameter.detach().clone()


def _gathered(tensor: Tensor, write: bool) -> Any:
    if not hasattr(tensor, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([tensor], modifier_rank=0 if write else None)
