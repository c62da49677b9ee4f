"""Lightning's own sharded folders and single files, written whole or not at all."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard._compat import sharding
from lightning_shard.checkpoint.whole import may_save, move_to, partial_of, save_whole_or_absent
from lightning_shard.units.full import full_tensor, has_sharded_tensors
from lightning_shard.units.loading import WEIGHTS, is_sharded, load_file, load_shards, saved_keys, shard_like

if TYPE_CHECKING:
    from lightning_shard.strategies.fsdp import FSDP2Strategy

CURRENT_MODEL = "current_model_state"
"""Where an averaging callback puts the weights that are trained, when it saves the averages as the module's."""


class ShardedCheckpoints:
    """Saves and loads for one strategy. Every method is collective."""

    def __init__(self, strategy: "FSDP2Strategy") -> None:
        self._strategy = strategy
        module = strategy.lightning_module
        assert module is not None
        self._module = module

    def save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any, as_shards: bool) -> None:
        """Write ``checkpoint`` to ``filepath``.

        Args:
            checkpoint: What the Trainer wants to be saved.
            filepath: A folder of shards, or a file.
            storage_options: Must be ``None``.
            as_shards: Whether it is to be a folder of shards.

        Raises:
            TypeError: If ``storage_options`` is given.
            IsADirectoryError: If a file is to be written where a folder stands that is no checkpoint.

        """
        strategy = self._strategy
        if not may_save(strategy, self._module, storage_options):
            return
        path = Path(strategy.broadcast(filepath))
        if as_shards:
            self._save_shards(checkpoint, path)
        else:
            self._save_file(checkpoint, path)

    def _save_shards(self, checkpoint: dict[str, Any], path: Path) -> None:
        sharded = {key: value for key, value in checkpoint.items() if has_sharded_tensors(value)}
        sharded.setdefault(WEIGHTS, checkpoint[WEIGHTS])
        states = sharded.pop("optimizer_states", checkpoint.get("optimizer_states", []))
        sharded.update({f"optimizer_{index}": state for index, state in enumerate(states)})
        rest = {key: value for key, value in checkpoint.items() if key not in sharded and key != "optimizer_states"}

        def write(folder: Path) -> None:
            save(sharded, checkpoint_id=folder)

        def complete(folder: Path) -> None:
            torch.save(rest, folder / sharding.METADATA_FILENAME)

        save_whole_or_absent(path, self._strategy.is_global_zero, write, complete)

    def _save_file(self, checkpoint: dict[str, Any], path: Path) -> None:
        if path.is_dir() and not is_sharded(path):
            raise IsADirectoryError(f"The checkpoint path is a folder, and no checkpoint: {path}")
        whole = _map_tensors(checkpoint, full_tensor if self._strategy.is_global_zero else _given_to_rank_zero)
        if self._strategy.is_global_zero:
            partial = partial_of(path)
            self._strategy.checkpoint_io.save_checkpoint(whole, str(partial))
            move_to(partial, path)  # what stands there is kept until the new one is whole
        self._strategy.barrier()

    def load(self, checkpoint_path: Any, weights_only: bool | None) -> dict[str, Any]:
        """Load weights, and for training on optimizer states, from a folder or a file, written by any number of ranks.

        Returns:
            Lightning's part of the checkpoint.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            MisconfigurationException: If the checkpoint is another module's, or training goes on and it holds another
                number of optimizers.

        """
        path = Path(self._strategy.broadcast(checkpoint_path))
        check_loadable(path)
        fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self._strategy.optimizers if fitting else []
        strict = self._module.strict_loading
        loaded: dict[str, Any]
        if is_sharded(path):
            saved = len({key.split(".")[0] for key in saved_keys(path) if key.startswith("optimizer_")})
        else:
            # Memory-mapped: only what is read is fetched.
            loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
            saved = len(loaded.get("optimizer_states", []))
        if fitting:
            check_optimizer_count(path, saved, len(optimizers))
        if is_sharded(path):
            load_shards(path, self._module, optimizers, strict)
            loaded = torch.load(path / sharding.METADATA_FILENAME, map_location="cpu", weights_only=weights_only)
        else:
            load_file(loaded, path, self._module, optimizers, strict)
        self._restore_averages(path, loaded)
        return loaded

    def _restore_averages(self, path: Path, loaded: dict[str, Any]) -> None:
        """Give an averaging callback what it looks for: the averages as the module's weights, and the trained ones."""
        in_shards = is_sharded(path) and any(key.startswith(f"{CURRENT_MODEL}.") for key in saved_keys(path))
        if not in_shards and CURRENT_MODEL not in loaded:
            return
        weights: dict[str, Any] = get_model_state_dict(self._module)
        if in_shards:
            current = {name: value.detach().clone() for name, value in weights.items()}
            load({CURRENT_MODEL: current}, checkpoint_id=path)
        else:
            trained = loaded[CURRENT_MODEL]
            current = {name: shard_like(value, weights[name]) for name, value in trained.items() if name in weights}
        loaded[CURRENT_MODEL] = current
        loaded[WEIGHTS] = {name: value.detach().clone() for name, value in weights.items()}


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


def whole_optimizer_state(optimizer: Optimizer, is_global_zero: bool) -> dict[str, Any]:
    """An optimizer's state dict as in one process, on rank 0; elsewhere an empty one. Collective."""
    return whole_on_rank_zero(optimizer.state_dict(), is_global_zero)


def check_optimizer_count(path: Path, saved: int, wanted: int) -> None:
    """Refuse to train on from a checkpoint without the optimizers' states.

    Raises:
        MisconfigurationException: With both numbers.

    """
    if saved == wanted:
        return
    if saved == 0:
        raise MisconfigurationException(
            f"{path} holds weights only (save_weights_only=True), so training cannot go on from it with the optimizer"
            " as it was. Load the weights into the module before `fit` to start a new run from them, or give a full"
            " checkpoint."
        )
    raise MisconfigurationException(
        f"{path} holds the states of {saved} optimizers, but `configure_optimizers` returned {wanted}."
    )


def check_loadable(path: Path) -> None:
    """Say what is wrong with a path at which there is no checkpoint.

    Raises:
        FileNotFoundError: If nothing is there, a part of a checkpoint, or a folder that is no whole one.

    """
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint at {path}.")
    if is_sharded(path.parent):
        raise FileNotFoundError(f"{path} lies inside the checkpoint {path.parent}. Give that folder's path instead.")
    if path.is_dir() and not is_sharded(path):
        raise FileNotFoundError(
            f"{path} is no whole checkpoint of shards: it has no file {sharding.METADATA_FILENAME!r}, which is written"
            " last."
        )


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, DTensor):
        return function(value)
    if isinstance(value, dict) and has_sharded_tensors(value):
        return type(value)((key, _map_tensors(each, function)) for key, each in value.items())
    if isinstance(value, (list, tuple)) and has_sharded_tensors(value):
        return [_map_tensors(each, function) for each in value]
    return value
