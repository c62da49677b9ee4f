"""Schedulers, loggers and callbacks around the engine, each equal to one process or refused before the first step."""

import csv
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim import lr_scheduler

from lightning_shard import ZeROStrategy
from lightning_shard.testing import RankFailed, run_distributed
from tests.strategies.cases import assert_all_same, each, under
from tests.strategies.test_zero_odd_models import two_groups
from tests.strategies.zero_modules import STAGES, Classifier, Trained, classes, numbers, sgd
from tests.strategies.zero_runs import in_one_process, loader, on_each_rank, trainer, world

pytestmark = pytest.mark.ranks

NAMES = ["zero1", "zero2_offload", "zero3"]


def scheduled(make: Any, **settings: Any) -> Any:
    """``configure_optimizers`` of two groups under one scheduler."""

    def optimizers(module: Any) -> Any:
        optimizer = two_groups(module)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **settings}}

    return optimizers


def one_rate(make: Any, **settings: Any) -> Any:
    def optimizers(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **settings}}

    return optimizers


class Rates(pl.Callback):
    """The learning rates that each batch and each epoch's end sees."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.epochs: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.batches.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.epochs.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.epochs.append(trainer.optimizers[0].param_groups[0]["lr"])


def rates(name: str, optimizers: Any, count: int = 2, **settings: Any) -> Rates:
    pl.seed_everything(0, verbose=False)
    seen, batches = Rates(), classes(count)

    class Constant(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", 1.0)

    run = trainer(name, callbacks=[seen], num_sanity_val_steps=0, **settings)
    run.fit(Constant(optimizers), loader(batches), loader(batches[:1]))
    return seen


def step_rule(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def plateau(optimizer: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)


def one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=[0.2, 0.1], total_steps=8)


def sequence(optimizer: Any) -> Any:
    warm, cool = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)
    return lr_scheduler.SequentialLR(optimizer, [warm, cool], milestones=[2])


def by_group(optimizer: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1 / (1 + step)])


def test_schedulers_by_epoch_and_on_plateau() -> None:
    def run(name: str) -> tuple[list[float], list[float]]:
        by_epoch = rates(name, one_rate(step_rule, interval="epoch"), max_epochs=3).epochs
        return by_epoch, rates(name, one_rate(plateau, monitor="val_loss"), max_epochs=3).epochs

    expected = ([1.0, 0.5, 0.25, 0.125], pytest.approx([1.0, 1.0, 0.1, 0.01]))
    assert run_distributed(each, 2, NAMES, run) == [dict.fromkeys(NAMES, expected)] * 2


BY_STEP: dict[Any, dict[str, Any]] = {
    step_rule: {"interval": "step", "frequency": 2},
    one_cycle: {"interval": "step"},
    sequence: {"interval": "step"},
    by_group: {"interval": "step"},
}


def test_schedulers_by_step_with_accumulation() -> None:
    def run(name: str) -> list[list[list[float]]]:
        settings: dict[str, Any] = {"count": 5, "max_epochs": 2, "accumulate_grad_batches": 2}
        return [rates(name, scheduled(make, **more), **settings).batches for make, more in BY_STEP.items()]

    expected = in_one_process(run)
    assert all(len({tuple(row) for row in schedule}) > 2 for schedule in expected)
    for found in run_distributed(each, 2, NAMES, run):
        for name, schedules in found.items():
            for make, seen, wanted in zip(BY_STEP, schedules, expected, strict=True):
                assert seen == [pytest.approx(row) for row in wanted], (name, make.__name__)


def test_training_under_a_scheduler() -> None:
    cases = {}
    for make in (one_cycle, sequence, by_group):
        optimizers = scheduled(make, interval="step")
        made = lambda optimizers=optimizers: Classifier(optimizers)  # noqa: E731
        for key, case in under(STAGES, made, classes(6), accumulate_grad_batches=2).items():
            cases[f"{make.__name__}: {key}"] = case
    assert_all_same(cases)


def test_rates_and_losses_in_the_log(tmp_path: Path) -> None:
    class Logged(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("loss", loss, sync_dist=True)
            return loss

    def run(name: str) -> list[dict[str, str]]:
        pl.seed_everything(0, verbose=False)
        folder = tmp_path / name
        logger = CSVLogger(folder, name="", version="")
        optimizers = scheduled(by_group, interval="step", name="rate")
        settings: dict[str, Any] = {"callbacks": [LearningRateMonitor()], "log_every_n_steps": 1}
        trainer(name, logger=logger, **settings).fit(Logged(optimizers), loader(classes(3)))
        path = folder / "metrics.csv"
        if world()[0] != 0:
            return []
        with path.open() as lines:
            return list(csv.DictReader(lines))

    expected = in_one_process(run)
    assert {"rate/first", "rate/rest", "loss", "step", "epoch"} <= set(expected[0])
    for name, found in run_distributed(each, 2, NAMES, run)[0].items():
        assert len(found) == len(expected), name
        for row, reference in zip(found, expected, strict=True):
            assert row.keys() == reference.keys(), name
            assert [value and float(value) for value in row.values()] == [
                value and pytest.approx(float(value), abs=1e-6, rel=1e-5) for value in reference.values()
            ], name


class Finetune(BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.net)  # type: ignore[arg-type]

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        raise AssertionError("a step was made")


REFUSED: dict[str, tuple[Any, str]] = {
    "finetuning": (Finetune, r"Finetuning callback does not support .*DeepSpeed strategy"),
    "changing accumulation": (lambda: GradientAccumulationScheduler({1: 2}), r"`ZeROStrategy` does not support"),
    "averaging": (lambda: StochasticWeightAveraging(1e-2), r"SWA does not currently support sharded models"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_callbacks_that_change_the_partitions_are_refused(kind: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(RankFailed, match=message):
        on_each_rank(lambda name: trainer(name, callbacks=[make()]).fit(Classifier(), loader(classes(1))), "zero2")


class WholeTensors(torch.optim.SGD):
    """Needs matrices as they are."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad is None or parameter.grad.dim() == 2, "not a matrix"
        return super().step(closure)


