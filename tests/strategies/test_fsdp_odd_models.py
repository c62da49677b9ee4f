"""Models and optimizers that sharding by units has broken elsewhere: each trains as in one process, or is refused."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_shard import ClassUnits, FSDP2Strategy
from lightning_shard.testing import RankFailed
from lightning_shard.units import standstill
from tests.strategies.fsdp_modules import (
    Case,
    Pair,
    Stack,
    assert_all_same,
    assert_same_tensors,
    fit,
    on_ranks,
    reference,
    seeded,
    smallest_units,
)
from tests.strategies.test_zero_odd_models import ODD, OtherMethods, OwnSeed, Tied, TwoHeads
from tests.strategies.zero_modules import Trained, adamw, classes, numbers, sgd
from tests.strategies.zero_runs import loader, trainer, world

pytestmark = pytest.mark.ranks

UNITS: dict[str, Any] = {"blocks": "fsdp2", "smallest": smallest_units, "kept": "fsdp2_grad"}


def under_all(make: Callable[[], pl.LightningModule], batches: Any, **settings: Any) -> dict[str, Case]:
    return {
        key: Case(make=make, batches=batches, strategy=strategy, settings=settings) for key, strategy in UNITS.items()
    }


def refused(make: Callable[[], pl.LightningModule], batches: Any, message: str, strategy: Any = "fsdp2") -> None:
    """The first fit stops with ``message`` before a step."""

    class NoStep(pl.Callback):
        def on_before_optimizer_step(self, *_: Any) -> None:
            raise AssertionError("a step was made")

    with pytest.raises(RankFailed, match=message):
        on_ranks(lambda: fit(strategy, make(), batches, callbacks=[NoStep()]))


# --- odd models ---


def test_odd_models() -> None:
    cases = {}
    for model in ODD:
        for key, case in under_all(lambda model=model: model(sgd(momentum=0.9)), numbers()).items():
            cases[f"{model.__name__}, {key}"] = case
    assert_all_same(cases)


def test_ranks_start_from_the_weights_of_rank_0() -> None:
    assert_all_same({"fsdp2": Case(make=OwnSeed, batches=classes())})

    def start() -> dict[str, Tensor]:
        return fit("fsdp2", seeded(lambda: Stack(sgd(0.0)), world()[0]), classes(1)).weights

    first, second = on_ranks(start)
    assert_same_tensors(first, second, atol=0.0)
    assert_same_tensors(first, reference(lambda: dict(seeded(Stack, 0).state_dict())), atol=0.0)


class TiedStack(Trained):
    """The first and the last layer share a weight, and so do two blocks."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([Pair() for _ in range(3)])
        self.blocks[2].layers[0].weight = self.blocks[0].layers[0].weight
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.roll(1, 1).flatten())


TOKENS = [(torch.arange(12).view(4, 3) * step) % 7 for step in (1, 2, 3)]


def test_ties_stay_ties() -> None:
    every_layer = lambda: FSDP2Strategy(units=ClassUnits(classes=[nn.Embedding, nn.Linear, Pair]))  # noqa: E731
    assert_all_same(
        {"layers": Case(make=TiedStack, batches=TOKENS, strategy=every_layer), **under_all(Tied, numbers())}
    )

    def tied() -> tuple[bool, bool, list[str]]:
        module = TiedStack()
        strategy = every_layer()
        fit(strategy, module, TOKENS)
        blocks: Any = module.blocks
        trained = [parameter for group in strategy.optimizers[0].param_groups for parameter in group["params"]]
        assert len(trained) == len({id(parameter) for parameter in trained}) == 12
        return (
            module.head.weight is module.embed.weight,
            blocks[0].layers[0].weight is blocks[2].layers[0].weight,
            sorted(strategy.running.layout.units),
        )

    units = ["", "blocks.0.layers.2", "blocks.1", "blocks.1.layers.0", "blocks.1.layers.2", "blocks.2.layers.2"]
    assert on_ranks(tied) == [(True, True, [unit for unit in units if unit != "blocks.1"])] * 2


