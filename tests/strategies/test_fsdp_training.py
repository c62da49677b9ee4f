"""FSDP2 trains as one process does: losses, all weights on every rank, and optimizer states."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import ClassUnits, FSDP2Strategy, MixedPrecision, SizeUnits
from tests.strategies.fsdp_modules import NAMES, Block, Case, Stack, assert_all_same, fit, on_ranks, smallest_units
from tests.strategies.zero_modules import Trained, adamw, classes, numbers, sgd

pytestmark = pytest.mark.ranks

FP32, BF16 = torch.float32, torch.bfloat16
BF16_COMPUTE = MixedPrecision(compute="bf16")

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]

UNITS: dict[str, tuple[Any, list[str]]] = {
    "blocks": ("blocks", [*BLOCKS, ""]),
    "size": (SizeUnits(min_params=115), ["blocks.0.up", "blocks.1.up", "blocks.2.up", *BLOCKS, ""]),
    "classes": (
        ClassUnits(classes=[Block, "torch.nn.Linear"]),
        [*(f"{block}.{layer}" for block in BLOCKS for layer in ("up", "down")), *BLOCKS, "first", "last", ""],
    ),
}
"""What a user asks for, and the units that `Stack` then has."""


def by_units() -> dict[str, Any]:
    return {key: lambda units=units: FSDP2Strategy(units=units) for key, (units, _) in UNITS.items()}


def cases(strategies: Mapping[str, Any], optimizer: Any = None, **settings: Any) -> dict[str, Case]:
    """`Stack` under several strategies with the same settings of the Trainer."""
    make = lambda: Stack(optimizer or sgd(momentum=0.9))  # noqa: E731
    told = "".join(f", {key}={value}" for key, value in settings.items())
    return {
        f"{key}{told}": Case(make=make, batches=classes(5), strategy=strategy, settings=settings)
        for key, strategy in strategies.items()
    }


def named(*names: str) -> dict[str, Any]:
    return {name: name for name in names}


# --- units and resharding ---


def test_units_are_those_asked_for() -> None:
    def names() -> dict[str, set[str]]:
        found = {}
        for key, (units, _) in UNITS.items():
            strategy = FSDP2Strategy(units=units)
            fit(strategy, Stack(), classes(1))
            found[key] = set(strategy.running.layout.units)
        return found

    for found in on_ranks(names):
        assert found == {key: set(expected) for key, (_, expected) in UNITS.items()}


@pytest.mark.parametrize("optimizer", [adamw(), sgd(momentum=0.9)], ids=["adamw", "sgd"])
def test_five_steps_on_two_ranks(optimizer: Any) -> None:
    assert_all_same(cases({**by_units(), **named("fsdp2_grad", "fsdp2_offload")}, optimizer))


def test_five_steps_on_four_ranks() -> None:
    to_two = {"to two": lambda: FSDP2Strategy(reshard_after_forward=2)}
    all_of_it = {"activation_checkpointing": True, "cpu_offload": True, "reshard_after_forward": False}
    assert_all_same(
        {
            **cases({**by_units(), **to_two, **named("fsdp2_grad", "fsdp2_hybrid", "fsdp2_offload")}),
            **cases({"hybrid": lambda: FSDP2Strategy(replicas=2, **all_of_it)}, gradient_clip_val=0.3),
            **cases(named("fsdp2_hybrid"), gradient_clip_val=0.1),
            **cases(named("fsdp2_hybrid"), accumulate_grad_batches=2),
            **cases(named("fsdp2_hybrid"), adamw(), max_epochs=2),
        },
        ranks=4,
    )


def test_one_rank() -> None:
    assert_all_same(cases(named(*NAMES), adamw(), gradient_clip_val=0.1), ranks=1)


# --- activation checkpointing ---


class Counting(Block):
    """Counts its forwards."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        Counting.runs += 1
        return super().forward(x)


class CountingStack(Stack):
    def __init__(self) -> None:
        super().__init__(sgd(momentum=0.9))
        self.blocks = nn.ModuleList([Counting(7) for _ in range(3)])

    def on_train_start(self) -> None:
        Counting.runs = 0  # what the dry run did does not count


