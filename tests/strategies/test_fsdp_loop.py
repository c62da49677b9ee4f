"""Loops, callbacks and Trainers around FSDP2's units: each equals one process, or is refused."""

import copy
import csv
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from lightning_shard import ClassUnits, FSDP2Strategy
from lightning_shard.testing import RankFailed
from tests.strategies.fsdp_modules import (
    NAMES,
    Block,
    Case,
    Stack,
    assert_all_same,
    assert_same_tensors,
    fit,
    on_ranks,
    reference,
    seeded,
    smallest_units,
)
from tests.strategies.test_zero_callbacks import DifferentKeys, Ranked
from tests.strategies.test_zero_manual import (
    ByClosure,
    Discarded,
    DiscardedByModule,
    EverySecondStep,
    Manual,
    Toggled,
    TwoBackwards,
)
from tests.strategies.zero_modules import adamw, classes, numbers, sgd
from tests.strategies.zero_runs import loader, trainer, world

pytestmark = pytest.mark.ranks


# --- manual optimization ---


class Gan(pl.LightningModule):
    """Two optimizers with a scheduler each, toggled; the generator's gradients are clipped."""

    def __init__(self, shifted: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 9), nn.LeakyReLU(0.2), nn.Linear(9, 1))
        self.shift = nn.Parameter(torch.zeros(4)) if shifted else None

    def forward(self, noise: Tensor) -> Tensor:
        made = self.generator(noise)
        return made if self.shift is None else made + self.shift

    def judge(self, rows: Tensor, real: float) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.discriminator(rows), torch.full((len(rows), 1), real))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        making, judging = self.optimizers()  # type: ignore[misc]
        noise = batch[:, :3].sin()
        self.toggle_optimizer(making)
        fooled = self.judge(self(noise), 1.0)
        making.zero_grad()
        self.manual_backward(fooled)
        self.clip_gradients(making, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        making.step()
        self.untoggle_optimizer(making)
        self.toggle_optimizer(judging)
        told = self.judge(batch, 1.0) + self.judge(self(noise).detach(), 0.0)
        judging.zero_grad()
        self.manual_backward(told)
        judging.step()
        self.untoggle_optimizer(judging)
        for schedule in self.lr_schedulers():  # type: ignore[union-attr]
            schedule.step()
        return (fooled + told).detach()

    def configure_optimizers(self) -> Any:
        making = [*self.generator.parameters(), *([] if self.shift is None else [self.shift])]
        optimizers = [
            torch.optim.SGD(making, lr=0.5, momentum=0.5),
            torch.optim.Adam(self.discriminator.parameters(), lr=0.01),
        ]
        return optimizers, [lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]


class SmallGan(Gan):
    """One weight and one bias a side."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(1, 1)  # type: ignore[assignment]
        self.discriminator = nn.Linear(1, 1)  # type: ignore[assignment]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch[:, :1], batch_idx)


def test_a_gan_with_two_optimizers() -> None:
    cases = {}
    for name in NAMES:
        cases[f"gan, {name}"] = Case(make=Gan, batches=numbers(6), strategy=name)
        cases[f"small, {name}"] = Case(make=SmallGan, batches=numbers(3), strategy=name)
    cases["shifted"] = Case(make=lambda: Gan(shifted=True), batches=numbers(6))
    cases["smallest"] = Case(make=lambda: Gan(shifted=True), batches=numbers(6), strategy=smallest_units)
    assert_all_same(cases)
    assert_all_same({"hybrid": Case(make=Gan, batches=numbers(6), strategy="fsdp2_hybrid")}, ranks=4)


MANUAL: list[type[Manual]] = [TwoBackwards, Discarded, DiscardedByModule, EverySecondStep, Toggled, ByClosure]


def test_loops_of_the_modules_own() -> None:
    cases = {}
    for kind in MANUAL:
        for key, strategy in {"fsdp2": "fsdp2", "kept": "fsdp2_grad", "smallest": smallest_units}.items():
            cases[f"{kind.__name__}, {key}"] = Case(make=kind, batches=numbers(4), strategy=strategy)
    assert_all_same(cases)


class CriticFirst(Gan):
    """Several steps of one side for each of the other."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        making, judging = self.optimizers()  # type: ignore[misc]
        noise = batch[:, :3].sin()
        for _ in range(3):
            told = self.judge(batch, 1.0) + self.judge(self(noise).detach(), 0.0)
            judging.zero_grad()
            self.manual_backward(told)
            judging.step()
        if batch_idx % 2:
            fooled = self.judge(self(noise), 1.0)
            making.zero_grad()
            self.manual_backward(fooled)
            making.step()
        return told.detach()


class KeptGraph(Manual):
    """Two backwards through one forward."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        hidden = self.net(batch)
        first, second = hidden.square().mean(), hidden.sin().mean()
        self.manual_backward(first, retain_graph=True)
        self.manual_backward(second)
        optimizer.step()
        return first.detach()


class PlainBackward(pl.LightningModule):
    """Not through `manual_backward`; in even steps it reaches no sharded parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.zeros(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        rows = batch + self.shift
        loss = (rows if batch_idx % 2 == 0 else self.layer(rows)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_backwards_of_the_modules_own() -> None:
    cases = {}
    for kind, batches in ((CriticFirst, numbers(4)), (KeptGraph, numbers(3))):
        for name in ("fsdp2", "fsdp2_grad"):
            cases[f"{kind.__name__}, {name}"] = Case(make=kind, batches=batches, strategy=name)
    assert_all_same(cases)


def test_a_plain_backward_averages_every_gradient() -> None:
    assert_all_same({"fsdp2": Case(make=PlainBackward, batches=numbers(4))})


class Adversarial(Stack):
    """A backward to the input within the step, and a second forward on what it found."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(F.cross_entropy(self(x), y), x)
        return F.cross_entropy(self((x + 0.1 * slope.sign()).detach()), y)


class AdversarialGan(Gan):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        _, judging = self.optimizers()  # type: ignore[misc]
        x = batch.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.judge(x, 1.0), x)
        loss = self.judge((batch + 0.1 * slope.sign()).detach(), 0.0)
        judging.zero_grad()
        self.manual_backward(loss)
        judging.step()
        return loss.detach()


def test_a_gradient_of_the_input() -> None:
    cases = {name: Case(make=Adversarial, batches=classes(3), strategy=name) for name in ("fsdp2", "fsdp2_grad")}
    cases["manual"] = Case(make=AdversarialGan, batches=numbers(3))
    assert_all_same(cases)


class Penalized(Stack):
    """The gradient of the input is in the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_(True)
        logits = self(x)
        (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return F.cross_entropy(logits, y) + slope.square().mean()


class PenalizedGan(Gan):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        _, judging = self.optimizers()  # type: ignore[misc]
        middle = (0.5 * batch + 0.5 * self(batch[:, :3].sin()).detach()).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.discriminator(middle).sum(), middle, create_graph=True)
        loss = self.judge(batch, 1.0) + 10 * (slope.norm(dim=1) - 1).square().mean()
        judging.zero_grad()
        self.manual_backward(loss)
        judging.step()
        return loss.detach()


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_grad"])
@pytest.mark.parametrize("kind", [Penalized, PenalizedGan])
def test_gradients_of_gradients_are_right_or_refused(kind: Any, name: str) -> None:
    batches, refusal = classes(3) if kind is Penalized else numbers(3), ""
    try:
        assert_all_same({name: Case(make=kind, batches=batches, strategy=name)})
    except RankFailed as failure:
        refusal = str(failure)
    assert not refusal or "MisconfigurationException: " in refusal


# --- hooks and tensors of the module's own ---


class ClipsByHand(Stack):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Halves(Stack):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class Clamps(Stack):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.2, 0.2)
            self.last.weight.data.mul_(0.9)


class Restarts(Stack):
    """Gives the sharded weights new values."""

    def on_fit_start(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 0.1)
                nn.init.zeros_(module.bias)


class Distills(Stack):
    """A frozen LightningModule inside."""

    def __init__(self) -> None:
        super().__init__(lambda module: torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], 1e-2))
        self.teacher = Stack().requires_grad_(False).eval()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch[0])
        return F.mse_loss(self(batch[0]), wanted)


