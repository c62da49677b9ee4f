"""Look at a checkpoint of any kind: who wrote it and what it holds. No tensor is read, and no code of it is run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_shard.checkpoint.outlines import Found, find
from lightning_shard.checkpoint.places import place_of


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """A tensor of a checkpoint."""

    name: str
    """Its name; of an optimizer's state the parameter's name (a plain file has numbers) and the state's."""

    shape: tuple[int, ...]
    """Its shape."""

    dtype: str
    """Its dtype, such as ``"float32"``."""

    bytes: int
    """Bytes that it takes."""


@dataclass(frozen=True, kw_only=True)
class OptimizerRow:
    """An optimizer of a checkpoint."""

    kind: str
    """Its class; ``""`` where the checkpoint does not say."""

    groups: list[dict[str, Any]]
    """Of each parameter group the hyper-parameters, and the names (or numbers) of its parameters as ``"params"``."""

    states: dict[str, int]
    """Names of the states, and how many parameters have each."""

    bytes: int
    """Bytes of all states."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What a checkpoint holds. ``str()`` of it is a table."""

    path: str
    """The checkpoint."""

    kind: str
    """``"portable"``; ``"file"`` for one plain Lightning file or state dict; ``"sharded"`` for a folder of Lightning's
    FSDP and ModelParallel strategies; ``"engine"`` for one of the DeepSpeed engine."""

    facts: dict[str, Any]
    """Who wrote it and when, epoch and step, as far as it says so."""

    weights: list[TensorRow]
    """Parameters and buffers; tied ones once."""

    tied: dict[str, str]
    """Further names of tied weights, and the name in `weights`."""

    optimizers: list[OptimizerRow]
    """Its optimizers; none for weights alone."""

    other: list[str] = field(default_factory=list)
    """Other entries: those of Lightning, and what callbacks added."""

    pickled: list[str] = field(default_factory=list)
    """What is no plain data, and only read where it is trusted."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(row.bytes for row in self.weights)

    @property
    def elements(self) -> int:
        """Number of elements of all weights."""
        return sum(torch.Size(row.shape).numel() for row in self.weights)

    @property
    def bytes(self) -> int:
        """Bytes of all weights and optimizer states."""
        return self.weight_bytes + sum(row.bytes for row in self.optimizers)

    def __str__(self) -> str:
        facts = {"kind": self.kind, **self.facts}
        lines = [self.path, *(f"  {key:<12} {value}" for key, value in facts.items() if value not in (None, "", {}))]
        lines += ["", *_table(self.weights, self.tied)]
        lines.append(
            f"  {len(self.weights)} weights, {self.elements:,} elements, {size_in_words(self.weight_bytes)}"
            f"{f'; tied to them: {len(self.tied)}' if self.tied else ''}"
        )
        for number, row in enumerate(self.optimizers):
            lines += ["", *_optimizer(number, row)]
        if not self.optimizers:
            lines += ["", "  no optimizer states: weights alone"]
        if self.other:
            lines += ["", f"  besides: {', '.join(self.other)}"]
        if self.pickled:
            lines += ["", f"  no plain data, only read where it is trusted: {', '.join(self.pickled)}"]
        return "\n".join([*lines, "", f"  {size_in_words(self.bytes)} in all"])


def inspect(path: str | Path) -> Inspection:
    """Say what a checkpoint holds.

    Args:
        path: A checkpoint of any kind, as a path or URL.

    Returns:
        Who wrote it, its weights and its optimizers.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If it is damaged.

    """
    place = place_of(path)
    found = find(place)
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    weights = []
    for name, tensor in found.weights.items():
        owner = first.setdefault(tensor.same, name)
        if owner != name:
            tied[name] = owner
        else:
            weights.append(_row(name, tensor.shape, tensor.dtype))
    return Inspection(
        path=str(place),
        kind=found.kind,
        facts=found.facts,
        weights=weights,
        tied=tied,
        optimizers=[_optimizer_row(found, number) for number in range(len(found.optimizers))],
        other=found.other,
        pickled=found.pickled,
    )


def _row(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> TensorRow:
    size = torch.Size(shape).numel() * dtype.itemsize
    return TensorRow(name=name, shape=shape, dtype=str(dtype).removeprefix("torch."), bytes=size)


def _optimizer_row(found: Found, number: int) -> OptimizerRow:
    optimizer = found.optimizers[number]
    counts: dict[str, int] = {}
    for names in optimizer.states.values():
        for name in names:
            counts[name] = counts.get(name, 0) + 1
    return OptimizerRow(kind=optimizer.kind, groups=optimizer.groups, states=counts, bytes=optimizer.bytes)


def _table(weights: Iterable[TensorRow], tied: Mapping[str, str]) -> list[str]:
    rows = [(row.name, " x ".join(map(str, row.shape)) or "()", row.dtype, size_in_words(row.bytes)) for row in weights]
    rows += [(alias, f"tied to {name}", "", "") for alias, name in tied.items()]
    head = ("name", "shape", "dtype", "size")
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(4)]
    return [
        f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]:>{widths[3]}}".rstrip()
        for row in [head, *rows]
    ]


def _optimizer(number: int, row: OptimizerRow) -> list[str]:
    states = ", ".join(f"{state} of {count}" for state, count in row.states.items()) or "none yet"
    kind, size = row.kind or "class not known", size_in_words(row.bytes)
    lines = [f"  optimizer {number}: {kind}, {size}; states: {states} parameters"]
    for place, group in enumerate(row.groups):
        known = ", ".join(f"{key}={group[key]}" for key in ("lr", "weight_decay", "betas", "momentum") if key in group)
        lines.append(f"    group {place}: {len(group['params'])} parameters{f', {known}' if known else ''}")
    return lines


def size_in_words(count: int) -> str:
    """Bytes in words, by powers of 1024."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
