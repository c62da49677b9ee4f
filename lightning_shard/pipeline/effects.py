"""What a step leaves in attributes of the LightningModule: the last stage has seen it all, the others copy it."""

import itertools
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_shard._compat.recording import version
from lightning_shard.pipeline.microbatch import join_outputs
from lightning_shard.pipeline.structure import map_leaves

_LIGHTNING = frozenset(vars(pl.LightningModule())) | {"log"}

Path = tuple[Any, ...]
"""The name of an attribute, and for an entry of a dict its key."""


class Effects:
    """Compares the attributes of a LightningModule before and after a step.

    Args:
        module: The module.
        device: Where tensors of other ranks are put.

    """

    def __init__(self, module: "pl.LightningModule", device: torch.device) -> None:
        self._module = module
        self._device = device
        self._before: dict[Path, Any] = {}
        self._marks: dict[Path, Any] = {}
        self._lengths: list[dict[Path, int]] = []
        self._order: list[int] = []
        self._warned: set[str] = set()

    def begin(self) -> None:
        """A step is about to run."""
        self._before = {path: _shallow(value) for path, value in self._places()}
        self._marks = {path: _mark(value) for path, value in self._places()}
        self._lengths = []
        self._order = []

    def after_microbatch(self, number: int) -> None:
        """The step has run on a microbatch, to its end."""
        self._order.append(number)
        self._lengths.append({path: len(value) for path, value in self._lists()})

    def join_lists(self, rows: Sequence[int]) -> None:
        """Let lists to which the step appends have one item a batch, as one process would.

        Args:
            rows: Rows of each microbatch.

        """
        for path, value in list(self._lists()):
            before = self._before.get(path, [])
            if len(self._lengths) < 2 or not isinstance(before, list):
                continue
            ends = [len(before), *(lengths.get(path, -1) for lengths in self._lengths)]
            counts = {end - start for start, end in itertools.pairwise(ends)}
            if len(counts) > 1 or not (count := counts.pop()) > 0 or not _grew(before, value, from_empty=True):
                continue
            parts = [value[start:end] for start, end in itertools.pairwise(ends)]
            ordered = [parts[self._order.index(number)] for number in range(len(parts))]
            with suppress(MisconfigurationException):  # items that are no parts of a whole stay as they are
                value[len(before) :] = [join_outputs([part[i] for part in ordered], rows) for i in range(count)]

    def changed(self) -> dict[Path, tuple[int, Any]]:
        """What the step changed: for each place how many first items of a list are as before, and the rest."""
        changes: dict[Path, tuple[int, Any]] = {}
        there = dict(self._places())
        for path in self._before.keys() - there.keys():  # a key or attribute is gone
            if hasattr(self._module, path[0]):
                self._note(changes, path[:1], 0, getattr(self._module, path[0]))
        for path, value in there.items():
            if path[:1] not in changes and not (path in self._marks and self._marks[path] == _mark(value)):
                before = self._before.get(path)
                kept = len(before) if isinstance(before, list) and _grew(before, value) else 0
                self._note(changes, path, kept, value[kept:] if kept else value)
        return changes

    def _note(self, changes: dict[Path, tuple[int, Any]], path: Path, kept: int, value: Any) -> None:
        content = map_leaves(value, Tensor, lambda tensor: tensor.detach())
        if self._can_be_sent(str(path[0]), content):
            changes[path] = (kept, content)

    def apply(self, changes: dict[Path, tuple[int, Any]]) -> None:
        """Make these places on this rank what they are on the last stage; the others keep what they have."""
        for path, (kept, content) in changes.items():
            content = map_leaves(content, Tensor, lambda tensor: tensor.to(self._device))
            name, *key = path
            holder: Any = vars(self._module)
            if key:
                if not isinstance(holder.get(name), dict):
                    holder[name] = {}
                holder, name = holder[name], key[0]
            own = holder.get(name)
            if kept and isinstance(own, list):
                own[:] = [*_as_before(self._before.get(path), kept), *content]
            elif isinstance(own, list) and isinstance(content, list):
                own[:] = content  # others may hold the same list
            elif _is_object(own) and type(own) is type(content):
                vars(own).update(vars(content))  # others may hold the same object
            else:
                holder[name] = content

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        for name, value in vars(self._module).items():
            ours = name.startswith("_lightning_shard")
            if name not in _LIGHTNING and not ours and not isinstance(value, nn.Module | nn.Parameter):
                yield name, value

    def _places(self) -> Iterator[tuple[Path, Any]]:
        """Attributes, and the entries of those that are dicts."""
        for name, value in self._attributes():
            if isinstance(value, dict) and value:
                yield from (((name, key), item) for key, item in value.items())
            else:
                yield (name,), value

    def _lists(self) -> Iterator[tuple[Path, list[Any]]]:
        yield from ((path, value) for path, value in self._places() if isinstance(value, list))

    def _can_be_sent(self, name: str, content: Any) -> bool:
        try:
            pickle.dumps(map_leaves(content, Tensor, lambda tensor: None))
        except Exception as error:
            if name not in self._warned:
                self._warned.add(name)
                rank_zero_warn(
                    f"The step changes self.{name}, which cannot be sent to the other ranks of the pipeline"
                    f" ({type(error).__name__}: {error}): they keep their own."
                )
            return False
        return True


def _is_object(value: Any) -> bool:
    """Whether a value is an object of the user's own class."""
    known = isinstance(value, dict | list | tuple | set | deque | Tensor)
    return hasattr(value, "__dict__") and not known and not callable(value)


def _shallow(value: Any) -> Any:
    return value.copy() if isinstance(value, list | dict | set | deque) else value


def _mark(value: Any, depth: int = 4) -> Any:
    """What tells whether a value, or something inside of it, was changed."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return id(value), version(value)
    if not depth:
        return id(value)
    if isinstance(value, list | tuple | deque):
        # Of what is outermost only identities: such a list may have grown for a whole epoch.
        inside = [id(item) for item in value] if depth == 4 else [_mark(item, depth - 1) for item in value]
        return type(value), inside
    if isinstance(value, dict):
        return type(value), [(key, _mark(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, set):
        return frozenset(value)
    if _is_object(value):
        return id(value), _mark(vars(value), depth - 1)
    return id(value)


def _grew(before: Any, value: Any, from_empty: bool = False) -> bool:
    return (
        isinstance(before, list)
        and isinstance(value, list)
        and (0 if from_empty else 1) <= len(before) <= len(value)
        and all(one is other for one, other in zip(before, value, strict=False))
    )


def _as_before(before: Any, kept: int) -> list[Any]:
    return list(before[:kept]) if isinstance(before, list) else []