class Averages(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.blocks).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for mean, parameter in zip(self.average.parameters(), self.blocks.parameters(), strict=True):
                mean.lerp_(parameter, 0.3)


class Recomputes(Stack):
    """Activation checkpointing by the module itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x) * self.log_scale.exp()


OWN: list[type[Stack]] = [ClipsByHand, Halves, Clamps, Restarts, Distills, Averages, Recomputes]


def test_hooks_and_tensors_of_the_modules_own() -> None:
    cases = {kind.__name__: Case(make=kind, batches=classes(3)) for kind in OWN}
    cases["offload"] = Case(make=Clamps, batches=classes(3), strategy="fsdp2_offload")
    cases["kept"] = Case(make=Recomputes, batches=classes(3), strategy="fsdp2_grad")
    windows = {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})], "max_epochs": 2}
    cases["windows"] = Case(make=Stack, batches=classes(4), settings=windows)
    assert_all_same(cases)


# --- what is trained changes on the way ---


class Body(nn.Module):
    """A layer and a 0-dimensional parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() * self.scale


class Backbone(pl.LightningModule):
    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.backbone = Body()
        self.head = nn.Linear(4, 2)
        self.make_optimizer = optimizer
        self.seen: list[tuple[list[float], list[float]]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.backbone(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(p for p in self.parameters() if p.requires_grad)

    def on_train_epoch_end(self) -> None:
        from lightning_shard.units.full import full_tensor

        rates = [group["lr"] for group in self.trainer.optimizers[0].param_groups]
        self.seen.append((rates, full_tensor(self.backbone.layer.weight).flatten().tolist()))


class Finetune(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            rate = optimizer.param_groups[0]["lr"] / 10
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=rate, initial_denom_lr=1)


FINETUNED: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
}


def test_finetuning_callback() -> None:
    def train(names: list[str]) -> list[Any]:
        found = []
        for name in names:
            for optimizer in FINETUNED.values():
                module = seeded(lambda made=optimizer: Backbone(made))
                start = module.backbone.layer.weight.detach().flatten().tolist()
                weights = fit(name, module, numbers(3), callbacks=[Finetune()], max_epochs=2).weights
                found.append((start, module.seen, weights))
        return found

    expected = reference(train, ["auto"] * 2)
    for found in on_ranks(train, ["fsdp2", "fsdp2_grad"]):
        for (_, seen, weights), (start, wanted, final) in zip(found, expected, strict=True):
            assert [rates for rates, _ in seen] == [rates for rates, _ in wanted] == [[0.1], [0.1, 0.01]]
            assert seen[0][1] == pytest.approx(start, abs=0) and seen[1][1] != pytest.approx(start, abs=1e-4)
            assert_same_tensors(weights, final)


class Thaws(Stack):
    """The blocks are trained from the third batch on, and the first layer up to then."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer or sgd(momentum=0.9))
        self.blocks.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.blocks.requires_grad_(batch_idx >= 2)
        self.first.requires_grad_(batch_idx < 2)


def test_freezing_and_unfreezing_on_the_way() -> None:
    assert_all_same({name: Case(make=Thaws, batches=classes(5), strategy=name) for name in NAMES})
    settings = {"precision": "bf16-mixed"}
    close = {"bf16": Case(make=lambda: Thaws(sgd(0.05)), batches=classes(5), settings=settings)}
    assert_all_same(close, atol=2e-2, rtol=2e-2)


# --- averages ---


class ValLosses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.losses.append(trainer.callback_metrics["val_loss"].item())


def test_averages_of_weights() -> None:
    """The callbacks swap the averages in for validation, and at the end of training."""

    def train(names: list[str]) -> list[tuple[list[float], dict[str, Tensor]]]:
        found = []
        for name in names:
            for make in (WeightAveraging, lambda: EMAWeightAveraging(decay=0.7)):
                seen = ValLosses()
                settings: dict[str, Any] = {"callbacks": [make(), seen], "max_epochs": 2, "num_sanity_val_steps": 0}
                module = seeded(lambda: Stack(adamw(1e-2)))
                weights = fit(name, module, classes(3), validate=classes(2, seed=9), **settings).weights
                found.append((seen.losses, weights))
        return found

    expected = reference(train, ["auto"] * 3)
    assert len(expected[0][0]) == 2
    for found in on_ranks(train, NAMES):
        for (losses, weights), (wanted, final) in zip(found, expected, strict=True):
            assert losses == pytest.approx(wanted, abs=5e-6)
            assert_same_tensors(weights, final)


def test_the_older_averaging_callback_is_refused() -> None:
    with pytest.raises(RankFailed, match=r"StochasticWeightAveraging|SWA does not"):
        on_ranks(lambda: fit("fsdp2", Stack(), classes(1), callbacks=[StochasticWeightAveraging(1e-2)]))


# --- several Trainers, several steps ---


def every_step(name: str) -> tuple[list[float], Tensor, dict[str, Tensor]]:
    """fit, validate, test and predict on one Trainer, then fit on another."""
    module, batches = seeded(lambda: Stack(adamw(1e-2))), classes(3)
    run = trainer(name)
    run.fit(module, loader(batches), loader(batches[:2]))
    values = [run.validate(module, loader(batches), verbose=False)[0]["val_loss"]]
    assert run.validate_loop.inference_mode is (name == "auto")
    values.append(run.test(module, loader(batches), verbose=False)[0]["test_loss"])
    predicted = torch.stack(run.predict(module, loader(batches)))  # type: ignore[arg-type]
    with torch.inference_mode():
        values.append(trainer(name).validate(module, loader(batches), verbose=False)[0]["val_loss"])
    assert module.training
    weights = fit(name, module, batches).weights
    values.append(trainer(name).validate(module, loader(batches), verbose=False)[0]["val_loss"])
    return values, predicted, weights


@pytest.mark.parametrize("name", NAMES)
def test_every_step_and_a_second_trainer(name: str) -> None:
    values, predicted, weights = reference(every_step, "auto")
    ranks = on_ranks(every_step, name)
    for found, _, final in ranks:
        assert found == pytest.approx(values, abs=5e-6)
        assert_same_tensors(final, weights)
    together = torch.cat([own for _, own, _ in ranks], dim=1)
    torch.testing.assert_close(together, predicted, atol=5e-6, rtol=1e-5)


def test_evaluation_alone() -> None:
    """Without any training before: the units are made for the step that comes."""

    def evaluate(name: str) -> list[float]:
        values = []
        for kind in ("validate", "test"):
            (metrics,) = getattr(trainer(name), kind)(seeded(Stack), loader(classes(2)), verbose=False)
            values.extend(metrics.values())
        predicted = trainer(name).predict(seeded(Stack), loader(classes(2)))
        assert predicted is not None
        return [*values, len(predicted)]

    assert on_ranks(evaluate, "fsdp2") == [pytest.approx(reference(evaluate, "auto"), abs=5e-6)] * 2


def test_other_settings_for_a_sharded_module_are_refused() -> None:
    def train() -> list[str]:
        module, found = Stack(), []
        fit("fsdp2", module, classes(1))
        for other in ("fsdp2_grad", "fsdp2_offload", FSDP2Strategy(units=ClassUnits(classes=[Block]))):
            with pytest.raises(Exception, match="was sharded by an earlier Trainer with") as error:
                fit(other, module, classes(1))
            found.append(str(error.value))
        with pytest.raises(Exception, match="precision='32-true'"):
            fit("fsdp2", module, classes(1), precision="bf16-mixed")
        return found

    for first, second, third in on_ranks(train):
        assert "reshard_after_forward=True" in first and "reshard_after_forward=False" in first
        assert "cpu_offload=False" in second and "cpu_offload=True" in second
        assert "units='blocks'" in third


def test_one_script_with_several_strategies() -> None:
    def script(names: list[str]) -> list[dict[str, Tensor]]:
        return [fit(name, seeded(Stack), classes(3)).weights for name in names]

    expected = reference(script, ["auto"])[0]
    for found in on_ranks(script, ["fsdp2", "ddp", "fsdp2_grad", "fsdp2"]):
        for weights in found:
            assert_same_tensors(weights, expected)


# --- callbacks and compiled parts ---


class Looks(pl.Callback):
    """Calls the module between the steps."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def _look(self, module: Any) -> None:
        with torch.no_grad():
            self.seen.append(module(torch.ones(2, 13)).sum().item())

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self._look(module)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self._look(module)

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._look(module)


def test_a_callback_that_calls_the_module() -> None:
    def train(names: list[Any]) -> list[Any]:
        found = []
        for name in names:
            looks = Looks()
            module = seeded(lambda: Stack(sgd(momentum=0.9)))
            strategy = name() if callable(name) else name
            weights = fit(strategy, module, classes(3), callbacks=[looks], validate=classes(1)).weights
            found.append((looks.seen, weights))
        return found

    expected = reference(train, ["auto"])[0]
    assert len(expected[0]) == 2 * 3 + 2
    for found in on_ranks(train, [*NAMES, smallest_units]):
        for seen, weights in found:
            assert seen == pytest.approx(expected[0], abs=5e-5)
            assert_same_tensors(weights, expected[1])


class Compiled(Stack):
    """One block compiled in place, one wrapped."""

    def __init__(self) -> None:
        super().__init__(sgd(momentum=0.9))
        self.blocks[0].compile(backend="eager")
        self.blocks[1] = torch.compile(self.blocks[1], backend="eager")


def test_compiled_parts_keep_plain_names_in_checkpoints(tmp_path: Path) -> None:
    whole = tmp_path / "whole.ckpt"

    def train() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        outcome = fit("fsdp2", seeded(Compiled), classes(3), save=tmp_path / "shards")
        strategy = FSDP2Strategy(save_distributed_checkpoint=False)
        return outcome.weights, fit(strategy, seeded(Compiled), classes(3), save=whole).weights

    def resumed(path: Path) -> dict[str, Tensor]:
        return fit("fsdp2", Stack(sgd(momentum=0.9)), classes(3), ckpt_path=path, max_epochs=2).weights

    expected = reference(lambda: fit("auto", seeded(lambda: Stack(sgd(momentum=0.9))), classes(3)).weights)
    for found in on_ranks(train):
        for weights in found:
            assert_same_tensors(plain(weights), expected)
    assert torch.load(whole, weights_only=False)["state_dict"].keys() == expected.keys()
    twice = reference(lambda: fit("auto", seeded(lambda: Stack(sgd(momentum=0.9))), classes(3), max_epochs=2).weights)
    for path in (whole, tmp_path / "shards"):
        for weights in on_ranks(resumed, path):
            assert_same_tensors(weights, twice)


def plain(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("._orig_mod", ""): value for name, value in weights.items()}


def named_groups(module: Any) -> Any:
    groups = [
        {"params": list(module.blocks.parameters()), "lr": 0.2, "name": "blocks"},
        {"params": [*module.first.parameters(), *module.last.parameters(), module.log_scale], "name": "rest"},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    schedule = lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1 / (1 + step)])
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "rate"}}


