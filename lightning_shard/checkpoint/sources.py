"""Checkpoints of every kind that can be read, in one form."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_shard.checkpoint.format import (
    LIGHTNING,
    MANIFEST,
    OPTIMIZERS,
    PICKLED,
    WEIGHTS,
    Manifest,
    is_extra_state,
    optimizer_at,
    plain_name,
    state_at,
    state_key,
    weight_at,
    weight_key,
)
from lightning_shard.checkpoint.kinds import SHARDED_METADATA, Kind, kind_of, refuse_safetensors
from lightning_shard.checkpoint.objects import with_values
from lightning_shard.checkpoint.places import Place
from lightning_shard.checkpoint.plain import load_plain, put_back, refuse_pickled
from lightning_shard.checkpoint.plain_file import FileReader
from lightning_shard.checkpoint.reading import Reader, ShardReader, Stored


@dataclass(kw_only=True)
class RawOptimizer:
    """An optimizer's states in a checkpoint, keyed as the checkpoint keys them."""

    groups: list[dict[str, Any]]
    """Parameter groups; ``"params"`` holds names, or numbers where a plain file counts parameters."""

    tensors: dict[tuple[Any, str], str] = field(default_factory=dict)
    """States with dimensions, by parameter and state name: the reader's keys."""

    values: dict[Any, dict[str, Any]] = field(default_factory=dict)
    """All other states."""


@dataclass(kw_only=True)
class Source:
    """A checkpoint that is open for reading."""

    path: str
    """As the user names it."""

    kind: Kind
    """Who writes such ones."""

    reader: Reader
    """Reads its tensors."""

    lightning: dict[str, Any]
    """Lightning's part."""

    weights: dict[str, str]
    """Names of the weights, tied ones too, and the reader's keys."""

    optimizers: list[RawOptimizer] | None
    """Of each optimizer its states; ``None`` for weights alone."""

    extra_state: dict[str, Any] = field(default_factory=dict)
    """Entries of the state dict that are no tensors."""

    nested: dict[tuple[Any, ...], str] = field(default_factory=dict)
    """Tensors in Lightning's part that are stored as shards: where they belong, and the reader's keys."""

    own_state: dict[str, Any] = field(default_factory=dict)
    """Numbers of the strategy that wrote it."""

    manifest: Manifest | None = None
    """Of a portable checkpoint."""

    def weight(self, name: str) -> Stored:
        """A weight's shape and dtype."""
        return self.reader.stored[self.weights[name]]


def open_source(place: Place, trusted: bool) -> Source:
    """Open a checkpoint: all is read but its tensors.

    Args:
        place: Where it is.
        trusted: Whether it may run code.

    Raises:
        FileNotFoundError: If there is none, or files of it are missing.
        ValueError: If it is damaged.
        MisconfigurationException: If it holds more than plain data and is not trusted, or is of DeepSpeed's own format.

    """
    kind = kind_of(place)
    if kind == "portable":
        return _portable(place, trusted)
    if kind == "sharded":
        return _sharded(place, trusted)
    if kind == "file":
        return _file(place, trusted)
    raise MisconfigurationException(
        f"{place} is in the DeepSpeed engine's own format, which only the same ZeRO stage and number of ranks can load."
        f" Convert it first: lightning-shard convert {place} {place}-portable"
    )


def _portable(place: Place, trusted: bool) -> Source:
    manifest = Manifest.from_json(place.read_bytes(MANIFEST), str(place))
    reader = ShardReader(place, manifest.data)
    reader.check_files()
    if manifest.pickled and not trusted:
        refuse_pickled(str(place), manifest.pickled)
    data = "" if manifest.data == "." else f"{manifest.data}/"
    for name in (LIGHTNING, *([PICKLED] if manifest.pickled else [])):
        if not place.exists(data + name):
            raise FileNotFoundError(f"{place} is not whole: {name} is missing.")
    with place.open(data + LIGHTNING) as file:
        part = load_plain(file, f"{place}/{LIGHTNING}", trusted)
    if manifest.pickled:
        with place.open(data + PICKLED) as file:
            part = put_back(part, load_plain(file, f"{place}/{PICKLED}", trusted))
    weights, nested, optimizers = _by_path(reader)
    weights |= {alias: weights[name] for alias, name in manifest.aliases.items()}
    if manifest.optimizers is None:
        found = None
    else:
        found = []
        for number, (entry, own) in enumerate(zip(manifest.optimizers, part["optimizers"], strict=True)):
            groups = [{**group, "params": names} for group, names in zip(own["groups"], entry["groups"], strict=True)]
            tensors = optimizers[number].tensors if number in optimizers else {}
            found.append(RawOptimizer(groups=groups, tensors=tensors, values=own["values"]))
    return Source(
        path=str(place),
        kind="portable",
        reader=reader,
        lightning=part["lightning"],
        weights=weights,
        optimizers=found,
        extra_state=part["extra_state"],
        nested=nested,
        own_state=part["own_state"],
        manifest=manifest,
    )


def _by_path(reader: ShardReader) -> tuple[dict[str, str], dict[tuple[Any, ...], str], dict[int, RawOptimizer]]:
    """Weights, other tensors and optimizer states by where they were in the nested dict that was saved."""
    weights: dict[str, str] = {}
    nested: dict[tuple[Any, ...], str] = {}
    optimizers: dict[int, RawOptimizer] = defaultdict(lambda: RawOptimizer(groups=[]))
    for key in reader.stored:
        path = reader.nested_path(key)
        if (name := weight_at(path)) is not None:
            weights[name] = key
        elif (found := state_at(path)) is not None:
            number, parameter, state = found
            optimizers[number].tensors[parameter, state] = key
        else:
            nested[path] = key
    return weights, nested, optimizers