CHECKPOINTED: dict[str, Any] = {
    "units": True,
    "classes": [f"{Counting.__module__}.Counting"],
}


def test_activation_checkpointing_recomputes_and_changes_nothing() -> None:
    options: dict[str, dict[str, Any]] = {
        **{key: {"activation_checkpointing": value} for key, value in CHECKPOINTED.items()},
        "layers": {"activation_checkpointing": ["torch.nn.Linear"]},
        "kept": {"activation_checkpointing": True, "reshard_after_forward": False},
    }
    assert_all_same(
        {
            key: Case(make=CountingStack, batches=classes(5), strategy=lambda chosen=chosen: FSDP2Strategy(**chosen))
            for key, chosen in options.items()
        }
    )

    def runs() -> list[int]:
        counted = []
        for value in (False, *CHECKPOINTED.values()):
            fit(FSDP2Strategy(activation_checkpointing=value), CountingStack(), classes(2))
            counted.append(Counting.runs)
        return counted

    assert on_ranks(runs) == [[6, 12, 12]] * 2


# --- accumulation and clipping ---


def test_accumulation_and_clipping() -> None:
    """Five batches in windows of two: the last is short. `Stack` has a whole parameter beside its shards."""
    by_value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    window = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05, "max_epochs": 2}
    assert_all_same(
        {
            **cases(named(*NAMES), accumulate_grad_batches=2),
            **cases(named(*NAMES), adamw(), **window),
            **cases({**by_units(), **named("fsdp2_offload")}, gradient_clip_val=0.1),
            **cases(named(*NAMES), **by_value),
        }
    )


class Slopes(Trained):
    """The gradient is (3, 4): one in a shard, one in a whole parameter."""

    def __init__(self) -> None:
        super().__init__(sgd(1.0))
        self.row = nn.Parameter(torch.zeros(1))
        self.scalar = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (batch * torch.stack([self.row[0], self.scalar])).sum(1).mean()


CLIPPED = [
    ({"gradient_clip_val": 0.5}, [-0.3, -0.4]),
    ({"gradient_clip_val": 3.5, "gradient_clip_algorithm": "value"}, [-3.0, -3.5]),
]


@pytest.mark.parametrize(("settings", "expected"), CLIPPED, ids=["norm", "value"])
def test_clipping_counts_whole_and_sharded_gradients_together(settings: Any, expected: list[float]) -> None:
    def clipped() -> list[float]:
        weights = fit("fsdp2", Slopes(), [torch.tensor([[3.0, 4.0]]).expand(2, 2)], **settings).weights
        return [weights["row"].item(), weights["scalar"].item()]

    assert on_ranks(clipped) == [pytest.approx(expected, abs=1e-6)] * 2


def test_accumulation_counts_batches_alike() -> None:
    """Gradients 1..8 in windows of four: the mean of each window."""

    class Slope(Trained):
        def __init__(self) -> None:
            super().__init__(sgd(1.0))
            self.w = nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (batch @ self.w).mean()

    def train() -> list[float]:
        batches = [torch.full((2, 1), float(x)) for x in range(1, 9)]
        return [fit(name, Slope(), batches, accumulate_grad_batches=4).weights["w"].item() for name in NAMES]

    assert on_ranks(train) == [pytest.approx([-(2.5 + 6.5)] * len(NAMES))] * 2


# --- precision ---


def test_bf16_mixed_stays_near_one_process() -> None:
    """`Stack` takes its cross entropy on its own outputs, without a cast.

    Sixty-four rows: a bf16 logit is rounded to 1/256 of its size, otherwise in a matrix product of other rows.
    """
    strategies = {**named(*NAMES), "smallest": smallest_units}
    made = cases(strategies, sgd(0.05), precision="bf16-mixed")
    made = {key: replace(case, batches=classes(5, rows=64)) for key, case in made.items()}
    for key, comparison in assert_all_same(made, atol=2e-2, rtol=2e-2).items():
        assert comparison.loss <= 1e-3, key
        assert comparison.weight <= 1e-3, key


