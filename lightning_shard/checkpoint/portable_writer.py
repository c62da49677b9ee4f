"""Write the portable format in one process, tensor by tensor."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_shard._compat.blocks import BlockWriter
from lightning_shard.checkpoint.boxes import Offsets
from lightning_shard.checkpoint.format import (
    LIGHTNING,
    PICKLED,
    WEIGHTS,
    Manifest,
    WrittenBy,
    lightning_part,
    state_key,
    weight_key,
)
from lightning_shard.checkpoint.places import LocalPlace
from lightning_shard.checkpoint.plain import dumped, spell, split_plain
from lightning_shard.checkpoint.progress import Progress
from lightning_shard.checkpoint.sources import Source
from lightning_shard.checkpoint.streaming import Stream, total_bytes


def write_portable(
    source: Source, target: LocalPlace, streams: Mapping[str, Stream], aliases: Mapping[str, str], shown: bool
) -> None:
    """Write a checkpoint as a portable folder; an old one stays until the new one is whole.

    Args:
        source: The checkpoint.
        target: The folder.
        streams: All of its tensors, by the reader's key.
        aliases: Further names of tied weights, and the name that the tensor is stored under.
        shown: Whether a bar is shown when it takes long.

    """
    optimizers = [(each.groups, each.values) for each in source.optimizers or []]
    plain, apart = split_plain(lightning_part(source.lightning, optimizers, source.extra_state, source.own_state))
    data = target.begin()
    try:
        writer = BlockWriter(Path(target.folder(data)))
        with Progress("Converting", total_bytes(list(streams.values())), shown) as progress:
            for key, (path, stream) in _entries(source, streams, aliases).items():
                writer.write(key, path, stream.stored.shape, stream.dtype, _blocks(stream, progress))
        writer.finish()
        target.write(data, LIGHTNING, dumped(plain))
        if apart:
            target.write(data, PICKLED, dumped(apart))
        manifest = _manifest(source, aliases, [spell(path[1:]) for path in apart])
        target.commit(data, replace(manifest, data=data).to_json())
    except BaseException:
        target.abandon(data)
        raise


def _blocks(stream: Stream, progress: Progress) -> Iterator[tuple[Offsets, Tensor]]:
    for piece in stream.pieces():
        yield piece.offsets, piece.tensor
        progress.advance(piece.tensor.nbytes)


def _entries(
    source: Source, streams: Mapping[str, Stream], aliases: Mapping[str, str]
) -> dict[str, tuple[tuple[Any, ...], Stream]]:
    """Every tensor once, under its key in the new checkpoint, with its path in a nested dict."""
    entries: dict[str, tuple[tuple[Any, ...], Stream]] = {}
    for name, key in source.weights.items():
        if name not in aliases:
            entries[weight_key(name)] = ((WEIGHTS, name), streams[key])
    for path, key in source.nested.items():
        entries[spell(path)] = (path, streams[key])
    for number, optimizer in enumerate(source.optimizers or []):
        for (parameter, state), key in optimizer.tensors.items():
            path = (f"optimizer_{number}", "state", parameter, state)
            entries[state_key(number, str(parameter), state)] = (path, streams[key])
    return entries


def _manifest(source: Source, aliases: Mapping[str, str], pickled: list[str]) -> Manifest:
    old = source.manifest
    if old is None:
        lightning = source.lightning
        old = Manifest(
            written_by=WrittenBy(
                strategy="",
                settings={"converted_from": source.kind},
                world_size=0,
                versions={"lightning": str(lightning.get("pytorch-lightning_version", ""))},
            ),
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            epoch=lightning.get("epoch"),
            global_step=lightning.get("global_step"),
        )
    kinds = [each.get("class", "") for each in old.optimizers or []]
    optimizers = None
    if source.optimizers is not None:
        optimizers = [
            {"class": kinds[number] if number < len(kinds) else "", "groups": [g["params"] for g in each.groups]}
            for number, each in enumerate(source.optimizers)
        ]
    return replace(old, aliases=dict(aliases), optimizers=optimizers, pickled=pickled)
