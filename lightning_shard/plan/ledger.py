"""A ledger of memory: what was allocated and freed, when, and what each piece turned out to be.

Pieces are told apart afterwards. While a step runs it is not known whether a tensor is an activation or a temporary;
when it is over, it is: the entries are read again from the start, with the kinds known, and the peak is split by them.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shard._compat.simulating import (
    in_backward,
    shapes_computed,
    storage_of,
    watch_resizing,
    when_freed,
)
from lightning_shard.pipeline.absent import AbsentTensor
from lightning_shard.plan.results import Memory
from lightning_shard.plan.workspaces import Workspaces
from lightning_shard.telemetry.traffic import TrafficCounter

Kind = Literal["parameters", "gradients", "optimizer", "activations", "gathered", "buffers", "temporaries"]

KINDS: tuple[Kind, ...] = get_args(Kind)
"""All of them, in order."""

Moments = list[tuple[int, ...]]
"""Bytes of each of the kinds, at one moment after the other."""

START = "start"
"""Name of the segment with which a step begins."""

_GATHERS = frozenset({"c10d::_allgather_base_", "c10d::allgather_", "c10d::allgather_into_tensor_coalesced_"})


@dataclass(eq=False)
class Piece:
    """One storage."""

    size: int
    """Bytes, as it is now."""

    kind: Kind | None = None
    """What it is, if that is known for sure."""

    in_forward: bool = True
    """Whether it was made outside of a backward and of the optimizer's step."""

    kept: bool = False
    """Whether a backward freed it."""

    alive: bool = True
    """Whether it is still there."""

    @property
    def guess(self) -> Kind:
        """What it must be if nobody said: forward keeps for backward what backward frees."""
        return "activations" if self.in_forward and self.kept else "temporaries"

    watch: Any = field(default=None, repr=False)
    """Tells when it is freed."""


@dataclass(frozen=True)
class Entry:
    """A change of memory."""

    piece: Piece
    """Whose."""

    change: int
    """Bytes more, or less."""


class Ledger(TrafficCounter):
    """Keeps book while it is active, of fake tensors as of real ones; counts collectives, too.

    Attributes:
        optimizing: Set while an optimizer steps: what is made then is none of the activations.

    Args:
        granularity: Bytes to whose multiple the device's allocator rounds: 512 for CUDA's, 1 for the CPU's.
        workspaces: What operators take for themselves; ``None`` to leave that out.

    """

    def __init__(self, granularity: int = 1, workspaces: Workspaces | None = None) -> None:
        super().__init__()
        self._granularity = granularity
        self._workspaces = workspaces
        self._pieces: dict[int, Piece] = {}
        self._entries: list[Entry | str] = []
        self._paused = 0
        self.optimizing = False
        self._stack = ExitStack()

    def __enter__(self) -> "Ledger":
        """Begin."""
        self._stack.enter_context(watch_resizing(self._resized))
        self._stack.enter_context(shapes_computed(self.paused))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is entered."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def declare(self, tensors: Iterable[Any], kind: Kind) -> None:
        """Say what tensors are; those that were not seen when they were made are entered now."""
        for tensor in tensors:
            for plain in _plain(tensor):
                piece = self._piece_of(plain)
                if piece is not None:
                    piece.kind = kind

    def begin_step(self) -> None:
        """Forget what was; what is there now is there at the step's start."""
        for piece in self._pieces.values():
            piece.kind = piece.kind or "buffers"  # what outlives a step and is nothing else
        self._entries = [Entry(piece, piece.size) for piece in self._pieces.values() if piece.alive and piece.size]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let an operator run, and enter what it made."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._paused or result is NotImplemented:
            return result
        for tensor in _tensors(result):
            self._piece_of(tensor)
        if self._workspaces is not None and (size := self._workspaces.of(func, args, kwargs or {})):
            inside = Piece(size=size, kind="temporaries")
            self._entries += [Entry(inside, size), Entry(inside, -size)]
        if func.namespace == "c10d" and func._schema.name in _GATHERS:
            self.declare(_tensors(args[0]), "gathered")
        return result

    def _piece_of(self, tensor: Tensor) -> Piece | None:
        found = storage_of(tensor)
        if found is None:
            return None
        key, storage = found
        piece = self._pieces.get(key)
        if piece is None:
            piece = Piece(size=self._rounded(storage.nbytes()), in_forward=not self.optimizing and not in_backward())
            piece.watch = when_freed(storage, lambda: self._freed(key, piece))
            self._pieces[key] = piece
            if piece.size:
                self._entries.append(Entry(piece, piece.size))
        return piece

    def _freed(self, key: int, piece: Piece) -> None:
        if piece.size:
            self._entries.append(Entry(piece, -piece.size))
        piece.alive = False
        piece.kept = in_backward()
        if self._pieces.get(key) is piece:
            del self._pieces[key]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        piece = self._pieces.get(int(storage._cdata))
        if piece is None:
            return  # not seen yet: it is entered with its size when an operator returns it
        size = self._rounded(storage.nbytes())
        if size != piece.size:
            self._entries.append(Entry(piece, size - piece.size))
            piece.size, piece.kind = size, piece.kind or "gathered"

    def _rounded(self, size: int) -> int:
        return -(-size // self._granularity) * self._granularity

    def mark(self, segment: str) -> None:
        """A new segment of the step begins; its name may come again."""
        self._entries.append(segment)

    def moments(self) -> dict[str, Moments]:
        """For each segment of the step the memory by kind after each of its changes."""
        now = dict.fromkeys(KINDS, 0)
        segment = START
        found: dict[str, Moments] = {START: []}
        for entry in self._entries:
            if isinstance(entry, str):
                segment = entry
                found.setdefault(segment, []).append(tuple(now.values()))
            else:
                now[entry.piece.kind or entry.piece.guess] += entry.change
                found[segment].append(tuple(now.values()))
        return found

    def held(self) -> Memory:
        """The memory that is held now, by kind."""
        now: dict[str, int] = {}
        for piece in self._pieces.values():
            kind = piece.kind or "temporaries"
            now[kind] = now.get(kind, 0) + piece.size
        return Memory(**now)


def peak(moments: Sequence[Sequence[float]]) -> Memory:
    """The memory at the moment when it is most."""
    most = max(moments, key=sum, default=(0,) * len(KINDS))
    return Memory(**dict(zip(KINDS, most, strict=True)))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if not isinstance(value, AbsentTensor) and not value.is_meta:  # shapes without memory
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _plain(value: Any) -> Iterator[Tensor]:
    for tensor in _tensors(value):
        yield tensor.to_local() if isinstance(tensor, DTensor) else tensor
