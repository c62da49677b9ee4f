"""What the strategy offers and warns of where values lie on other stages; and a checkpoint that ddp goes on from."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard.checkpoint.assemble import load_whole
from lightning_shard.testing import run_distributed
from tests.strategies.pipeline_models import MLP, MODELS

pytestmark = pytest.mark.ranks


def fit(
    module: pl.LightningModule,
    strategy: str,
    devices: int,
    *,
    steps: tuple[int, ...] = (0, 1),
    epochs: int = 1,
    resume: Path | None = None,
) -> pl.Trainer:
    make_batch = MODELS["MLP in nn.Sequential"][1]
    batches = [make_batch(step) for step in steps]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    loader: DataLoader[Any] = DataLoader(batches, batch_size=1, collate_fn=lambda items: items[0])  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=resume)
    return trainer


class Norms(MLP):
    """Looks at the norm of all gradients, and at a value of the last stage."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        if hasattr(strategy, "gradient_norm"):
            self.norm = float(strategy.gradient_norm())
            value = torch.tensor(5.0) if strategy.has_last_stage else None
            self.told = float(strategy.broadcast_from_last(value))
        else:
            self.norm = float(torch.stack([each.grad.norm() for each in self.parameters()]).norm())


class Counts(MLP):
    """Counts its steps, and logs the norm that Lightning's function gives."""

    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))


class Clips(MLP):
    """Clips by itself."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


def seeded(make: type[MLP]) -> MLP:
    pl.seed_everything(3, verbose=False)
    return make()


def look(_: int) -> dict[str, Any]:
    norms = seeded(Norms)
    fit(norms, "pipeline_1f1b", 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(seeded(Counts), "pipeline_1f1b", 2)
    with pytest.raises(MisconfigurationException, match=r"Clips.on_before_optimizer_step calls clip_grad_norm_"):
        fit(seeded(Clips), "pipeline_1f1b", 2)
    return {"norm": norms.norm, "told": norms.told, "warned": [str(each.message) for each in caught]}


def test_norms_and_values_of_other_stages_and_what_is_warned_of() -> None:
    one = seeded(Norms)
    fit(one, "auto", 1)
    first, last = run_distributed(look, 2, 0)
    for rank in (first, last):
        assert rank["norm"] == pytest.approx(one.norm, rel=1e-5)
        assert rank["told"] == 5.0
    for text in ("Counts.training_step changes self.steps", "on_before_optimizer_step calls grad_norm"):
        assert any(text in message for message in first["warned"]), text


def save(path: Path) -> list[float]:
    trainer = fit(seeded(MLP), "pipeline_1f1b", 2)
    trainer.save_checkpoint(path)
    weights = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    return [float(weight.double().sum()) for weight in weights.values()]


def go_on_under_ddp(path: Path) -> tuple[int, list[float]]:
    saved = load_whole(path)
    trainer = fit(seeded(MLP), "ddp", 2, steps=(9,), epochs=2, resume=path)
    return trainer.global_step, [float(weight.double().sum()) for weight in saved["state_dict"].values()]


def test_ddp_goes_on_from_a_pipelines_checkpoint(tmp_path: Path) -> None:
    weights = run_distributed(save, 2, tmp_path / "a folder" / "pipeline.ckpt")
    for step, read in run_distributed(go_on_under_ddp, 2, tmp_path / "a folder" / "pipeline.ckpt"):
        assert step > 2
        assert read == pytest.approx(weights[0])
        assert weights[0] == weights[1]
