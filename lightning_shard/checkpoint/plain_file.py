"""Read one file that `torch.save` wrote, tensor by tensor: what is not asked for is never in memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from lightning_shard._compat.dcp import fake_mode, file_offset, is_fake
from lightning_shard.checkpoint.boxes import Box, Held, cut, runs
from lightning_shard.checkpoint.places import Place
from lightning_shard.checkpoint.plain import load_plain
from lightning_shard.checkpoint.progress import Progress
from lightning_shard.checkpoint.reading import Stored


class FileReader:
    """A plain checkpoint file.

    Args:
        place: The file.
        trusted: Whether it may run code.

    Raises:
        MisconfigurationException: If it needs pickle, or is no checkpoint.

    """

    def __init__(self, place: Place, trusted: bool) -> None:
        self._place = place
        self.contents: dict[str, Any]
        with place.open() as file:
            zipped = file.read(2) == b"PK"
            file.seek(0)
            if zipped:
                with fake_mode():
                    self.contents = load_plain(file, str(place), trusted)
            else:  # an older form, which can only be read as a whole
                self.contents = load_plain(file, str(place), trusted)
        self._tensors: dict[str, Tensor] = {}

    def offer(self, key: str, tensor: Tensor) -> None:
        """Let a tensor of the contents be read under ``key``."""
        self._tensors[key] = tensor

    @property
    def stored(self) -> Mapping[str, Stored]:
        """What can be read, by key."""
        return {key: Stored(shape=tuple(each.shape), dtype=each.dtype) for key, each in self._tensors.items()}

    def blocks(self, key: str) -> Iterator[Box]:
        """A tensor as one block, in new memory."""
        tensor = self._tensors[key]
        yield Box(offsets=(0,) * tensor.dim(), tensor=self.real(tensor))

    def read(self, wanted: Mapping[str, Iterable[Held]], progress: Progress) -> None:
        """Read tensors into what this rank holds of them: their shapes must be the stored ones."""
        with self._place.open() as file:
            for key, holders in wanted.items():
                for box in (box for held in holders for box in held.boxes):
                    self._read_box(file, self._tensors[key], box)
                    progress.advance(box.tensor.numel() * box.tensor.element_size())

    def real(self, tensor: Tensor) -> Tensor:
        """A tensor of the contents with its values."""
        if not is_fake(tensor):
            return tensor.detach().clone()
        with self._place.open() as file:
            if tensor.is_contiguous():
                return _elements(file, tensor, 0, tensor.numel()).view(tensor.shape)
            return _whole(file, tensor)

    def real_everywhere(self, value: Any) -> Any:
        """A part of the contents with the values of all of its tensors."""
        return map_tensors(value, self.real)

    def _read_box(self, file: Any, tensor: Tensor, box: Box) -> None:
        sizes = tuple(box.tensor.shape)
        if is_fake(tensor) and tensor.is_contiguous() and box.tensor.is_contiguous():
            flat = box.tensor.view(-1)
            place = 0
            for start, length, _ in runs(tuple(tensor.shape), box.offsets, sizes):
                flat[place : place + length].copy_(_elements(file, tensor, start, length))
                place += length
            return
        whole = _whole(file, tensor) if is_fake(tensor) else tensor
        box.tensor.copy_(cut(whole, (0,) * whole.dim(), box.offsets, sizes))


def _elements(file: Any, tensor: Tensor, start: int, length: int) -> Tensor:
    """Elements of a contiguous tensor, flat."""
    return _from_storage(file, tensor, int(tensor.storage_offset()) + start, length)


def _whole(file: Any, tensor: Tensor) -> Tensor:
    """A tensor of whatever strides."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return _from_storage(file, tensor, 0, count).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _from_storage(file: Any, tensor: Tensor, start: int, length: int) -> Tensor:
    values = torch.empty(length, dtype=tensor.dtype, device="cpu")
    if not length:
        return values
    file.seek(file_offset(tensor) + start * tensor.element_size())
    view = values.view(torch.uint8).numpy().data
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise ValueError("the file ends in the middle of a tensor")
        done += count
    return values


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """A nested value with ``function`` applied to each tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        mapped = {key: map_tensors(each, function) for key, each in value.items()}
        if type(value) is dict:
            return mapped
        same = copy(value)
        same.update(mapped)
        return same
    if type(value) in (list, tuple):
        return type(value)(map_tensors(each, function) for each in value)
    return value
