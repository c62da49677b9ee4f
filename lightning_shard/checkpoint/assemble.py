"""A checkpoint as one process has it: whole tensors in one dictionary, in Lightning's own layout."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import cut
from lightning_shard.checkpoint.format import OPTIMIZERS, WEIGHTS
from lightning_shard.checkpoint.places import place_of
from lightning_shard.checkpoint.plain import put_back
from lightning_shard.checkpoint.reading import Reader
from lightning_shard.checkpoint.sources import RawOptimizer, Source, open_source


def load_whole(path: Any, weights_only: bool | None = None) -> dict[str, Any]:
    """What Lightning's own loading does for a file, for a checkpoint of any kind.

    Args:
        path: The checkpoint.
        weights_only: ``False`` to allow what is no plain data, which can run any code.

    Returns:
        Lightning's part, ``"state_dict"`` and ``"optimizer_states"``, with all tensors in memory.

    Raises:
        FileNotFoundError: If there is no checkpoint, or files of it are missing.
        MisconfigurationException: If it holds more than plain data.

    """
    return assemble(open_source(place_of(path), trusted=weights_only is False))


def assemble(source: Source) -> dict[str, Any]:
    """All of a checkpoint in memory."""
    by_key: dict[str, Tensor] = {}
    for key in dict.fromkeys(source.weights.values()):
        by_key[key] = whole(source.reader, key)
    checkpoint = dict(source.lightning)
    if source.nested:
        nested = {path: whole(source.reader, key) for path, key in source.nested.items()}
        checkpoint = put_back(checkpoint, nested)
    checkpoint[WEIGHTS] = {name: by_key[key] for name, key in source.weights.items()} | source.extra_state
    if source.optimizers is not None:
        checkpoint[OPTIMIZERS] = [
            packed(optimizer, {state: whole(source.reader, key) for state, key in optimizer.tensors.items()})
            for optimizer in source.optimizers
        ]
    return checkpoint


def packed(optimizer: RawOptimizer, tensors: Mapping[tuple[Any, str], Any]) -> dict[str, Any]:
    """An optimizer's state dict as in one process: parameters are counted through the groups.

    Args:
        optimizer: The states.
        tensors: What stands for each state with dimensions.

    """
    numbers: dict[Any, int] = {}
    groups = []
    for group in optimizer.groups:
        counted = [numbers.setdefault(parameter, len(numbers)) for parameter in group["params"]]
        groups.append({**group, "params": counted})
    state: dict[int, dict[str, Any]] = {}
    for parameter, values in optimizer.values.items():
        state.setdefault(numbers[parameter], {}).update(values)
    for (parameter, name), tensor in tensors.items():
        state.setdefault(numbers[parameter], {})[name] = tensor
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def whole(reader: Reader, key: str) -> Tensor:
    """A tensor with all of its values, in new memory."""
    stored = reader.stored[key]
    result: Tensor | None = None
    for box in reader.blocks(key):
        if tuple(box.tensor.shape) == stored.shape:
            return box.tensor
        if result is None:
            result = torch.empty(stored.shape, dtype=stored.dtype)
        cut(result, (0,) * result.dim(), box.offsets, tuple(box.tensor.shape)).copy_(box.tensor)
    return torch.empty(stored.shape, dtype=stored.dtype) if result is None else result
