"""Convert a checkpoint of any kind, with a few megabytes of it in memory at a time."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_shard._compat.dcp import file_offset, is_fake
from lightning_shard.checkpoint.engine_folder import open_engine
from lightning_shard.checkpoint.format import WEIGHTS, plain_name
from lightning_shard.checkpoint.kinds import check_can_be_replaced, kind_of
from lightning_shard.checkpoint.places import LocalPlace, Place, place_of
from lightning_shard.checkpoint.plain_file import FileReader
from lightning_shard.checkpoint.plain_writer import write_plain
from lightning_shard.checkpoint.portable_writer import write_portable
from lightning_shard.checkpoint.safetensors_writer import write_safetensors
from lightning_shard.checkpoint.sources import Source, open_source
from lightning_shard.checkpoint.streaming import Stream

Target = Literal["portable", "lightning", "safetensors"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""What floating-point weights can be converted to."""

_TRAINING_ONLY = ("callbacks", "lr_schedulers")
"""Entries of Lightning's part that go with optimizer states; a checkpoint of weights alone has none."""


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: Target | None = None,
    weights_only: bool = False,
    dtype: str | None = None,
    trusted: bool = False,
    progress: bool = True,
) -> Path:
    """Write a checkpoint in another format. The source stays as it is.

    Needs host memory for the largest stored block of a tensor, and a few megabytes; not for the model.

    Args:
        source: A checkpoint: the portable folder, one plain Lightning file, a folder of Lightning's FSDP and
            ModelParallel strategies, or one of the DeepSpeed engine (states that lived on NVMe are left out, with a
            warning).
        target: What to write, on a local file system. It appears when it is whole; a checkpoint that stands there is
            kept until then.
        to: ``"lightning"`` for one plain file as one process or ddp would save it, ``"safetensors"`` for one file of
            weights, ``"portable"`` for the folder that loads under every strategy. ``None`` goes by the name:
            ``.ckpt``, ``.pt`` and ``.pth`` are plain files, ``.safetensors`` is what it says, all else is portable.
        weights_only: Whether optimizer states, schedulers and callbacks are left out.
        dtype: ``"bf16"``, ``"fp16"`` or ``"fp32"`` to convert floating-point weights to; optimizer states stay.
        trusted: Whether the source may hold more than plain data, which can run any code when it is read.
        progress: Whether a bar is shown when it takes long.

    Returns:
        ``target`` as a path.

    Raises:
        FileNotFoundError: If ``source`` is no checkpoint, or files of it are missing.
        ValueError: If it is damaged, or an argument is none of its choices.
        MisconfigurationException: If the source holds more than plain data and is not trusted, or the target is the
            source, lies inside it, or is something else than a checkpoint.

    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is none of {', '.join(map(repr, DTYPES))}.")
    kind = to or _by_name(str(target))
    if kind not in get_args(Target):
        raise ValueError(f"to={to!r} is none of {', '.join(map(repr, get_args(Target)))}.")
    origin, place = place_of(source), _target(target, kind)
    kind_of(origin)
    _check_apart(origin, place)
    opened = open_any(origin, trusted)
    if weights_only or kind == "safetensors":
        opened = without_training(opened)
    elif opened.kind == "engine" and opened.optimizers is None:
        rank_zero_warn(
            f"{opened.path}: the optimizer states lived on NVMe and are left out; only weights are converted."
        )
        opened = without_training(opened)
    write(opened, place, kind, DTYPES[dtype] if dtype else None, progress)
    return place.path


def open_any(place: Place, trusted: bool) -> Source:
    """Open a checkpoint of any kind, those of the DeepSpeed engine too; see `open_source`."""
    if kind_of(place) != "engine":
        return open_source(place, trusted)
    if not isinstance(place, LocalPlace):
        raise MisconfigurationException(
            f"{place} is a checkpoint of the DeepSpeed engine: copy it to a local disk first."
        )
    return open_engine(place.path, trusted)


def without_training(source: Source) -> Source:
    """The weights, and of Lightning's part what `save_weights_only` keeps."""
    kept = {key: value for key, value in source.lightning.items() if key not in _TRAINING_ONLY}
    nested = {path: key for path, key in source.nested.items() if path[0] not in _TRAINING_ONLY}
    return replace(source, lightning=kept, nested=nested, optimizers=None, own_state={})