class Logged(Stack):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss


def test_rates_and_losses_in_the_log(tmp_path: Path) -> None:
    def run(name: str) -> list[dict[str, str]]:
        folder = tmp_path / name
        logger = CSVLogger(folder, name="", version="")
        settings: dict[str, Any] = {"callbacks": [LearningRateMonitor()], "log_every_n_steps": 1}
        trainer(name, logger=logger, **settings).fit(seeded(lambda: Logged(named_groups)), loader(classes(3)))
        with (folder / "metrics.csv").open() if world()[0] == 0 else Path("/dev/null").open() as lines:
            return list(csv.DictReader(lines))

    expected = reference(run, "auto")
    assert {"rate/blocks", "rate/rest", "loss", "step", "epoch"} <= set(expected[0])
    found = on_ranks(run, "fsdp2")[0]
    assert len(found) == len(expected) > 3
    for row, wanted in zip(found, expected, strict=True):
        assert row.keys() == wanted.keys()
        for key, value in wanted.items():
            assert row[key] == value == "" or float(row[key]) == pytest.approx(float(value), abs=1e-6, rel=1e-5)


# --- ranks that part ---


def test_all_ranks_stop_when_one_would() -> None:
    def run() -> int:
        stop = EarlyStopping("metric", patience=1, check_on_train_epoch_end=True)
        one = trainer("fsdp2", callbacks=[stop], max_epochs=5)
        one.fit(Ranked(), loader(numbers(2)))
        return one.current_epoch

    assert on_ranks(run) == [2, 2]


class Fails(Stack):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and world()[0] == 1:
            raise ValueError("boom")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_an_error_on_one_rank_is_told_at_once(checkpointed: bool, tmp_path: Path) -> None:
    def train() -> None:
        callbacks = [OnExceptionCheckpoint(tmp_path)] if checkpointed else []
        fit("fsdp2", Fails(), classes(5), callbacks=callbacks, enable_checkpointing=True)

    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)Rank 1 of 2 failed.*ValueError: boom.*raised on rank 1 of 2"):
        on_ranks(train, timeout=60.0)
    assert time.monotonic() - start < 30.0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_ranks_that_log_different_keys_do_not_wait_for_ever() -> None:
    def run() -> None:
        fit(FSDP2Strategy(timeout=timedelta(seconds=4)), DifferentKeys(), numbers(2))

    with pytest.raises(RankFailed):
        on_ranks(run, timeout=45.0)
