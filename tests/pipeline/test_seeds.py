"""Random numbers are the same on all stages, differ between microbatches, and leave the run's own alone."""

import random

import numpy as np
import torch

from lightning_shard.pipeline.seeds import mix, own_numbers, run_seed, seed_everything
from tests.pipeline.replaying import CPU, alone


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_a_seed_starts_all_generators_anew() -> None:
    with own_numbers():
        seed_everything(3)
        first, second = draw(), draw()
        seed_everything(3)
        assert draw() == first != second
        seed_everything(4)
        assert all(one != other for one, other in zip(draw(), first, strict=True))


def test_large_seeds_are_taken() -> None:
    with own_numbers():
        for seed in (0, 1, 2**63, 2**64 - 1):
            seed_everything(seed)
            draw()


def test_numbers_outside_go_on_as_if_nothing_was_drawn() -> None:
    with own_numbers():
        seed_everything(1)
        expected = [draw(), draw()]
        seed_everything(1)
        first = draw()
        with own_numbers():
            seed_everything(99)
            draw()
        assert [first, draw()] == expected


def test_any_difference_of_numbers_and_their_order_gives_another_seed() -> None:
    seeds = {mix(a, b, c) for a in range(20) for b in range(20) for c in range(3)}
    assert len(seeds) == 20 * 20 * 3
    assert len({mix(1, 2), mix(2, 1), mix(1, 2, 0), mix(0, 1, 2), mix(1), mix()}) == 6
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert mix(5, -1) == mix(5, 2**64 - 1)


def test_about_half_of_the_bits_change() -> None:
    changed = [(mix(7, number) ^ mix(7, number + 1)).bit_count() for number in range(200)]
    assert 28 < sum(changed) / len(changed) < 36 and min(changed) > 10


def test_the_first_values_of_splitmix64_are_those_of_its_authors() -> None:
    # java.util.SplittableRandom and the reference code give these for the state 0.
    assert mix(0) == 0xE220A8397B1DCDAF


def test_the_seed_of_a_run_is_that_of_the_user() -> None:
    with own_numbers(), alone():
        torch.manual_seed(1234)
        assert run_seed(CPU) == 1234
        torch.rand(3)
        assert run_seed(CPU) == 1234