class UsedTwice(Trained):
    """z = w (w x): the slope is 2 w x."""

    def __init__(self) -> None:
        super().__init__(sgd(0.1))
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.layer.weight, 2.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(self.layer(batch)).mean()


def test_a_module_used_twice_by_hand() -> None:
    def weight() -> list[float]:
        ones = [torch.ones(2, 1)]
        return [
            fit(make(), UsedTwice(), ones).weights["layer.weight"].item() for make in (FSDP2Strategy, smallest_units)
        ]

    assert on_ranks(weight) == [pytest.approx([1.6, 1.6])] * 2


class BoundForward(OtherMethods):
    """Validation calls a bound forward."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        bound = self.encoder.forward
        self.log("loss", F.mse_loss(self.decode(bound(batch) + self.shift), batch), sync_dist=True)


def test_methods_other_than_forward_in_validation() -> None:
    def validated(names: list[Any]) -> list[float]:
        found = []
        for strategy in names:
            pl.seed_everything(0, verbose=False)
            run = trainer(strategy() if callable(strategy) else strategy, num_sanity_val_steps=0)
            run.fit(BoundForward(), loader(numbers()), loader(numbers(2, seed=8)))
            found.append(run.callback_metrics["loss"].item())
        return found

    expected = reference(validated, ["auto"] * 3)
    assert on_ranks(validated, list(UNITS.values())) == [pytest.approx(expected, abs=5e-6)] * 2


class TwoDtypes(Trained):
    def __init__(self) -> None:
        super().__init__(sgd())
        self.single = nn.Linear(4, 5)
        self.double_ = nn.Linear(5, 3).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.double_(self.single(batch).double()).square().mean()


def test_dtypes_that_differ_are_refused_by_name_or_in_units_of_their_own() -> None:
    refused(TwoDtypes, numbers(), r"'single\.weight' is float32, 'double_\.weight' is float64")
    assert_all_same({"apart": Case(make=TwoDtypes, batches=numbers(), strategy=smallest_units)})


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.w * x, 0.5)


class DropsTwice(Trained):
    """The gradient of w equals the loss, if backward draws the same mask and w is 1."""

    def __init__(self) -> None:
        super().__init__(sgd(1.0))
        self.dropping = Dropping()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.dropping(batch).mean()


def test_recomputed_dropout_draws_the_same_mask() -> None:
    def train() -> tuple[float, float]:
        pl.seed_everything(world()[0], verbose=False)
        strategy = FSDP2Strategy(units=ClassUnits(classes=[Dropping]), activation_checkpointing=True)
        outcome = fit(strategy, DropsTwice(), [torch.ones(2, 1000)])
        return outcome.losses[0], outcome.weights["dropping.w"].item()

    results = on_ranks(train)
    assert results[0][0] != results[1][0]
    expected = 1 - sum(loss for loss, _ in results) / 2
    assert [weight for _, weight in results] == pytest.approx([expected] * 2, abs=1e-6)


# --- parts without a gradient ---


class HeadOfTheRank(TwoHeads):
    """Rank 0 uses head A where rank 1 uses B."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.heads[(batch_idx + world()[0]) % 2](self.trunk(batch)).square().mean()


MOVED_BY_ZERO = {"sgd": sgd(momentum=0.9, weight_decay=0.1), "adamw": adamw(1e-2)}
"""Optimizers that would move a weight whose gradient is zero, and leave one alone that has none."""


