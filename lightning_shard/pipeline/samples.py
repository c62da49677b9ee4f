"""A real batch of each step to come, to trace the step on, without taking it from the run."""

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, IterableDataset

from lightning_shard.pipeline.microbatch import Microbatch, split_batch
from lightning_shard.units.dry_copy import cuda_in_use
from lightning_shard.units.peek import NO_BATCH, peek_batch
from lightning_shard.units.plan import steps_to_come


def sample_microbatches(
    trainer: "pl.Trainer", module: "pl.LightningModule", microbatches: int
) -> Iterator[tuple[str, Microbatch]]:
    """For each step that the Trainer is about to run, and each of its loaders, the name of the step and a microbatch.

    Where a batch does not divide evenly, a microbatch of each size.

    Args:
        trainer: The Trainer, whose loaders are asked for here, a little earlier than otherwise.
        module: Whose hooks batches go through on their way to the device.
        microbatches: Into how many a batch is split.

    Raises:
        MisconfigurationException: If a loader gives no batch that may be used up, or its batch cannot be split.

    """
    for step, loader in steps_to_come(trainer):
        if loader is None or _is_empty(loader):  # limit_val_batches=0 and the like
            continue
        with isolate_rng(include_cuda=cuda_in_use()):
            batch = peek_batch(loader)
            if batch is NO_BATCH:
                batch = _first_of_stream(loader, step)
            batch = trainer.precision_plugin.convert_input(batch)
            batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        first, *others = split_batch(batch, microbatches)
        yield step, first
        if others and others[-1].rows != first.rows:
            yield step, others[-1]


def _is_empty(loader: Any) -> bool:
    """Whether a loader says that it has no batch; the Trainer then leaves its loop out."""
    try:
        return len(loader) == 0
    except TypeError:
        return False


def _first_of_stream(loader: Any, step: str) -> Any:
    """A batch from the beginning of a stream that begins anew each time it is iterated."""
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        dataset = _apart(loader.dataset)
        stream = iter(dataset)
        if stream is not dataset and stream is not loader.dataset:
            if loader.batch_size is None:
                return loader.collate_fn(next(stream))
            items = list(islice(stream, loader.batch_size))
            if items:
                return loader.collate_fn(items)
    elif not isinstance(loader, DataLoader):
        stream = iter(loader)
        if stream is not loader:
            for batch in stream:
                return batch
    raise MisconfigurationException(
        f"PipelineStrategy traces {step} on a batch before the run, but the loader ({type(loader).__name__}) gives none"
        " that could be taken without being missed in the run: its dataset is empty, fails when read in the main"
        " process, or can be iterated only once. Use a map-style dataset, or an iterable one whose __iter__ returns a"
        " new iterator each time."
    )


def _apart(dataset: Any) -> Any:
    try:
        return copy.copy(dataset)
    except Exception:
        return dataset
