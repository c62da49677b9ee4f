"""ZeRO-Infinity: states on NVMe. Needs a compiler and libaio; the op compiles for minutes, so run `make test-nvme`."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_shard import Offload, ZeROStrategy, consolidate_checkpoint
from lightning_shard.testing import assert_same_training, run_distributed
from tests.strategies.test_zero_checkpoint import close, fit, reference, seeded
from tests.strategies.zero_modules import Trained, adamw, classes, sgd

pytestmark = [pytest.mark.ranks, pytest.mark.nvme]

SWAPPED_BYTES = 1 << 20
"""The engine swaps only what has at least this many bytes on a rank; smaller tensors would prove nothing."""

TIMEOUT = 1500.0
"""Seconds; the first run compiles the op."""

_FIRST = 1023
_SECOND = 1025
ELEMENTS = 13 * _FIRST + _FIRST + _FIRST * _SECOND + _SECOND + _SECOND * 3 + 3


class Large(Trained):
    """About 1.07 M parameters in unequal pieces that no world size divides, one of them tied, one frozen."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer or adamw(1e-4))
        self.net = nn.Sequential(
            nn.Linear(13, _FIRST), nn.Tanh(), nn.Linear(_FIRST, _SECOND), nn.Tanh(), nn.Linear(_SECOND, 3)
        )
        self.still = nn.Parameter(torch.full((3,), 0.25), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy((self.net(x) + self.still).float(), y)


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    path = tmp_path / "a local drive"
    path.mkdir()
    return path


def offloads(drive: Path) -> dict[str, Offload]:
    return {
        "optimizer": Offload(optimizer="nvme", nvme_path=str(drive)),
        "both": Offload(optimizer="nvme", parameters="nvme", nvme_path=str(drive)),
        "parameters": Offload(optimizer="cpu", parameters="nvme", nvme_path=str(drive)),
    }


def swap_files(drive: Path, kind: str) -> list[int]:
    """Sizes in bytes of the swap files of optimizer states or parameters."""
    folder = "optimizer" if kind == "optimizer" else "param"
    return [path.stat().st_size for path in drive.rglob("*.swp") if folder in str(path.parent)]


@pytest.mark.parametrize("kind", ["optimizer", "both", "parameters"])
@pytest.mark.parametrize("optimizer", [adamw(1e-4), sgd(0.01, momentum=0.9)], ids=["adamw", "sgd"])
def test_trains_as_one_process(kind: str, optimizer: Any, drive: Path) -> None:
    offload = offloads(drive)[kind]
    print(
        assert_same_training(
            lambda: Large(optimizer), {kind: lambda: ZeROStrategy(offload=offload)}, classes(5), timeout=TIMEOUT
        )
    )
    per_rank = ELEMENTS * 4 // 2
    assert per_rank > SWAPPED_BYTES
    if kind in ("optimizer", "both"):
        states = [size for size in swap_files(drive, "optimizer") if size >= per_rank]
        # The master weights and each state of each rank.
        assert len(states) >= 2 * (3 if optimizer is not None and "adamw" in repr(optimizer) else 2)
    if kind in ("parameters", "both"):
        largest = (_FIRST * _SECOND + 1) // 2 * 4
        assert max(swap_files(drive, "parameters")) >= largest, "fp32 parameters must take four bytes each"


@pytest.mark.parametrize("kind", ["optimizer", "both"])
def test_resume_keeps_the_whole_state_of_adam(kind: str, drive: Path, tmp_path: Path) -> None:
    def train(epochs: int, path: Any = None, save: Any = None) -> Any:
        strategy = ZeROStrategy(offload=offloads(drive)[kind])
        module = seeded(Large) if path is None else Large()
        return fit(strategy, module, classes(3), epochs, ckpt_path=path, save=save)

    saved = run_distributed(train, 2, 1, save=tmp_path / "c", timeout=TIMEOUT)[0]
    expected = reference(Large, classes(3), 2)
    for resumed in run_distributed(train, 2, 2, tmp_path / "c", timeout=TIMEOUT):
        assert resumed.losses == pytest.approx(expected.losses[3:], abs=5e-6)
        assert all(close(resumed.weights[key], value) for key, value in expected.weights.items())
        assert {float(state["step"]) for state in resumed.optimizer.values()} == {6.0}
        assert float(resumed.optimizer["net.2.weight"]["exp_avg_sq"].abs().sum()) > 0
    plain = torch.load(consolidate_checkpoint(tmp_path / "c", tmp_path / "plain.ckpt"), weights_only=False)
    assert plain["state_dict"].keys() == saved.weights.keys()
    assert all(torch.equal(plain["state_dict"][key], value) for key, value in saved.weights.items())
    Large().load_state_dict(plain["state_dict"], strict=True)


def test_small_groups_stay_in_memory_and_come_back_too(drive: Path, tmp_path: Path) -> None:
    """Nothing is large enough to be swapped here: the engine's own checkpoint would lose everything."""

    class Small(Large):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(13, 17), nn.Tanh(), nn.Linear(17, 3))

    def train(epochs: int, path: Any = None, save: Any = None) -> Any:
        strategy = ZeROStrategy(offload=offloads(drive)["optimizer"])
        return fit(strategy, seeded(Small) if path is None else Small(), classes(3), epochs, ckpt_path=path, save=save)

    run_distributed(train, 2, 1, save=tmp_path / "c", timeout=TIMEOUT)
    assert not swap_files(drive, "optimizer")
    expected = reference(Small, classes(3), 2)
    for resumed in run_distributed(train, 2, 2, tmp_path / "c", timeout=TIMEOUT):
        assert all(close(resumed.weights[key], value) for key, value in expected.weights.items())


def test_bf16_under_the_registered_name_equals_cpu_offload(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(drive)
    report = assert_same_training(
        lambda: Large(sgd(0.001)), ["zero3_nvme", "zero3_offload_params"], classes(5), precision="bf16-mixed",
        atol=2e-2, rtol=2e-2, timeout=TIMEOUT,
    )  # fmt: skip
    assert report.strategies["zero3_nvme"].losses == report.strategies["zero3_offload_params"].losses
    assert any(path.name.endswith(".swp") for path in drive.rglob("*"))


def test_evaluation_after_a_fit(drive: Path) -> None:
    def run() -> float:
        import os

        from torch.utils.data import DataLoader

        class Validated(Large):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

        rank = int(os.environ["RANK"])
        data = [(x.chunk(2)[rank], y.chunk(2)[rank]) for x, y in classes(3)]
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy=ZeROStrategy(offload=offloads(drive)["both"]), max_epochs=1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, use_distributed_sampler=False,
        )  # fmt: skip
        module, loader = Validated(), DataLoader(data, batch_size=1, collate_fn=lambda rows: rows[0])
        trainer.fit(module, loader)
        return float(trainer.validate(module, loader, verbose=False)[0]["val_loss"])

    losses = run_distributed(run, 2, timeout=TIMEOUT)
    assert losses[0] == losses[1] > 0
