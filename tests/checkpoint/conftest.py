"""One small training saved in every format, for the tests of what reads checkpoints without a Trainer."""

from pathlib import Path
from typing import Any

import pytest

from lightning_shard.testing import run_distributed
from tests.checkpoint.formats import save_in_every_format


@pytest.fixture(scope="session")
def saved(tmp_path_factory: Any) -> Path:
    """A folder with checkpoints of the same training: ``fsdp2``, ``zero3``, ``1f1b`` (portable), ``engine1`` to
    ``engine3`` (the DeepSpeed engine's), ``sharded`` (Lightning's own), ``plain.ckpt``."""
    folder: Path = tmp_path_factory.mktemp("every format")
    run_distributed(save_in_every_format, 2, folder)
    return folder
