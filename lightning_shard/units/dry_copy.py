"""A copy of a module, or of anything that it holds, in which every tensor is fake: running it changes no original."""

import copy
import functools
import random
import re
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from enum import Enum
from typing import Any, NoReturn

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.data import DataLoader, Dataset

from lightning_shard._compat.dry_run import FakeTensorMode, uncompile

_SHARED: tuple[type, ...] = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    Enum,
    re.Pattern,
    types.ModuleType,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.jit.ScriptModule,
    torch.Generator,  # fake tensors draw nothing from it
    Dataset,
    DataLoader,
    pl.LightningDataModule,
    pl.Trainer,
    pl.Callback,
    Logger,
)
"""Left as they are: either they cannot change, or they are large and no step's business to change."""

_LIBRARIES = {"torch", "lightning", "pytorch_lightning"}
"""Objects of these libraries (other than modules and tensors) are shared, too."""


def cuda_in_use() -> bool:
    """Whether there is a random state on GPUs to put back; to ask for it would start CUDA in this process."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class DryCopier:
    """Copies by structure: tensors become fakes of the same shape, dtype and device; ties and cycles stay.

    Args:
        mode: Under which the fakes are made.
        device: Stands in for the meta device, on which nothing could meet a batch.
        replaced: What to put in the place of certain objects.

    """

    def __init__(self, mode: FakeTensorMode, device: torch.device, replaced: list[tuple[Any, Any]]) -> None:
        self._mode = mode
        self._device = device
        self._memo: dict[int, tuple[Any, Any]] = {id(old): (old, new) for old, new in replaced}

    def __call__(self, value: Any) -> Any:
        """The copy of ``value``; the same copy for the same object."""
        known = self._memo.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, Tensor):
            return self._remember(value, self._fake(value))
        if isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule):
            return self._module(value)
        if isinstance(value, _SHARED):
            return value
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(value)
        if isinstance(value, dict | list | tuple | set | frozenset | deque):
            return self._collection(value)
        if isinstance(value, types.MethodType):
            # LightningCLI binds a partial function, with an optimizer of the module among its arguments.
            of_instance = isinstance(value.__func__, functools.partial)
            return types.MethodType(self(value.__func__) if of_instance else value.__func__, self(value.__self__))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, functools.partial):
            made = functools.partial(self(value.func), *self(value.args), **self(value.keywords))
            vars(made).update(vars(value))  # what `functools.update_wrapper` has put there
            return self._remember(value, made)
        if isinstance(value, weakref.ref):
            target = value()
            return weakref.ref(self(target)) if isinstance(target, nn.Module) else value
        if isinstance(value, np.ndarray):
            return self._remember(value, _read_only(value))
        if isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
            return self._remember(value, copy.deepcopy(value))
        if isinstance(value, Iterator) and not hasattr(value, "read"):
            return self._remember(value, _NotDrawn(value))
        return self._object(value)

    def _remember(self, value: Any, new: Any) -> Any:
        self._memo[id(value)] = (value, new)
        return new

    def _fake(self, tensor: Tensor) -> Tensor:
        """A fake leaf with the attributes that were set on ``tensor``, and without its gradient."""
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise TypeError("it has a lazy parameter, whose shape is not known before a first forward")
        device = self._device if tensor.is_meta else tensor.device
        with self._mode:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            else:
                fake.requires_grad_(tensor.requires_grad)
        of_fakes = set(vars(fake))  # such as the mode that a fake belongs to, of which the copy has its own
        for name, value in vars(tensor).items():
            if name not in of_fakes:
                setattr(fake, name, self(value))
        return fake

    def _module(self, module: nn.Module) -> nn.Module:
        clone = self._remember(module, object.__new__(type(module)))
        # `vars`, since modules may guard their attributes, and a compiled module hands them on.
        vars(clone).update({name: self(value) for name, value in vars(module).items()})
        uncompile(clone)
        return clone  # type: ignore[no-any-return]

    def _collection(self, value: Any) -> Any:
        if isinstance(value, tuple):
            items = [self(item) for item in value]
            return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
        if isinstance(value, frozenset):
            return type(value)(self(item) for item in value)
        # A subclass keeps what else it is (a default factory, attributes) by the shallow copy.
        new = self._remember(value, copy.copy(value))
        if isinstance(value, dict):
            for key, item in dict.items(value):
                dict.__setitem__(new, key, self(item))
        elif isinstance(value, list):
            new[:] = [self(item) for item in value]
        else:
            new.clear()
            for item in value:
                new.add(self(item)) if isinstance(value, set) else new.append(self(item))
        for name, item in getattr(value, "__dict__", {}).items():
            vars(new)[name] = self(item)
        return new

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """An optimizer that was made before the copy: it has the copy's parameters, and no states yet."""
        clone = self._remember(optimizer, object.__new__(type(optimizer)))
        for name, value in vars(optimizer).items():  # lists hold parameters: groups, and L-BFGS's own
            vars(clone)[name] = self(value) if isinstance(value, list) else value
        clone.state = defaultdict(dict)
        return clone  # type: ignore[no-any-return]

    def _function(self, function: types.FunctionType) -> Any:
        """A function with what it closes over copied: a hook that collects features must collect them elsewhere."""
        if not function.__closure__:
            return function
        cells = tuple(types.CellType() for _ in function.__closure__)
        new = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        new.__kwdefaults__ = function.__kwdefaults__
        self._remember(function, new)
        for cell, old in zip(cells, function.__closure__, strict=True):
            try:
                content = old.cell_contents
            except ValueError:  # an empty cell
                continue
            cell.cell_contents = self(content)
        vars(new).update({name: self(item) for name, item in vars(function).items()})
        return new

    def _object(self, value: Any) -> Any:
        """A plain object with its attributes copied; one that is not plain, such as a lock or a file, is shared."""
        if not hasattr(value, "__dict__") or type(value).__module__.partition(".")[0] in _LIBRARIES:
            return value
        try:
            clone = object.__new__(type(value))
        except TypeError:
            return value
        self._remember(value, clone)
        vars(clone).update({name: self(item) for name, item in vars(value).items()})
        for name in slots(type(value)):
            if hasattr(value, name):
                object.__setattr__(clone, name, self(getattr(value, name)))
        return clone


class _NotDrawn:
    """Stands for an iterator: to draw from it would take the item from the run."""

    def __init__(self, iterator: Any) -> None:
        self._kind = type(iterator).__name__

    def __iter__(self) -> "_NotDrawn":
        return self

    def __next__(self) -> NoReturn:
        raise RuntimeError(f"it draws from an iterator ({self._kind}), which a dry run must not advance")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"it uses {name!r} of an iterator ({self._kind}), which a dry run must not advance")


def _read_only(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """The same memory, which may be large, behind a door that only opens inward."""
    view = array.view()
    view.flags.writeable = False
    return view


def slots(kind: type) -> Iterator[str]:
    """Names of the attributes that objects of a class have in slots."""
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield name
