"""Write a checkpoint: whole, or not at all."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.checkpoint.boxes import Box, Held
from lightning_shard.checkpoint.dtensors import hold_shards
from lightning_shard.checkpoint.format import (
    LIGHTNING,
    OPTIMIZERS,
    PICKLED,
    WEIGHTS,
    Manifest,
    is_extra_state,
    lightning_part,
    plain_name,
    state_key,
    weight_key,
)
from lightning_shard.checkpoint.places import LocalPlace, Place
from lightning_shard.checkpoint.plain import dumped, spell, split_plain
from lightning_shard.checkpoint.progress import Progress
from lightning_shard.checkpoint.states import HeldOptimizer, TrainingStates
from lightning_shard.checkpoint.together import from_first, together
from lightning_shard.checkpoint.writing import write_tensors


@dataclass(frozen=True, kw_only=True)
class Contents:
    """All that a rank has to write."""

    tensors: dict[str, Held]
    """Its blocks of tensors, by key."""

    paths: dict[str, tuple[str | int, ...]]
    """Where each key's tensor would be in a nested dict."""

    lightning: bytes
    """Lightning's part, as it is stored; rank 0 writes it."""

    pickled: bytes | None
    """What of it is no plain data."""

    manifest: Manifest
    """Who wrote it."""

    @property
    def bytes(self) -> int:
        """Bytes of this rank's blocks."""
        return sum(held.bytes for held in self.tensors.values() if held.writes)

    def on_host(self, buffers: dict[tuple[str, int], Tensor]) -> "Contents":
        """The same with copies of all blocks in host memory, which is reused from save to save.

        Args:
            buffers: Memory of earlier copies by key and block; what is missing is added.

        """
        copies = {}
        for key, held in self.tensors.items():
            boxes = []
            for number, box in enumerate(held.boxes if held.writes else ()):
                source = box.tensor
                copy = buffers.get((key, number))
                if copy is None or copy.shape != source.shape or copy.dtype != source.dtype:
                    copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                    buffers[key, number] = copy
                copy.copy_(source, non_blocking=True)
                boxes.append(Box(offsets=box.offsets, tensor=copy))
            copies[key] = replace(held, boxes=tuple(boxes))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return replace(self, tensors=copies)


def gather_contents(
    checkpoint: Mapping[str, Any], states: TrainingStates, stand_ins: Mapping[str, Any], leave_out_frozen: bool
) -> Contents:
    """What this rank has to write of a checkpoint that the Trainer and the hooks have put together. Collective.

    Args:
        checkpoint: The checkpoint as hooks left it.
        states: The training's states.
        stand_ins: What the strategy gave as the module's weights; what is still there is saved from ``states``.
        leave_out_frozen: Whether frozen parameters are left out.

    Raises:
        MisconfigurationException: If a hook put a tensor there of which this rank has only a part.

    """
    frozen = _frozen(states.module) if leave_out_frozen else set()
    edited = {plain_name(name): value for name, value in checkpoint[WEIGHTS].items() if plain_name(name) not in frozen}
    own_names = {id(value): plain_name(name) for name, value in stand_ins.items()}
    held = states.weights()
    chosen = together("Saving", lambda: _chosen(edited, own_names, held))
    extra = {name: value for name, value in edited.items() if name not in chosen}
    aliases = _aliases(chosen)
    tensors = {weight_key(name): own for name, own in chosen.items() if name not in aliases}
    paths: dict[str, tuple[str | int, ...]] = {
        weight_key(name): (WEIGHTS, name) for name in chosen if name not in aliases
    }
    rest = {key: value for key, value in checkpoint.items() if key not in (WEIGHTS, OPTIMIZERS)}
    rest = {key: _without_shards(value, (str(key),), tensors, paths) for key, value in rest.items()}
    optimizers = (states.optimizers() if OPTIMIZERS in checkpoint else None) or None
    if optimizers is None:
        rest.pop("lr_schedulers", None)  # what belongs to an optimizer would not fit weights alone
    for number, optimizer in enumerate(optimizers or []):
        for (name, state), part in optimizer.tensors.items():
            key = state_key(number, name, state)
            tensors[key] = part
            paths[key] = (f"optimizer_{number}", "state", name, state)
    parts = [(each.groups, each.values) for each in optimizers or []]
    lightning, apart = split_plain(lightning_part(rest, parts, extra, states.own_state()))
    return Contents(
        tensors=tensors,
        paths=paths,
        lightning=dumped(lightning),
        pickled=_pickled(apart) if apart else None,
        manifest=Manifest(
            written_by=states.written_by(),
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            epoch=checkpoint.get("epoch"),
            global_step=checkpoint.get("global_step"),
            aliases=aliases,
            left_out=sorted(frozen),
            optimizers=None if optimizers is None else [_names(each) for each in optimizers],
            pickled=[spell(path[1:]) for path in apart],
        ),
    )


