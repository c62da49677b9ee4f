"""What a rank holds of a tensor: boxes, at their places in the whole.

Every strategy cuts tensors in its own way: in rows (FSDP), in flat slices (ZeRO), by owner (pipelines). A box is a
rectangular block of the whole tensor, and all of these parts can be said as a few boxes, so that each rank reads and
writes its own, and no tensor is ever gathered.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

Offsets = tuple[int, ...]
Sizes = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Box:
    """A block of a tensor."""

    offsets: Offsets
    """Its first element's index in the whole tensor, in elements along each dimension."""

    tensor: Tensor
    """Its values, in its own shape; a view of the training's memory, so that writing to it changes the training."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """A tensor, and what this rank holds of it."""

    shape: Sizes
    """The whole tensor's shape."""

    dtype: torch.dtype
    """Its dtype."""

    boxes: tuple[Box, ...] = ()
    """This rank's blocks; none if it holds nothing."""

    writes: bool = True
    """Whether this rank's blocks are to be saved, as far as no other rank saves the same ones."""

    @classmethod
    def whole(cls, tensor: Tensor, writes: bool = True) -> "Held":
        """A tensor that this rank has as a whole."""
        box = Box(offsets=(0,) * tensor.dim(), tensor=tensor.detach())
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype, boxes=(box,), writes=writes)

    @classmethod
    def of_range(cls, shape: Sizes, flat: Tensor, start: int) -> "Held":
        """A tensor of which this rank has a range of elements.

        Args:
            shape: The whole tensor's shape.
            flat: The range, shape ``(elements,)``.
            start: The range's first element, in elements of the flattened tensor.

        """
        boxes, place = [], 0
        for offsets, sizes in boxes_of_range(shape, start, start + flat.numel()):
            count = math.prod(sizes)
            boxes.append(Box(offsets=offsets, tensor=flat.detach()[place : place + count].view(sizes)))
            place += count
        return cls(shape=shape, dtype=flat.dtype, boxes=tuple(boxes))

    @property
    def bytes(self) -> int:
        """Bytes of this rank's blocks."""
        return sum(box.tensor.numel() * box.tensor.element_size() for box in self.boxes)


def boxes_of_range(shape: Sizes, start: int, stop: int) -> Iterator[tuple[Offsets, Sizes]]:
    """Cut a range of a flattened tensor into blocks: at most two for each dimension, in the order of elements.

    Args:
        shape: The tensor's shape; ``()`` has one element.
        start: The first element.
        stop: Behind the last.

    Yields:
        Offsets and sizes of each block.

    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows that lie wholly in the range
    if first > last:  # the range lies inside one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if last * row < stop:
        yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sizes, row: int, start: int, stop: int) -> Iterator[tuple[Offsets, Sizes]]:
    for offsets, sizes in boxes_of_range(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)


def overlap(first: tuple[Offsets, Sizes], second: tuple[Offsets, Sizes]) -> tuple[Offsets, Sizes] | None:
    """The block that two blocks of one tensor share, or ``None``."""
    offsets = tuple(map(max, first[0], second[0]))
    ends = tuple(min(a + n, b + m) for a, n, b, m in zip(first[0], first[1], second[0], second[1], strict=True))
    sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
    return (offsets, sizes) if all(size > 0 for size in sizes) else None


def cut(tensor: Tensor, own: Offsets, offsets: Offsets, sizes: Sizes) -> Tensor:
    """The block at ``offsets`` of the whole tensor, out of ``tensor``, which lies at ``own``."""
    for dim, (outer, inner, size) in enumerate(zip(own, offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, inner - outer, size)
    return tensor


def runs(shape: Sizes, offsets: Offsets, sizes: Sizes) -> Iterator[tuple[int, int, Offsets]]:
    """The runs of neighbouring elements that a block takes in the flattened tensor.

    Yields:
        A run's first element in the whole, its number of elements, and the index of its first element in the block.

    """
    if 0 in sizes:
        return
    inner = len(shape)  # dimensions from here on are whole in the block, so that they lie in one run
    while inner > 0 and (inner == len(shape) or sizes[inner] == shape[inner]):
        inner -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = math.prod(sizes[inner:])
    for outer in product(*(range(size) for size in sizes[:inner])):
        index = (*outer, *(0,) * (len(shape) - inner))
        start = sum((offset + place) * stride for offset, place, stride in zip(offsets, index, strides, strict=True))
        yield start, length, index
