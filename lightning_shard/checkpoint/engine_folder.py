"""Open a folder that the DeepSpeed engine wrote: Lightning's DeepSpeedStrategy's, or ours in the engine's format.

Every rank wrote its part of a few flat vectors: the fp32 master weights of each parameter group, and the optimizer's
states in the same layout. The files say which layout, so that a parameter is read from its places alone.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_shard._compat.dcp import file_offset
from lightning_shard.checkpoint.engine_layout import (
    Layout,
    Placed,
    engine_files,
    engine_ranks,
    even_layout,
    even_slices,
    mapped_layout,
    model_name,
    named_shapes,
)
from lightning_shard.checkpoint.engine_reader import EngineReader, Range
from lightning_shard.checkpoint.format import WEIGHTS, state_key, weight_key
from lightning_shard.checkpoint.places import LocalPlace
from lightning_shard.checkpoint.plain_file import FileReader
from lightning_shard.checkpoint.sources import RawOptimizer, Source

ENGINE_KEYS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler"
    " data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size"
    " mp_world_size ds_config ds_version checkpoint_parallel_dimensions universal_checkpoint_info".split()
)
"""What the engine puts beside Lightning's part."""

_NVME_FILE = "lightning_shard_nvme_rank_{rank}_group_{group}.pt"
_NVME_WHOLE = "lightning_shard_nvme_whole.pt"

FlatOf = Callable[[int, int], tuple[FileReader, Tensor]]
"""The vector of a rank and group, and the file that it is in."""


class _Numbers:
    """Stands for the engine's own classes, which hold a few numbers: to read them no code of the file's is run."""

    start: int
    numel: int

    def __init__(self, *values: Any) -> None:
        self.values = values


_KNOWN: list[Any] = [
    (_Numbers, f"deepspeed.{name}")
    for name in (
        "utils.tensor_fragment.fragment_address",
        "runtime.zero.config.ZeroStageEnum",
        "runtime.fp16.loss_scaler.LossScaler",
        "runtime.fp16.loss_scaler.DynamicLossScaler",
    )
]


def open_engine(path: Path, trusted: bool) -> Source:
    """Open a checkpoint of the engine: all is read but its tensors.

    States of optimizers that lived on NVMe are left out; `Source.optimizers` is ``None`` then.

    Args:
        path: The checkpoint's folder.
        trusted: Whether its files may run code.

    Raises:
        FileNotFoundError: If files are missing.
        MisconfigurationException: If it holds more than plain data and is not trusted, or was cut in other ways than
            ZeRO's (tensor parallelism, experts).

    """
    folder = engine_files(path)
    models, states = engine_ranks(path, folder)
    with torch.serialization.safe_globals(_KNOWN):
        return _Opening(
            path,
            folder,
            [FileReader(LocalPlace(file), trusted) for file in models],
            [FileReader(LocalPlace(file), trusted) for file in states],
        ).source()


