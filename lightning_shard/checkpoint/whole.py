"""A checkpoint folder that is whole or absent, however its writing ends."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_shard.failing import fails_alone


def may_save(strategy: Strategy, module: "pl.LightningModule", storage_options: Any) -> bool:
    """Whether the ranks can write a checkpoint together; after an error on one of them they cannot.

    Raises:
        TypeError: If ``storage_options`` is given: every rank writes its own part, to a plain file system.

    """
    if storage_options is not None:
        raise TypeError(
            f"`Trainer.save_checkpoint(..., storage_options=...)` is not supported by {type(strategy).__name__}: every"
            " rank writes its own part, to a plain file system."
        )
    if module.trainer.world_size > 1 and fails_alone(module):
        rank_zero_info(
            "Not saving a checkpoint after an error: every rank writes its own part, and the others may be waiting in"
            " another collective."
        )
        return False
    return True


def save_whole_or_absent(
    path: Path, is_global_zero: bool, write: Callable[[Path], None], complete: Callable[[Path], None]
) -> None:
    """Write a checkpoint under a temporary name and move it to ``path`` when every rank has finished. Collective.

    A checkpoint that stands at ``path`` already is kept until the new one is whole.

    Args:
        path: The checkpoint's folder.
        is_global_zero: Whether this is rank 0, which does the moving.
        write: Writes this rank's part below the folder that it is given.
        complete: Writes what makes a checkpoint of the folder; called on rank 0, when every rank has written its part.

    Raises:
        RuntimeError: On every rank, if writing failed on any; the temporary folder is removed.

    """
    partial = partial_of(path)
    if is_global_zero:
        remove(partial)
        partial.mkdir(parents=True)
    _barrier()
    failure: str | None = None
    try:
        write(partial)
    except Exception as error:
        # The other ranks may wait in a collective of the writing itself, so this rank cannot ask them first.
        error.add_note(f"The checkpoint {path} was not written; what stands there is the old one, or nothing.")
        raise
    # Only when the last rank has written its part is the whole there to be moved.
    _barrier()
    if is_global_zero:
        try:
            complete(partial)
            move_to(partial, path)
        except OSError as error:
            failure = f"{type(error).__name__}: {error}"
            shutil.rmtree(partial, ignore_errors=True)
    for rank, reason in enumerate(_everyones(failure)):
        if reason is not None:
            raise RuntimeError(f"The checkpoint {path} was not written: rank {rank} failed with {reason}")


def partial_of(path: Path) -> Path:
    """Where a checkpoint is written before it is whole."""
    return path.with_name(f".{path.name}.partial")


def old_of(path: Path) -> Path:
    """Where a checkpoint is put aside while a new one takes its place."""
    return path.with_name(f".{path.name}.old")


def move_to(partial: Path, path: Path) -> None:
    """Put a whole checkpoint, folder or file, in its place; one that stands there already is kept until then."""
    old = old_of(path)
    remove(old)
    if path.exists() or path.is_symlink():
        path.rename(old)
    partial.rename(path)
    remove(old)


def remove(path: Path) -> None:
    """Remove a folder or a file, or nothing; of a link the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _barrier() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def _everyones(reason: str | None) -> list[str | None]:
    if not torch.distributed.is_initialized():
        return [reason]
    reasons: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reasons, reason)
    return reasons
