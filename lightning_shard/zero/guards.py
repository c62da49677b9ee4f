"""Checks before the first step, and one at every batch, for what the engine would get wrong without an error."""

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_shard import _compat


def check_run(trainer: "pl.Trainer", module: nn.Module, precision: str, stage: int) -> None:
    """All checks that need no engine yet.

    Args:
        trainer: The Trainer.
        module: The user's module.
        precision: The Trainer's precision.
        stage: The ZeRO stage.

    Raises:
        MisconfigurationException: Naming the setting, module or parameter, and the remedy.

    """
    check_trainer(trainer, precision)
    check_hooks(trainer, module, stage)
    check_modules(module, stage)
    check_parameters(module, precision)


def check_hooks(trainer: "pl.Trainer", module: nn.Module, stage: int) -> None:
    """Refuse user code that the engine would pass over, and warn of code that finds no gradients.

    Raises:
        MisconfigurationException: Naming the hook or the callback.

    """
    name = type(module).__name__
    if is_overridden("backward", module, pl.LightningModule):
        raise MisconfigurationException(
            f"{name} overrides `backward`, but ZeRO's engine runs backward itself and would pass it over. Put what it"
            " does to the loss into `training_step`, or use strategy='ddp'."
        )
    if stage == 3:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging):
                raise MisconfigurationException(
                    f"The callback {type(callback).__name__} copies whole weights, which no rank holds at stage 3. Use"
                    " stage 1 or 2, or another strategy."
                )
    for hook in ("on_after_backward", "on_before_optimizer_step"):
        if is_overridden(hook, module, pl.LightningModule):
            rank_zero_warn(
                f"{name} overrides `{hook}`: under ZeRO `parameter.grad` is None there, since the engine keeps"
                " gradients in its partitions. Clip by Trainer(gradient_clip_val=...) or self.clip_gradients(...), and"
                " read a gradient by deepspeed.utils.safe_get_full_grad(parameter), on every rank."
            )


def check_modules(module: nn.Module, stage: int) -> None:
    """Refuse compiled modules at stage 3, and below it parameters that an earlier run has left partitioned.

    Raises:
        MisconfigurationException: Naming the module or the parameter.

    """
    for name, submodule in module.named_modules():
        if isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)) and submodule.sparse:
            raise MisconfigurationException(
                f"Module {name!r} makes sparse gradients (sparse=True), which do not fit ZeRO's flat partitions. Set"
                " sparse=False."
            )
    if stage == 3:
        for name, parameter in module.named_parameters():
            if not parameter.numel() and not hasattr(parameter, "ds_id"):
                raise MisconfigurationException(
                    f"Parameter {name!r} has no elements (shape {tuple(parameter.shape)}): the engine cannot partition"
                    " it at stage 3. Remove it, or use stage 1 or 2."
                )
        for name, submodule in module.named_modules():
            if _compat.is_compiled(submodule):
                raise MisconfigurationException(
                    f"Module {name!r} comes from torch.compile, which cannot trace through the hooks that gather"
                    " parameters at stage 3. Leave it uncompiled, or use stage 1 or 2."
                )
        return
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise MisconfigurationException(
                f"Parameter {name!r} is still partitioned by an earlier stage-3 run of this module, but stage={stage}"
                " holds parameters whole. Save a checkpoint there and load it into a new module, or use stage 3 again."
            )


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
        if dtype.is_floating_point:
            fits = dtype != torch.float64 and (precision != "32-true" or dtype == torch.float32)
        else:
            # Integers stay as they are; only numbers of the partitions' kind can be trained.
            fits = not dtype.is_complex and not parameter.requires_grad
        if not fits:
            raise MisconfigurationException(
                f"Parameter {name!r} has dtype {dtype}, but ZeRO holds all parameters of a run in one flat buffer of"
                f" one dtype, and Trainer(precision={precision!r}) would change it silently. Convert the parameter, or"
                " choose another precision."
            )


def check_trainer(trainer: "pl.Trainer", precision: str) -> None:
    """Refuse settings of the Trainer that the engine cannot follow.

    Raises:
        MisconfigurationException: Naming the setting and what works instead.

    """
    if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
        raise MisconfigurationException(
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val}, gradient_clip_algorithm='value') does not work"
            " under ZeRO: the engine clips the norm of all gradients, which no rank holds whole. Set"
            " gradient_clip_algorithm='norm', or use strategy='ddp'."
        )
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    works = ["32-true"]
    if accelerator.is_bf16_supported():
        works += ["bf16-mixed", "bf16-true"]
    if accelerator.is_fp16_supported():
        works += ["16-mixed", "16-true"]
    if precision not in works:
        raise MisconfigurationException(
            f"Trainer(precision={precision!r}) does not work under ZeRO on this {accelerator.device_name()} device,"
            f" which cannot compute in that dtype. Choose one of {', '.join(map(repr, works))}."
        )


def warn_of_skipped_step(module: "pl.LightningModule | None") -> None:
    """Say that the engine has left a step out."""
    assert module is not None
    rank_zero_warn(
        f"A gradient was infinite or not a number at global step {module.trainer.global_step}: the engine left this"
        " optimizer step out. Weights are unchanged; look for the cause if it happens again."
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
