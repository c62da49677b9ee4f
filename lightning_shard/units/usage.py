"""A dry run of a step on fake tensors: which modules' forward runs, and which parameters are used outside of it.

FSDP gathers a unit's parameters around the forward of the unit's module. A parameter that is used at another moment,
because a method other than forward was called or somebody else took the weight, must not be in that unit.
"""

import inspect
import io
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from lightning_shard._compat.dry_run import (
    attached_trainer,
    fake_mode,
    quiet_module,
    quiet_trainer,
    stand_in_metric,
)
from lightning_shard.units.dry_copy import DryCopier, cuda_in_use
from lightning_shard.units.watch import StepWatch


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a dry run saw."""

    ran: frozenset[str]
    """Names of the modules whose forward ran through the module's call; ``""`` is the LightningModule."""

    outside: dict[str, str]
    """Module name -> name of one of its parameters that was used while the module's forward was not running."""

    changed: dict[str, frozenset[str] | None] = field(default_factory=dict)
    """Name of a parameter that the step changes in place, such as a moving average of weights -> names of the
    parameters that it is computed from, where that can be done shard by shard; ``None`` where it needs the whole."""

    complete: bool
    """Whether the whole step ran, without a made-up value."""

    reason: str
    """Why it did not, in one line; empty if it did."""


def watch_step(module: "pl.LightningModule", step: str, batch: Any) -> Usage:
    """Run a step of a structural copy of ``module`` on fake tensors and watch it.

    Nothing of the original changes: not its tensors, attributes, metrics, optimizers or Trainer, nor the random state.
    Memory and time of the copy do not depend on the sizes of tensors.

    Args:
        module: The module, attached to its Trainer; its tensors may be on any device, the meta device included.
        step: ``"training_step"``, ``"validation_step"``, ``"test_step"`` or ``"predict_step"``.
        batch: A batch on the module's device.

    Returns:
        What was seen. A step that wants values of tensors goes on with made-up ones, and one that fails has been
        watched up to there; both are not ``complete``.

    """
    names = {id(submodule): name for name, submodule in module.named_modules()}
    watch = StepWatch(module, names)
    reason = ""
    with ExitStack() as stack:
        stack.enter_context(isolate_rng(include_cuda=cuda_in_use()))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(redirect_stdout(io.StringIO()))
        try:
            _run(module, step, batch, watch, stack)
        except Exception as error:
            reason = watch.explain(error)
    return Usage(
        ran=frozenset(watch.ran),
        outside=watch.outside,
        changed=watch.changed,
        complete=not (reason or watch.guessed),
        reason="; ".join(filter(None, [watch.guessed, reason])),
    )


def merge(usages: Iterable[Usage]) -> Usage:
    """What several dry runs saw together: of the training and the validation step, say."""
    ran: set[str] = set()
    changed: dict[str, frozenset[str] | None] = {}
    outside: dict[str, str] = {}
    reasons: dict[str, None] = {}
    complete = True
    for usage in usages:
        ran |= usage.ran
        for name, sources in usage.changed.items():
            before = changed.get(name, frozenset())
            changed[name] = None if sources is None or before is None else before | sources
        outside = usage.outside | outside
        complete = complete and usage.complete
        if usage.reason:
            reasons[usage.reason] = None
    return Usage(ran=frozenset(ran), outside=outside, changed=changed, complete=complete, reason="; ".join(reasons))


def agree(by_rank: Sequence[Usage]) -> Usage:
    """What all ranks saw, each with batches of its own: a module ran only if it did on every rank.

    Every rank takes part in every gather, so a module that only some ranks run cannot be a unit.
    """
    together = merge(by_rank)
    return replace(together, ran=frozenset.intersection(*(usage.ran for usage in by_rank)))


def _run(module: "pl.LightningModule", step: str, batch: Any, watch: StepWatch, stack: ExitStack) -> None:
    mode = fake_mode()
    device = _device(module, batch)
    trainer = attached_trainer(module)
    copier = DryCopier(mode, device, [] if trainer is None else [(trainer, quiet_trainer(trainer, step))])
    clone = copier(module)
    fake_batch = copier(batch)
    if step != "training_step":
        clone.eval()
    for submodule in clone.modules():
        if isinstance(submodule, pl.LightningModule):
            quiet_module(submodule, device)
        elif not any(True for _ in submodule.parameters()):
            stand_in_metric(submodule)
    watch.follow(clone)
    # User code may leave a compiled function or a gradient mode behind; both are put back.
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    stack.enter_context(torch.set_grad_enabled(step == "training_step"))
    stack.enter_context(mode)
    stack.enter_context(watch)
    method = getattr(clone, step)
    method(*step_arguments(method, fake_batch))


def _device(module: nn.Module, batch: Any) -> torch.device:
    """Where a module on the meta device is imagined: beside its batch."""
    found: list[Tensor] = []

    def look(value: Any) -> None:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            for item in value.values():
                look(item)
        elif isinstance(value, list | tuple):
            for item in value:
                look(item)

    look(batch)
    tensors = [tensor for tensor in [*found, *module.parameters()] if not tensor.is_meta]
    return tensors[0].device if tensors else torch.device("cpu")


def step_arguments(method: Callable[..., Any], batch: Any) -> list[Any]:
    """The batch, and 0 for what else a step takes by position: the numbers of the batch and of its loader."""
    parameters = list(inspect.signature(method).parameters.values())
    if any(parameter.name == "dataloader_iter" for parameter in parameters):
        raise RuntimeError("it draws its batches from dataloader_iter, which a dry run must not advance")
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    known = [p for p in positional[1:] if p.default is p.empty or p.name in ("batch_idx", "dataloader_idx")]
    several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return [batch, *[0] * (1 if several and not known else len(known))]
