"""What a pipeline refuses, and how it ends: it names the culprit and a remedy on every rank, and never waits."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision
from torch import Tensor, nn

from lightning_shard import PipelineStrategy
from lightning_shard.testing import RankFailed, run_distributed
from tests.strategies.pipeline_modules import (
    Layers,
    fit,
    on_ranks,
    pipeline,
    rows_of,
    seeded,
    trainer,
)
from tests.strategies.test_zero_scripts import Script, group_ended, start
from tests.strategies.zero_modules import Trained, numbers
from tests.strategies.zero_runs import world

# --- arguments ---

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "schedule": ({"schedule": "2f2b"}, r"schedule='2f2b'.*gpipe, 1f1b"),
    "stages": ({"stages": 0}, r"stages=0"),
    "microbatches": ({"microbatches": "all"}, r"microbatches='all'.*'auto'"),
    "stages of a rank": ({"schedule": "zbv", "stages_per_rank": 3}, r"'zbv'.*stages_per_rank=3.*exactly 2"),
    "split": ({"split": "layers.2"}, r"split='layers.2'.*list of names"),
    "balance": ({"balance": "time"}, r"balance='time'.*'flops'"),
    "data parallel": ({"data_parallel": "fsdp"}, r"data_parallel='fsdp'.*'replicate'"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_impossible_arguments(name: str) -> None:
    arguments, message = ARGUMENTS[name]
    with pytest.raises(MisconfigurationException, match=message):
        PipelineStrategy(**arguments)


def test_precisions_that_a_pipeline_has_not() -> None:
    for plugin in (MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu")), HalfPrecision("16-true")):
        with pytest.raises(MisconfigurationException, match=rf"precision='{plugin.precision}'.*bf16-mixed"):
            PipelineStrategy(precision_plugin=plugin)
    with pytest.raises(MisconfigurationException, match=r"precision='16-true'"):
        pl.Trainer(accelerator="cpu", devices=2, strategy=PipelineStrategy(), precision="16-true", logger=False)


# --- modules, optimizers, callbacks and numbers ---


class Manual(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Gan(Layers):
    """Two optimizers, which needs manual optimization."""

    def __init__(self, manual: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = not manual

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.layers[:3], self.layers[3:])]


class OwnBackward(Layers):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


class EarlyOptimizer(Layers):
    """Takes its parameters before the stages are laid out."""

    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.early


class Lazy(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = nn.LazyLinear(4)


class Empty(Trained):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch.mean()


class Writing(Layers):
    """Changes a parameter in its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.layers[1].weight.mul_(0.9)
        return self.loss(batch)


class NoLoss(Layers):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.loss(batch)
        return None


class Single(Trained):
    """Calls no module: nowhere to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (batch @ self.weight).square().mean()


class Together(torch.optim.SGD):
    """Looks at all gradients at once."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        total = sum(gradient.square().sum() for gradient in gradients if gradient is not None) ** 0.5
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(group["lr"] * parameter.grad / total)
        return loss


def lbfgs(module: pl.LightningModule) -> Any:
    return torch.optim.LBFGS(module.parameters())


def together(module: pl.LightningModule) -> Any:
    return Together(module.parameters(), lr=0.1)


Make = Callable[[], pl.LightningModule]