def _sharded(place: Place, trusted: bool) -> Source:
    """A folder that Lightning's FSDPStrategy or ModelParallelStrategy wrote."""
    reader = ShardReader(place)
    reader.check_files()
    with place.open(SHARDED_METADATA) as file:
        part = load_plain(file, f"{place}/{SHARDED_METADATA}", trusted)
    weights, nested, optimizers = _by_path(reader)
    extra: dict[str, Any] = {}
    groups: dict[int, dict[int, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for key in reader.other:
        path = reader.nested_path(key)
        value = _unpacked(reader, key, place, trusted)
        if (name := weight_at(path)) is not None:
            extra[name] = value
        elif (number := optimizer_at(path)) is not None:
            _take_entry(path[1:], value, optimizers[number], groups[number])
    for name in [name for name in weights if is_extra_state(name)]:
        extra[name] = _one_tensor(reader, weights.pop(name))
    for number, raw in optimizers.items():
        raw.groups = [
            {**group, "params": [plain_name(name) for name in group["params"]]}
            for _, group in sorted(groups[number].items())
        ]
        _values_out(raw, reader)
    ordered = [optimizers[number] for number in sorted(optimizers)]
    return Source(
        path=str(place),
        kind="sharded",
        reader=reader,
        lightning=part,
        weights=weights,
        optimizers=ordered or None,
        extra_state=extra,
        nested=nested,
    )


def _unpacked(reader: ShardReader, key: str, place: Place, trusted: bool) -> Any:
    import io

    return load_plain(io.BytesIO(reader.read_bytes(key)), f"{place}: {key}", trusted)


def _take_entry(path: tuple[Any, ...], value: Any, raw: RawOptimizer, groups: dict[int, dict[str, Any]]) -> None:
    if path == ("param_groups",):
        groups.update(dict(enumerate(value)))
    elif path[0] == "param_groups" and len(path) == 2:
        groups[int(path[1])].update(value)
    elif path[0] == "param_groups" and len(path) == 3:
        groups[int(path[1])][str(path[2])] = value
    elif path[0] == "state" and len(path) == 3:
        raw.values.setdefault(plain_name(str(path[1])), {})[str(path[2])] = value


def _values_out(raw: RawOptimizer, reader: Reader) -> None:
    """States without dimensions are values in a source, not tensors to be read."""
    for (name, state), key in list(raw.tensors.items()):
        if not reader.stored[key].shape:
            del raw.tensors[name, state]
            raw.values.setdefault(name, {})[state] = _one_tensor(reader, key)


def _one_tensor(reader: Reader, key: str) -> Tensor:
    """A tensor that was not cut."""
    (box,) = reader.blocks(key)
    return box.tensor


def _file(place: Place, trusted: bool) -> Source:
    """A plain Lightning file, or a bare state dict."""
    refuse_safetensors(place)
    reader = FileReader(place, trusted)
    contents = reader.contents
    if not isinstance(contents, dict):
        raise MisconfigurationException(f"{place} holds a {type(contents).__name__}, and no checkpoint.")
    if not isinstance(contents.get(WEIGHTS), Mapping):
        if not contents or not all(isinstance(value, Tensor) for value in contents.values()):
            raise MisconfigurationException(
                f"{place} is no Lightning checkpoint: it has no {WEIGHTS!r}, only"
                f" {', '.join(map(str, list(contents)[:5]))}."
            )
        contents = {WEIGHTS: contents}
    weights, extra = {}, {}
    for name, value in contents[WEIGHTS].items():
        if isinstance(value, Tensor) and not is_extra_state(name):
            weights[plain_name(name)] = weight_key(name)
            reader.offer(weight_key(name), value)
        else:
            extra[plain_name(name)] = value
    optimizers = None
    if OPTIMIZERS in contents:
        optimizers = [_plain_optimizer(reader, number, state) for number, state in enumerate(contents[OPTIMIZERS])]
    rest = {key: value for key, value in contents.items() if key not in (WEIGHTS, OPTIMIZERS)}
    return Source(
        path=str(place),
        kind="file",
        reader=reader,
        lightning=with_values(reader.real_everywhere(rest), reader.real),
        weights=weights,
        optimizers=optimizers,
        extra_state=reader.real_everywhere(extra),
    )


def _plain_optimizer(reader: FileReader, number: int, state: Any) -> RawOptimizer:
    groups = reader.real_everywhere(list(state.get("param_groups", [])))
    raw = RawOptimizer(groups=[{**group, "params": list(group["params"])} for group in groups])
    for parameter, values in state.get("state", {}).items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dim():
                key = state_key(number, str(parameter), name)
                reader.offer(key, value)
                raw.tensors[parameter, name] = key
            else:
                raw.values.setdefault(parameter, {})[name] = reader.real_everywhere(value)
    return raw


def dtype_kind(dtype: torch.dtype) -> str:
    """What kind of numbers a dtype has: converting between kinds loses what they mean."""
    return "complex" if dtype.is_complex else "floating-point" if dtype.is_floating_point else "integer"
