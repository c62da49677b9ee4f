"""A dry run of a step on fake tensors: which modules' forward runs, and which parameters are used outside of it.

FSDP gathers a unit's parameters around the forward of the unit's module. A parameter that is used at another moment,
because a method other than forward was called or somebody else took the weight, must not be in that unit.
"""

import inspect
import io
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_shard._compat.dry_run import (
    UnsupportedOperatorException,
    ValueWanted,
    fake_mode,
    quiet_module,
    quiet_trainer,
    stand_in_metric,
)
from lightning_shard.units.dry_copy import DryCopier, cuda_in_use

_MOST_GUESSES = 64
"""Values that one dry run may make up: a loop that waits for a value to change would never end."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a dry run saw."""

    ran: frozenset[str]
    """Names of the modules whose forward ran through the module's call; ``""`` is the LightningModule."""

    outside: dict[str, str]
    """Module name -> name of one of its parameters that was used while the module's forward was not running."""

    changed: frozenset[str] = frozenset()
    """Names of the parameters that the step changes in place, such as the weights of a moving average."""

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
    watch = _Watch(module, names)
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
        changed=frozenset(watch.changed),
        complete=not (reason or watch.guessed),
        reason=watch.guessed or reason,
    )


def merge(usages: Iterable[Usage]) -> Usage:
    """What several dry runs saw together: of the training and the validation step, say."""
    ran: set[str] = set()
    changed: set[str] = set()
    outside: dict[str, str] = {}
    reasons: dict[str, None] = {}
    complete = True
    for usage in usages:
        ran |= usage.ran
        changed |= usage.changed
        outside = usage.outside | outside
        complete = complete and usage.complete
        if usage.reason:
            reasons[usage.reason] = None
    return Usage(
        ran=frozenset(ran), outside=outside, changed=frozenset(changed), complete=complete, reason="; ".join(reasons)
    )


def _run(module: "pl.LightningModule", step: str, batch: Any, watch: "_Watch", stack: ExitStack) -> None:
    mode = fake_mode()
    device = _device(module, batch)
    trainer = module._trainer
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
    method(*_arguments(method, fake_batch))


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


def _arguments(method: Callable[..., Any], batch: Any) -> list[Any]:
    """The batch, and 0 for what else a step takes by position: the numbers of the batch and of its loader."""
    parameters = list(inspect.signature(method).parameters.values())
    if any(parameter.name == "dataloader_iter" for parameter in parameters):
        raise RuntimeError("it draws its batches from dataloader_iter, which a dry run must not advance")
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    known = [p for p in positional[1:] if p.default is p.empty or p.name in ("batch_idx", "dataloader_idx")]
    several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return [batch, *[0] * (1 if several and not known else len(known))]


_VALUES_OF = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes that hand out a tensor's elements; the others only describe it."""

_DESCRIPTIONS = frozenset(
    "size dim ndimension stride storage_offset numel nelement element_size get_device is_contiguous is_floating_point"
    " is_complex is_signed is_conj is_neg is_pinned is_shared is_inference is_same_size data_ptr requires_grad_"
    " register_hook register_post_accumulate_grad_hook retain_grad type __len__ __hash__ __repr__ backward grad"
    " result_type can_cast".split()
)
"""Functions that read no element of their arguments, by name; ``grad`` is ``torch.autograd.grad``."""

_IN_PLACE = frozenset("__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __ipow__ __imod__".split())

_GUESSES: dict[str, Callable[..., Any]] = {
    "item": lambda tensor: _made_up(tensor),
    "tolist": lambda tensor: _nested(tensor),
    "__bool__": lambda tensor: False,
    "is_nonzero": lambda tensor: False,
    "__int__": lambda tensor: 1,
    "__index__": lambda tensor: 1,
    "__float__": lambda tensor: 1.0,
    "__format__": lambda tensor, form: format(_made_up(tensor), form),
    "__contains__": lambda tensor, value: False,
    "equal": lambda one, other: one.shape == other.shape,
    "allclose": lambda one, other, *_, **__: True,
    "__getitem__": lambda tensor, index: tensor[_as_rows(index)],
    "masked_select": lambda tensor, mask: (tensor + torch.zeros_like(mask, dtype=tensor.dtype)).reshape(-1),
    "nonzero": lambda tensor, **_: torch.zeros(tensor.numel(), tensor.dim(), dtype=torch.long, device=tensor.device),
}
"""What to go on with where a value is wanted; where only its number of rows is unknown, the most that it can have."""