def _pickled(apart: Mapping[tuple[Any, ...], Any]) -> bytes:
    """What is no plain data, as it is stored.

    Raises:
        MisconfigurationException: If an entry cannot be pickled, naming it.

    """
    for path, value in apart.items():
        try:
            dumped(value)
        except Exception as error:
            raise MisconfigurationException(
                f"The entry {spell(path[1:])!r} of the checkpoint cannot be saved: {type(error).__name__}: {error}."
                " Leave it out (`self.save_hyperparameters(ignore=...)`), or give it a form that can be pickled."
            ) from error
    rank_zero_warn(
        f"Entries of the checkpoint are no plain data: {', '.join(spell(path[1:]) for path in apart)}. It can be loaded"
        " only with `trusted=True`, as to read them can run any code."
    )
    return dumped(apart)


def _frozen(module: nn.Module) -> set[str]:
    named = module.named_parameters(remove_duplicate=False)
    return {plain_name(name) for name, parameter in named if not parameter.requires_grad}


def _aliases(weights: Mapping[str, Held]) -> dict[str, str]:
    """Further names of tied weights, and the first name of each."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(own), name) for name, own in weights.items()}
    return {name: owner for name, owner in names.items() if owner != name}


def _chosen(edited: Mapping[str, Any], own_names: Mapping[int, str], held: Mapping[str, Held]) -> dict[str, Held]:
    """What is saved under each name: of the strategy's stand-ins what they stand for, and tensors of a hook's own."""
    found = {}
    for name, value in edited.items():
        if not isinstance(value, Tensor) or is_extra_state(name):
            continue
        own = own_names.get(id(value))
        if own is None:
            found[name] = _given(value, name, held.get(name))
        elif own in held:  # else it is the module's extra state, which is no part of a tensor
            found[name] = held[own]
    return found


def _given(value: Tensor, name: str, held: Held | None) -> Held:
    """A tensor that a hook put among the weights: rank 0's is saved, if it is no sharded one.

    Raises:
        MisconfigurationException: If it was made of stand-ins.

    """
    if isinstance(value, DTensor):
        return hold_shards(value)
    has_values = type(value) in (Tensor, nn.Parameter) and not value.is_meta
    if not has_values or (held is not None and not value.numel() and 0 not in held.shape):
        raise MisconfigurationException(
            f"on_save_checkpoint put a tensor at {name!r} of which this rank has no values ({type(value).__name__},"
            f" shape {tuple(value.shape)}): it was computed from weights that other ranks hold. Leave weights as they"
            " are there, or save a file with whole weights (save_distributed_checkpoint=False, or `lightning-shard"
            " convert`)."
        )
    return Held.whole(value, writes=not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0)


def _without_shards(
    value: Any, path: tuple[str | int, ...], tensors: dict[str, Held], paths: dict[str, tuple[str | int, ...]]
) -> Any:
    """Take sharded tensors out of a nested entry: they are written like weights, each rank its own part."""
    if isinstance(value, DTensor):
        key = ".".join(map(str, path))
        tensors[key], paths[key] = hold_shards(value), path
        return None
    if type(value) in (dict, OrderedDict):
        kept = {key: _without_shards(each, (*path, key), tensors, paths) for key, each in value.items()}
        return kept if type(value) is dict else OrderedDict(kept)
    if type(value) in (list, tuple):
        return type(value)(_without_shards(each, (*path, i), tensors, paths) for i, each in enumerate(value))
    return value


def _names(optimizer: HeldOptimizer) -> dict[str, Any]:
    return {"class": optimizer.kind, "groups": [group["params"] for group in optimizer.groups]}


def write_checkpoint(place: Place, contents: Contents, group: Any, shown: bool) -> None:
    """Write a checkpoint to a place, where an old one stays until the new one is whole. Collective.

    Args:
        place: Where to.
        contents: What this rank has to write.
        group: The ranks; ``None`` for all.
        shown: Whether a bar is shown on rank 0 when it takes long.

    Raises:
        RuntimeError: On every rank, if writing failed on any, with the cause. What was written is removed.

    """
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank(group) == 0
    data, failure = from_first(_begin(place) if first else None, group)
    if failure is not None:
        raise _not_written(place, f"rank 0 failed with {failure}")
    remote = not isinstance(place, LocalPlace)
    try:
        with Progress("Saving", contents.bytes, shown=shown and first) as progress:
            write_tensors(place.folder(data), remote, contents.tensors, contents.paths, group, progress)
        failure = _complete(place, data, contents) if first else None
        failure = from_first(failure, group)
        if failure is not None:
            raise RuntimeError(f"rank 0 failed with {failure}")
    except BaseException as error:
        if first:
            place.abandon(data)
        if isinstance(error, RuntimeError):
            raise _not_written(place, str(error)) from error
        raise


def _not_written(place: Place, reason: str) -> RuntimeError:
    return RuntimeError(
        f"The checkpoint {place} was not written: {reason}. What stands there is the old one, or nothing."
    )


def _begin(place: Place) -> tuple[str, str | None]:
    try:
        return place.begin(), None
    except Exception as error:
        return "", f"{type(error).__name__}: {error}"


def _complete(place: Place, data: str, contents: Contents) -> str | None:
    try:
        place.write(data, LIGHTNING, contents.lightning)
        if contents.pickled is not None:
            place.write(data, PICKLED, contents.pickled)
        place.commit(data, replace(contents.manifest, data=data).to_json())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
