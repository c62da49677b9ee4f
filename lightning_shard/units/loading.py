"""Read checkpoints back into a sharded module and its optimizers, whoever wrote them on however many ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_shard._compat import sharding

WEIGHTS = "state_dict"
"""Where a checkpoint has the module's weights."""


def is_sharded(path: Path) -> bool:
    """Whether ``path`` is a whole checkpoint of shards."""
    return path.is_dir() and (path / sharding.METADATA_FILENAME).is_file()


def saved_keys(path: Path) -> dict[str, Any]:
    """The keys of a folder of shards, nested ones joined by dots, with what is stored there."""
    return dict(FileSystemReader(path).read_metadata().state_dict_metadata)


def load_shards(path: Path, module: nn.Module, optimizers: Sequence[Optimizer], strict: bool) -> None:
    """Load weights and optimizer states from a folder of shards. Collective.

    Args:
        path: The folder.
        module: The sharded module.
        optimizers: Its optimizers; none to load weights only.
        strict: Whether the names must be the module's.

    Raises:
        MisconfigurationException: Naming missing and unknown weights.

    """
    keys = saved_keys(path)
    weights: dict[str, Any] = get_model_state_dict(module)
    prefix = f"{WEIGHTS}."
    stored = {key.removeprefix(prefix) for key, kind in keys.items() if _is_tensor_of(key, kind, prefix)}
    if strict:
        check_names(path, {name for name, value in weights.items() if isinstance(value, Tensor)}, stored)
    load({WEIGHTS: weights}, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=not strict))
    set_model_state_dict(module, weights, options=StateDictOptions(strict=strict))
    for index, optimizer in enumerate(optimizers):
        _load_optimizer_shards(path, f"optimizer_{index}", set(keys), module, optimizer)


def _is_tensor_of(key: str, kind: Any, prefix: str) -> bool:
    return key.startswith(prefix) and isinstance(kind, TensorStorageMetadata)


def _load_optimizer_shards(path: Path, entry: str, keys: set[str], module: nn.Module, optimizer: Optimizer) -> None:
    """A parameter that had no state when it was saved, since it had no gradient yet, has none afterwards either."""
    state: dict[str, Any] = get_optimizer_state_dict(module, optimizer)
    fresh = {}
    for name in list(state["state"]):
        if not any(key.startswith(f"{entry}.state.{name}.") for key in keys):
            fresh[name] = state["state"].pop(name)
    load({entry: state}, checkpoint_id=path)
    state["state"].update(fresh)
    set_optimizer_state_dict(module, optimizer, state, options=StateDictOptions(cpu_offload=True))
    # Plain names, as a state dict has them: a compiled module puts a part of its own in between.
    names = {name.replace("_orig_mod.", ""): parameter for name, parameter in module.named_parameters()}
    for name in fresh:
        optimizer.state.pop(names[name], None)


def load_file(
    checkpoint: dict[str, Any], path: Path, module: nn.Module, optimizers: Sequence[Optimizer], strict: bool
) -> None:
    """Load weights and optimizer states from one file of whole tensors, which every rank has read. Collective.

    Args:
        checkpoint: The file's content; the weights are taken out of it.
        path: The file, for messages.
        module: The sharded module.
        optimizers: Its optimizers; none to load weights only.
        strict: Whether the names must be the module's.

    Raises:
        MisconfigurationException: Naming missing and unknown weights, or an optimizer that does not fit.

    """
    weights: dict[str, Any] = get_model_state_dict(module)
    stored = checkpoint.pop(WEIGHTS)
    if strict:
        check_names(path, set(weights), set(stored))
    fitting = {name: shard_like(value, weights[name]) for name, value in stored.items() if name in weights}
    set_model_state_dict(module, fitting, options=StateDictOptions(strict=strict))
    for index, optimizer in enumerate(optimizers):
        _load_whole_optimizer(checkpoint["optimizer_states"][index], index, path, optimizer)


def _load_whole_optimizer(saved: dict[str, Any], index: int, path: Path, optimizer: Optimizer) -> None:
    """As ``Optimizer.load_state_dict``, with every state cut like its parameter."""
    here = [len(group["params"]) for group in optimizer.param_groups]
    there = [len(group["params"]) for group in saved["param_groups"]]
    if here != there:
        raise MisconfigurationException(
            f"{path}: optimizer {index} has groups of {there} parameters, but the module's has groups of {here}."
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    own_keys = {key: place for place, key in enumerate(keys)}
    state = {
        own_keys[key]: {
            name: shard_like(value, parameters[own_keys[key]]) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
        for key, values in saved["state"].items()
        if key in own_keys
    }
    groups, place = [], 0
    for group in saved["param_groups"]:
        count = len(group["params"])
        groups.append({**group, "params": list(range(place, place + count))})
        place += count
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def shard_like(value: Any, like: Any) -> Any:
    """The part of a whole tensor that this rank holds of one that is cut like ``like``; anything else as it is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    # Every rank has read the same file: each cuts its own part out, and none has to send.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def check_names(path: Path, wanted: set[str], stored: set[str]) -> None:
    """Refuse a checkpoint of another module.

    Raises:
        MisconfigurationException: Naming what is missing and what is unknown.

    """
    missing, unknown = sorted(wanted - stored), sorted(stored - wanted)
    if missing or unknown:
        raise MisconfigurationException(
            f"{path} was saved from another module. Missing in it: {_few(missing)}; unknown to this module:"
            f" {_few(unknown)}. Load the module that it was saved from, or set `strict_loading = False` on the module"
            " to load what both have."
        )


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:5])) or "nothing"
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
