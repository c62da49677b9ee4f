"""Containers of batches and outputs: how each kind is taken apart, and put together again as its own type."""

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True, kw_only=True)
class Container:
    """A container, taken apart."""

    items: list[tuple[str, Any]]
    """Each part with the Python text that reaches it from the container: ``['image']``, ``[1]``, ``.mask``."""

    rebuild: Callable[[list[Any]], Any]
    """Makes a container of the same type from as many parts, in the same order."""


def open_container(value: Any) -> Container | None:
    """Take a container apart.

    Args:
        value: A tuple, namedtuple, list, mapping or dataclass, a subclass of one, or an object with tensors as
            attributes. What else such an object knows (derived fields, a ``default_factory``) is kept.

    Returns:
        Its parts, or None if it is no container.

    """
    match value:
        case Tensor() | np.ndarray() | torch.Size():
            return None
        case tuple():
            names = getattr(value, "_fields", None)
            accessors = [f".{name}" for name in names] if names else [f"[{i}]" for i in range(len(value))]
            make = getattr(value, "_make", type(value))
            return Container(items=list(zip(accessors, value, strict=True)), rebuild=make)
        case list():
            items = [(f"[{i}]", item) for i, item in enumerate(value)]
            return Container(items=items, rebuild=lambda parts: like_list(value, parts))
        case dict():
            return _open_dict(value)
        case type():
            return None
        case UserDict():
            return _open_object(value)
        case Mapping():
            return _open_mapping(value)
    return _open_object(value) if is_dataclass(value) or _holds_arrays(value) else None


def like_list(model: list[Any], items: Sequence[Any]) -> list[Any]:
    """A list of the type of ``model``, with its attributes, that holds ``items``."""
    made = copy.copy(model)
    made[:] = items
    return made


def _open_dict(value: dict[Any, Any]) -> Container:
    attributes = vars(value) if hasattr(value, "__dict__") else {}
    # A dict that offers its items as attributes too must not end with two versions of one.
    mirrored = [name for name, item in attributes.items() if name in value and value[name] is item]
    others = [name for name in attributes if name not in mirrored]
    keys = list(value)

    def rebuild(parts: list[Any]) -> Any:
        made = copy.copy(value)
        for key, part in zip(keys, parts[: len(keys)], strict=True):
            made[key] = part
        for name in mirrored:
            object.__setattr__(made, name, made[name])
        for name, part in zip(others, parts[len(keys) :], strict=True):
            object.__setattr__(made, name, part)
        return made

    items = [(f"[{key!r}]", value[key]) for key in keys] + [(f".{name}", attributes[name]) for name in others]
    return Container(items=items, rebuild=rebuild)


def _open_mapping(value: Mapping[Any, Any]) -> Container:
    keys = list(value)

    def rebuild(parts: list[Any]) -> Any:
        if all(part is value[key] for key, part in zip(keys, parts, strict=True)):
            return value  # a mapping without rows need not be one that can be built
        try:
            return type(value)(dict(zip(keys, parts, strict=True)))  # type: ignore[call-arg]  # as most mappings allow
        except TypeError as error:
            raise MisconfigurationException(
                f"A {type(value).__name__} cannot be built from a dict ({error}), so none can be made for a microbatch."
                " Use a dict, or let the class take one."
            ) from error

    return Container(items=[(f"[{key!r}]", value[key]) for key in keys], rebuild=rebuild)


def _open_object(value: Any) -> Container:
    names = [field.name for field in fields(value) if hasattr(value, field.name)] if is_dataclass(value) else []
    names += [name for name in getattr(value, "__dict__", ()) if name not in names]

    def rebuild(parts: list[Any]) -> Any:
        made = copy.copy(value)
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(made, name, part)  # also where the class is frozen
        return made

    mapping = isinstance(value, UserDict)  # its items lie in the attribute `data`, which nobody writes
    items = [("" if mapping and name == "data" else f".{name}", getattr(value, name)) for name in names]
    return Container(items=items, rebuild=rebuild)


def _holds_arrays(value: Any) -> bool:
    """Whether an object is a batch of a class of its own; modules, functions and metrics are none."""
    return not callable(value) and any(is_array(item) for item in getattr(value, "__dict__", {}).values())


def is_array(value: Any) -> bool:
    """Whether a value is a tensor, or numpy array, that has a first dimension."""
    return isinstance(value, Tensor | np.ndarray) and value.ndim > 0


def arrays(value: Any, path: str) -> Iterator[tuple[str, Tensor | np.ndarray]]:
    """Walk a value and yield each tensor or numpy array that has a first dimension.

    Args:
        value: Any value.
        path: How messages call it.

    Yields:
        The path of an array, and the array.

    Raises:
        MisconfigurationException: At a kind of value that has no rows to split or join.

    """
    refuse_without_rows(value, path)
    if is_array(value):
        yield path, value
    elif (container := open_container(value)) is not None:
        for accessor, item in container.items:
            yield from arrays(item, path + accessor)


def refuse_without_rows(value: Any, path: str) -> None:
    """Refuse what holds tensors in a form that cannot be cut between two rows.

    Raises:
        MisconfigurationException: With the path and the kind.

    """
    kind, remedy = "", "Give padded tensors, with a mask or the lengths beside them"
    if isinstance(value, PackedSequence):
        kind = "a PackedSequence"
        remedy += ", and pack them inside the step"
    elif isinstance(value, Distribution):
        kind, remedy = f"a {type(value).__name__} distribution", "Give its parameters as tensors"
    elif isinstance(value, Tensor) and value.is_nested:
        kind = "a nested tensor"
    elif isinstance(value, Tensor) and value.layout != torch.strided:
        kind, remedy = f"a tensor of layout {value.layout}", "Give a dense tensor, and convert it inside the step"
    if kind:
        raise MisconfigurationException(f"{path} is {kind}: it cannot be handled in microbatches. {remedy}.")