def test_an_optimizer_of_whole_tensors_is_refused() -> None:
    def train(name: str) -> None:
        module = Classifier(lambda module: WholeTensors(module.parameters(), lr=0.1))
        trainer(name).fit(module, loader(classes(1)))

    with pytest.raises(RankFailed, match=r"WholeTensors .*elementwise"):
        on_each_rank(train, "zero2")


class FreezesLater(Classifier):
    """Changes what is trained when training has begun."""

    def __init__(self, frozen_first: bool) -> None:
        super().__init__()
        self.frozen_first = frozen_first
        self.net[0].requires_grad_(not frozen_first)

    def on_train_batch_end(self, *_: Any) -> None:
        self.net[0].requires_grad_(self.frozen_first)


@pytest.mark.parametrize(("frozen_first", "change"), [(False, "frozen"), (True, "unfrozen")])
def test_a_change_of_what_is_trained_is_refused(frozen_first: bool, change: str) -> None:
    with pytest.raises(RankFailed, match=rf"'net\.0\.weight' was {change} after training had started"):
        on_each_rank(lambda name: trainer(name).fit(FreezesLater(frozen_first), loader(classes(3))), "zero2")


def test_a_second_fit_with_other_layers_frozen() -> None:
    def run(name: str) -> float:
        pl.seed_everything(0, verbose=False)
        module, batches = Classifier(), loader(classes(3))
        for frozen in (True, False):
            module.net[0].requires_grad_(not frozen)
            trainer(name).fit(module, batches)
        return trainer(name).validate(module, batches, verbose=False)[0]["val_loss"]

    expected = pytest.approx(in_one_process(run), abs=1e-6, rel=1e-5)
    assert run_distributed(each, 2, NAMES, run) == [dict.fromkeys(NAMES, expected)] * 2


class Ranked(Trained):
    """Rank 0's metric falls from epoch to epoch, rank 1's rises."""

    def __init__(self) -> None:
        super().__init__(sgd())
        self.net = torch.nn.Linear(4, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("metric", (1.0 if world()[0] else -1.0) * self.current_epoch, on_step=False, on_epoch=True)
        return self.net(batch).square().mean()


def test_all_ranks_stop_when_one_would() -> None:
    def run(name: str) -> int:
        stop = EarlyStopping("metric", patience=1, check_on_train_epoch_end=True)
        one = trainer(name, callbacks=[stop], max_epochs=5)
        one.fit(Ranked(), loader(numbers(2)))
        return one.current_epoch

    # Rank 1 is without improvement in its second epoch, numbered 1.
    assert run_distributed(each, 2, STAGES, run) == [dict.fromkeys(STAGES, 2)] * 2


class DifferentKeys(Ranked):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        for key in ("a", "b")[: world()[0] + 1]:
            self.log(key, loss.detach(), on_epoch=True, on_step=False, sync_dist=True)
        return loss


def test_ranks_that_log_different_keys_do_not_wait_for_ever() -> None:
    """Lightning reduces key by key, so rank 1 waits alone for its second key: no longer than the strategy's timeout."""

    def run(_: str) -> None:
        strategy = ZeROStrategy(2, timeout=timedelta(seconds=5))
        trainer(strategy).fit(DifferentKeys(), loader(numbers(2)))

    with pytest.raises(RankFailed, match=r"(?i)timed out|connection"):
        on_each_rank(run, "", timeout=45.0)
