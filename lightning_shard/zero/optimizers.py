"""Which optimizers may run on flat partitions, and which one runs on an offloaded partition.

ZeRO gives the optimizer one flat slice of all parameters per rank. An update that treats every element alone (SGD,
Adam) does not notice; one that looks at a tensor's shape or at the whole model (Adafactor, Muon, LAMB, L-BFGS) would
train something else without an error. Well-known ones are judged by name, all others by a trial on small tensors.
"""

import re
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_shard.zero.trial import NotElementwise, try_on_slices

_ELEMENTWISE = frozenset("SGD ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop".split())
"""Classes of torch.optim that update each element alone."""

_SHAPE_DEPENDENT = {
    "adafactor": "it factors second moments over rows and columns",
    "muon": "it orthogonalises whole matrices",
    "shampoo": "it preconditions along each dimension",
    "soap": "it preconditions along each dimension",
    "lamb": "it scales by the norm of each whole tensor",
    "lars": "it scales by the norm of each whole tensor",
    "galore": "it projects whole matrices",
    "came": "it factors second moments over rows and columns",
    "kfac": "it preconditions whole layers",
}
"""Words in the names of well-known optimizers that are not elementwise, and why."""

_REMEDY = (
    "Choose an elementwise optimizer (SGD, Adam, AdamW, Adagrad, RMSprop, ...), or a strategy that keeps whole tensors"
    " together with this optimizer (for example 'ddp')."
)


def check_elementwise(optimizer: Optimizer, device: torch.device) -> None:
    """Refuse an optimizer whose update on flat slices differs from its update on whole tensors.

    Args:
        optimizer: The module's optimizer, before its first step. Not changed.
        device: Where the trial of an unknown optimizer runs.

    Raises:
        MisconfigurationException: If it depends on shapes, on the whole model, or on a closure; or if it cannot be
            tried. The message names the optimizer.

    """
    kind = type(optimizer)
    name = kind.__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise MisconfigurationException(
            f"{name} evaluates the loss several times in one step through a closure, which ZeRO's engine does not do."
            f" {_REMEDY}"
        )
    if kind is getattr(torch.optim, name, None) and name in _ELEMENTWISE:
        return
    if kind.__module__.startswith("deepspeed.ops.") and name in ("FusedAdam", "DeepSpeedCPUAdam", "DeepSpeedCPULion"):
        return
    for word, reason in _SHAPE_DEPENDENT.items():
        if _names_word(name, word):
            raise MisconfigurationException(
                f"{name} cannot run under ZeRO: {reason}, but ZeRO gives it flat slices of all parameters, on which it"
                f" would train something else without an error. {_REMEDY}"
            )
    try:
        try_on_slices(optimizer, device)
    except NotElementwise as error:
        raise MisconfigurationException(f"{name} {error}. {_REMEDY}") from error.__cause__


def _names_word(name: str, word: str) -> bool:
    """Whether ``word`` is a word of a class name: in ``FusedLAMB`` and ``Lamb8bit``, but not in ``LambdaSGD``."""
    for match in re.finditer(word, name, re.IGNORECASE):
        before, after = name[: match.start()][-1:], name[match.end() :][:1]
        if not after.islower() and (not before.isalpha() or match.group()[0].isupper()):
            return True
    return False


def check_no_early_state(optimizer: Optimizer) -> None:
    """Refuse an optimizer that made its state at construction, keyed by whole parameters (Adagrad is handled).

    Raises:
        MisconfigurationException: If there is state that the partitions would lose.

    """
    if len(optimizer.state) and not isinstance(optimizer, torch.optim.Adagrad):
        raise MisconfigurationException(
            f"{type(optimizer).__name__} holds state for {len(optimizer.state)} parameters before the first step. ZeRO"
            " replaces the parameters by flat slices and would lose it. Build the optimizer fresh in"
            " `configure_optimizers`, without loading or creating state there."
        )


