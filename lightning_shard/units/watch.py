"""Watch a step: whose forward is running when a function of tensors takes a parameter."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_shard._compat.dry_run import UnsupportedOperatorException, ValueWanted

_MOST_GUESSES = 64
"""Values that one dry run may make up: a loop that waits for a value to change would never end."""

VALUES_OF = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes that hand out a tensor's elements; the others only describe it."""

DESCRIPTIONS = frozenset(
    "size dim ndimension stride storage_offset numel nelement element_size get_device is_contiguous is_floating_point"
    " is_complex is_signed is_conj is_neg is_pinned is_shared is_inference is_same_size data_ptr requires_grad_"
    " register_hook register_post_accumulate_grad_hook retain_grad __len__ __hash__ __repr__ backward grad"
    " result_type can_cast".split()
)
"""Functions that read no element of their arguments, by name; ``grad`` is ``torch.autograd.grad``."""

IN_PLACE = frozenset("__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __ipow__ __imod__".split())

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
    "where": lambda mask: tuple(torch.zeros(mask.numel(), dtype=torch.long, device=mask.device) for _ in mask.shape),
    "argwhere": lambda tensor: torch.zeros(tensor.numel(), tensor.dim(), dtype=torch.long, device=tensor.device),
    "unique": lambda tensor, **_: tensor.reshape(-1),
    "nonzero": lambda tensor, **_: torch.zeros(tensor.numel(), tensor.dim(), dtype=torch.long, device=tensor.device),
}
"""What to go on with where a value is wanted; where only its number of rows is unknown, the most that it can have."""


class StepWatch(TorchFunctionMode):
    """Sees every function of tensors that a step calls, and keeps the stack of the modules whose forward runs."""

    def __init__(self, module: nn.Module, names: dict[int, str]) -> None:
        super().__init__()
        self.ran: set[str] = {""}
        self.outside: dict[str, str] = {}
        self.changed: dict[str, frozenset[str] | None] = {}
        self.guessed = ""
        self._guesses = 0
        self._stack = [""]
        self._failed: list[tuple[BaseException, str]] = []
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
        place = next((name for failed, name in self._failed if failed is error), "")
        return f"{_place(place)}: {text}"

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
            if name in VALUES_OF:
                self._used(args)
            elif descriptor == "__set__" and name == "data" and id(args[0]) in self._names:
                self.changed[self._names[id(args[0])]] = None
            return func(*args, **kwargs)
        if name not in DESCRIPTIONS:
            self._look(name, args, kwargs)
        try:
            return func(*args, **kwargs)
        except Exception as error:
            if name == "backward":  # no gradient is needed
                return None
            return self._guess(name, error, args, kwargs)

    def _look(self, name: str, args: Any, kwargs: Any) -> None:
        in_place = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        targets = {self._names[id(tensor)] for tensor in _tensors(args[:1]) if id(tensor) in self._names}
        if not in_place or not targets:
            self._used((args, kwargs))
            return
        # A moving average reads one weight and writes another where they are: as shards, outside any forward.
        sources = {self._names[id(t)] for t in _tensors((args[1:], kwargs)) if id(t) in self._names}
        for target in targets:
            before = self.changed.get(target, frozenset())
            running = any(holder and holder in self._stack for holder in self._holders[target])
            self.changed[target] = None if running or before is None else before | sources

    def _used(self, arguments: Any) -> None:
        for tensor in _tensors(arguments):
            name = self._names.get(id(tensor))
            for holder in self._holders[name] if name is not None else ():
                if holder not in self._stack:
                    self.outside.setdefault(holder, name or "")

    def _guess(self, name: str, error: Exception, args: Any, kwargs: Any) -> Any:
        made_up = guess_value(name, error, args, kwargs)
        self._guesses += 1
        if self._guesses > _MOST_GUESSES:
            raise error
        self.guessed = self.guessed or (
            f"{_place(self._stack[-1])}: {name} wants values of a tensor, which a dry run does not have; it went on"
            " with made-up ones"
        )
        return made_up

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.ran.add(name)
            self._stack.append(name)

        return hook

    def _leaving(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            error = sys.exc_info()[1]
            if error is not None:  # a hook that is always called is called while its forward's error is handled
                self._failed.append((error, name))
            while self._stack.pop() != name:
                pass

        return hook


def guess_value(name: str, error: Exception, args: Any, kwargs: Any) -> Any:
    """What to go on with where function ``name`` wanted values that a fake tensor does not have.

    Raises:
        Exception: ``error`` itself, if it is another error, or there is no sensible guess.

    """
    guess = _GUESSES.get(name)
    if guess is None or not isinstance(error, ValueWanted):
        raise error
    return guess(*args, **kwargs)


def _place(module: str) -> str:
    return f"in the forward of {module!r}" if module else "in the step"


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
