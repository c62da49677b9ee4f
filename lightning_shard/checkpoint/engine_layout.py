"""Where the DeepSpeed engine puts each parameter: in slices of flat vectors, in the files of each rank."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard.checkpoint.boxes import Sizes
from lightning_shard.checkpoint.format import plain_name
from lightning_shard.checkpoint.kinds import ENGINE


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A rank's part of a parameter."""

    rank: int
    """The rank."""

    place: int
    """The part's first element in the rank's vector."""

    length: int
    """Number of elements."""

    start: int
    """The part's first element in the flattened parameter."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A parameter, and where it lies."""

    shape: Sizes
    """Its shape."""

    group: int
    """The number of the vectors that it lies in: of the parameter group, or of ZeRO-3's sub-group."""

    slices: Sequence[Slice]
    """Its parts, in the order of its elements, without empty ones."""


Layout = Mapping[str, Placed]
"""Parameters by name."""


def mapped_layout(shapes: Sequence[Mapping[str, Sizes]], mappings: Sequence[Sequence[Mapping[str, Any]]]) -> Layout:
    """The layout of ZeRO-1 and -2, which cut a group's vector into equal parts, across parameters.

    Args:
        shapes: Of each group the parameters' shapes.
        mappings: Of each rank and group where in the rank's vector a parameter's part is: ``start`` and ``numel``.

    Returns:
        The layout. Parameters that no rank has are not in it.

    """
    layout = {}
    for group, own in enumerate(shapes):
        slices: dict[str, list[Slice]] = {name: [] for name in own}
        filled = dict.fromkeys(own, 0)
        for rank, mapping in enumerate(mappings):
            for raw_name, part in mapping[group].items():
                name = model_name(raw_name)
                slices[name].append(Slice(rank=rank, place=part.start, length=part.numel, start=filled[name]))
                filled[name] += part.numel
        for name, shape in own.items():
            if slices[name] and filled[name] == math.prod(shape):
                layout[name] = Placed(shape=shape, group=group, slices=slices[name])
    return layout


def even_layout(shapes: Sequence[Mapping[str, Sizes]], ranks: int) -> Layout:
    """The layout of ZeRO-3, which cuts each parameter into equal parts, the last ones padded.

    Args:
        shapes: Of each sub-group the parameters' shapes.
        ranks: Number of ranks.

    """
    layout = {}
    for group, own in enumerate(shapes):
        place = 0
        for name, shape in own.items():
            elements = -(-math.prod(shape) // ranks)
            layout[name] = Placed(shape=shape, group=group, slices=even_slices(shape, place, elements, ranks))
            place += elements
    return layout


def even_slices(shape: Sizes, place: int, elements: int, ranks: int) -> list[Slice]:
    """Equal parts of a parameter, ``elements`` of it on each rank, at the same place of each rank's vector."""
    whole = math.prod(shape)
    lengths = [max(0, min(elements, whole - rank * elements)) for rank in range(ranks)]
    return [
        Slice(rank=rank, place=place, length=length, start=rank * elements)
        for rank, length in enumerate(lengths)
        if length
    ]


def named_shapes(groups: Iterable[Mapping[str, Iterable[int]]]) -> list[dict[str, Sizes]]:
    """The shapes of each group's parameters, under the names of the plain model."""
    return [{model_name(name): tuple(shape) for name, shape in group.items()} for group in groups]


def model_name(name: str) -> str:
    """A name as the plain model has it; early versions of Lightning put their own in front."""
    return plain_name(name.removeprefix("_forward_module."))


def engine_files(path: Path) -> Path:
    """The folder of the engine's files in a checkpoint.

    Raises:
        FileNotFoundError: If it is not there.

    """
    tag = ENGINE
    if not (path / tag).is_dir() and (path / "latest").is_file():
        tag = (path / "latest").read_text().strip()
    if not (path / tag).is_dir():
        raise FileNotFoundError(f"{path} is not whole: the folder {tag!r} of the DeepSpeed engine's files is missing.")
    return path / tag


def engine_ranks(path: Path, folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of model states and of optimizer states, in the order of ranks.

    Args:
        path: The checkpoint's folder, for messages.
        folder: The folder of the engine's files in it.

    Raises:
        FileNotFoundError: If there are none.
        MisconfigurationException: If they were cut in other ways than ZeRO's.

    """
    for file in sorted(folder.iterdir()):
        found = re.search(r"mp_rank_(\d+)", file.name)
        if (found and int(found[1])) or file.name.startswith(("expert_", "layer_")):
            raise MisconfigurationException(
                f"{path} holds {file.name}: it was cut by tensor parallelism, pipelines or experts of DeepSpeed. Only"
                " checkpoints of ZeRO alone can be converted; DeepSpeed's own ds_to_universal.py reads the others."
            )

    def rank(file: Path) -> int:
        found = re.search(r"zero_pp_rank_(\d+)_", file.name)
        return int(found[1]) if found else 0

    models = sorted(folder.glob("*_model_states.pt"), key=rank)
    states = sorted(folder.glob("*_optim_states.pt"), key=rank)
    if not models or not states:
        kind = "optimizer" if models else "model"
        raise FileNotFoundError(f"{path} is not whole: it holds no file of {kind} states of the DeepSpeed engine.")
    return models, states