class _Watch(TorchFunctionMode):
    """Sees every function of tensors that a step calls, and keeps the stack of the modules whose forward runs."""

    def __init__(self, module: nn.Module, names: dict[int, str]) -> None:
        super().__init__()
        self.ran: set[str] = {""}
        self.outside: dict[str, str] = {}
        self.changed: set[str] = set()
        self.guessed = ""
        self._guesses = 0
        self._stack = [""]
        self._names: dict[int, str] = {}
        self._holders: dict[str, list[str]] = {}
        self._aliases: list[Tensor] = []  # alive, so that none of their ids is used again
        for name, parameter in module.named_parameters():
            self._names[id(parameter)] = name  # the original, which a global function may have caught
            self._holders[name] = []
        for submodule in module.modules():
            for parameter in submodule.parameters():
                self._holders[self._names[id(parameter)]].append(names[id(submodule)])

    def follow(self, clone: nn.Module) -> None:
        """Watch the modules and parameters of the copy."""
        for name, parameter in clone.named_parameters():
            self._names[id(parameter)] = name
        for name, submodule in clone.named_modules():
            if name and not isinstance(submodule, torch.jit.ScriptModule):
                # Like FSDP's own hooks: before the user's, and after them.
                submodule.register_forward_pre_hook(self._entering(name), prepend=True)
                submodule.register_forward_hook(self._leaving(name), always_call=True)

    def explain(self, error: Exception) -> str:
        """Why the run ended, in one line, with the module in which it did."""
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        if isinstance(error, ValueWanted):
            text = f"{error.func} wants values of a tensor, which a dry run does not have"
        elif isinstance(error, UnsupportedOperatorException):
            text = f"the operator {error.func} has no fake implementation"
        return f"{self._place()}: {text}"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, descriptor = _name(func)
        if (descriptor == "__get__" and name == "data") or name == "detach":
            result = func(*args, **kwargs)
            if id(args[0]) in self._names:
                self._names[id(result)] = self._names[id(args[0])]
                self._aliases.append(result)
            return result
        if descriptor:
            if name in _VALUES_OF:
                self._used(args)
            elif descriptor == "__set__" and name == "data" and id(args[0]) in self._names:
                self.changed.add(self._names[id(args[0])])
            return func(*args, **kwargs)
        if name not in _DESCRIPTIONS:
            self._look(name, args, kwargs)
        try:
            return func(*args, **kwargs)
        except Exception as error:
            if name == "backward":  # no gradient is needed
                return None
            return self._guess(name, error, args, kwargs)

    def _look(self, name: str, args: Any, kwargs: Any) -> None:
        in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        targets = {self._names[id(tensor)] for tensor in _tensors(args[:1]) if id(tensor) in self._names}
        if in_place and targets:
            # A moving average reads one weight and writes another where they are: as shards, outside any forward.
            self.changed |= targets
        else:
            self._used((args, kwargs))

    def _used(self, arguments: Any) -> None:
        for tensor in _tensors(arguments):
            name = self._names.get(id(tensor))
            for holder in self._holders[name] if name is not None else ():
                if holder not in self._stack:
                    self.outside.setdefault(holder, name or "")

    def _guess(self, name: str, error: Exception, args: Any, kwargs: Any) -> Any:
        guess = _GUESSES.get(name)
        wanted = isinstance(error, ValueWanted)
        if guess is None or not wanted:
            raise error
        self._guesses += 1
        if self._guesses > _MOST_GUESSES:
            raise error
        self.guessed = self.guessed or (
            f"{self._place()}: {name} wants values of a tensor, which a dry run does not have; it went on with made-up"
            " ones"
        )
        return guess(*args, **kwargs)

    def _place(self) -> str:
        inner = self._stack[-1]
        return f"in the forward of {inner!r}" if inner else "in the step"

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.ran.add(name)
            self._stack.append(name)

        return hook

    def _leaving(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            while self._stack.pop() != name:
                pass

        return hook


def _name(func: Any) -> tuple[str, str]:
    """The name of a function or attribute of tensors, and for an attribute how it is accessed."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(func.__self__, "__name__", ""), name
    return name, ""


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _made_up(tensor: Tensor) -> Any:
    if tensor.dtype == torch.bool:
        return False
    return 1.0 if tensor.is_floating_point() else 1


def _nested(tensor: Tensor) -> Any:
    value = _made_up(tensor)
    for size in reversed(tensor.shape):
        value = [value] * size
    return value


def _as_rows(index: Any) -> Any:
    """An index in which every mask is replaced by row numbers, one for each of its elements."""
    rows: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        if isinstance(item, Tensor) and item.dtype == torch.bool:
            rows += [torch.zeros(item.numel(), dtype=torch.long, device=item.device)] * item.dim()
        else:
            rows.append(item)
    return tuple(rows)
