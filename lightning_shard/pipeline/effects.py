"""What a step leaves in attributes of the LightningModule: the last stage has seen it all, the others copy it."""

import itertools
import pickle
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_shard.pipeline.microbatch import join_outputs
from lightning_shard.pipeline.structure import map_leaves

_LIGHTNING = frozenset(vars(pl.LightningModule())) | {"log"}


class Effects:
    """Compares the attributes of a LightningModule before and after a step.

    Args:
        module: The module.
        device: Where tensors of other ranks are put.

    """

    def __init__(self, module: "pl.LightningModule", device: torch.device) -> None:
        self._module = module
        self._device = device
        self._before: dict[str, Any] = {}
        self._lengths: list[dict[str, int]] = []
        self._order: list[int] = []
        self._warned: set[str] = set()

    def begin(self) -> None:
        """A step is about to run."""
        self._before = {name: _shallow(value) for name, value in self._attributes()}
        self._lengths = []
        self._order = []

    def after_microbatch(self, number: int) -> None:
        """The step has run on a microbatch, to its end."""
        self._order.append(number)
        self._lengths.append({name: len(value) for name, value in self._attributes() if isinstance(value, list)})

    def join_lists(self, rows: Sequence[int]) -> None:
        """Let lists to which the step appends have one item a batch, as one process would.

        Args:
            rows: Rows of each microbatch.

        """
        for name, value in list(self._attributes()):
            before = self._before.get(name)
            if not isinstance(value, list) or not isinstance(before, list) or len(self._lengths) < 2:
                continue
            ends = [len(before), *(lengths.get(name, -1) for lengths in self._lengths)]
            counts = {end - start for start, end in itertools.pairwise(ends)}
            if len(counts) > 1 or not (count := counts.pop()) > 0 or not _grew(before, value, from_empty=True):
                continue
            parts = [value[start:end] for start, end in itertools.pairwise(ends)]
            ordered = [parts[self._order.index(number)] for number in range(len(parts))]
            with suppress(MisconfigurationException):  # items that are no parts of a whole stay as they are
                value[len(before) :] = [join_outputs([part[i] for part in ordered], rows) for i in range(count)]

    def changed(self) -> dict[str, tuple[int, Any]]:
        """What the step changed: for each attribute how many first items of a list are as before, and the rest."""
        changes: dict[str, tuple[int, Any]] = {}
        for name, value in self._attributes():
            before = self._before.get(name, _NONE)
            if _same(before, value):
                continue
            kept = len(before) if _grew(before, value) else 0
            content = map_leaves(value[kept:] if kept else value, Tensor, lambda tensor: tensor.detach())
            if self._can_be_sent(name, content):
                changes[name] = (kept, content)
        return changes

    def apply(self, changes: dict[str, tuple[int, Any]]) -> None:
        """Make the attributes of this rank what they are on the last stage."""
        for name, (kept, content) in changes.items():
            content = map_leaves(content, Tensor, lambda tensor: tensor.to(self._device))
            own = getattr(self._module, name, None)
            if kept and isinstance(own, list):
                own[:] = [*_as_before(self._before.get(name), kept), *content]
            elif isinstance(own, list) and isinstance(content, list):
                own[:] = content  # others may hold the same list
            else:
                setattr(self._module, name, content)

    def _attributes(self) -> Any:
        for name, value in vars(self._module).items():
            if name not in _LIGHTNING and not isinstance(value, nn.Module | nn.Parameter):
                yield name, value

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


class _None:
    """No attribute was there."""


_NONE = _None()


def _shallow(value: Any) -> Any:
    return value.copy() if isinstance(value, list | dict | set | deque) else value


def _same(before: Any, value: Any) -> bool:
    if isinstance(value, list | tuple | deque) and type(before) is type(value):
        return len(before) == len(value) and all(one is other for one, other in zip(before, value, strict=True))
    if isinstance(value, dict) and isinstance(before, dict):
        return before.keys() == value.keys() and all(before[key] is value[key] for key in value)
    if isinstance(value, int | float | str | bool):
        return type(before) is type(value) and before == value
    if isinstance(value, set) and isinstance(before, set):
        return before == value
    return before is value


def _grew(before: Any, value: Any, from_empty: bool = False) -> bool:
    return (
        isinstance(before, list)
        and isinstance(value, list)
        and (0 if from_empty else 1) <= len(before) <= len(value)
        and all(one is other for one, other in zip(before, value, strict=False))
    )


def _as_before(before: Any, kept: int) -> list[Any]:
    return list(before[:kept]) if isinstance(before, list) else []
