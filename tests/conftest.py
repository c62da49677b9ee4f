"""What every test leaves behind as it found it."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_seed_stays() -> Iterator[None]:
    """``seed_everything`` in one test would seed the ranks of all later ones, through the environment."""
    yield
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)
