"""What every test leaves behind as it found it."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from lightning_shard import _pool

NAMES = "PL_GLOBAL_SEED PL_SEED_WORKERS LOCAL_RANK NODE_RANK RANK WORLD_SIZE LOCAL_SIZE MASTER_ADDR MASTER_PORT".split()


def pytest_collection_finish() -> None:
    """No garbage collection walks what was imported: a command line is parsed in half the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _ranks_get_ready(request: pytest.FixtureRequest) -> None:
    """The server of the ranks starts beside the first tests."""
    if any(item.get_closest_marker("ranks") for item in request.session.items):
        _pool.start()


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
