"""Checks before the first step, and one at every batch, for what the engine would get wrong without an error."""

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer


def check_parameters(module: nn.Module, precision: str) -> None:
    """Refuse parameters that a flat partition of one dtype cannot hold.

    Args:
        module: The user's module, before the engine has it.
        precision: The Trainer's precision.

    Raises:
        MisconfigurationException: Naming the parameter and its dtype.

    """
    for name, parameter in module.named_parameters():
        dtype = parameter.dtype
        if not (dtype.is_floating_point or not parameter.requires_grad) or dtype in (torch.float64, torch.complex64):
            fits = False
        else:
            fits = precision != "32-true" or dtype == torch.float32 or not dtype.is_floating_point
        if not fits:
            raise MisconfigurationException(
                f"Parameter {name!r} has dtype {dtype}, but ZeRO holds all parameters of a run in one flat buffer of"
                f" one dtype, and Trainer(precision={precision!r}) would change it silently. Convert the parameter, or"
                " choose another precision."
            )


def check_optimizer_parameters(module: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer over parameters that are not the module's, or that lists one twice.

    Raises:
        MisconfigurationException: Naming the group and the place in it.

    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    seen: dict[int, str] = {}
    trainable = False
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            place = f"parameter {index} of group {group_index} (shape {tuple(parameter.shape)})"
            if id(parameter) not in names:
                raise MisconfigurationException(
                    f"The optimizer's {place} belongs to no submodule of {type(module).__name__}, so ZeRO cannot"
                    " partition it. Register it in the module."
                )
            if id(parameter) in seen:
                raise MisconfigurationException(
                    f"{names[id(parameter)]!r} is in the optimizer twice: as {seen[id(parameter)]} and as {place}."
                )
            seen[id(parameter)] = place
            trainable |= parameter.requires_grad
    if not trainable:
        raise MisconfigurationException(
            f"No parameter in the optimizer of {type(module).__name__} requires a gradient: there is nothing to train."
        )


class RequiresGradWatch:
    """Notices parameters that are frozen, unfrozen or added after the engine has fixed its partitions.

    The engine would leave a newly unfrozen parameter untrained, and go on applying momentum and weight decay to a newly
    frozen one, both silently.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = list(module.parameters())
        self._trainable = [parameter.requires_grad for parameter in self._parameters]

    def check(self) -> None:
        """Raise when ``requires_grad`` of a parameter, or the set of parameters, has changed.

        Raises:
            MisconfigurationException: Naming the parameter.

        """
        # The fast path runs at every batch: two list comparisons, no names.
        parameters = list(self._module.parameters())
        same = len(parameters) == len(self._parameters) and all(map(_is, parameters, self._parameters))
        if same and [parameter.requires_grad for parameter in parameters] == self._trainable:
            return
        known = {id(p): trainable for p, trainable in zip(self._parameters, self._trainable, strict=True)}
        for name, parameter in self._module.named_parameters():
            before = known.get(id(parameter))
            if before is None:
                change = "was added"
            elif before != parameter.requires_grad:
                change = "was unfrozen" if parameter.requires_grad else "was frozen"
            else:
                continue
            raise MisconfigurationException(
                f"Parameter {name!r} {change} after training had started, but ZeRO fixes its partitions at the start:"
                " the change would be ignored or half applied. Make it before `fit` (a second `fit` builds new"
                " partitions), or use a strategy without flat partitions, for example 'ddp'."
            )
        raise MisconfigurationException(
            "A parameter was removed from the module after training had started, but ZeRO fixes its partitions at the"
            " start. Make the change before `fit`."
        )


def _is(left: object, right: object) -> bool:
    return left is right
