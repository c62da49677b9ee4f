"""Users' configs and optimizers on ranks: each must train as one process does, or be refused before the first step."""

import copy
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
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
from tests.strategies.cases import assert_all_same, each, under
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


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run with 2 rows a batch and rank."""

    strategy: Callable[[], Any]
    module: Callable[[], Any] = Classifier
    settings: Mapping[str, Any] = field(default_factory=dict)


def outcomes(runs: Mapping[str, Run]) -> dict[str, tuple[str, int]]:
    """How each run ends on all ranks, and after how many batches."""

    def outcome(key: str) -> tuple[str, int]:
        made = runs[key].module()
        batches: list[int] = []
        made.on_train_batch_end = lambda *_: batches.append(1)
        rows = torch.randn(8, 13), torch.randint(0, 3, (8,))
        run = DataLoader(TensorDataset(*rows), batch_size=2)
        try:
            trainer(runs[key].strategy(), **runs[key].settings).fit(made, run)
        except MisconfigurationException as error:
            return str(error), len(batches)
        return "trained", len(batches)

    first, second = run_distributed(each, 2, list(runs), outcome, timeout=60)
    assert first == second
    return first


def refusals_on_ranks(runs: Mapping[str, Run]) -> dict[str, str]:
    """The one message of each run that all ranks raise, none of them after a step."""
    found = outcomes(runs)
    for key, (message, batches) in found.items():
        assert message != "trained" and batches == 0, key
    return {key: message for key, (message, _) in found.items()}


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

    settings = {"accumulate_grad_batches": 2}
    (message,) = refusals_on_ranks({"sizes": Run(strategy=strategy, settings=settings)}).values()
    assert "train_batch_size=12" in message and "2*2*2=8" in message


CONTRADICTIONS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"gradient_accumulation_steps": 2}, {"accumulate_grad_batches": 4}, ["=2", "accumulate_grad_batches=4"]),
    ({"train_micro_batch_size_per_gpu": 4}, {}, ["train_micro_batch_size_per_gpu=4", "says 2"]),
    ({"gradient_clipping": 1.0}, {"gradient_clip_val": 0.5}, ["gradient_clipping=1.0", "gradient_clip_val=0.5"]),
    ({"fp16": {"enabled": True}}, {}, ["fp16.enabled=True", "precision='32-true'"]),
    ({"gradient_cliping": 1.0}, {}, ["'gradient_cliping'", "Did you mean 'gradient_clipping'?"]),
    ({"optimizer": {"type": "AdamW"}}, {}, ["optimizer", "overrides `configure_optimizers`"]),
]
"""Of a config and the Trainer's settings, with the words that the refusal must have."""


def test_contradictions_are_refused_on_every_rank() -> None:
    runs = {
        str(config): Run(strategy=lambda config=config: ZeROStrategy(config=config), settings=settings)
        for config, settings, _ in CONTRADICTIONS
    }
    messages = refusals_on_ranks(runs)
    for config, _, named in CONTRADICTIONS:
        assert all(words in messages[str(config)] for words in named), (config, messages[str(config)])


def test_equal_values_in_both_places_train() -> None:
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    run = Run(strategy=lambda: ZeROStrategy(config=config), settings={"accumulate_grad_batches": 2})
    assert outcomes({"equal": run}) == {"equal": ("trained", 4)}


def test_offload_of_the_config_trains_as_the_arguments() -> None:
    strategies: dict[str, Any] = {}
    for stage in (1, 2, 3):
        section: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
        pinned = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}}
        offload = Offload(optimizer="cpu", pin_memory=True)
        strategies[f"config, stage {stage}"] = partial(ZeROStrategy, stage, config={"zero_optimization": section})
        strategies[f"both, stage {stage}"] = partial(ZeROStrategy, stage, offload=offload, config=pinned)
    assert_all_same(under(strategies, lambda: Classifier(adamw()), classes(3)))


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
    for found in run_distributed(each, 2, (2, 3), run, timeout=60):
        for stage, (ours, state) in found.items():
            assert ours == pytest.approx(rates), stage
            for key, value in expected.items():
                assert torch.allclose(state[key], value, atol=5e-6), (stage, key)


def test_the_trainer_tells_the_scheduler_how_many_steps_there_are() -> None:
    section = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2}}
    config = {"optimizer": OPTIMIZER, "scheduler": section}

    def run() -> int:
        run = trainer(ZeROStrategy(config=config), max_epochs=3, accumulate_grad_batches=2)
        run.fit(Bare(), loader(classes(4)))
        return run.strategy.lr_scheduler_configs[0].scheduler.total_num_steps

    assert run_distributed(run, 2, timeout=60) == [6, 6]
    endless = Run(strategy=lambda: ZeROStrategy(config=config), module=Bare, settings={"max_epochs": -1})
    (message,) = refusals_on_ranks({"endless": endless}).values()
    assert "scheduler.params.total_num_steps='auto'" in message


# --- optimizers ---


FLAGS: list[dict[str, Any]] = [
    {"fused": True},
    {"foreach": True},
    {"amsgrad": True},
    {"maximize": True},
    {"lr": torch.tensor(1e-3)},
]


def test_flags_of_adamw_train_as_in_one_process() -> None:
    cases = {}
    for flags in FLAGS:
        for name, case in under(STAGES, lambda flags=flags: Classifier(adamw(**flags)), classes(3)).items():
            cases[f"{flags} under {name}"] = case
    assert_all_same(cases)


def test_an_unknown_elementwise_optimizer_trains_as_in_one_process() -> None:
    def lion(module: Any) -> Any:
        optimizer = Lion(module.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    assert_same_training(lambda: Classifier(lion), ["zero2", "zero3", "zero3_offload"], classes(4))


def muon(module: Any) -> Any:
    matrices = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    return torch.optim.Muon(matrices, lr=0.01)


REFUSED: dict[str, tuple[Any, str]] = {
    "Muon": (muon, "Muon cannot run under ZeRO"),
    "Adafactor": (lambda module: torch.optim.Adafactor(module.parameters()), "Adafactor cannot run under ZeRO"),
    "LBFGS": (lambda module: torch.optim.LBFGS(module.parameters()), "LBFGS evaluates the loss several times"),
    "NeedsMatrices": (
        lambda module: NeedsMatrices(module.parameters()),
        "NeedsMatrices is not known to be elementwise",
    ),
    "Trusting": (lambda module: Trusting(module.parameters(), lr=0.0), "Trusting cannot run under ZeRO"),
}


def test_optimizers_that_slices_would_break_are_refused_before_step_1() -> None:
    runs = {
        name: Run(strategy=lambda: "zero3", module=lambda make=make: Classifier(make))
        for name, (make, _) in REFUSED.items()
    }
    for name, message in refusals_on_ranks(runs).items():
        assert message.startswith(REFUSED[name][1]) and "Choose an elementwise optimizer" in message, name


# --- no op is compiled that is not needed ---


def test_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))

    def run(name: str) -> tuple[int, int, list[str]]:
        assert os.environ["TORCH_EXTENSIONS_DIR"].startswith(str(tmp_path))
        run = trainer(name)
        run.fit(Classifier(adamw()), loader(classes(2)))
        run.validate(run.lightning_module, loader(classes(1)), verbose=False)
        compiled = [str(path) for path in (tmp_path / "extensions").rglob("*") if path.is_file()]
        return run.global_step, world()[0], compiled

    for rank, found in enumerate(run_distributed(each, 2, ZERO_NAMES, run, timeout=60)):
        assert found == dict.fromkeys(ZERO_NAMES, (2, rank, []))
