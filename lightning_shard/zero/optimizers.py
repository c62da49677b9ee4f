"""Which optimizers may run on flat partitions, and which one runs on an offloaded partition.

ZeRO gives the optimizer one flat slice of all parameters per rank. An update that treats every element alone (SGD, Adam)
does not notice; one that looks at a tensor's shape or at the whole model (Adafactor, Muon, LAMB, L-BFGS) would train
something else without an error. Well-known ones are judged by name, all others by a trial on small tensors.
"""

import copy
from collections import defaultdict
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

_ELEMENTWISE = frozenset(
    f"torch.optim.{name}"
    for name in (
        "SGD ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop".split()
    )
)
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
    if kind.__module__.startswith("torch.optim") and f"torch.optim.{name}" in _ELEMENTWISE:
        return
    if kind.__module__.startswith("deepspeed.ops.") and name in ("FusedAdam", "DeepSpeedCPUAdam", "DeepSpeedCPULion"):
        return
    for word, reason in _SHAPE_DEPENDENT.items():
        if word in name.lower():
            raise MisconfigurationException(
                f"{name} cannot run under ZeRO: {reason}, but ZeRO gives it flat slices of all parameters, on which it"
                f" would train something else without an error. {_REMEDY}"
            )
    _try_on_slices(optimizer, device)


def _try_on_slices(optimizer: Optimizer, device: torch.device) -> None:
    """Three steps on two small tensors, whole and cut into the slices that two ranks would hold."""
    name = type(optimizer).__name__
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 4), (5,)]
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(3)]
    try:
        whole = _trial(optimizer, start, gradients, device)
    except Exception as error:
        raise MisconfigurationException(
            f"{name} is not known to be elementwise, and trying it on two small tensors failed:"
            f" {type(error).__name__}: {error}. {_REMEDY}"
        ) from error
    expected = _flat(whole)
    half = (expected.numel() + 1) // 2
    try:
        slices = [
            _trial(
                optimizer,
                [_flat(start)[begin : begin + half]],
                [[_flat(step)[begin : begin + half]] for step in gradients],
                device,
            )
            for begin in (0, half)
        ]
    except Exception as error:
        raise MisconfigurationException(
            f"{name} cannot run under ZeRO: it works on whole tensors, but failed on flat slices of them with"
            f" {type(error).__name__}: {error}. {_REMEDY}"
        ) from error
    difference = float((_flat([tensor for part in slices for tensor in part]) - expected).abs().max())
    if not difference <= 1e-6 * max(1.0, float(expected.abs().max())):
        raise MisconfigurationException(
            f"{name} cannot run under ZeRO: three steps on flat slices of two small tensors gave weights that differ by"
            f" {difference:.1e} from three steps on the whole tensors, so its update is not elementwise. {_REMEDY}"
        )


def _trial(
    optimizer: Optimizer, start: list[Tensor], gradients: list[list[Tensor]], device: torch.device
) -> list[Tensor]:
    """The weights after ``gradients`` under a copy of ``optimizer`` with the settings of its first group."""
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    parameters = [nn.Parameter(tensor.clone().to(device)) for tensor in start]
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**copy.deepcopy(settings), "params": parameters}]
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone().to(device)
        # Not `trial.step`: a learning-rate scheduler has wrapped the instance's own step to count calls.
        type(trial).step(trial)
    return [parameter.detach().cpu() for parameter in parameters]


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


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
    known = {entry.split(".")[-1].lower(): entry.split(".")[-1] for entry in _ELEMENTWISE}
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
