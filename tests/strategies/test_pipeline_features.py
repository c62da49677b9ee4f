"""What a Trainer does around a pipeline: logs, metrics, schedulers, callbacks and settings, each as in one process."""

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim import lr_scheduler
from torchmetrics import MeanSquaredError, MetricCollection, MinMetric, SumMetric

from tests.strategies.pipeline_modules import (
    SCHEDULES,
    Layers,
    Product,
    alone,
    assert_close,
    on_ranks,
    rows_of,
    same_on_all_ranks,
    seeded,
    trainer,
)
from tests.strategies.zero_modules import numbers, sgd
from tests.strategies.zero_runs import world

pytestmark = pytest.mark.ranks

UNEVEN = [*numbers(2, rows=8), *numbers(1, rows=6, seed=7), *numbers(1, rows=3, seed=8)]
"""Four batches; the last has fewer rows than there are microbatches."""


# --- logging ---


class Logging(Layers):
    """Logs in every way, and keeps what each batch's log call made known."""

    def __init__(self) -> None:
        super().__init__()
        self.squares = MeanSquaredError()
        self.collected = MetricCollection({"sum": SumMetric(), "low": MinMetric()})
        self.own = SumMetric()
        self.outputs: list[Tensor] = []
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        made = self(batch)
        loss = (made - 1).square().mean()
        self.log("loss", loss, prog_bar=True)
        self.log("both", loss.detach(), on_step=True, on_epoch=True)
        self.log_dict(
            {"first": made[:, 0].mean(), "epoch_number": float(self.current_epoch)}, on_step=False, on_epoch=True
        )
        self.log("largest", made.max(), reduce_fx="max", on_epoch=True, on_step=False)
        self.log("smallest", made.min(), reduce_fx=torch.min, on_epoch=True, on_step=False)
        self.log("count", len(batch), reduce_fx="sum", on_epoch=True, on_step=False)
        self.log("positional", loss, False, True, True)
        self.squares.update(made, torch.ones_like(made))
        self.log("squares", self.squares, on_epoch=True, on_step=False)
        self.own.update(made.sum())
        return {"loss": loss, "made": made.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.seen[f"output {batch_idx}"] = (outputs["loss"].detach(), outputs["made"])

    def on_train_epoch_end(self) -> None:
        self.log("own", self.own.compute())
        self.own.reset()

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        made = self(batch)
        self.log("val_loss", (made - 1).square().mean())
        self.collected.update(made)
        self.log_dict({"named": made.mean()}, on_step=True, on_epoch=True)
        self.outputs.append(made[:, 0])
        return made

    def on_validation_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.seen[f"validated {batch_idx}"] = outputs

    def on_validation_epoch_end(self) -> None:
        every = torch.cat([output.flatten() for output in self.outputs])
        self.seen["stacked"] = every
        self.seen["batches"] = len(self.outputs)
        self.log("spread", every.std())
        self.log_dict(self.collected.compute())
        self.collected.reset()
        self.outputs.clear()


class EachStep(pl.Callback):
    """What is known after each batch."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        bar = {f"bar {name}": float(value) for name, value in trainer.progress_bar_metrics.items()}
        self.steps.append({**bar, **{name: float(value) for name, value in trainer.logged_metrics.items()}})


def logged(key: str) -> dict[str, Any]:
    steps, module = EachStep(), seeded(Logging)
    run = trainer(key, callbacks=[steps], max_epochs=2, log_every_n_steps=1)
    run.fit(module, rows_of(UNEVEN), rows_of(UNEVEN[1:]))
    return {
        "callbacks": {name: float(value) for name, value in run.callback_metrics.items()},
        "steps": steps.steps,
        "seen": module.seen,
    }


def test_everything_that_is_logged_and_kept() -> None:
    expected = same_on_all_ranks(logged, ["1f1b", "zbv", "interleaved"])
    assert expected["callbacks"]["count"] == 25.0
    assert {"both_step", "both_epoch", "own", "spread", "sum", "low", "named_epoch"} <= set(expected["callbacks"])


def rates(optimizer: Any, kind: str) -> Any:
    match kind:
        case "epoch":
            return {"scheduler": lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "epoch"}
        case "step":
            return {"scheduler": lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step", "frequency": 2}
        case "plateau":
            rule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
            return {"scheduler": rule, "monitor": "constant"}
        case _:
            rule = lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.1)
            return {"scheduler": rule, "monitor": "val_loss"}


class Scheduled(Layers):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.rates: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("constant", 1.0)

    def on_train_batch_start(self, *_: Any) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return {"optimizer": optimizer, "lr_scheduler": rates(optimizer, self.kind)}


def scheduled(key: str) -> dict[str, list[float]]:
    found = {}
    for kind in ("epoch", "step", "plateau", "real plateau"):
        module = seeded(lambda kind=kind: Scheduled(kind))
        more = {"accumulate_grad_batches": 2} if kind == "step" else {}
        trainer(key, max_epochs=4, num_sanity_val_steps=0, **more).fit(module, rows_of(UNEVEN[:2]), rows_of(UNEVEN[2:]))
        found[kind] = module.rates
    return found


def test_learning_rate_schedulers() -> None:
    expected = same_on_all_ranks(scheduled, ["1f1b", "dualpipev"])
    assert expected["epoch"] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
    assert expected["plateau"][::2] == pytest.approx([1.0, 1.0, 0.1, 0.01])
    assert expected["real plateau"][-1] < 1.0


def test_files_that_callbacks_and_loggers_write(tmp_path: Path) -> None:
    def run(key: str) -> Any:
        folder = tmp_path / key
        best = ModelCheckpoint(folder, "{epoch}-{val_loss:.4f}", monitor="val_loss", save_top_k=2, save_last=True)
        module = seeded(lambda: Scheduled("epoch"))
        logger = CSVLogger(folder, name="", version="", flush_logs_every_n_steps=1)
        one = trainer(
            key,
            callbacks=[best, LearningRateMonitor()],
            logger=logger,
            log_every_n_steps=1,
            max_epochs=3,
            enable_checkpointing=True,
            enable_progress_bar=True,
            enable_model_summary=True,
        )
        one.fit(module, rows_of(UNEVEN), rows_of(UNEVEN[1:]))
        files = sorted(path.name for path in folder.glob("*.ckpt"))
        scores = [float(score) for score in best.best_k_models.values()]
        if world()[0]:
            return files, scores, float(best.best_model_score or 0), None
        with (folder / "metrics.csv").open() as lines:
            rows = [{name: value and float(value) for name, value in row.items()} for row in csv.DictReader(lines)]
        return files, scores, float(best.best_model_score or 0), rows

    expected = alone(run)
    assert {"lr-SGD", "loss", "val_loss", "constant"} <= set(expected[3][0])
    for found in on_ranks(run, ["1f1b", "zbv"]):
        for files, scores, best, rows in found.values():
            assert files == expected[0]
            assert scores == pytest.approx(expected[1], rel=1e-5)
            assert best == pytest.approx(expected[2], rel=1e-5)
            for row, wanted in zip(rows or [], expected[3] if rows else [], strict=True):
                assert row == {
                    name: value and pytest.approx(value, rel=1e-5, abs=1e-7) for name, value in wanted.items()
                }


# --- loops ---


class Counting(Layers):
    """Which batches and hooks came, and in which order."""

    def __init__(self) -> None:
        super().__init__(sgd(0.05))
        self.events: list[str] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.events.append(f"train {batch_idx} of {len(batch)} rows")

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.events.append(f"validate {batch_idx} {self.trainer.sanity_checking} {self.training}")

    def on_before_zero_grad(self, *_: Any) -> None:
        self.events.append("zero")

    def on_before_backward(self, loss: Tensor) -> None:
        self.events.append("backward")

    def on_after_backward(self) -> None:
        self.events.append("after")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.events.append("step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.events.append(f"end {self.training}")


LOOPS: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate_grad_batches": 3, "max_epochs": 2},
    "limited": {"limit_train_batches": 2, "limit_val_batches": 1, "val_check_interval": 1},
    "overfitted": {"overfit_batches": 1, "max_epochs": 2},
    "once": {"fast_dev_run": True},
    "timed": {"max_time": {"seconds": 0}, "max_epochs": 50},
    "steps": {"max_steps": 3, "max_epochs": -1, "num_sanity_val_steps": 2},
}


def looped(key: str) -> dict[str, Any]:
    found = {}
    for name, settings in LOOPS.items():
        module = seeded(Counting)
        run = trainer(key, **settings)
        run.fit(module, rows_of(UNEVEN), rows_of(UNEVEN[1:]))
        metrics = {metric: float(value) for metric, value in run.callback_metrics.items()}
        found[name] = (module.events, run.global_step, metrics)
    return found


def test_loops_and_their_hooks() -> None:
    expected = same_on_all_ranks(looped)
    assert expected["accumulated"][0].count("step") == 4
    assert expected["steps"][1] == 3


class Stopping(Product):
    """A metric that only the last stage can compute, and that grows."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("metric", self(batch).mean() * 0 + self.current_epoch)


def test_early_stopping() -> None:
    def run(key: str) -> tuple[int, float]:
        stop = EarlyStopping("metric", patience=1)
        one = trainer(key, callbacks=[stop], max_epochs=6)
        one.fit(Stopping(1.0, 1.0, 1.0, 1.0), rows_of(UNEVEN), rows_of(UNEVEN))
        return one.current_epoch, float(stop.best_score)

    assert same_on_all_ranks(run, ["1f1b", "zbv"]) == (2, 0.0)


# --- evaluation ---


def evaluated(key: str) -> dict[str, Any]:
    module, batches = seeded(Layers), [*UNEVEN, *numbers(1, rows=1, seed=9)]
    run = trainer(key)
    run.fit(module, rows_of(batches[:2]), rows_of(batches))
    found: dict[str, Any] = {
        "validate": run.validate(module, rows_of(batches), verbose=False),
        "test": run.test(module, rows_of(batches[3:]), verbose=False),
    }
    found["mode"] = module.training
    predicted = run.predict(module, rows_of(batches))
    if world()[0] == 0:
        assert predicted is not None
        found["rows"] = torch.cat(predicted)  # type: ignore[arg-type]
    return found


def test_evaluation_under_every_schedule() -> None:
    expected = alone(evaluated)
    assert len(expected["rows"]) == 26
    for found in on_ranks(evaluated, SCHEDULES):
        for key, value in found.items():
            assert_close(value, {name: expected[name] for name in value}, key)
