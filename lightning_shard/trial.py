"""Let a copy of an optimizer train small tensors, to see what it makes of them when they are cut up."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

STEPS = 25
"""Enough for what an optimizer does only every ten steps, or begins to do after some."""

_LR = 1.0
"""A scheduler's warm-up may have set the learning rate to 0 for now, under which all optimizers agree; and one that
estimates its step size over the whole model needs a full step to see progress."""

_SHAPES = ((6, 4), (5,))


def distinct_settings(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """The settings of an optimizer's groups, each once: it may treat its groups by different rules."""
    tried: set[str] = set()
    for group in optimizer.param_groups:
        settings = trial_settings(group)
        key = repr(sorted(settings.items()))
        if key not in tried:
            tried.add(key)
            yield settings


def trial_settings(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings, without what says which parameters it has, and with the trial's learning rate."""
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}
    lr = settings.get("lr")
    if isinstance(lr, Tensor):
        settings["lr"] = torch.full_like(lr, _LR)
    elif lr is not None:
        settings["lr"] = _LR
    return settings


def trial_problem(dtype: torch.dtype) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Two tensors, and their gradients for each step.

    The gradients keep their direction for the most part: an optimizer that estimates its step size over the whole model
    starts to use the estimate only once it makes progress.
    """
    generator = torch.Generator().manual_seed(0)

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator, dtype=dtype) for shape in _SHAPES]

    start, direction = draw(), draw()
    noise = [draw() for _ in range(STEPS)]
    return start, [[base + 0.3 * extra for base, extra in zip(direction, step, strict=True)] for step in noise]


def train_copy(
    optimizer: Optimizer,
    settings: dict[str, Any],
    start: list[Tensor],
    gradients: list[list[Tensor]],
    place: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """The weights after ``gradients`` under a copy of ``optimizer`` with one group of ``settings``.

    Args:
        optimizer: The optimizer; not changed.
        settings: A group's settings.
        start: The weights before.
        gradients: For each step the gradient of each weight.
        place: Brings a copy of a tensor to where the optimizer is to find it.

    """
    parameters = [nn.Parameter(place(tensor)) for tensor in start]
    trial = _bare_copy(optimizer, {**copy.deepcopy(settings), "params": parameters})
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = place(gradient)
        trial.step()
    return [parameter.detach() for parameter in parameters]


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


def differs(found: Tensor, expected: Tensor, before: Tensor) -> tuple[float, float] | None:
    """By how much training ended up otherwise, beyond rounding, and how far it went; ``None`` if it did not.

    Args:
        found: Weights after training one way.
        expected: Weights after training the other way.
        before: Weights before.

    """
    change = float((expected - before).abs().max())
    difference = float((found - expected).abs().max())
    rounding = 64 * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    return None if difference <= 1e-5 * change + rounding else (difference, change)