REFUSED: dict[str, tuple[Make, Any, dict[str, Any], str]] = {
    "manual optimization": (Manual, pipeline(), {}, "automatic_optimization=False"),
    "a gan": (Gan, pipeline(), {}, "one optimizer"),
    "two optimizers": (lambda: Gan(manual=False), pipeline(), {}, "optimizer"),
    "its own backward": (OwnBackward, pipeline(), {}, "overrides `backward`"),
    "lbfgs": (lambda: Layers(lbfgs), pipeline(), {}, "LBFGS"),
    "an optimizer of all": (lambda: Layers(together), pipeline(), {}, "Together looks at all parameters together"),
    "parameters taken early": (EarlyOptimizer, pipeline(), {}, "inside `configure_optimizers`"),
    "a lazy layer": (Lazy, pipeline(), {}, "'layers.2.weight' has no shape"),
    "no parameters": (Empty, pipeline(), {}, "Empty has no parameters"),
    "a step that writes": (Writing, pipeline(), {}, "'layers.1.weight' in place"),
    "no modules": (Single, pipeline(), {}, "2 stages need 1 cuts"),
    "averaging": (Layers, pipeline(), {"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging"),
    "moving average": (Layers, pipeline(), {"callbacks": [EMAWeightAveraging()]}, "EMAWeightAveraging"),
    "few microbatches": (Layers, pipeline(microbatches=1), {}, "microbatches"),
    "an unknown split": (Layers, pipeline(split=["layers.9"]), {}, "layers.9"),
    "too many splits": (Layers, pipeline(split=["layers.1", "layers.3"]), {}, "2 names"),
    "too many stages": (Layers, pipeline(stages=3), {}, "3"),
    "parts of a layer": (Layers, pipeline("interleaved", stages_per_rank=4), {}, "8 stages need 7 cuts"),
    "no rows": (Layers, pipeline(), {"batches": [torch.tensor(1.0)]}, "no tensor with rows"),
    "rows that differ": (
        Layers,
        pipeline(),
        {"batches": [{"x": torch.ones(8, 4), "y": torch.ones(7)}]},
        "batch['x'] has 8 rows and batch['y'] has 7 rows",
    ),
}


@pytest.mark.ranks
def test_refusals_come_before_the_first_step_on_every_rank() -> None:
    class Steps(pl.Callback):
        count = 0

        def on_before_optimizer_step(self, *_: Any) -> None:
            self.count += 1

    def run(key: str) -> tuple[str, int]:
        make, strategy, settings, _ = REFUSED[key]
        batches = settings.get("batches", numbers(2))
        steps = Steps()
        callbacks = [steps, *settings.get("callbacks", [])]
        try:
            trainer(strategy, callbacks=callbacks).fit(seeded(make), rows_of(batches))
        except Exception as error:
            return f"{type(error).__name__}: {error}", steps.count
        return "nothing", steps.count

    for rank, found in enumerate(on_ranks(run, REFUSED)):
        for key, (message, count) in found.items():
            assert REFUSED[key][3] in message, (rank, key, message)
            assert count == 0, (rank, key)


@pytest.mark.ranks
def test_a_step_without_a_loss_is_refused_on_every_rank() -> None:
    def run() -> str:
        try:
            fit(pipeline(), seeded(NoLoss), numbers(1))
        except MisconfigurationException as error:
            return str(error)
        return "nothing"

    for message in run_distributed(run, 2, timeout=20.0):
        assert "NoLoss.training_step returned" in message


# --- while it runs ---


class Logged(Layers):
    """Only the last stage logs, with a sum over ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.trainer.strategy.has_last_stage:  # type: ignore[attr-defined]
            self.log("metric", 2.0, sync_dist=True, on_epoch=True, on_step=False)
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss


@pytest.mark.ranks
def test_what_only_the_last_stage_logs_is_known_everywhere() -> None:
    def run(key: str) -> float:
        one = trainer(key)
        one.fit(seeded(Logged), rows_of(numbers(2)))
        return float(one.callback_metrics["metric"])

    for found in on_ranks(run, ["1f1b", "zbv", "dualpipev"]):
        assert set(found.values()) == {2.0}


class Peeking(Layers):
    """Prints a number of the first layer after each batch, on every rank."""

    def on_train_batch_end(self, *_: Any) -> None:
        print(self.layers[0].weight.sum().item())


class Branching(Layers):
    """Leaves layers out after some batches."""

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            if self.global_step == 0 or place not in (2, 3):
                x = layer(x)
        return x


class Failing(Layers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and world()[0] == 1:
            raise ValueError("boom")
        return self.loss(batch)


class OtherRows(Layers):
    """Gives each rank another batch, as unseeded augmentation does."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch + world()[0]


FAILING: dict[str, tuple[Make, Any, str]] = {
    "a value of another stage": (Peeking, pipeline(), r"layers\.0\.weight, which another stage"),
    "another path": (Branching, pipeline(split=["layers.2"]), r"(?s)StepMismatch.*layers\.2"),
    "other rows": (OtherRows, pipeline(), r"different batches in training_step.*seed_everything"),
    "a stage": (Failing, pipeline(), r"(?s)ValueError: boom.*raised on rank 1 of 2"),
    "a stage of two": (Failing, pipeline("zbv"), r"(?s)ValueError: boom.*raised on rank 1 of 2"),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", FAILING)
def test_a_step_that_fails_on_one_stage_ends_the_run(name: str) -> None:
    make, strategy, message = FAILING[name]
    begun = time.monotonic()
    with pytest.raises(RankFailed, match=message):
        run_distributed(lambda: fit(strategy, seeded(make), numbers(4)), 2, timeout=30.0)
    assert time.monotonic() - begun < 25.0


# --- whole scripts ---

STEPS = """
import os, signal, time

class Stages(Module):
    def __init__(self, ends):
        super().__init__()
        self.net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
        self.ends = ends

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 1:
            open("ended", "w").write(str(time.time()))
            if self.ends == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("boom")
        return self.net(batch).square().mean()

if __name__ == "__main__":
    batches = DataLoader(torch.arange(64.0).view(16, 4) / 64, batch_size=2)  # the same on each rank
    run = trainer(lightning_shard.PipelineStrategy(), callbacks=[OnExceptionCheckpoint("saved on failure")])
    run.fit(Stages(sys.argv[1]), batches)
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Script]]:
    """Both at once, on ports of their own."""
    folder = tmp_path_factory.mktemp("pipelines")
    started = {name: start(folder / name, STEPS, name) for name in ("fails", "killed")}
    yield started
    for script in started.values():
        script.kill()


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["fails", "killed"])
def test_one_stage_ends_and_so_do_the_others(name: str, scripts: dict[str, Script]) -> None:
    output = scripts[name].finish(limit=90.0)
    ended = time.time() - float((scripts[name].folder / "ended").read_text())
    assert scripts[name].process.returncode != 0, output
    assert group_ended(scripts[name].process, limit=10.0), output
    assert ended < 10.0 or name == "killed", (ended, output)
    assert not list(scripts[name].folder.glob("saved*")), "a checkpoint of one rank alone"
    if name == "fails":
        assert "ValueError: boom" in output and "(raised on rank 1 of 2)" in output