def write(source: Source, place: LocalPlace, kind: Target, dtype: torch.dtype | None, shown: bool) -> None:
    """Write an open checkpoint.

    Args:
        source: The checkpoint.
        place: Where to.
        kind: The format.
        dtype: What floating-point weights are converted to, if given.
        shown: Whether a bar is shown when it takes long.

    """
    aliases = tied_names(source)
    source = replace(source, weights={name: source.weights[aliases.get(name, name)] for name in source.weights})
    streams = _streams(source, dtype)
    if kind == "lightning":
        write_plain(source, place.path, streams, shown)
    elif kind == "portable":
        write_portable(source, place, streams, aliases, shown)
    else:
        weights = {name: streams[key] for name, key in source.weights.items() if name not in aliases}
        write_safetensors(source.path, place.path, weights, aliases, shown)


def tied_names(source: Source) -> dict[str, str]:
    """Further names of tied weights, and the first name of each."""
    first: dict[Any, str] = {}
    aliases = {}
    places = _places_in_file(source.reader) if isinstance(source.reader, FileReader) else {}
    for name, key in source.weights.items():
        owner = first.setdefault(places.get(name, key), name)
        if owner != name:
            aliases[name] = owner
    return aliases


def _places_in_file(reader: FileReader) -> dict[str, Any]:
    """Where in the file each weight lies; those that share a place are tied."""
    weights = reader.contents.get(WEIGHTS, reader.contents)
    return {plain_name(name): _place_in_file(value) for name, value in weights.items() if isinstance(value, Tensor)}


def _place_in_file(value: Tensor) -> Any:
    start = file_offset(value) if is_fake(value) else value.untyped_storage().data_ptr()
    return (start, value.storage_offset(), tuple(value.shape), value.stride(), value.dtype)


def _streams(source: Source, dtype: torch.dtype | None) -> dict[str, Stream]:
    stored = source.reader.stored
    streams = {}
    for key in dict.fromkeys(source.weights.values()):
        cast = dtype is not None and stored[key].dtype.is_floating_point
        streams[key] = Stream(reader=source.reader, key=key, dtype=dtype if cast and dtype else stored[key].dtype)
    others = [*source.nested.values(), *(key for each in source.optimizers or [] for key in each.tensors.values())]
    for key in others:
        streams[key] = Stream(reader=source.reader, key=key, dtype=stored[key].dtype)
    return streams


def _by_name(target: str) -> Target:
    suffixes: Mapping[str, Target] = {
        ".ckpt": "lightning", ".pt": "lightning", ".pth": "lightning", ".safetensors": "safetensors"
    }  # fmt: skip
    return suffixes.get(Path(target).suffix, "portable")


def _target(target: str | Path, kind: Target) -> LocalPlace:
    place = place_of(target)
    if not isinstance(place, LocalPlace):
        raise MisconfigurationException(
            f"{target} is no local path. Convert to a local disk, and copy what was written."
        )
    if place.is_folder() and kind != "portable" and not place.names():
        raise MisconfigurationException(f"{place} is a folder, and is not replaced by a file: give a name inside it.")
    if place.exists() and not place.is_folder() and kind == "portable":
        raise MisconfigurationException(
            f"{place} is a file, and a portable checkpoint is a folder: give another name, or remove it first."
        )
    if not (place.exists() and str(place).endswith(".safetensors")):
        check_can_be_replaced(place)
    return place


def _check_apart(source: Place, target: LocalPlace) -> None:
    if not isinstance(source, LocalPlace):
        return
    one, other = source.path.resolve(), target.path.resolve()
    if one == other:
        raise MisconfigurationException(
            f"{target} is the checkpoint that is converted: give another name for the new one."
        )
    if one in other.parents or other in one.parents:
        raise MisconfigurationException(f"One of {source} and {target} lies inside the other: give another name.")
