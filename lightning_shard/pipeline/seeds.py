"""Random numbers that all stages of a pipeline draw alike, and no two microbatches."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_shard.units.dry_copy import cuda_in_use

_MASK = 2**64 - 1


def run_seed(device: torch.device) -> int:
    """The seed of this run, from rank 0's random state, on every rank. Collective."""
    seed = torch.tensor([torch.initial_seed() & (2**62 - 1)], device=device)
    if dist.is_initialized():
        dist.broadcast(seed, src=0)
    return int(seed.item())


def mix(*numbers: int) -> int:
    """One number of 64 bits out of several; any difference changes about half of its bits.

    Mixes as splitmix64 does (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
    """
    state = 0
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_everything(seed: int) -> None:
    """Start the generators of torch on all devices, of numpy and of Python anew."""
    # Not torch.manual_seed, which also remembers, with the whole call stack, to seed devices that are not in use.
    torch.default_generator.manual_seed(seed)
    if cuda_in_use():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def own_numbers() -> Iterator[None]:
    """Put the random states back at the end: what is drawn outside of steps does not depend on the pipeline."""
    with isolate_rng(include_cuda=cuda_in_use()):
        yield
