"""Blocks of tensors: every range of a flattened tensor as boxes, and every box as runs of neighbouring elements."""

import itertools
import math

import pytest
import torch

from lightning_shard.checkpoint.boxes import Box, Held, boxes_of_range, cut, overlap, runs

SHAPES: list[tuple[int, ...]] = [
    (),
    (1,),
    (7,),
    (3, 4),
    (1, 5),
    (5, 1),
    (2, 3, 4),
    (5, 1, 3),
    (2, 1, 1, 6),
    (3, 2, 2, 2),
]


def counted(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose values are the places of its elements."""
    return torch.arange(math.prod(shape)).view(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_range_of_elements_is_a_few_boxes_in_order(shape: tuple[int, ...]) -> None:
    whole = counted(shape)
    for start, stop in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
        held = Held.of_range(shape, whole.flatten()[start:stop], start)
        for box in held.boxes:
            assert torch.equal(cut(whole, (0,) * len(shape), box.offsets, tuple(box.tensor.shape)), box.tensor)
        elements = [element for box in held.boxes for element in box.tensor.flatten().tolist()]
        assert elements == list(range(start, stop))
        assert len(held.boxes) <= max(1, 2 * len(shape) - 1)
        assert held.bytes == 8 * (stop - start)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_box_is_runs_of_neighbouring_elements(shape: tuple[int, ...]) -> None:
    whole = counted(shape)
    spans = [[(a, b - a) for a, b in itertools.combinations(range(size + 1), 2)] for size in shape]
    for box in itertools.product(*spans):
        offsets, sizes = tuple(start for start, _ in box), tuple(length for _, length in box)
        block = cut(whole, (0,) * len(shape), offsets, sizes)
        found = []
        for start, length, index in runs(shape, offsets, sizes):
            assert int(block[index]) == start
            found += range(start, start + length)
        assert found == block.flatten().tolist(), (offsets, sizes)


def test_a_whole_tensor_is_one_run() -> None:
    assert list(runs((3, 4, 5), (0, 0, 0), (3, 4, 5))) == [(0, 60, (0, 0, 0))]
    assert list(runs((3, 4, 5), (1, 0, 0), (2, 4, 5))) == [(20, 40, (0, 0, 0))]
    assert list(runs((), (), ())) == [(0, 1, ())]


def test_nothing_is_no_box_and_no_run() -> None:
    assert list(boxes_of_range((3, 4), 5, 5)) == []
    assert list(boxes_of_range((0, 4), 0, 0)) == []
    assert list(runs((3, 4), (1, 0), (0, 4))) == []
    assert Held.of_range((3,), torch.empty(0), 3).boxes == ()


def test_overlaps_are_what_two_boxes_share() -> None:
    shape = (4, 5)
    whole = counted(shape)
    spans = [[(a, b - a) for a, b in itertools.combinations(range(size + 1), 2)] for size in shape]
    boxes = [tuple(zip(*pair, strict=True)) for pair in itertools.product(*spans)]
    for first, second in itertools.product(boxes[::3], boxes):
        elements = [set(cut(whole, (0, 0), *each).flatten().tolist()) for each in (first, second)]
        shared = overlap(first, second)  # type: ignore[arg-type]
        found = set() if shared is None else set(cut(whole, (0, 0), *shared).flatten().tolist())
        assert found == elements[0] & elements[1]
    assert overlap(((), ()), ((), ())) == ((), ())


def test_boxes_are_views_of_the_memory_that_is_trained() -> None:
    flat = torch.zeros(7)
    for box in Held.of_range((2, 5), flat, 2).boxes:
        box.tensor.fill_(3.0)
    assert flat.eq(3.0).all()
    parameter = torch.nn.Parameter(torch.zeros(3))
    (box,) = Held.whole(parameter).boxes
    assert isinstance(box, Box) and not box.tensor.requires_grad
    box.tensor.fill_(2.0)
    assert parameter.detach().eq(2.0).all()
