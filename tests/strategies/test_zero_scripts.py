"""Whole scripts under Lightning's own launcher: failures end every process, and runs do not disturb each other."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
OUTPUT = "output.txt"

MODULE = """
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader

import lightning_shard


class Module(pl.LightningModule):
    def __init__(self, fails_on=None):
        super().__init__()
        self.net = torch.nn.Linear(4, 3)
        self.fails_on = fails_on

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == self.fails_on:
            raise ValueError("boom")
        return self.net(batch).square().mean()

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def trainer(strategy, **settings):
    return pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, **settings
    )


batches = DataLoader(torch.randn(16, 4), batch_size=2)
"""

FAILS = """
if __name__ == "__main__":
    callbacks = [OnExceptionCheckpoint("saved on failure")] if sys.argv[3] == "saves" else []
    run = trainer(sys.argv[1], callbacks=callbacks, enable_checkpointing=bool(callbacks))
    run.fit(Module(int(sys.argv[2])), batches)
"""

TWO_RUNS = """
import os

if __name__ == "__main__":
    module = Module()
    trainer("zero2", enable_checkpointing=False).fit(module, batches)
    second = trainer("zero3", enable_checkpointing=False)
    second.fit(module, batches)
    (metrics,) = second.test(module, batches, verbose=False)
    assert metrics["test_loss"] > 0
    assert "DS_ACCELERATOR" not in os.environ
    open(f"done on rank {second.global_rank}", "w").close()
"""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script that runs, or has run."""

    folder: Path
    process: "subprocess.Popen[str]"

    def finish(self, limit: float) -> str:
        """All that its processes have written."""
        try:
            self.process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"not finished after {limit:g} s:\n{(self.folder / OUTPUT).read_text()}")
        return (self.folder / OUTPUT).read_text()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def start(folder: Path, body: str, *arguments: str) -> Script:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "script.py").write_text(MODULE + body)
    mine = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "NODE_RANK", "GROUP_RANK", "TORCHELASTIC", "DS_ACCELERATOR")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(mine)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / OUTPUT).open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "script.py", *arguments],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # its processes are one group, which can be asked for and ended
        )
    return Script(folder=folder, process=process)


def group_ended(process: "subprocess.Popen[str]", limit: float) -> bool:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    return False


FAILURES = {"zero2": (1, "not"), "zero3": (0, "saves")}
"""Under which strategy which rank fails, and whether a callback would save then."""

COPIES = ("copy 0", "copy 1")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Script]]:
    """All scripts at once, each in a folder of its name: none must disturb another, and it takes half as long."""
    folder = tmp_path_factory.mktemp("a folder") / "of scripts"
    started = {copy: start(folder / copy, TWO_RUNS) for copy in COPIES}
    for name, (rank, saves) in FAILURES.items():
        started[name] = start(folder / f"{name} fails", FAILS, name, str(rank), saves)
    yield started
    for script in started.values():
        script.kill()


@pytest.mark.parametrize("name", FAILURES)
def test_one_rank_fails(name: str, scripts: dict[str, Script]) -> None:
    # Most of the limit is the start of Python on two ranks, beside those of the other scripts.
    output = scripts[name].finish(limit=90.0)
    assert scripts[name].process.returncode != 0
    assert "ValueError: boom" in output
    assert f"(raised on rank {FAILURES[name][0]} of 2)" in output
    assert group_ended(scripts[name].process, limit=10.0), output
    assert not list(scripts[name].folder.glob("saved*")), "a checkpoint of one rank alone"


@pytest.mark.parametrize("copy", COPIES)
def test_two_strategies_in_a_script_and_two_scripts_at_once(copy: str, scripts: dict[str, Script]) -> None:
    output = scripts[copy].finish(limit=120.0)
    assert scripts[copy].process.returncode == 0, output
    done = {path.name for path in scripts[copy].folder.glob("done*")}
    assert done == {"done on rank 0", "done on rank 1"}, output
    assert group_ended(scripts[copy].process, limit=10.0)