class _Opening:
    """One folder on its way to a source."""

    def __init__(self, path: Path, folder: Path, models: list[FileReader], files: list[FileReader]) -> None:
        self._path, self._folder, self._models, self._files = path, folder, models, files
        self._model = models[0].contents
        self._states = [file.contents["optimizer_state_dict"] for file in files]
        self._reader = EngineReader()
        self._nvme = [
            [
                FileReader(LocalPlace(file), False)
                for file in sorted(folder.glob(_NVME_FILE.format(rank=rank, group="*")))
            ]
            for rank in range(len(files))
        ]
        self._on_nvme = bool(self._nvme[0])
        self._cuts_each = "fp32_flat_groups" in self._states[0]  # ZeRO-3
        counts = self._states[0].get("partition_count", len(files))
        if any(count != len(files) for count in (counts if isinstance(counts, list) else [counts])):
            raise MisconfigurationException(
                f"{path} has {len(files)} files of optimizer states, but its partitions were cut for {counts} ranks:"
                " files are missing, or it was written with partitions inside groups of ranks, which cannot be"
                " converted."
            )

    def source(self) -> Source:
        layout = self._layout()
        for name, placed in layout.items():
            self._offer(weight_key(name), placed, self._master)
        aliases = self._aliases(list(layout))
        extra = self._offer_module({*layout, *aliases})
        weights = {key.removeprefix(f"{WEIGHTS}."): key for key in self._reader.stored}
        weights |= {alias: weights[name] for alias, name in aliases.items() if name in weights}
        self._refuse_missing({*weights, *extra})
        lightning = {key: value for key, value in self._model.items() if key not in ENGINE_KEYS}
        return Source(
            path=str(self._path),
            kind="engine",
            reader=self._reader,
            lightning=self._models[0].real_everywhere(lightning),
            weights=weights,
            optimizers=None if self._on_nvme else [self._optimizer(layout)],
            extra_state=extra,
            own_state=self._own_state(),
        )

    def _layout(self) -> Layout:
        if self._on_nvme:
            return {
                model_name(name): Placed(
                    shape=tuple(shape),
                    group=group,
                    slices=even_slices(tuple(shape), place, elements, len(self._files)),
                )
                for group, file in enumerate(self._nvme[0])
                for name, shape, place, elements in file.contents["layout"]
            }
        shapes = named_shapes(self._model["param_shapes"])
        if self._cuts_each:
            return even_layout(shapes, len(self._files))
        return mapped_layout(shapes, [states["param_slice_mappings"] for states in self._states])

    def _master(self, rank: int, group: int) -> tuple[FileReader, Tensor]:
        if self._on_nvme:
            file = self._nvme[rank][group]
            return file, file.contents["master"]
        key = "fp32_flat_groups" if self._cuts_each else "single_partition_of_fp32_groups"
        return self._files[rank], self._states[rank][key][group]

    def _offer(self, key: str, placed: Placed, flat_of: FlatOf) -> None:
        parts = []
        for each in placed.slices:
            file, flat = flat_of(each.rank, placed.group)
            values = flat.reshape(-1)[each.place : each.place + each.length]
            if values.numel() != each.length:
                raise ValueError(
                    f"{self._path} is not whole: rank {each.rank} should hold {each.length} elements of {key!r}, and"
                    f" has {values.numel()}."
                )
            parts.append(Range(file=file, values=values, start=each.start))
        self._reader.offer(key, placed.shape, parts)

    # --- the rest of the weights ---

    def _offer_module(self, known: set[str]) -> dict[str, Any]:
        """Offer buffers and parameters that are not trained.

        Returns:
            Entries of the module's state dict that are no tensors.

        """
        frozen = self._model.get("frozen_param_shapes") or {}
        buffers = set(self._model.get("buffer_names") or ())
        extra = {}
        for raw_name, value in self._model["module"].items():
            name = model_name(raw_name)
            if name in known:
                continue
            if not isinstance(value, Tensor):
                extra[name] = self._models[0].real_everywhere(value)
            elif self._cuts_each and raw_name in frozen:
                self._offer_frozen(name, raw_name, tuple(frozen[raw_name]))
            elif not self._cuts_each or raw_name in buffers:
                self._offer_whole(name, self._models[0], value)
        if self._on_nvme:
            file = FileReader(LocalPlace(self._folder / _NVME_WHOLE), False)
            for raw_name, value in file.contents.items():
                self._offer_whole(model_name(raw_name), file, value)
        return extra

    def _offer_whole(self, name: str, file: FileReader, value: Tensor) -> None:
        part = Range(file=file, values=value.reshape(-1), start=0)
        self._reader.offer(weight_key(name), tuple(value.shape), [part])

    def _offer_frozen(self, name: str, raw_name: str, shape: tuple[int, ...]) -> None:
        """A frozen parameter of ZeRO-3: each rank's part is in its file of model states."""
        fragments = [(file.contents.get("frozen_param_fragments") or {}).get(raw_name) for file in self._models]
        found = [fragment for fragment in fragments if fragment is not None]
        if len(found) < len(self._models):
            return
        parts = [
            Range(file=self._models[each.rank], values=found[each.rank].reshape(-1)[: each.length], start=each.start)
            for each in even_slices(shape, 0, found[0].numel(), len(found))
        ]
        self._reader.offer(weight_key(name), shape, parts)

    def _aliases(self, trained: Iterable[str]) -> dict[str, str]:
        """Tied names and their owners: what the module's file has of both, if only a rest, is at one place."""
        tensors = {model_name(key): value for key, value in self._model["module"].items() if isinstance(value, Tensor)}
        places = {
            name: (file_offset(value), value.storage_offset(), tuple(value.shape)) for name, value in tensors.items()
        }
        owners = {places[name]: name for name in trained if name in places}
        shared = {model_name(name): model_name(to) for name, to in dict(self._model.get("shared_params") or {}).items()}
        found = {}
        for name in tensors:
            owner = shared.get(name) or owners.setdefault(places[name], name)
            if owner != name and name not in set(trained):
                found[name] = owner
        return found

    def _refuse_missing(self, found: set[str]) -> None:
        if missing := sorted({model_name(name) for name in self._model["module"]} - found):
            raise MisconfigurationException(
                f"{self._path} has no values of {missing[0]!r}: frozen parameters were left out when it was saved"
                " (exclude_frozen_parameters=True), or its files are not whole."
            )

    # --- the optimizer ---

    def _optimizer(self, layout: Layout) -> RawOptimizer:
        key = "optimizer_state_dict" if self._cuts_each else "base_optimizer_state"
        inner = [states[key] for states in self._states]
        shapes = named_shapes(self._model["param_shapes"])
        raw = RawOptimizer(groups=[])
        for number, group in enumerate(inner[0]["param_groups"]):
            vectors = group["params"] if self._cuts_each else [number]
            names = [name for vector in vectors for name in shapes[vector]]
            raw.groups.append({**self._files[0].real_everywhere(group), "params": names})
        for name, placed in layout.items():
            for state, value in inner[0]["state"].get(placed.group, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    self._check_flat(state, placed.group, value)

                    def flat_of(rank: int, group: int, state: str = state) -> tuple[FileReader, Tensor]:
                        return self._files[rank], inner[rank]["state"][group][state]

                    own = state_key(0, name, state)
                    self._offer(own, placed, flat_of)
                    if placed.shape:
                        raw.tensors[name, state] = own
                    else:
                        (block,) = self._reader.blocks(own)
                        raw.values.setdefault(name, {})[state] = block.tensor
                else:
                    raw.values.setdefault(name, {})[state] = _counted(self._files[0].real_everywhere(value))
        return raw

    def _check_flat(self, state: str, group: int, value: Tensor) -> None:
        _, master = self._master(0, group)
        if value.numel() < master.numel():
            raise MisconfigurationException(
                f"{self._path}: the optimizer's state {state!r} of group {group} has {value.numel()} elements, its"
                f" parameters have {master.numel()}: it cannot be told which belongs to which, so such a checkpoint"
                " cannot be converted."
            )

    def _own_state(self) -> dict[str, Any]:
        numbers = vars(self._states[0].get("loss_scaler", _Numbers()))
        found = {key: value for key, value in numbers.items() if isinstance(value, (int, float))}
        return {"loss_scaler": found} if found else {}


def _counted(value: Any) -> Any:
    """A step count as torch's optimizers keep it."""
    return torch.tensor(float(value)) if isinstance(value, int) and not isinstance(value, bool) else value
