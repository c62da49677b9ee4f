"""Writing torch's formats piece by piece: a folder of shards, block by block.

torch's own writer keeps a reference to every tensor until the last one is written, and takes them in an order of its
own where there is a GPU. What it writes is simple: each block as `torch.save` writes it, one behind the other, and the
place of each in ``.metadata``. The class of such a place is private.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

FILE = "__0_0.distcp"


class BlockWriter:
    """Writes tensors to one file of a new folder of shards.

    Args:
        folder: An empty folder.

    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[str, TensorStorageMetadata] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._results: list[WriteResult] = []

    def write(
        self,
        key: str,
        path: tuple[Any, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        blocks: Iterable[tuple[tuple[int, ...], torch.Tensor]],
    ) -> None:
        """Write a tensor.

        Args:
            key: Its key.
            path: Where it would be in a nested dict.
            shape: Its shape.
            dtype: Its dtype.
            blocks: Offsets and values of each of its blocks.

        """
        chunks = []
        with (self._folder / FILE).open("ab") as file:
            for offsets, block in blocks:
                start = file.tell()
                if block.untyped_storage().nbytes() != block.nbytes:  # torch saves all that a view looks at
                    block = block.clone()
                torch.save(block, file)
                info = _StorageInfo(relative_path=FILE, offset=start, length=file.tell() - start)
                chunk = ChunkStorageMetadata(torch.Size(offsets), block.shape)
                chunks.append(chunk)
                index = MetadataIndex(key, chunk.offsets)
                self._results.append(WriteResult(index=index, size_in_bytes=info.length, storage_data=info))
        self._entries[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
        self._paths[key] = path

    def finish(self) -> None:
        """Write ``.metadata``, and both to the disk itself."""
        file = self._folder / FILE
        file.touch()
        with file.open("r+b") as handle:
            os.fsync(handle.fileno())
        metadata = Metadata(state_dict_metadata=dict(self._entries), planner_data=self._paths)
        FileSystemWriter(self._folder).finish(metadata, [self._results])


def memory_of(tensor: torch.Tensor) -> int:
    """Tells a tensor's memory from that of others, also where it has none yet; `torch.save` numbers memory by it."""
    return int(tensor.untyped_storage()._cdata)