class UpcastStack(Stack):
    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer or sgd(0.05))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x).float(), y)


def test_bf16_true_and_compute_in_bf16_stay_near() -> None:
    mixed = {"reduced in fp32": BF16_COMPUTE, "reduced in bf16": MixedPrecision(compute="bf16", reduce="bf16")}
    wanted = {
        "true": Case(make=UpcastStack, batches=classes(5), settings={"precision": "bf16-true"}),
        **{
            key: Case(make=UpcastStack, batches=classes(5), strategy=lambda m=m: FSDP2Strategy(mixed_precision=m))
            for key, m in mixed.items()
        },
    }
    assert_all_same(wanted, atol=2e-2, rtol=2e-2)


class Dtypes(pl.Callback):
    """What is stored, gathered, returned and kept by the optimizer."""

    def __init__(self) -> None:
        self.seen: dict[str, torch.dtype] = {}

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        def look(layer: Any, args: Any, output: Tensor) -> None:
            self.seen.update(gathered=layer.weight.dtype, output=output.dtype)

        module.blocks[1].up.register_forward_hook(look)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        self.seen.update(stored=module.last.weight.dtype, gradient=module.last.weight.grad.dtype)

    def on_train_end(self, trainer: Any, module: pl.LightningModule) -> None:
        moments = [state["exp_avg"].dtype for state in trainer.strategy.full_optimizer_state().values()]
        assert len(set(moments)) == 1
        self.seen["moments"] = moments[0]
        assert trainer.scaler is None


DTYPES: dict[str, tuple[Any, Any, Mapping[str, torch.dtype]]] = {
    "32-true": (None, "32-true", {"stored": FP32, "gathered": FP32, "gradient": FP32, "moments": FP32, "output": FP32}),
    "bf16-true": (
        None, "bf16-true", {"stored": BF16, "gathered": BF16, "gradient": BF16, "moments": BF16, "output": BF16},
    ),
    "bf16-mixed": (
        None, "bf16-mixed", {"stored": FP32, "gathered": BF16, "gradient": FP32, "moments": FP32, "output": BF16},
    ),
    "MixedPrecision": (
        BF16_COMPUTE, "32-true", {"stored": FP32, "gathered": BF16, "gradient": FP32, "moments": FP32, "output": BF16},
    ),
}  # fmt: skip


def test_dtypes_are_those_of_the_table() -> None:
    def seen() -> dict[str, dict[str, torch.dtype]]:
        found = {}
        for key, (mixed, precision, _) in DTYPES.items():
            look = Dtypes()
            strategy = FSDP2Strategy(mixed_precision=mixed)
            fit(strategy, UpcastStack(adamw()), classes(2), callbacks=[look], precision=precision)
            found[key] = look.seen
        return found

    for found in on_ranks(seen):
        for key, (_, _, expected) in DTYPES.items():
            assert {name: found[key][name] for name in expected} == expected, key


@pytest.mark.parametrize("precision", ["64-true", "16-mixed", "transformer-engine"])
def test_other_precisions_are_refused_at_construction(precision: Any) -> None:
    with pytest.raises(Exception, match=r"32-true.*bf16-mixed.*bf16-true.*16-true"):
        pl.Trainer(accelerator="cpu", devices=1, strategy=FSDP2Strategy(), precision=precision)


def test_numbers_of_rows_do_not_matter() -> None:
    """Parameters with fewer rows than ranks leave some ranks an empty shard."""

    class Narrow(Trained):
        def __init__(self) -> None:
            super().__init__(adamw())
            self.layers = nn.Sequential(nn.Linear(4, 1), nn.Tanh(), nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 2))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layers(batch).square().mean()

    strategies = {**named("fsdp2", "fsdp2_offload"), "smallest": smallest_units}
    settings = {"gradient_clip_val": 0.2}
    narrow = {
        key: Case(make=Narrow, batches=numbers(), strategy=strategy, settings=settings)
        for key, strategy in strategies.items()
    }
    assert_all_same(narrow, ranks=4)
