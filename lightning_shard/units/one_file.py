"""One plain Lightning file, written by rank 0: what one process would save."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shard.checkpoint.format import WEIGHTS, plain_name
from lightning_shard.checkpoint.kinds import kind_of
from lightning_shard.checkpoint.places import place_of
from lightning_shard.checkpoint.whole import may_save, move_to, partial_of
from lightning_shard.units.full import full_tensor, has_sharded_tensors

if TYPE_CHECKING:
    from lightning_shard.strategies.fsdp import FSDP2Strategy


def save_file(strategy: "FSDP2Strategy", checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
    """Write ``checkpoint`` to one file. Collective.

    Args:
        strategy: The strategy.
        checkpoint: What the Trainer wants to be saved, with whole tensors on rank 0.
        filepath: The file.
        storage_options: Must be ``None``.

    Raises:
        TypeError: If ``storage_options`` is given.
        IsADirectoryError: If a folder stands there that is no checkpoint.

    """
    assert strategy.lightning_module is not None
    if not may_save(strategy, strategy.lightning_module, storage_options):
        return
    path = Path(strategy.broadcast(filepath))
    if path.is_dir() and not _is_checkpoint(path):
        raise IsADirectoryError(f"The checkpoint path is a folder, and no checkpoint: {path}")
    whole = _map_tensors(checkpoint, full_tensor if strategy.is_global_zero else _given_to_rank_zero)
    if strategy.is_global_zero:
        whole[WEIGHTS] = {plain_name(name): value for name, value in whole[WEIGHTS].items()}
        partial = partial_of(path)
        strategy.checkpoint_io.save_checkpoint(whole, str(partial))
        move_to(partial, path)  # what stands there is kept until the new one is whole
    strategy.barrier()


def _is_checkpoint(path: Path) -> bool:
    try:
        return bool(kind_of(place_of(path)))
    except FileNotFoundError:
        return False


class OnRankZero(dict[str, Any]):
    """The weights or states on a rank that writes none of them: empty, and to take entries out of it is no mistake.

    ``on_save_checkpoint`` runs on every rank, and edits what only rank 0 has.
    """

    def __delitem__(self, key: str) -> None:
        """Nothing."""

    def pop(self, key: str, default: Any = None) -> Any:
        """The default."""
        return default


def whole_on_rank_zero(value: dict[str, Any], is_global_zero: bool) -> dict[str, Any]:
    """A nested dict with every sharded tensor whole, on rank 0; elsewhere an empty one. Collective."""
    whole: dict[str, Any] = _map_tensors(value, full_tensor if is_global_zero else _given_to_rank_zero)
    return whole if is_global_zero else OnRankZero()


def _given_to_rank_zero(value: Tensor) -> Tensor:
    full_tensor(value)
    return torch.empty(0)


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, DTensor):
        return function(value)
    if isinstance(value, dict) and has_sharded_tensors(value):
        return type(value)((key, _map_tensors(each, function)) for key, each in value.items())
    if isinstance(value, (list, tuple)) and has_sharded_tensors(value):
        return [_map_tensors(each, function) for each in value]
    return value
