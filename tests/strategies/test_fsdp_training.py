"""FSDP2 trains as one process does: losses, all weights on every rank, and optimizer states."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import ClassUnits, FSDP2Strategy, MixedPrecision, SizeUnits
from lightning_shard.testing import SameTraining, assert_same_training
from tests.strategies.fsdp_modules import NAMES, Block, Stack, fit, on_ranks, smallest_units
from tests.strategies.zero_modules import Trained, adamw, classes, numbers, sgd

pytestmark = pytest.mark.ranks

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


def by_units(**settings: Any) -> dict[str, Any]:
    return {key: lambda units=units: FSDP2Strategy(units=units, **settings) for key, (units, _) in UNITS.items()}


def same(strategies: Any, optimizer: Any = None, ranks: int = 2, count: int = 5, **settings: Any) -> SameTraining:
    make = lambda: Stack(optimizer or sgd(momentum=0.9))  # noqa: E731
    return assert_same_training(make, strategies, classes(count), world_size=ranks, trainer_kwargs=settings)


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
    same({**by_units(), "kept": "fsdp2_grad", "offload": "fsdp2_offload"}, optimizer)


def test_five_steps_on_four_ranks() -> None:
    to_two = {f"{key}, to two": make for key, make in by_units(reshard_after_forward=2).items() if key != "size"}
    same({**by_units(), **to_two, "kept": "fsdp2_grad", "hybrid": "fsdp2_hybrid"}, ranks=4)


def test_adamw_on_four_ranks() -> None:
    same(["fsdp2", "fsdp2_hybrid"], adamw(), ranks=4)


def test_one_rank() -> None:
    same([*NAMES], adamw(), ranks=1, count=3)


def test_hybrid_goes_with_the_other_options() -> None:
    options = {"activation_checkpointing": True, "cpu_offload": True, "reshard_after_forward": False}
    same({"hybrid": lambda: FSDP2Strategy(replicas=2, **options)}, ranks=4, gradient_clip_val=0.3)


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
    strategies = {
        **{
            key: lambda value=value: FSDP2Strategy(activation_checkpointing=value)
            for key, value in CHECKPOINTED.items()
        },
        "layers": lambda: FSDP2Strategy(activation_checkpointing=["torch.nn.Linear"]),
        "kept": lambda: FSDP2Strategy(activation_checkpointing=True, reshard_after_forward=False),
    }
    assert_same_training(CountingStack, strategies, classes(5), trainer_kwargs={"gradient_clip_val": 0.3})

    def runs(value: Any) -> int:
        fit(FSDP2Strategy(activation_checkpointing=value), CountingStack(), classes(2))
        return Counting.runs

    def all_runs() -> list[int]:
        return [runs(value) for value in (False, *CHECKPOINTED.values())]

    assert on_ranks(all_runs) == [[6, 12, 12]] * 2


# --- accumulation and clipping ---


def test_accumulation() -> None:
    """Five batches in windows of two: the last window is short."""
    same(NAMES, accumulate_grad_batches=2)
    same(["fsdp2"], adamw(), accumulate_grad_batches=3, gradient_clip_val=0.05, max_epochs=2)
    same(["fsdp2_hybrid"], ranks=4, accumulate_grad_batches=2)


def test_clipping_by_norm() -> None:
    """`Stack` has a whole parameter beside its shards; their common norm counts."""
    same({**by_units(), "offload": "fsdp2_offload"}, gradient_clip_val=0.1)
    same(["fsdp2_hybrid"], ranks=4, gradient_clip_val=0.1)


def test_clipping_by_value() -> None:
    same(NAMES, gradient_clip_val=0.01, gradient_clip_algorithm="value")


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

    def train(name: str) -> float:
        batches = [torch.full((2, 1), float(x)) for x in range(1, 9)]
        return fit(name, Slope(), batches, accumulate_grad_batches=4).weights["w"].item()

    for name in NAMES:
        assert on_ranks(train, name) == [pytest.approx(-(2.5 + 6.5))] * 2


# --- precision ---


def test_bf16_mixed_stays_near_one_process() -> None:
    strategies = {**dict(zip(NAMES, NAMES, strict=True)), "smallest": smallest_units}
    report = assert_same_training(
        lambda: Stack(sgd(0.05)), strategies, classes(5), precision="bf16-mixed", atol=2e-2, rtol=2e-2
    )
    for figures in report.strategies.values():
        assert figures.loss_difference <= 1e-3
        assert figures.weight_difference <= 1e-3


class Upcast(Stack):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x).float(), y)


def test_bf16_true_and_compute_in_bf16_stay_near() -> None:
    report = assert_same_training(
        lambda: Upcast(sgd(0.05)), ["fsdp2"], classes(5), precision="bf16-true", atol=2e-2, rtol=2e-2
    )
    assert report.strategies["fsdp2"].loss_difference <= 2e-2
    pure = {
        "reduced in fp32": lambda: FSDP2Strategy(mixed_precision=MixedPrecision(compute="bf16")),
        "reduced in bf16": lambda: FSDP2Strategy(mixed_precision=MixedPrecision(compute="bf16", reduce="bf16")),
    }
    assert_same_training(lambda: Upcast(sgd(0.05)), pure, classes(5), atol=2e-2, rtol=2e-2)


class Dtypes(pl.Callback):
    """What is stored, gathered, returned and kept by the optimizer."""

    def __init__(self) -> None:
        self.seen: dict[str, torch.dtype] = {}

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        def look(block: Any, args: Any, output: Tensor) -> None:
            self.seen.update(gathered=block.up.weight.dtype, output=output.dtype)

        module.blocks[1].register_forward_hook(look)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        self.seen.update(stored=module.last.weight.dtype, gradient=module.last.weight.grad.dtype)

    def on_train_end(self, trainer: Any, module: pl.LightningModule) -> None:
        moments = [state["exp_avg"].dtype for state in trainer.strategy.full_optimizer_state().values()]
        assert len(set(moments)) == 1
        self.seen["moments"] = moments[0]
        assert trainer.scaler is None


FP32, BF16 = torch.float32, torch.bfloat16
BF16_COMPUTE = MixedPrecision(compute="bf16")

DTYPES: dict[str, tuple[Any, Any, Mapping[str, torch.dtype]]] = {
    "32-true": (None, "32-true", {"stored": FP32, "gathered": FP32, "gradient": FP32, "moments": FP32, "output": FP32}),
    "bf16-true": (
        None, "bf16-true", {"stored": BF16, "gathered": BF16, "gradient": BF16, "moments": BF16, "output": BF16},
    ),
    "bf16-mixed": (None, "bf16-mixed", {"stored": FP32, "gathered": BF16, "gradient": FP32, "moments": FP32}),
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
            fit(strategy, Upcast(adamw()), classes(2), callbacks=[look], precision=precision)
            found[key] = look.seen
        return found

    for found in on_ranks(seen):
        for key, (_, _, expected) in DTYPES.items():
            assert {name: found[key][name] for name in expected} == expected, key


@pytest.mark.parametrize("precision", ["64-true", "16-mixed", "transformer-engine"])
def test_other_precisions_are_refused_at_construction(precision: Any) -> None:
    with pytest.raises(Exception, match=r"'32-true', 'bf16-mixed', 'bf16-true', '16-true'"):
        pl.Trainer(accelerator="cpu", devices=1, strategy=FSDP2Strategy(), precision=precision)


def test_numbers_of_rows_do_not_matter() -> None:
    """Parameters with fewer rows than ranks leave some ranks an empty shard."""

    class Narrow(Trained):
        def __init__(self) -> None:
            super().__init__(adamw())
            self.layers = nn.Sequential(nn.Linear(4, 1), nn.Tanh(), nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 2))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layers(batch).square().mean()

    strategies = {"fsdp2": "fsdp2", "offload": "fsdp2_offload", "smallest": smallest_units}
    assert_same_training(Narrow, strategies, numbers(), world_size=4, trainer_kwargs={"gradient_clip_val": 0.2})
