"""Tensors on their way from one checkpoint to another, a few megabytes at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box, boxes_of_range, runs
from lightning_shard.checkpoint.progress import Progress
from lightning_shard.checkpoint.reading import Reader, Stored
from lightning_shard.checkpoint.whole import move_to, partial_of, remove

PIECE = 16 * 1024**2
"""Bytes of a piece. Only the stored block that it is cut from is in memory besides."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A tensor of a checkpoint, to be read in pieces."""

    reader: Reader
    """Of the checkpoint that it is in."""

    key: str
    """The reader's key."""

    dtype: torch.dtype
    """The dtype that is to be written."""

    @property
    def stored(self) -> Stored:
        """Shape and dtype as they are to be written."""
        return Stored(shape=self.reader.stored[self.key].shape, dtype=self.dtype)

    @property
    def bytes(self) -> int:
        """Bytes that are to be written."""
        return torch.Size(self.stored.shape).numel() * self.dtype.itemsize

    def pieces(self) -> Iterator[Box]:
        """Blocks of at most `PIECE` bytes, contiguous, in the dtype that is to be written."""
        blocks = self.reader.blocks(self.key)
        while (block := next(blocks, None)) is not None:
            yield from self._cut(block)
            # The next block is read when this one's memory is free again.
            del block

    def _cut(self, block: Box) -> Iterator[Box]:
        shape = tuple(block.tensor.shape)
        flat = block.tensor.reshape(-1)
        if not flat.numel():
            yield Box(offsets=block.offsets, tensor=block.tensor.to(self.dtype))
        step = max(1, PIECE // max(flat.element_size(), self.dtype.itemsize))
        for start in range(0, flat.numel(), step):
            place = start
            for inner, sizes in boxes_of_range(shape, start, min(start + step, flat.numel())):
                count = torch.Size(sizes).numel()
                offsets = tuple(outer + own for outer, own in zip(block.offsets, inner, strict=True))
                yield Box(offsets=offsets, tensor=flat[place : place + count].view(sizes).to(self.dtype))
                place += count


def total_bytes(streams: "Iterator[Stream] | list[Stream]") -> int:
    """Bytes of all tensors that are to be written."""
    return sum(stream.bytes for stream in streams)


def write_flat(stream: Stream, file: IO[bytes], place: int, progress: Progress) -> None:
    """Write a tensor's elements in their order.

    Args:
        stream: The tensor.
        file: Where to.
        place: Where in the file its first element goes, in bytes.
        progress: Is told of the bytes.

    """
    size = stream.dtype.itemsize
    for piece in stream.pieces():
        content, done = bytes_of(piece.tensor), 0
        for start, length, _ in runs(stream.stored.shape, piece.offsets, tuple(piece.tensor.shape)):
            file.seek(place + start * size)
            file.write(content[done : done + length * size])
            done += length * size
        progress.advance(done)
        del content, piece


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's memory, in the order of elements."""
    return memoryview(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary name, under which a file is written that then appears at ``path``, whole or not at all."""
    partial = partial_of(path)
    partial.parent.mkdir(parents=True, exist_ok=True)
    remove(partial)  # left by a run that was killed
    try:
        yield partial
        with partial.open("r+b") as file:
            os.fsync(file.fileno())
        move_to(partial, path)
    finally:
        partial.unlink(missing_ok=True)
