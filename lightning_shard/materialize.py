"""Give a module that was built on the meta device real values, module by module, or say which values cannot be made."""

from collections.abc import Callable, Iterator

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn


def has_meta_tensors(module: nn.Module) -> bool:
    """Whether any parameter or buffer of ``module`` is on the meta device."""
    return any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def materialize(module: nn.Module, device: torch.device, after_each: Callable[[nn.Module], None] | None = None) -> None:
    """Allocate and initialise every meta parameter and buffer by its owner's ``reset_parameters``.

    Only one submodule's own tensors are new at a time; ``after_each`` may partition them before the next follows.
    Ranks draw their own random numbers: the caller makes the values equal.

    Args:
        module: The module; tensors that are not on the meta device are left alone.
        device: Where the values are made.
        after_each: Called with each submodule that was materialised.

    Raises:
        MisconfigurationException: Naming every parameter and buffer that no ``reset_parameters`` fills.

    """
    problems = []
    tied = _Ties(module)
    for prefix, submodule in module.named_modules():
        own = dict(_own_tensors(submodule))
        meta = [name for name, tensor in own.items() if tensor.is_meta]
        if not meta:
            continue
        names = [f"{prefix}.{name}" if prefix else name for name in meta]
        reset = getattr(submodule, "reset_parameters", None)
        if not callable(reset) or len(meta) < len(own):
            why = "has no reset_parameters()" if not callable(reset) else "mixes meta and real tensors"
            problems.append(f"{', '.join(names)} ({type(submodule).__name__} {why})")
            continue
        submodule.to_empty(device=device, recurse=False)
        for _, tensor in _own_tensors(submodule):
            _poison(tensor)
        with torch.no_grad():
            reset()
        tensors = [tensor for _, tensor in _own_tensors(submodule)]
        left = [name for name, tensor in zip(names, tensors, strict=True) if _is_poisoned(tensor)]
        if left:
            problems.append(f"{', '.join(left)} ({type(submodule).__name__}.reset_parameters() leaves them unset)")
            continue
        tied.restore(submodule)
        if after_each is not None:
            after_each(submodule)
    if problems:
        raise MisconfigurationException(
            "These tensors were built on the meta device and no reset_parameters() gives them values: "
            + "; ".join(problems)
            + ". Give the class a reset_parameters() that fills its own parameters and buffers (also non-persistent"
            " ones), or build the module without the meta device, in configure_model()."
        )


_NO_BOOL = 2
"""A byte that is neither ``False`` nor ``True``."""


class _Ties:
    """Parameters that several places share: ``to_empty`` would give each place a tensor of its own."""

    def __init__(self, module: nn.Module) -> None:
        self._shared: dict[tuple[int, str], int] = {}
        self._made: dict[int, nn.Parameter] = {}
        for submodule in module.modules():
            for name, parameter in submodule.named_parameters(recurse=False):
                self._shared[id(submodule), name] = id(parameter)
        self._keep = list(module.parameters())

    def restore(self, submodule: nn.Module) -> None:
        for name, parameter in list(submodule.named_parameters(recurse=False)):
            original = self._shared[id(submodule), name]
            first = self._made.setdefault(original, parameter)
            if first is not parameter:
                setattr(submodule, name, first)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _poison(tensor: Tensor) -> None:
    """Fill with a value that no initialiser leaves, so that an untouched tensor can be told."""
    with torch.no_grad():
        if tensor.dtype == torch.bool:
            tensor.view(torch.uint8).fill_(_NO_BOOL)
        else:
            tensor.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else _sentinel(tensor.dtype))


def _is_poisoned(tensor: Tensor) -> bool:
    if tensor.dtype == torch.bool:
        return bool((tensor.view(torch.uint8) == _NO_BOOL).any())
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return bool((tensor == _sentinel(tensor.dtype)).any())


def _sentinel(dtype: torch.dtype) -> int:
    info = torch.iinfo(dtype)
    return info.min if info.min < 0 else info.max
