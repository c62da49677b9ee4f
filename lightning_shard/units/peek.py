"""One batch as the loaders would give it, without drawing from them."""

import copy
from enum import Enum
from typing import Any, Final

from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
)

from lightning_shard.units.dry_copy import cuda_in_use


class _Nothing(Enum):
    NO_BATCH = "no batch"


NO_BATCH: Final = _Nothing.NO_BATCH
"""What `peek_batch` returns where a batch can only be had by drawing it."""


def peek_batch(loaders: Any) -> Any:
    """One batch of ``loaders``, made from the first items of their datasets in this process.

    Samplers, workers and iterators are not touched, datasets are read through shallow copies, so that what they open
    stays out of them, and the random state is put back.

    Args:
        loaders: What the Trainer takes: a loader, or nested dicts, lists and tuples of loaders, which give batches of
            that structure. As in the Trainer, anything else that can be indexed counts as a loader of its elements.

    Returns:
        The batch, on the CPU; `NO_BATCH` if a dataset is iterable, empty, or fails here (where workers prepare it, or
        positions are no keys of it), or if a loader can only be iterated.

    """
    with isolate_rng(include_cuda=cuda_in_use()):
        try:
            return _peek(loaders)
        except Exception:
            return NO_BATCH


class _OnlyDrawn(Exception):
    """A batch can only be had by drawing it."""


def _peek(loaders: Any) -> Any:
    if isinstance(loaders, CombinedLoader):
        return _peek(loaders.iterables)
    if isinstance(loaders, dict):
        return {key: _peek(loader) for key, loader in loaders.items()}
    if isinstance(loaders, list | tuple):
        batches = [_peek(loader) for loader in loaders]
        return type(loaders)(*batches) if hasattr(loaders, "_fields") else type(loaders)(batches)
    if isinstance(loaders, DataLoader):
        return _of_loader(loaders)
    if isinstance(loaders, Tensor) or (hasattr(loaders, "__getitem__") and hasattr(loaders, "__len__")):
        return loaders[0]
    raise _OnlyDrawn


def _of_loader(loader: "DataLoader[Any]") -> Any:
    if isinstance(loader.dataset, IterableDataset):
        raise _OnlyDrawn
    dataset = _apart(loader.dataset)
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[0])
    batch_size = getattr(loader.batch_sampler, "batch_size", 1)
    positions = _first_positions(getattr(loader.batch_sampler, "sampler", None), batch_size, len(dataset))
    if hasattr(dataset, "__getitems__"):
        return loader.collate_fn(dataset.__getitems__(positions))
    return loader.collate_fn([dataset[position] for position in positions])


def _first_positions(sampler: Any, batch_size: int, items: int) -> list[int]:
    """Where a sampler, whatever it is, could begin; the shape of a batch does not depend on it."""
    if type(sampler) is SubsetRandomSampler:
        return list(sampler.indices[:batch_size])
    if isinstance(sampler, Sampler) and type(sampler).__module__.startswith(("torch.", "lightning.")):
        items = min(items, len(sampler))  # type: ignore[arg-type]
    if not items:
        raise _OnlyDrawn
    return list(range(min(batch_size, items)))


def _apart(dataset: Any) -> Any:
    """A shallow copy, through the datasets inside: a file that is opened at the first item is not kept for workers."""
    if not isinstance(dataset, Dataset):
        return dataset
    apart = copy.copy(dataset)
    for name, value in vars(apart).items():
        if isinstance(value, Dataset):
            vars(apart)[name] = _apart(value)
        elif isinstance(value, list | tuple) and value and all(isinstance(item, Dataset) for item in value):
            vars(apart)[name] = [_apart(item) for item in value]
    return apart
