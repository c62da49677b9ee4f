"""Shapes and names out of a checkpoint of any kind, for a look at it."""

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_shard._compat.outline import Outline, Unknown, outline
from lightning_shard.checkpoint.engine_folder import ENGINE_KEYS
from lightning_shard.checkpoint.engine_layout import engine_files, engine_ranks, model_name, named_shapes
from lightning_shard.checkpoint.format import (
    LIGHTNING,
    MANIFEST,
    OPTIMIZERS,
    WEIGHTS,
    Manifest,
    optimizer_at,
    plain_name,
    state_at,
    weight_at,
)
from lightning_shard.checkpoint.kinds import SHARDED_METADATA, Kind, kind_of, refuse_safetensors
from lightning_shard.checkpoint.places import LocalPlace, Place
from lightning_shard.checkpoint.plain_file import FileReader
from lightning_shard.checkpoint.reading import ShardReader


@dataclass(frozen=True, kw_only=True)
class FoundTensor:
    """A weight."""

    shape: tuple[int, ...]
    """Its shape."""

    dtype: torch.dtype
    """Its dtype."""

    same: Any
    """Equal for names of one tensor."""


@dataclass(kw_only=True)
class FoundOptimizer:
    """An optimizer."""

    kind: str = ""
    """Its class, if the checkpoint says so."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    """Hyper-parameters and ``"params"`` of each group."""

    states: dict[Any, dict[str, None]] = field(default_factory=dict)
    """Names of the states by parameter."""

    bytes: int = 0
    """Bytes of all states."""

    def take(self, parameter: Any, state: str, value: Any) -> None:
        """Note a state."""
        self.states.setdefault(parameter, {})[state] = None
        shape = getattr(value, "shape", None)
        if shape is not None:
            self.bytes += torch.Size(shape).numel() * value.dtype.itemsize


@dataclass(kw_only=True)
class Found:
    """What there is."""

    kind: Kind
    """Who writes such ones."""

    facts: dict[str, Any]
    """Who wrote it, epoch and step."""

    weights: dict[str, FoundTensor]
    """By name, tied names too."""

    optimizers: list[FoundOptimizer]
    """The optimizers."""

    other: list[str]
    """Other entries."""

    pickled: list[str] = field(default_factory=list)
    """What is no plain data."""


def find(place: Place) -> Found:
    """Look at a checkpoint.

    Raises:
        FileNotFoundError: If there is none, or files of it are missing.
        ValueError: If it is damaged.

    """
    kind = kind_of(place)
    if kind == "portable":
        return _portable(place)
    if kind == "sharded":
        return _sharded(place)
    if kind == "file":
        return _file(place)
    if not isinstance(place, LocalPlace):
        raise MisconfigurationException(
            f"{place} is a checkpoint of the DeepSpeed engine: copy it to a local disk first."
        )
    return _engine(place)


def _load(place: Place, name: str = "") -> Any:
    try:
        with place.open(name) as file:
            return outline(file)
    except ValueError as error:
        raise ValueError(f"{place}{f'/{name}' if name else ''} is damaged, or no checkpoint: {error}") from error


def _portable(place: Place) -> Found:
    manifest = Manifest.from_json(place.read_bytes(MANIFEST), str(place))
    reader = ShardReader(place, manifest.data)
    reader.check_files()
    part = _load(place, LIGHTNING if manifest.data == "." else f"{manifest.data}/{LIGHTNING}")
    optimizers = [
        FoundOptimizer(
            kind=entry["class"],
            groups=[{**group, "params": names} for group, names in zip(own["groups"], entry["groups"], strict=True)],
        )
        for entry, own in zip(manifest.optimizers or [], part["optimizers"], strict=True)
    ]
    for optimizer, own in zip(optimizers, part["optimizers"], strict=True):
        for parameter, values in own["values"].items():
            for state, value in values.items():
                optimizer.take(parameter, state, value)
    weights, other = _shards(reader, optimizers)
    weights |= {alias: weights[name] for alias, name in manifest.aliases.items()}
    by = manifest.written_by
    facts = {
        "written by": by.strategy,
        **by.settings,
        "ranks": by.world_size or None,
        "mesh": ", ".join(f"{axis} {size}" for axis, size in by.mesh.items()),
        "precision": by.precision,
        "saved at": manifest.saved_at,
        "epoch": manifest.epoch,
        "step": manifest.global_step,
        "versions": ", ".join(f"{name} {version}" for name, version in by.versions.items() if version),
        "left out": ", ".join(manifest.left_out),
    }
    other += [str(key) for key in part["lightning"]]
    return Found(
        kind="portable", facts=facts, weights=weights, optimizers=optimizers, other=other, pickled=manifest.pickled
    )


def _shards(reader: ShardReader, optimizers: list[FoundOptimizer]) -> tuple[dict[str, FoundTensor], list[str]]:
    weights: dict[str, FoundTensor] = {}
    other = []
    for key, stored in reader.stored.items():
        path = reader.nested_path(key)
        if (name := weight_at(path)) is not None:
            weights[name] = FoundTensor(shape=stored.shape, dtype=stored.dtype, same=key)
        elif (found := state_at(path)) is not None:
            number, parameter, state = found
            while len(optimizers) <= number:
                optimizers.append(FoundOptimizer())
            optimizers[number].take(parameter, state, stored)
        else:
            other.append(".".join(map(str, path)))
    return weights, other


def _sharded(place: Place) -> Found:
    reader = ShardReader(place)
    reader.check_files()
    part = _load(place, SHARDED_METADATA)
    optimizers: list[FoundOptimizer] = []
    weights, other = _shards(reader, optimizers)
    groups: dict[tuple[int, int], dict[str, Any]] = {}
    for key in reader.other:
        path = reader.nested_path(key)
        number = optimizer_at(path)
        if number is not None and path[1] == "param_groups":
            value = outline(io.BytesIO(reader.read_bytes(key)))
            if len(path) == 4:
                groups.setdefault((number, int(path[2])), {})[str(path[3])] = value
            elif len(path) == 2:
                groups.update({(number, place): each for place, each in enumerate(value)})
    for (number, _), group in sorted(groups.items()):
        names = [plain_name(name) for name in group.get("params", [])]
        optimizers[number].groups.append({**group, "params": names})
    return Found(
        kind="sharded", facts=_facts(part), weights=weights, optimizers=optimizers, other=[*other, *map(str, part)]
    )


def _file(place: Place) -> Found:
    refuse_safetensors(place)
    with place.open() as file:
        zipped = file.read(2) == b"PK"
    contents = _load(place) if zipped else FileReader(place, trusted=False).contents
    if not isinstance(contents, Mapping):
        raise ValueError(f"{place} is no checkpoint: it holds one object.")
    weights = _weights(contents[WEIGHTS] if isinstance(contents.get(WEIGHTS), Mapping) else contents)
    if not weights:
        raise ValueError(
            f"{place} is no checkpoint: it has no {WEIGHTS!r}, only {', '.join(map(str, list(contents)[:5]))}."
        )
    optimizers = []
    for state in contents.get(OPTIMIZERS, []):
        optimizer = FoundOptimizer(groups=[dict(group) for group in state.get("param_groups", [])])
        for parameter, values in state.get("state", {}).items():
            for name, value in values.items():
                optimizer.take(parameter, name, value)
        optimizers.append(optimizer)
    rest = {key: value for key, value in contents.items() if key not in weights and key not in (WEIGHTS, OPTIMIZERS)}
    return Found(
        kind="file",
        facts=_facts(contents),
        weights=weights,
        optimizers=optimizers,
        other=list(map(str, rest)),
        pickled=sorted(_unknown(rest, "")),
    )


def _weights(contents: Mapping[Any, Any]) -> dict[str, FoundTensor]:
    found = {}
    for name, value in contents.items():
        if isinstance(value, Outline):
            same: Any = (value.place, value.shape)
        elif isinstance(value, Tensor):
            same = (value.untyped_storage().data_ptr(), value.storage_offset(), tuple(value.shape))
        else:
            continue
        found[plain_name(str(name))] = FoundTensor(shape=tuple(value.shape), dtype=value.dtype, same=same)
    return found


def _unknown(value: Any, path: str) -> Iterable[str]:
    if isinstance(value, Unknown):
        yield f"{path} ({type(value).name})"
    elif isinstance(value, type) and issubclass(value, Unknown):
        yield f"{path} ({value.name})"
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _unknown(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            yield from _unknown(each, f"{path}.{place}")


def _engine(place: LocalPlace) -> Found:
    models, files = engine_ranks(place.path, engine_files(place.path))
    model = _load(LocalPlace(models[0]))
    states = _load(LocalPlace(files[0]))["optimizer_state_dict"]
    shapes = named_shapes(model.get("param_shapes") or [])
    trained = {name: shape for group in shapes for name, shape in group.items()}
    frozen = named_shapes([model.get("frozen_param_shapes") or {}])[0]
    weights: dict[str, FoundTensor] = {}
    places: dict[Any, str] = {}
    for raw_name, value in model["module"].items():
        name = model_name(raw_name)
        if isinstance(value, Outline):
            shape = trained.get(name, frozen.get(name, value.shape))
            owner = places.setdefault((value.place, value.shape), name)
            is_master = name in trained or owner in trained
            dtype = torch.float32 if is_master else value.dtype
            weights[name] = weights.get(owner) or FoundTensor(shape=shape, dtype=dtype, same=name)
    inner = states.get("optimizer_state_dict") or states.get("base_optimizer_state") or {}
    cuts_each = "fp32_flat_groups" in states
    optimizer = FoundOptimizer()
    for number, group in enumerate(inner.get("param_groups", [])):
        vectors = group["params"] if cuts_each else [number]
        names = [name for vector in vectors for name in shapes[vector]]
        optimizer.groups.append({**group, "params": names})
    for number, values in inner.get("state", {}).items():
        for name, shape in shapes[number].items():
            for state, value in values.items():
                flat = isinstance(value, Outline) and value.shape
                optimizer.take(name, state, Outline(shape=shape, dtype=value.dtype, place=("", 0)) if flat else value)
    facts = {"ZeRO stage": 3 if cuts_each else "1 or 2", "ranks": len(files), **_facts(model)}
    facts["deepspeed"] = model.get("ds_version")
    other = [str(key) for key in model if key not in ENGINE_KEYS]
    return Found(kind="engine", facts=facts, weights=weights, optimizers=[optimizer], other=other)


def _facts(contents: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "epoch": contents.get("epoch"),
        "step": contents.get("global_step"),
        "lightning": contents.get("pytorch-lightning_version"),
    }