def choose_for_offload(optimizer: Optimizer, cpu_adam: bool) -> Optimizer:
    """The optimizer that runs on an offloaded partition.

    Args:
        optimizer: The module's optimizer.
        cpu_adam: Whether DeepSpeed's compiled CPU Adam may take the place of torch's Adam or AdamW.

    Returns:
        ``DeepSpeedCPUAdam`` with the hyper-parameters and the very group dictionaries of ``optimizer`` (so that
        learning-rate schedulers go on steering it), or ``optimizer`` itself.

    """
    if not cpu_adam or type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return optimizer
    reason = _why_not_cpu_adam(optimizer)
    name = type(optimizer).__name__
    if reason is not None:
        rank_zero_info(f"ZeRO offload: torch.optim.{name} runs on the CPU as it is ({reason}).")
        return optimizer
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    group = optimizer.param_groups[0]
    replacement: Optimizer = DeepSpeedCPUAdam(
        optimizer.param_groups,
        lr=group["lr"],
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        adamw_mode=isinstance(optimizer, torch.optim.AdamW),
    )
    for ours, theirs in zip(optimizer.param_groups, list(replacement.param_groups), strict=True):
        for key, value in theirs.items():
            ours.setdefault(key, value)
    replacement.param_groups = optimizer.param_groups
    rank_zero_info(
        f"ZeRO offload: DeepSpeed's CPU Adam takes the place of torch.optim.{name}, with its"
        f" {len(optimizer.param_groups)} parameter group(s), learning rates, betas, eps and weight decay."
        " Offload(cpu_adam=False) keeps torch's."
    )
    return replacement


def cpu_adam_fits(optimizer: Optimizer) -> bool:
    """Whether DeepSpeed's CPU Adam computes the same as ``optimizer``."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and _why_not_cpu_adam(optimizer) is None


def _why_not_cpu_adam(optimizer: Optimizer) -> str | None:
    for group in optimizer.param_groups:
        for option in ("amsgrad", "maximize", "differentiable"):
            if group.get(option):
                return f"{option}=True is unknown to DeepSpeed's CPU Adam"
        if group.get("decoupled_weight_decay", False) != isinstance(optimizer, torch.optim.AdamW):
            return "its weight decay differs from DeepSpeed's CPU Adam"
    return None


def from_config_section(section: dict[str, Any], module: nn.Module) -> Optimizer:
    """The optimizer that a DeepSpeed ``optimizer`` section describes, from torch.

    torch's class is taken rather than the engine's fused one, which would have to be compiled and computes the same.

    Args:
        section: ``{"type": "AdamW", "params": {"lr": 1e-3, ...}}``.
        module: Whose trainable parameters it updates.

    Raises:
        MisconfigurationException: If the type is no elementwise torch optimizer, or the parameters do not fit it.

    """
    name = str(section.get("type"))
    params = dict(section.get("params") or {})
    known = {entry.lower(): entry for entry in _ELEMENTWISE}
    if name.lower() not in known:
        raise MisconfigurationException(
            f"The DeepSpeed config's optimizer.type={name!r} is not one that ZeROStrategy can build. Choose one of"
            f" {', '.join(sorted(known.values()))}, or return the optimizer from `configure_optimizers`."
        )
    class_name = known[name.lower()]
    params.pop("torch_adam", None)
    # DeepSpeed decouples Adam's weight decay unless told otherwise.
    if class_name == "Adam" and params.pop("adam_w_mode", True):
        class_name = "AdamW"
    params.pop("adam_w_mode", None)
    if class_name in ("Adam", "AdamW"):
        # DeepSpeed's default differs from torch's AdamW.
        params.setdefault("weight_decay", 0.0)
        if params.get("bias_correction") is True:
            params.pop("bias_correction")
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        optimizer: Optimizer = getattr(torch.optim, class_name)(trainable, **params)
    except (TypeError, ValueError) as error:
        raise MisconfigurationException(
            f"The DeepSpeed config's optimizer section does not fit torch.optim.{class_name}: {error}"
        ) from error
    return optimizer
