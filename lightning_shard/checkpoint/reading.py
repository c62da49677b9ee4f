"""Read blocks of tensors out of a folder of shards, each stored block once, straight into the places they belong to."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from lightning_shard._compat.dcp import read_metadata
from lightning_shard.checkpoint.boxes import Box, Held, Offsets, Sizes, cut, overlap
from lightning_shard.checkpoint.format import METADATA
from lightning_shard.checkpoint.places import Below, Place
from lightning_shard.checkpoint.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in a checkpoint."""

    shape: Sizes
    """Its shape."""

    dtype: torch.dtype
    """Its dtype."""


class Reader(Protocol):
    """Something that tensors can be read from."""

    @property
    def stored(self) -> Mapping[str, Stored]:
        """What there is, by key."""

    def blocks(self, key: str) -> Iterator[Box]:
        """A tensor's blocks as they are stored, one at a time, in new memory."""

    def read(self, wanted: Mapping[str, Iterable[Held]], progress: Progress) -> None:
        """Read tensors into what this rank holds of them."""


class ShardReader:
    """Reads a folder that torch.distributed.checkpoint wrote, whoever asked it to.

    Args:
        place: The checkpoint.
        data: The folder of the shards, below it.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file is damaged or shorter than it was written. Both name a tensor that was in it.

    """

    def __init__(self, place: Place, data: str = ".") -> None:
        self._place, self._data = place, data
        try:
            with place.open(self._file(METADATA)) as file:
                self._metadata: Metadata = read_metadata(file)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ValueError(f"{place}: {METADATA} is damaged: {error}") from error
        self.other: list[str] = []
        self._stored: dict[str, Stored] = {}
        for key, entry in self._metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self._stored[key] = Stored(shape=tuple(entry.size), dtype=entry.properties.dtype)
            else:
                self.other.append(key)

    @property
    def stored(self) -> Mapping[str, Stored]:
        """What tensors there are, by key."""
        return self._stored

    def nested_path(self, key: str) -> tuple[Any, ...]:
        """Where the entry was in the nested dict that was saved."""
        return tuple((self._metadata.planner_data or {}).get(key, (key,)))

    def _file(self, name: str) -> str:
        return name if self._data == "." else f"{self._data}/{name}"

    def check_files(self) -> None:
        """Look whether all files are there and as long as they were written, without reading them."""
        needed: dict[str, tuple[int, str]] = {}
        for index, info in self._metadata.storage_data.items():
            end = info.offset + info.length
            if end > needed.get(info.relative_path, (-1, ""))[0]:
                needed[info.relative_path] = (end, index.fqn)
        for name, (length, key) in sorted(needed.items()):
            if not self._place.exists(self._file(name)):
                raise FileNotFoundError(
                    f"{self._place} is not whole: {name} is missing, which holds a part of {key!r}."
                )
            found = self._place.size(self._file(name))
            if found < length:
                raise ValueError(
                    f"{self._place} is not whole: {name} has {found} bytes of {length}, which cuts off a part of"
                    f" {key!r}."
                )

    def blocks(self, key: str) -> Iterator[Box]:
        """A tensor's blocks as they are stored, one at a time, in new memory."""
        for _, offsets, index in self._chunks(key):
            yield Box(offsets=offsets, tensor=self._load(index))

    def read(self, wanted: Mapping[str, Iterable[Held]], progress: Progress) -> None:
        """Read tensors into what this rank holds of them: their shapes must be the stored ones."""
        copies: dict[MetadataIndex, list[tuple[Tensor, Offsets, Offsets, Offsets, Sizes]]] = defaultdict(list)
        for key, holders in wanted.items():
            targets = [box for held in holders for box in held.boxes]
            for sizes, offsets, index in self._chunks(key):
                for box in targets:
                    if (shared := overlap((offsets, sizes), (box.offsets, tuple(box.tensor.shape)))) is not None:
                        copies[index].append((box.tensor, box.offsets, offsets, *shared))
        places = self._metadata.storage_data
        order = sorted(copies, key=lambda index: (places[index].relative_path, places[index].offset))
        with _Files(self._place) as files:
            for index in order:
                stored = self._load(index, files)
                for target, own, offsets, start, sizes in copies[index]:
                    cut(target, own, start, sizes).copy_(cut(stored, offsets, start, sizes))
                    progress.advance(target.element_size() * torch.Size(sizes).numel())
                del stored  # before the next one is loaded

    def read_bytes(self, key: str) -> bytes:
        """An entry that is no tensor, as torch saved it."""
        info = self._metadata.storage_data[MetadataIndex(key)]
        with self._place.open(self._file(info.relative_path)) as file:
            file.seek(info.offset)
            return file.read(info.length)

    def _chunks(self, key: str) -> list[tuple[Sizes, Offsets, MetadataIndex]]:
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        found = []
        for number, chunk in enumerate(entry.chunks):
            index = MetadataIndex(key, chunk.offsets, number)
            if index not in self._metadata.storage_data:  # a tensor that was saved as a whole
                index = MetadataIndex(key)
            found.append((tuple(chunk.sizes), tuple(chunk.offsets), index))
        return found

    def _load(self, index: MetadataIndex, files: "_Files | None" = None) -> Tensor:
        info = self._metadata.storage_data[index]
        name = self._file(info.relative_path)
        try:
            if files is not None:
                return _load(files.open(name), info)
            with self._place.open(name) as file:
                return _load(file, info)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ValueError(f"{self._place}: the part of {index.fqn!r} in {name} is damaged: {error}") from error


def _load(file: Any, info: Any) -> Tensor:
    if getattr(info, "transform_descriptors", None):
        raise ValueError("it was compressed or encrypted by an extension, which is not supported")
    loaded = torch.load(Below(file, info.offset, info.length), map_location="cpu", weights_only=True)  # type: ignore[arg-type]
    assert isinstance(loaded, Tensor)
    return loaded


class _Files:
    """The last file that was opened stays open."""

    def __init__(self, place: Place) -> None:
        self._place, self._name, self._file = place, "", None

    def open(self, name: str) -> Any:
        if name != self._name:
            self.__exit__()
            self._file, self._name = self._place.open(name), name  # type: ignore[assignment]
        return self._file

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._name = None, ""
