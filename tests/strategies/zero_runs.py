"""Trainers for tests that look at more than losses and weights: quiet, and each rank on its own rows."""

import gc
import os
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

import lightning_shard  # noqa: F401  (registers the names)
from lightning_shard.testing import run_distributed, split_rows


def world() -> tuple[int, int]:
    """This process's rank and the number of ranks."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def forget_engines() -> None:
    """Finalize the engines of earlier runs now.

    They import modules then. In the midst of another import, where a later garbage collection may come, Python 3.11
    fails with a KeyError of its import lock.
    """
    gc.collect()


def trainer(strategy: Any, **settings: Any) -> pl.Trainer:
    """A Trainer over all ranks that writes nothing."""
    forget_engines()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "max_epochs": 1,
    }
    return pl.Trainer(accelerator="cpu", devices=world()[1], strategy=strategy, **{**quiet, **settings})


class Rows(Dataset[Any]):
    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = [split_rows(batch, *world()) for batch in batches]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


def loader(batches: Sequence[Any]) -> DataLoader[Any]:
    """This rank's rows of each global batch."""
    return DataLoader(Rows(batches), batch_size=None)


def weights(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    """Whole weights while the Trainer runs; collective."""
    strategy: Any = trainer.strategy
    if hasattr(strategy, "full_state_dict"):
        return strategy.full_state_dict()
    return {name: value.detach().clone() for name, value in trainer.lightning_module.state_dict().items()}


def on_each_rank(fn: Callable[[str], Any], strategy: str, ranks: int = 2, timeout: float = 60.0) -> list[Any]:
    """``fn(strategy)`` on every rank."""
    return run_distributed(fn, ranks, strategy, timeout=timeout)


def in_one_process(fn: Callable[[str], Any]) -> Any:
    """``fn("auto")`` in a fresh process of its own: what every rank must equal."""
    return run_distributed(fn, 1, "auto", timeout=60.0)[0]
