"""Sizes that follow the model."""

import pytest
import torch
from torch import nn

from lightning_shard.zero.sizing import count_elements, sizes_for

MODELS = [0, 1, 3, 1_001, 499_999, 8_000_001, 150_000_000, 7_000_000_000, 10**12]


@pytest.mark.parametrize("elements", MODELS)
def test_sizes_are_fit_for_the_engine(elements: int) -> None:
    sizes = sizes_for(elements)
    assert sizes.bucket % 2 == 0 and sizes.bucket >= 2
    assert min(sizes.prefetch, sizes.persistence) >= 0
    assert all(isinstance(value, int) for value in vars(sizes).values())


@pytest.mark.parametrize("elements", MODELS[2:])
def test_sizes_stay_in_proportion_to_the_model(elements: int) -> None:
    sizes = sizes_for(elements)
    assert sizes.bucket <= elements + 1
    assert sizes.prefetch <= elements / 10
    assert sizes.persistence <= elements / 1000
    # A step uses each parameter a few times: no distance between two uses comes near this.
    assert sizes.all_live >= 100 * elements or sizes.all_live >= 10**9


def test_sizes_grow_with_the_model_up_to_the_links_need() -> None:
    buckets = [sizes_for(elements).bucket for elements in MODELS]
    assert buckets == sorted(buckets)
    assert buckets[-1] == buckets[-2] == 200_000_000
    assert sizes_for(160_000_000).bucket == 10_000_000
    # The engine keeps 1e5 elements whole: most of a small model.
    assert sizes_for(150_000).persistence == 150


def test_elements_are_counted_once_and_whole() -> None:
    tied = nn.Linear(3, 5)
    model = nn.ModuleList([tied, nn.Linear(3, 5)])
    model[1].weight = tied.weight
    assert count_elements(model.parameters()) == 3 * 5 + 5 + 5
    assert count_elements([*model.parameters(), tied.weight]) == 25
    partitioned = nn.Parameter(torch.empty(0))
    partitioned.ds_numel = 77  # type: ignore[attr-defined]
    assert count_elements([partitioned, nn.Parameter(torch.tensor(1.0))]) == 78