def test_alternating_heads() -> None:
    cases = {}
    for name, optimizer in MOVED_BY_ZERO.items():
        for key, case in under_all(lambda chosen=optimizer: TwoHeads(chosen), numbers(6)).items():
            cases[f"{name}, {key}"] = case
    cases["accumulated"] = Case(
        make=lambda: TwoHeads(MOVED_BY_ZERO["sgd"]),
        batches=numbers(6),
        settings={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    )
    assert_all_same(cases)


def test_heads_that_differ_by_rank_equal_ddp() -> None:
    def train(names: list[str]) -> list[dict[str, Tensor]]:
        found = []
        for name in names:
            for optimizer in MOVED_BY_ZERO.values():
                found.append(fit(name, seeded(lambda made=optimizer: HeadOfTheRank(made)), numbers(6)).weights)
        return found

    expected = on_ranks(train, ["ddp_find_unused_parameters_true"])[0]
    for found in on_ranks(train, ["fsdp2"]):
        for mine, theirs in zip(found, expected, strict=True):
            assert_same_tensors(mine, theirs)


class Skips(Trained):
    """After the first step rank 1 leaves a block out."""

    def __init__(self, width: int) -> None:
        super().__init__(sgd())
        self.blocks = nn.ModuleList([Pair(), Pair(), Pair()])
        self.blocks[1].layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index != 1 or batch_idx == 0 or world()[0] == 0:
                batch = block(batch)
        return batch.square().mean()


def test_ranks_that_use_different_units_are_told() -> None:
    """No timeout of a collective would tell; tensors of the same size would even be mixed up."""

    def train(width: int) -> None:
        standstill._TICK, standstill._GRACE = 0.5, 3.0
        fit("fsdp2", Skips(width), numbers(6))

    with pytest.raises(RankFailed, match=r"(?s)wait for each other in different places.*'blocks\.\d'"):
        on_ranks(train, 5)
    with pytest.raises(RankFailed) as different_sizes:
        on_ranks(train, 50)
    assert "had not finished" not in str(different_sizes.value)


# --- meta device ---


class OnMeta(Trained):
    """Builds tied layers on the meta device."""

    def __init__(self) -> None:
        super().__init__(sgd())
        self.embed: nn.Embedding | None = None

    def configure_model(self) -> None:
        if self.embed is None:
            with torch.device("meta"):
                self.embed = nn.Embedding(7, 4)
                self.blocks = nn.ModuleList([Pair(), Pair()])
                self.head = nn.Linear(4, 7, bias=False)
                self.head.weight = self.embed.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.embed is not None
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.roll(1, 1).flatten())


class Before(pl.Callback):
    """Whole weights before the first step."""

    weights: dict[str, Tensor]

    def on_train_start(self, trainer: Any, module: pl.LightningModule) -> None:
        self.weights = {name: value.clone() for name, value in trainer.strategy.full_state_dict().items()}


def test_meta_init_gives_each_shard_values_of_its_own() -> None:
    def train() -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
        pl.seed_everything(world()[0], verbose=False)
        before, module = Before(), OnMeta()
        after = fit("fsdp2", module, TOKENS, callbacks=[before]).weights
        return before.weights, after, module.head.weight is module.embed.weight  # type: ignore[union-attr]

    (before, after, tied), other = on_ranks(train)
    assert tied and other[2]
    assert_same_tensors(other[0], before, atol=0.0)
    assert_same_tensors(other[1], after, atol=0.0)
    for value in (before["embed.weight"], before["blocks.0.layers.0.weight"], before["blocks.0.layers.0.bias"]):
        assert value.unique().numel() == value.numel()
    assert not torch.equal(before["blocks.0.layers.0.weight"], before["blocks.1.layers.0.weight"])

    def continued() -> dict[str, Tensor]:
        module = OnMeta()
        module.configure_model()
        module.to_empty(device="cpu")
        module.head.weight = module.embed.weight  # type: ignore[union-attr]
        module.load_state_dict(before)
        return fit("auto", module, TOKENS).weights

    assert_same_tensors(after, reference(continued))


