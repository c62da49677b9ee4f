"""Users' configs and optimizers on ranks: each must train as one process does, or be refused before the first step."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard.config import Offload
from lightning_shard.strategies.zero import ZeROStrategy
from lightning_shard.testing import assert_same_training, run_distributed
from lightning_shard.zero.user_config import CONFIG_VARIABLE
from tests.strategies.zero_modules import STAGES, ZERO_NAMES, Classifier, adamw, classes
from tests.strategies.zero_runs import loader, trainer, weights, world
from tests.zero.test_engine_config import AUTO_EVERYWHERE, GUIDE
from tests.zero.test_trial import Lion, NeedsMatrices, Trusting

pytestmark = pytest.mark.ranks

GUIDE_32 = {key: value for key, value in GUIDE.items() if key not in ("fp16", "train_batch_size")}
"""The guides' config for a device without fp16, and for a loader of ready-made batches."""


class Bare(Classifier):
    """Leaves the optimizer to the config."""

    configure_optimizers = pl.LightningModule.configure_optimizers


def outcome(strategy: Callable[[], Any], module: Callable[[], Any] = Classifier, **settings: Any) -> tuple[str, int]:
    """How a run with 2 rows a batch and rank ends on all ranks, and after how many batches."""

    def run() -> tuple[str, int]:
        made = module()
        batches: list[int] = []
        made.on_train_batch_end = lambda *_: batches.append(1)
        rows = torch.randn(8, 13), torch.randint(0, 3, (8,))
        try:
            trainer(strategy(), **settings).fit(made, DataLoader(TensorDataset(*rows), batch_size=2))
        except MisconfigurationException as error:
            return str(error), len(batches)
        return "trained", len(batches)

    first, second = run_distributed(run, 2, timeout=60)
    assert first == second
    return first


def refusal_on_ranks(strategy: Callable[[], Any], module: Callable[[], Any] = Classifier, **settings: Any) -> str:
    """The one message that all ranks raise, none of them after a step."""
    message, batches = outcome(strategy, module, **settings)
    assert message != "trained" and batches == 0
    return message


# --- configs ---


def test_a_guides_config_trains_as_one_process() -> None:
    before = copy.deepcopy(GUIDE_32)
    report = assert_same_training(
        lambda: Classifier(adamw()),
        {"guide": lambda: ZeROStrategy(config=GUIDE_32)},
        lambda: classes(4, rows=16),
        trainer_kwargs={"gradient_clip_val": 1.0},
    )
    assert report.strategies["guide"].loss_difference < 1e-6
    assert before == GUIDE_32


def test_a_config_with_auto_everywhere_trains_as_one_process(tmp_path: Path) -> None:
    path = tmp_path / "with a space" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(AUTO_EVERYWHERE))
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    assert_same_training(
        lambda: Classifier(adamw()),
        {"file": lambda: ZeROStrategy(config=path)},
        lambda: classes(4),
        trainer_kwargs=settings,
    )


def test_lightnings_environment_variable_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"gradient_clipping": 0.25, "zero_optimization": {"reduce_bucket_size": 64}}))
    monkeypatch.setenv(CONFIG_VARIABLE, str(path))

    def run() -> Any:
        run = trainer("zero2")
        run.fit(Classifier(), loader(classes(1)))
        return run.strategy.config["gradient_clipping"], run.strategy.config["zero_optimization"]["reduce_bucket_size"]

    assert run_distributed(run, 2, timeout=60) == [(0.25, 64)] * 2
    monkeypatch.setenv(CONFIG_VARIABLE, str(path) + ".missing")
    with pytest.raises(MisconfigurationException, match=r"config\.json\.missing"):
        ZeROStrategy()


