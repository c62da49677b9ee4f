"""The tensors in what a module returns, wherever they sit, and the same structure with others in their places."""

import copy
import functools
import gc
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_shard.units.dry_copy import slots

_CODE: Any = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, types.GeneratorType)
_OPAQUE: Any = (types.FunctionType, types.MethodType, types.GeneratorType, functools.partial)
_WHOLE = (type(None), bool, int, float, complex, str, bytes, type, Tensor, nn.Module)


@dataclass(frozen=True)
class Slot:
    """Where a tensor sits in a structure."""

    key: int
    """What belongs here."""


@dataclass(frozen=True)
class ParameterSlot:
    """Where a parameter of the module sits in a structure."""

    name: str
    """Which."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a structure, in order; the same tensor as often as it occurs."""
    found: list[Tensor] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(value, Tensor, note)
    yield from found


Kind = Any
"""A class, or several as `isinstance` takes them."""


def map_leaves(value: Any, kind: Kind, function: Callable[[Any], Any]) -> Any:
    """A copy of a structure in which each leaf of ``kind`` is what ``function`` makes of it.

    Tuples, lists, sets of them, dicts, and objects with attributes (dataclasses, outputs of models, caches) are
    structures; modules, and whatever has no attributes, are not, and stay the same objects.

    """
    return _map(value, kind, function, {})


def _map(value: Any, kind: Kind, function: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, _WHOLE):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, tuple):
        items = [_map(item, kind, function, memo) for item in value]
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, list):
        return _filled(copy.copy(value), value, kind, function, memo)
    if isinstance(value, deque):
        new = copy.copy(value)
        memo[id(value)] = new
        new.clear()
        new.extend(_map(item, kind, function, memo) for item in value)
        return new
    if isinstance(value, dict):
        return _dict(value, kind, function, memo)
    if not isinstance(value, _CODE) and (hasattr(value, "__dict__") or any(True for _ in slots(type(value)))):
        return _object(value, kind, function, memo)
    return value


def _filled(new: Any, old: list[Any], kind: Kind, function: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    memo[id(old)] = new
    new[:] = [_map(item, kind, function, memo) for item in old]
    return new


def _dict(value: dict[Any, Any], kind: Kind, function: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """Subclasses of dict may guard their keys or mirror them as attributes, as the outputs of models do."""
    new = copy.copy(value)
    memo[id(value)] = new
    for key, item in dict.items(value):
        mapped = _map(item, kind, function, memo)
        if mapped is item:
            continue
        if isinstance(new, OrderedDict):
            OrderedDict.__setitem__(new, key, mapped)
        else:
            dict.__setitem__(new, key, mapped)
        if key in getattr(new, "__dict__", {}):
            vars(new)[key] = mapped
    return new


def _object(value: Any, kind: Kind, function: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    try:
        new = copy.copy(value)
    except Exception:
        return value
    memo[id(value)] = new
    for name, item in getattr(value, "__dict__", {}).items():
        mapped = _map(item, kind, function, memo)
        if mapped is not item and name in vars(new):
            vars(new)[name] = mapped
    for name in slots(type(value)):
        if hasattr(value, name):
            item = getattr(value, name)
            mapped = _map(item, kind, function, memo)
            if mapped is not item:
                object.__setattr__(new, name, mapped)
    return new


def has_plain_leaf(value: Any) -> bool:
    """Whether a structure holds a number, a text or nothing where it could hold something else."""
    found: list[Any] = []
    map_leaves(value, (bool, int, float, str, type(None)), found.append)
    return bool(found)


def plain_content(value: Any) -> list[Any]:
    """What the lists and dicts in a call's arguments hold: their lengths, numbers and texts."""
    content: list[Any] = []

    def look(item: Any, inside: bool) -> None:
        if isinstance(item, dict):
            content.append(len(item))
            for each in dict.values(item):
                look(each, True)
        elif isinstance(item, list | set | deque):
            content.append(len(item))
            for each in item:
                look(each, True)
        elif inside and isinstance(item, bool | int | float | str):
            content.append(item)

    args, kwargs = value if value else ((), {})
    for argument in (*args, *kwargs.values()):
        look(argument, False)
    return content


def hidden_tensors(value: Any) -> str:
    """The type of an object in a structure that holds tensors which cannot be replaced; empty if there is none."""
    found: list[str] = []

    def look(leaf: Any) -> Any:
        if not isinstance(leaf, _WHOLE) and _refers_to_tensor(leaf, depth=4):
            found.append(type(leaf).__name__)
        return leaf

    # With the tensors taken out, what still refers to one could not be taken apart.
    map_leaves(map_leaves(value, Tensor, lambda tensor: None), _OPAQUE, look)
    return found[0] if found else ""


def _refers_to_tensor(value: Any, depth: int) -> bool:
    for other in gc.get_referents(value):
        if isinstance(other, Tensor):
            return True
        inside = isinstance(other, (*_OPAQUE, dict, list, tuple, set, types.CellType))
        if inside and depth and _refers_to_tensor(other, depth - 1):
            return True
    return False
