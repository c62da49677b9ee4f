"""Private API behind the dry run of a step: fake tensors, the Trainer's insides, stand-ins for optimizers, metrics."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch

# There is no public reading of a `configure_optimizers` in all its forms.
from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor, nn

# Fake tensors are documented, but have no public name. Neither have the errors that say that a value was wanted.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torchmetrics import Metric, MetricCollection

from lightning_shard._compat.process import is_compiled

__all__ = [
    "DynamicOutputShapeException",
    "FakeTensorMode",
    "UnsupportedOperatorException",
    "ValueWanted",
    "attached_trainer",
    "fake_mode",
    "quiet_module",
    "quiet_trainer",
    "stand_in_metric",
    "uncompile",
]

ValueWanted = (DataDependentOutputException, DynamicOutputShapeException)
"""What a fake tensor raises when a number, or a shape that follows from numbers, is asked of it."""

_STAGES = {
    "training_step": "training",
    "validation_step": "validating",
    "test_step": "testing",
    "predict_step": "predicting",
}


def fake_mode() -> FakeTensorMode:
    """A mode in which operators compute shapes only; real tensors that meet it are read as fakes and never changed.

    Collectives on fake tensors communicate nothing.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def attached_trainer(module: "pl.LightningModule") -> "pl.Trainer | None":
    """The module's Trainer; the public property raises where there is none."""
    return module._trainer


def quiet_trainer(trainer: "pl.Trainer", step: str) -> "pl.Trainer":
    """A shallow copy whose attributes may be set without effect on the Trainer, and which logs and profiles nothing."""
    quiet = object.__new__(type(trainer))
    vars(quiet).update(vars(trainer))
    quiet.state = copy.copy(trainer.state)
    setattr(quiet, _STAGES[step], True)
    quiet.loggers = [DummyLogger() for _ in trainer.loggers]
    vars(quiet)["profiler"] = PassThroughProfiler()
    return quiet


def uncompile(clone: nn.Module) -> None:
    """Let the copy of a compiled module run its code as it is written."""
    if is_compiled(clone):
        vars(clone)["forward"] = clone.get_submodule("_orig_mod").__call__
    vars(clone)["_compiled_call_impl"] = None  # set by `module.compile()`


def quiet_module(clone: "pl.LightningModule", device: torch.device) -> None:
    """Replace what a copied LightningModule does to the Trainer in a step by what does nothing.

    Methods are shadowed by attributes of the instance. Optimizers and schedulers are made from the copy's own
    ``configure_optimizers`` when the step asks for them.
    """
    made: list[tuple[list[Any], list[Any]]] = []

    def configured() -> tuple[list[Any], list[Any]]:
        if not made:
            optimizers, schedulers = _init_optimizers_and_lr_schedulers(clone)
            for optimizer in optimizers:
                optimizer.step = _run_closure  # type: ignore[method-assign]
            made.append((optimizers, [config.scheduler for config in schedulers]))
        return made[0]

    def optimizers(use_pl_optimizer: bool = True) -> Any:
        found = configured()[0]
        return _one_or_all([_stand_in(optimizer) for optimizer in found] if use_pl_optimizer else found)

    def lr_schedulers() -> Any:
        return _one_or_all(configured()[1]) if configured()[1] else None

    def manual_backward(loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    def all_gather(data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        ranks = clone.trainer.world_size
        gather: Callable[[Tensor], Tensor] = lambda tensor: tensor.expand(ranks, *tensor.shape)  # noqa: E731
        return _map_tensors(data, gather) if ranks > 1 else data

    vars(clone).update(
        log=_nothing,
        log_dict=_nothing,
        print=_nothing,
        optimizers=optimizers,
        lr_schedulers=lr_schedulers,
        manual_backward=manual_backward,
        toggle_optimizer=_nothing,
        untoggle_optimizer=_nothing,
        toggled_optimizer=lambda optimizer: nullcontext(),
        clip_gradients=_nothing,
        all_gather=all_gather,
    )
    if clone.device.type == "meta":
        vars(clone)["_device"] = device


def stand_in_metric(clone: nn.Module) -> None:
    """Let a copied metric that asks for values, as most do, give a zero instead of ending the step."""
    if not isinstance(clone, Metric | MetricCollection):
        return

    def zero() -> Any:
        if isinstance(clone, MetricCollection):
            return {name: torch.zeros(()) for name in clone.keys()}  # noqa: SIM118 - `keys` adds prefixes
        return torch.zeros(())

    for name in ("forward", "update", "compute"):
        vars(clone)[name] = _or_else(getattr(clone, name), zero)


def _or_else(method: Callable[..., Any], default: Callable[[], Any]) -> Callable[..., Any]:
    def attempt(*args: Any, **kwargs: Any) -> Any:
        try:
            with (
                torch._C.DisableTorchFunction()
            ):  # nobody watches: whatever it asks for, the step does not depend on it
                return method(*args, **kwargs)
        except Exception:
            return default()

    return attempt


def _stand_in(optimizer: Any) -> Any:
    """Lightning's wrapper, without the strategy that would step for it."""
    if isinstance(optimizer, LightningOptimizer):
        return optimizer
    wrapper = LightningOptimizer(optimizer)
    vars(wrapper).update(step=_run_closure, toggle_model=_toggled)
    return wrapper


def _run_closure(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
    """A step that updates nothing. Its closure is a part of the user's step, which may run modules."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


@contextmanager
def _toggled(sync_grad: bool = True) -> Iterator[None]:
    yield


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _one_or_all(items: list[Any]) -> Any:
    return items[0] if len(items) == 1 else items


def _map_tensors(data: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(data, Tensor | int | float):
        return function(torch.as_tensor(data))
    if isinstance(data, Mapping):
        return {key: _map_tensors(value, function) for key, value in data.items()}
    return type(data)(_map_tensors(value, function) for value in data)
