"""Write one plain Lightning file, as one process would have saved it, without ever holding its tensors.

torch can write a file that has room for its tensors and no values (`torch.serialization.skip_data`). They are filled in
one after the other.
"""

import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_shard._compat.blocks import memory_of
from lightning_shard._compat.dcp import fake_mode
from lightning_shard.checkpoint.assemble import packed
from lightning_shard.checkpoint.format import OPTIMIZERS, WEIGHTS
from lightning_shard.checkpoint.plain import put_back
from lightning_shard.checkpoint.progress import Progress
from lightning_shard.checkpoint.sources import Source
from lightning_shard.checkpoint.streaming import Stream, bytes_of, new_file, total_bytes, write_flat

_LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a zip file's member: the lengths of its name and of its extra field, behind which the data begins."""


def write_plain(source: Source, target: Path, streams: Mapping[str, Stream], shown: bool) -> None:
    """Write a checkpoint as one plain file; an old one stays until the new one is whole.

    Args:
        source: The checkpoint.
        target: The file.
        streams: All of its tensors, by the reader's key. Names of one key share their memory in the file.
        shown: Whether a bar is shown when it takes long.

    """
    with fake_mode():
        fakes = {
            key: torch.empty(stream.stored.shape, dtype=stream.dtype, device="cpu") for key, stream in streams.items()
        }
    stream_of = {id(fake): streams[key] for key, fake in fakes.items()}
    with new_file(target) as partial:
        tensors = _save_without_values(_contents(source, fakes), partial)
        with (
            Progress("Converting", total_bytes(list(streams.values())), shown) as progress,
            partial.open("r+b") as file,
        ):
            for tensor, place in zip(tensors, _places(partial, len(tensors)), strict=True):
                if id(tensor) in stream_of:
                    write_flat(stream_of[id(tensor)], file, place, progress)
                elif tensor.untyped_storage().nbytes():
                    file.seek(place)
                    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                    file.write(bytes_of(whole.cpu()))


def _contents(source: Source, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The checkpoint in Lightning's layout."""
    checkpoint = dict(source.lightning)
    if source.nested:
        checkpoint = put_back(checkpoint, {path: tensors[key] for path, key in source.nested.items()})
    checkpoint[WEIGHTS] = {name: tensors[key] for name, key in source.weights.items()} | source.extra_state
    if source.optimizers is not None:
        checkpoint[OPTIMIZERS] = [
            packed(optimizer, {state: tensors[key] for state, key in optimizer.tensors.items()})
            for optimizer in source.optimizers
        ]
    return checkpoint


def _save_without_values(contents: dict[str, Any], path: Path) -> list[Tensor]:
    """Save all but the values of tensors.

    Returns:
        A tensor of each stored memory, in the order in which torch numbers them.

    """
    found: dict[int, Tensor] = {}

    class Pickler(pickle.Pickler):
        """Notes the tensors as torch meets them, those inside of other objects too."""

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, Tensor):
                found.setdefault(memory_of(value), value)
            return NotImplemented

    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(contents, path, pickle_module=SimpleNamespace(__name__="pickle", Pickler=Pickler))
    return list(found.values())


def _places(path: Path, count: int) -> list[int]:
    """Where in the file the memory of each tensor begins, in bytes."""
    with zipfile.ZipFile(path) as members, path.open("rb") as file:
        headers = {info.filename.partition("/")[2]: info.header_offset for info in members.infolist()}
        places = []
        for number in range(count):
            header = headers[f"data/{number}"]
            file.seek(header)
            name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            places.append(header + _LOCAL_HEADER.size + name + extra)
        assert f"data/{count}" not in headers
    return places
