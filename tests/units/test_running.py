"""A sharded module at work."""

import gc
import weakref

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shard.testing import run_distributed

pytestmark = pytest.mark.ranks


class Layer(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def module_is_left_alone() -> bool:
    module = Layer()
    trainer = pl.Trainer(
        strategy="fsdp2",
        accelerator="cpu",
        devices=2,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8, 3), batch_size=2))
    gone = weakref.ref(module)
    del module, trainer
    gc.collect()
    return gone() is None


def test_a_module_that_nobody_uses_any_more_is_freed() -> None:
    assert run_distributed(module_is_left_alone, 2) == [True, True]


class Reads(pl.Callback):
    """What a callback finds that reads weights as it would in one process."""

    def __init__(self) -> None:
        self.found: tuple[float, float] | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        total = float(sum(parameter.abs().sum() for parameter in pl_module.parameters()))
        norm = pl_module.get_parameter("layer.weight").norm().item()
        self.found = total, norm


def numbers_by_callback(strategy: str, devices: int) -> tuple[float, float]:
    pl.seed_everything(1, verbose=False)
    reads = Reads()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[reads],
    )
    trainer.fit(Layer(), torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=2))
    assert reads.found is not None
    return reads.found


def test_numbers_read_off_shards_are_the_wholes() -> None:
    (expected,) = run_distributed(numbers_by_callback, 1, "auto", 1)
    for found in run_distributed(numbers_by_callback, 2, "fsdp2", 2):
        assert found == pytest.approx(expected, abs=1e-6)
