"""Try an optimizer on flat slices: does it train them as it trains the whole tensors?"""

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_STEPS = 25
"""Enough for what an optimizer does only every ten steps, or begins to do after some."""

_LR = 1.0
"""A scheduler's warm-up may have set the learning rate to 0 for now, under which all optimizers agree; and one that
estimates its step size over the whole model needs a full step to see progress."""

_SHAPES = ((6, 4), (5,))


class NotElementwise(Exception):
    """Why an optimizer cannot run on flat slices, as the end of a sentence that begins with its name."""


def try_on_slices(optimizer: Optimizer, device: torch.device) -> None:
    """Let a copy of ``optimizer`` train two small tensors, whole and as the flat slices that two ranks would hold.

    Each group's settings are tried, since an optimizer may treat its groups by different rules.

    Args:
        optimizer: The optimizer; neither it, its parameters, nor the random state is changed.
        device: Where the trial runs.

    Raises:
        NotElementwise: If the slices end up otherwise than the whole tensors, or the optimizer fails.

    """
    tried: set[str] = set()
    for group in optimizer.param_groups:
        settings = _settings(group)
        key = repr(sorted(settings.items()))
        if key not in tried:
            tried.add(key)
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                _compare(optimizer, settings, device)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings, without what says which parameters it has, and with the trial's learning rate."""
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}
    lr = settings.get("lr")
    if isinstance(lr, Tensor):
        settings["lr"] = torch.full_like(lr, _LR)
    elif lr is not None:
        settings["lr"] = _LR
    return settings


def _compare(optimizer: Optimizer, settings: dict[str, Any], device: torch.device) -> None:
    try:
        # Double precision tells an update that is not elementwise from rounding, but some kernels lack it.
        dtype = torch.float64
        start, gradients = _problem(dtype)
        whole = _train(optimizer, settings, start, gradients, device)
    except Exception:
        dtype = torch.float32
        start, gradients = _problem(dtype)
        try:
            whole = _train(optimizer, settings, start, gradients, device)
        except Exception as error:
            raise NotElementwise(
                "is not known to be elementwise, and trying it on two small tensors failed with"
                f" {type(error).__name__}: {error}"
            ) from error
    before, expected = _flat(start), _flat(whole)
    half = (expected.numel() + 1) // 2
    parts = []
    for begin in (0, half):
        part = slice(begin, begin + half)
        try:
            parts += _train(optimizer, settings, [before[part]], [[_flat(step)[part]] for step in gradients], device)
        except Exception as error:
            raise NotElementwise(
                "cannot run under ZeRO: it works on whole tensors, but failed on flat slices of them with"
                f" {type(error).__name__}: {error}"
            ) from error
    change = float((expected - before).abs().max())
    if change == 0:
        raise NotElementwise(
            f"is not known to be elementwise, and {_STEPS} trial steps on two small tensors changed nothing, so that it"
            " cannot be judged (an optimizer that wraps another one cannot be tried)"
        )
    difference = float((_flat(parts) - expected).abs().max())
    rounding = 64 * torch.finfo(dtype).eps * float(expected.abs().max())
    if not difference <= 1e-5 * change + rounding:
        raise NotElementwise(
            f"cannot run under ZeRO, since its update is not elementwise: {_STEPS} steps move two small tensors by up"
            f" to {change:.1e}, and flat slices of them by an amount that differs by {difference:.1e}"
        )


def _problem(dtype: torch.dtype) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Two tensors, and their gradients for each step.

    The gradients keep their direction for the most part: an optimizer that estimates its step size over the whole model
    starts to use the estimate only once it makes progress.
    """
    generator = torch.Generator().manual_seed(0)

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator, dtype=dtype) for shape in _SHAPES]

    start, direction = draw(), draw()
    noise = [draw() for _ in range(_STEPS)]
    return start, [[base + 0.3 * extra for base, extra in zip(direction, step, strict=True)] for step in noise]


def _train(
    optimizer: Optimizer,
    settings: dict[str, Any],
    start: list[Tensor],
    gradients: list[list[Tensor]],
    device: torch.device,
) -> list[Tensor]:
    """The weights after ``gradients`` under a copy of ``optimizer`` with one group of ``settings``."""
    parameters = [nn.Parameter(tensor.to(device, copy=True)) for tensor in start]
    trial = _bare_copy(optimizer, {**copy.deepcopy(settings), "params": parameters})
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.to(device, copy=True)
        trial.step()
    return [parameter.detach().cpu() for parameter in parameters]


def _bare_copy(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """An optimizer of the same class and attributes over ``group``, without state, hooks, or a scheduler's wrapper.

    Attributes are copied, so that a step of the copy changes nothing of the original; parameters among them are not.
    """
    base = vars(torch.optim.SGD([torch.zeros(1)], lr=0.0))
    parameters = {id(parameter): parameter for entry in optimizer.param_groups for parameter in entry["params"]}
    bare = type(optimizer).__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key in base or key == "step":
            continue
        try:
            vars(bare)[key] = copy.deepcopy(value, dict(parameters))
        except Exception:
            # A process group or a lock cannot be copied, nor does a step change it.
            vars(bare)[key] = value
    bare.__setstate__({"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": [group]})
    return bare


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
