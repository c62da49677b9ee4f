"""What every test leaves behind as it found it."""

import os
from collections.abc import Iterator

import pytest
import torch

NAMES = "PL_GLOBAL_SEED PL_SEED_WORKERS LOCAL_RANK NODE_RANK RANK WORLD_SIZE LOCAL_SIZE MASTER_ADDR MASTER_PORT".split()


@pytest.fixture(autouse=True)
def _no_run_leaves_its_ranks_behind() -> Iterator[None]:
    """A seed would seed the ranks of all later tests, and the variables of a launched run would make them its ranks."""
    before = {name: os.environ.get(name) for name in NAMES}
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
