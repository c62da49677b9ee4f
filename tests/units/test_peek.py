"""A batch is had without drawing from the loaders, or not at all."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_shard.units.peek import NO_BATCH, peek_batch

NUMBERS = torch.arange(10)


class Numbers(Dataset[int]):
    """Remembers in itself what it opened, and draws a random number of each kind for each item."""

    def __init__(self) -> None:
        self.opened = False

    def __len__(self) -> int:
        return 10

    def __getitem__(self, position: int) -> int:
        self.opened = True
        torch.rand(1), random.random(), np.random.rand()
        return position


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a peek must not start an iteration")


class Odd(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a peek must not draw from a sampler")

    def __len__(self) -> int:
        return 10


class OddBatches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        raise AssertionError("a peek must not draw from a sampler")


def test_a_batch_is_made_of_the_first_items_by_the_loaders_own_collate() -> None:
    loader = DataLoader(Numbers(), batch_size=4, collate_fn=lambda items: {"items": items})
    assert peek_batch(loader) == {"items": [0, 1, 2, 3]}


def test_no_loader_dataset_or_random_state_is_changed() -> None:
    numbers = Numbers()
    loader = DataLoader(torch.utils.data.Subset(numbers, range(5, 10)), batch_size=3, shuffle=True, num_workers=2)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(peek_batch(loader), torch.tensor([5, 6, 7]))
    assert not numbers.opened
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_a_dataset_may_be_shorter_than_a_batch() -> None:
    assert len(peek_batch(DataLoader(Numbers(), batch_size=40))) == 10


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batch_size": 2, "shuffle": True}, [0, 1]),
        ({"batch_size": 4, "sampler": DistributedSampler(NUMBERS, 4, 1)}, [0, 1, 2]),  # 3 items a rank
        ({"batch_size": 2, "sampler": SubsetRandomSampler([7, 8, 9])}, [7, 8]),
        ({"batch_size": 2, "sampler": WeightedRandomSampler([1.0] * 10, 3)}, [0, 1]),
        ({"batch_sampler": BatchSampler(SequentialSampler(NUMBERS), 3, False)}, [0, 1, 2]),
        ({"batch_size": None}, 0),
    ],
)
def test_samplers_of_torch(options: dict[str, Any], expected: Any) -> None:
    batch = peek_batch(DataLoader(Numbers(), **options))
    assert (batch.tolist() if isinstance(batch, Tensor) else batch) == expected


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Stream(), batch_size=2),
        DataLoader(Numbers(), batch_size=2, collate_fn=lambda items: items[99]),
        DataLoader(TensorDataset(torch.ones(0, 3)), batch_size=2),
        iter([torch.ones(2)]),
        (number for number in range(3)),
        None,
    ],
    ids=range(6),
)
def test_what_can_only_be_drawn_is_not(loader: Any) -> None:
    assert peek_batch(loader) is NO_BATCH
    assert peek_batch({"known": DataLoader(Numbers(), batch_size=2), "drawn": loader}) is NO_BATCH


def test_samplers_of_the_users_own_are_not_asked() -> None:
    """What they would give may be other items, but a batch of the same shape."""
    assert peek_batch(DataLoader(Numbers(), batch_size=2, sampler=Odd())).tolist() == [0, 1]
    assert peek_batch(DataLoader(Numbers(), batch_sampler=OddBatches())).tolist() == [0]


def test_the_iterator_still_has_its_first_item() -> None:
    iterator = iter([1, 2])
    peek_batch([iterator])
    assert next(iterator) == 1


def test_nested_loaders_give_what_the_trainer_gives() -> None:
    loaders = {
        "one": DataLoader(Numbers(), batch_size=2),
        "more": [DataLoader(Numbers(), batch_size=3), (DataLoader(Numbers(), batch_size=1),)],
        "rows": torch.arange(6).reshape(3, 2),
    }
    combined = CombinedLoader(loaders, "min_size")
    expected = next(iter(combined))[0]
    for found in (peek_batch(loaders), peek_batch(combined)):
        assert found.keys() == expected.keys()
        assert torch.equal(found["one"], expected["one"]) and torch.equal(found["rows"], expected["rows"])
        first, (second,) = found["more"]
        assert torch.equal(first, expected["more"][0]) and torch.equal(second, expected["more"][1][0])
