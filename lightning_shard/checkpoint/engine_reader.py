"""Read tensors that lie in ranges of flat vectors in several files, as the DeepSpeed engine stores them."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from lightning_shard.checkpoint.boxes import Box, Held, Sizes, boxes_of_range, cut, overlap
from lightning_shard.checkpoint.plain_file import FileReader
from lightning_shard.checkpoint.progress import Progress
from lightning_shard.checkpoint.reading import Stored


@dataclass(frozen=True, kw_only=True)
class Range:
    """A range of a tensor's elements."""

    file: FileReader
    """Where it lies."""

    values: Tensor
    """Its elements, flat, as the file has them."""

    start: int
    """Its first element, in elements of the flattened tensor."""


class EngineReader:
    """Reads tensors that are offered as ranges."""

    def __init__(self) -> None:
        self._stored: dict[str, Stored] = {}
        self._ranges: dict[str, list[Range]] = {}

    def offer(self, key: str, shape: Sizes, ranges: list[Range]) -> None:
        """Let a tensor be read under ``key``."""
        self._stored[key] = Stored(shape=shape, dtype=ranges[0].values.dtype)
        self._ranges[key] = ranges

    @property
    def stored(self) -> Mapping[str, Stored]:
        """What can be read, by key."""
        return self._stored

    def blocks(self, key: str) -> Iterator[Box]:
        """A tensor's blocks, range by range, in new memory."""
        shape = self._stored[key].shape
        for part in self._ranges[key]:
            flat, place = part.file.real(part.values), 0
            for offsets, sizes in boxes_of_range(shape, part.start, part.start + flat.numel()):
                count = math.prod(sizes)
                yield Box(offsets=offsets, tensor=flat[place : place + count].view(sizes))
                place += count
            del flat  # before the next range is read

    def read(self, wanted: Mapping[str, Iterable[Held]], progress: Progress) -> None:
        """Read tensors into what this rank holds of them: their shapes must be the stored ones."""
        for key, holders in wanted.items():
            targets = [box for held in holders for box in held.boxes]
            for block in self.blocks(key):
                for box in targets:
                    own = (box.offsets, tuple(box.tensor.shape))
                    if (shared := overlap((block.offsets, tuple(block.tensor.shape)), own)) is not None:
                        cut(box.tensor, box.offsets, *shared).copy_(cut(block.tensor, block.offsets, *shared))
                        progress.advance(box.tensor.element_size() * math.prod(shared[1]))
