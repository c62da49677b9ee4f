"""Try an optimizer on flat slices: does it train them as it trains the whole tensors?"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.trial import STEPS, differs, distinct_settings, train_copy, trial_problem


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
    for settings in distinct_settings(optimizer):
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            _compare(optimizer, settings, device)


def _compare(optimizer: Optimizer, settings: dict[str, Any], device: torch.device) -> None:
    place = partial(torch.Tensor.to, device=device, copy=True)
    try:
        # Double precision tells an update that is not elementwise from rounding, but some kernels lack it.
        dtype = torch.float64
        start, gradients = trial_problem(dtype)
        whole = train_copy(optimizer, settings, start, gradients, place)
    except Exception:
        dtype = torch.float32
        start, gradients = trial_problem(dtype)
        try:
            whole = train_copy(optimizer, settings, start, gradients, place)
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
            parts += train_copy(optimizer, settings, [before[part]], [[_flat(step)[part]] for step in gradients], place)
        except Exception as error:
            raise NotElementwise(
                "cannot run under ZeRO: it works on whole tensors, but failed on flat slices of them with"
                f" {type(error).__name__}: {error}"
            ) from error
    change = float((expected - before).abs().max())
    if change == 0:
        raise NotElementwise(
            f"is not known to be elementwise, and {STEPS} trial steps on two small tensors changed nothing, so that it"
            " cannot be judged (an optimizer that wraps another one cannot be tried)"
        )
    if (found := differs(_flat(parts), expected, before)) is not None:
        raise NotElementwise(
            f"cannot run under ZeRO, since its update is not elementwise: {STEPS} steps move two small tensors by up"
            f" to {found[1]:.1e}, and flat slices of them by an amount that differs by {found[0]:.1e}"
        )


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1).cpu() for tensor in tensors])
