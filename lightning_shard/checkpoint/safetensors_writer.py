"""Write weights as one safetensors file, tensor by tensor; the format's own library wants all of them at once.

The format: eight bytes with the length of the header (little-endian), the header (JSON, padded with blanks), and the
elements of all tensors without gaps. See https://huggingface.co/docs/safetensors.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard.checkpoint.progress import Progress
from lightning_shard.checkpoint.streaming import Stream, new_file, total_bytes, write_flat

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the dtypes that the format knows."""


def write_safetensors(
    path: str, target: Path, weights: Mapping[str, Stream], aliases: Mapping[str, str], shown: bool
) -> None:
    """Write weights; an old file stays until the new one is whole.

    A tied weight is stored once, under its first name, and its other names are in the metadata beside that one. So
    does `safetensors.torch.save_model`, and `load_model` of a module with the same ties is content with it.

    Args:
        path: The checkpoint, for messages.
        target: The file.
        weights: The tensors, by name.
        aliases: Further names of tied weights, and the name in ``weights``.
        shown: Whether a bar is shown when it takes long.

    Raises:
        MisconfigurationException: If the format has no such dtype.

    """
    for name, stream in weights.items():
        if stream.dtype not in _DTYPES:
            raise MisconfigurationException(
                f"{path}: {name!r} is {stream.dtype}, which safetensors files cannot hold. Convert to one plain file"
                " instead (`--to lightning`)."
            )
    # Wide elements come first, so that all are aligned.
    order = sorted(weights, key=lambda name: (-weights[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {**aliases, "format": "pt"}}
    place = 0
    places = {}
    for name in order:
        stream = weights[name]
        places[name] = place
        header[name] = {
            "dtype": _DTYPES[stream.dtype],
            "shape": list(stream.stored.shape),
            "data_offsets": [place, place + stream.bytes],
        }
        place += stream.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with new_file(target) as partial, partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        with Progress("Converting", total_bytes(list(weights.values())), shown) as progress:
            for name in order:
                write_flat(weights[name], file, 8 + len(text) + places[name], progress)