class Unset(nn.Module):
    """Has no reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Rotating(nn.Module):
    """Two buffers, one of them in no state dict."""

    def __init__(self, resets: bool) -> None:
        super().__init__()
        self.resets = resets
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("freqs", torch.arange(4.0), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.count.zero_()
        if self.resets:
            self.freqs.copy_(torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        assert x.is_meta or self.freqs.is_meta or type(self.freqs) is not Tensor or self.freqs.tolist() == [0, 1, 2, 3]
        self.count += 1
        return x * self.weight + self.freqs


class MetaPart(Trained):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(sgd())
        self.make = make
        self.part: nn.Module | None = None
        self.last = nn.Linear(4, 1)

    def configure_model(self) -> None:
        if self.part is None:
            with torch.device("meta"):
                self.part = self.make()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.part is not None
        return self.last(self.part(batch)).square().mean()


def test_what_nobody_gives_a_value_is_refused_by_name() -> None:
    refused(lambda: MetaPart(Unset), numbers(), r"part\.scale \(Unset has no reset_parameters")
    refused(lambda: MetaPart(lambda: Rotating(False)), numbers(), r"part\.freqs \(Rotating\.reset_parameters")


@pytest.mark.parametrize("ranks", [2, 4])
def test_buffers_under_meta_init(ranks: int, tmp_path: Any) -> None:
    def train(phase: int) -> tuple[list[float], int]:
        module = MetaPart(lambda: Rotating(True))
        settings: dict[str, Any] = {"max_epochs": phase, "save" if phase == 1 else "ckpt_path": tmp_path / "c"}
        fit("fsdp2", module, numbers(2), **settings)
        return module.part.freqs.tolist(), int(module.part.count)  # type: ignore[union-attr]

    assert on_ranks(train, 1, ranks=ranks) == [([0, 1, 2, 3], 2)] * ranks
    assert on_ranks(train, 2, ranks=ranks) == [([0, 1, 2, 3], 4)] * ranks


# --- optimizers ---

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.5, "nesterov": True},
    "ASGD": {},
    "Adadelta": {},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"foreach": True},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"lr": 1e-3, "momentum": 0.5},
}


def of_torch(name: str, **settings: Any) -> Any:
    return lambda module: getattr(torch.optim, name)(module.parameters(), **settings)


class WholeTensors(torch.optim.SGD):
    """Needs every gradient as a matrix in its full shape."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.shapes = {tuple(parameter.shape) for group in self.param_groups for parameter in group["params"]}

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad is None or parameter.grad.dim() == 2, "not a matrix"
                assert parameter.grad is None or parameter.grad.shape == parameter.shape
        super().step()
        return loss


class Matrices(Trained):
    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.layers = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()


def two_groups(module: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": list(module.blocks.parameters()), "lr": 0.2, "initial_accumulator_value": 0.5},
        {"params": [*module.first.parameters(), *module.last.parameters(), module.log_scale]},
    ]
    return torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1)


def test_optimizers_equal_one_process() -> None:
    cases = {
        name: Case(make=lambda name=name, chosen=chosen: Stack(of_torch(name, **chosen)), batches=classes(4))
        for name, chosen in OPTIMIZERS.items()
    }
    cases["two groups"] = Case(make=lambda: Stack(two_groups), batches=classes(4))
    cases["offloaded"] = Case(make=lambda: Stack(two_groups), batches=classes(4), strategy="fsdp2_offload")
    whole = lambda: Matrices(lambda module: WholeTensors(module.parameters(), lr=0.1))  # noqa: E731
    cases["whole tensors"] = Case(make=whole, batches=numbers())
    assert_all_same(cases)


REFUSED: dict[str, dict[str, Any]] = {"Adafactor": {}, "Muon": {}, "Rprop": {}, "LBFGS": {}}


def test_optimizers_that_need_whole_tensors_are_refused_by_name() -> None:
    def messages() -> dict[str, str]:
        found = {}
        for name, chosen in REFUSED.items():
            try:
                fit("fsdp2", Matrices(of_torch(name, **chosen)), numbers())
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        return found

    for found in on_ranks(messages):
        assert found.keys() == REFUSED.keys()
        for name, message in found.items():
            assert message.startswith(f"MisconfigurationException: {name} "), message
            assert "elementwise optimizer" in message


class CollectedEarly(Matrices):
    def __init__(self) -> None:
        super().__init__(lambda module: torch.optim.SGD(module.collected, lr=0.1))
        self.collected = list(self.parameters())


def test_parameters_collected_before_sharding_are_refused() -> None:
    refused(CollectedEarly, numbers(), r"shape \[5, 4\] \(group 0, place 0\).*before sharding")