@pytest.mark.parametrize("text", ['{"zero_optimization": ', "[]"])
def test_a_broken_file_is_refused_at_construction(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(MisconfigurationException, match=str(path)):
        ZeROStrategy(config=path)


def test_the_batch_sizes_of_config_and_trainer_must_multiply() -> None:
    def strategy() -> Any:
        sizes = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"}
        return ZeROStrategy(config=sizes)

    message = refusal_on_ranks(strategy, accumulate_grad_batches=2)
    assert "train_batch_size=12" in message and "2*2*2=8" in message


@pytest.mark.parametrize(
    ("config", "settings", "named"),
    [
        ({"gradient_accumulation_steps": 2}, {"accumulate_grad_batches": 4}, ["=2", "accumulate_grad_batches=4"]),
        ({"train_micro_batch_size_per_gpu": 4}, {}, ["train_micro_batch_size_per_gpu=4", "says 2"]),
        ({"gradient_clipping": 1.0}, {"gradient_clip_val": 0.5}, ["gradient_clipping=1.0", "gradient_clip_val=0.5"]),
        ({"fp16": {"enabled": True}}, {}, ["fp16.enabled=True", "precision='32-true'"]),
        ({"gradient_cliping": 1.0}, {}, ["'gradient_cliping'", "Did you mean 'gradient_clipping'?"]),
        ({"optimizer": {"type": "AdamW"}}, {}, ["optimizer", "overrides `configure_optimizers`"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_contradiction_is_refused_on_every_rank(config: Any, settings: Any, named: list[str]) -> None:
    message = refusal_on_ranks(lambda: ZeROStrategy(config=config), **settings)
    assert all(words in message for words in named), message


def test_equal_values_in_both_places_train() -> None:
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    assert outcome(lambda: ZeROStrategy(config=config), accumulate_grad_batches=2) == ("trained", 4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_of_the_config_trains_as_the_arguments(stage: Any) -> None:
    section: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    strategies = {
        "config": lambda: ZeROStrategy(stage=stage, config={"zero_optimization": section}),
        "both": lambda: ZeROStrategy(
            stage=stage,
            offload=Offload(optimizer="cpu", pin_memory=True),
            config={"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}},
        ),
    }
    assert_same_training(lambda: Classifier(adamw()), strategies, classes(3))


# --- the config's optimizer and scheduler ---

OPTIMIZER: dict[str, Any] = {
    "type": "AdamW",
    "params": {"lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1},
}
SCHEDULERS: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 3}),
    ("WarmupDecayLR", {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_max_lr": 0.02, "warmup_type": "linear"}),
    ("StepLR", {"step_size": 2, "gamma": 0.5}),
]


class Recorder(pl.Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []
        self.weights: dict[str, Tensor] = {}

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.rates.append(float(optimizer.param_groups[0]["lr"]))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.weights = weights(trainer)


@pytest.mark.parametrize(("name", "params"), SCHEDULERS)
def test_the_configs_optimizer_and_scheduler_train_as_in_one_process(name: str, params: dict[str, Any]) -> None:
    batches = classes(6)

    class WithTorch(Classifier):
        def configure_optimizers(self) -> Any:
            from deepspeed.runtime import lr_schedules

            optimizer = torch.optim.AdamW(self.parameters(), **OPTIMIZER["params"])
            kind = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
            return [optimizer], [{"scheduler": kind(optimizer, **params), "interval": "step"}]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()

    def run(stage: int) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        recorder = Recorder()
        config = {"optimizer": OPTIMIZER, "scheduler": {"type": name, "params": params}}
        strategy: Any = ZeROStrategy(stage=stage, config=config) if stage else "auto"
        trainer(strategy, callbacks=[recorder]).fit(Bare() if stage else WithTorch(), loader(batches))
        return recorder.rates, recorder.weights

    ((rates, expected),) = run_distributed(run, 1, 0, timeout=60)
    assert len(rates) == len(batches) and len(set(rates)) > 2
    for stage in (2, 3):
        for ours, state in run_distributed(run, 2, stage, timeout=60):
            assert ours == pytest.approx(rates)
            for key, value in expected.items():
                assert torch.allclose(state[key], value, atol=5e-6), key


def test_the_trainer_tells_the_scheduler_how_many_steps_there_are() -> None:
    section = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2}}
    config = {"optimizer": OPTIMIZER, "scheduler": section}

    def run() -> int:
        run = trainer(ZeROStrategy(config=config), max_epochs=3, accumulate_grad_batches=2)
        run.fit(Bare(), loader(classes(4)))
        return run.strategy.lr_scheduler_configs[0].scheduler.total_num_steps

    assert run_distributed(run, 2, timeout=60) == [6, 6]
    message = refusal_on_ranks(lambda: ZeROStrategy(config=config), Bare, max_epochs=-1)
    assert "scheduler.params.total_num_steps='auto'" in message


# --- optimizers ---


@pytest.mark.parametrize(
    "settings",
    [{"fused": True}, {"foreach": True}, {"amsgrad": True}, {"maximize": True}, {"lr": torch.tensor(1e-3)}],
    ids=str,
)
def test_flags_of_adamw_train_as_in_one_process(settings: dict[str, Any]) -> None:
    assert_same_training(lambda: Classifier(adamw(**settings)), STAGES, classes(3))


def test_an_unknown_elementwise_optimizer_trains_as_in_one_process() -> None:
    def lion(module: Any) -> Any:
        optimizer = Lion(module.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    assert_same_training(lambda: Classifier(lion), ["zero2", "zero3", "zero3_offload"], classes(4))


def muon(module: Any) -> Any:
    matrices = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    return torch.optim.Muon(matrices, lr=0.01)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (muon, "Muon cannot run under ZeRO"),
        (lambda module: torch.optim.Adafactor(module.parameters()), "Adafactor cannot run under ZeRO"),
        (lambda module: torch.optim.LBFGS(module.parameters()), "LBFGS evaluates the loss several times"),
        (lambda module: NeedsMatrices(module.parameters()), "NeedsMatrices is not known to be elementwise"),
        (lambda module: Trusting(module.parameters(), lr=0.0), "Trusting cannot run under ZeRO"),
    ],
    ids=["Muon", "Adafactor", "LBFGS", "NeedsMatrices", "Trusting"],
)
def test_an_optimizer_that_slices_would_break_is_refused_before_step_1(make: Any, named: str) -> None:
    message = refusal_on_ranks(lambda: "zero3", lambda: Classifier(make))
    assert message.startswith(named) and "Choose an elementwise optimizer" in message


# --- no op is compiled that is not needed ---


@pytest.mark.parametrize("name", ZERO_NAMES)
def test_nothing_is_compiled(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))

    def run() -> tuple[int, int]:
        assert os.environ["TORCH_EXTENSIONS_DIR"].startswith(str(tmp_path))
        run = trainer(name)
        run.fit(Classifier(adamw()), loader(classes(2)))
        run.validate(run.lightning_module, loader(classes(1)), verbose=False)
        return run.global_step, world()[0]

    assert run_distributed(run, 2, timeout=60) == [(2, 0), (2, 1)]
    assert not [path for path in (tmp_path / "extensions").rglob("*") if path.is_file()]
