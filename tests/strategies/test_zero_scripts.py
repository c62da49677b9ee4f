"""Whole scripts under Lightning's own launcher: failures end every process, and runs do not disturb each other."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]

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


def start(folder: Path, body: str, *arguments: str) -> "subprocess.Popen[str]":
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "script.py").write_text(MODULE + body)
    mine = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "NODE_RANK", "GROUP_RANK", "TORCHELASTIC", "DS_ACCELERATOR")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(mine)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "script.py", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # its processes are one group, which can be asked for and ended
    )


def finish(process: "subprocess.Popen[str]", limit: float) -> str:
    try:
        return process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"not finished after {limit:g} s:\n{process.communicate()[0]}")


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


@pytest.mark.parametrize(("name", "rank", "saves"), [("zero2", 1, "not"), ("zero3", 0, "saves")])
def test_one_rank_fails(tmp_path: Path, name: str, rank: int, saves: str) -> None:
    process = start(tmp_path / "a folder", FAILS, name, str(rank), saves)
    # Most of the limit is the start of Python on two ranks.
    output = finish(process, limit=60.0)
    assert process.returncode != 0
    assert "ValueError: boom" in output
    assert f"(raised on rank {rank} of 2)" in output
    assert group_ended(process, limit=10.0), output
    assert not list((tmp_path / "a folder").glob("saved*")), "a checkpoint of one rank alone"


def test_two_strategies_in_a_script_and_two_scripts_at_once(tmp_path: Path) -> None:
    folders = [tmp_path / f"copy {number}" for number in range(2)]
    processes = [start(folder, TWO_RUNS) for folder in folders]
    for folder, process in zip(folders, processes, strict=True):
        output = finish(process, limit=120.0)
        assert process.returncode == 0, output
        assert {path.name for path in folder.glob("done*")} == {"done on rank 0", "done on rank 1"}, output
        assert group_ended(process, limit=10.0)
