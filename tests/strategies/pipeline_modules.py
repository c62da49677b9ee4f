"""Modules and runs for tests of pipelines: as many layers as there are stages, and every rank on the same rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_shard import PipelineStrategy
from lightning_shard.testing import run_distributed
from tests.strategies.cases import Case as Case
from tests.strategies.cases import assert_all_same as assert_all_same
from tests.strategies.cases import each
from tests.strategies.zero_modules import MakeOptimizer, Trained, adamw, sgd
from tests.strategies.zero_runs import trainer as plain_trainer

SCHEDULES = ["gpipe", "1f1b", "interleaved", "looped_bfs", "zero_bubble", "zbv", "dualpipev"]
"""Every schedule."""

Found = TypeVar("Found")


def pipeline(schedule: Any = "1f1b", **settings: Any) -> Callable[[], PipelineStrategy]:
    """Makes a strategy where it is used: on each rank."""
    return partial(PipelineStrategy, schedule=schedule, **settings)


def strategy_of(key: str) -> Any:
    """``"auto"`` for one process; else the strategy of a schedule."""
    return PipelineStrategy(schedule=key) if key in SCHEDULES else key  # type: ignore[arg-type]


class Layers(Trained):
    """Six linear layers with what may be in every step: a loss per row, so that means over rows are right."""

    def __init__(self, optimizer: MakeOptimizer | None = None, width: int = 4, depth: int = 6) -> None:
        super().__init__(optimizer)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + 0.5 * x
        return x

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"] if isinstance(batch, dict) else batch
        return (self(x) - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch)


class Times(nn.Module):
    """One number that multiplies."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(float(value)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Product(Trained):
    """The mean of ``x`` times several numbers, each a module, so that a stage may end behind each."""

    def __init__(self, *factors: float, optimizer: MakeOptimizer | None = None) -> None:
        super().__init__(optimizer)
        self.factors = nn.ModuleList([Times(factor) for factor in factors])

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = factor(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch).mean())


class Masked(Product):
    """The mean over the rows that count."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch["x"]) * batch["mask"]).sum() / batch["mask"].sum()

    def microbatch_weight(self, batch: Any) -> float:
        return float(batch["mask"].sum())


class Ignoring(Product):
    """Cross-entropy that leaves rows out."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = torch.stack([self(batch["x"]), torch.zeros(len(batch["x"]))], 1)
        return F.cross_entropy(scores, batch["y"], ignore_index=-100)

    def microbatch_weight(self, batch: Any) -> float:
        return float((batch["y"] != -100).sum())


class Skipping(Trained):
    """One tensor goes past the stage in the middle; every second batch does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ModuleList([Times(0.5), Times(0.7), Times(1.2), Times(0.9)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        skip = self.factors[0](batch["x"])
        main = self.factors[2](self.factors[1](skip.sin()))
        made = self.factors[3](main)
        return ((made + skip) if batch["uses"] else made).square().mean()


class Keywords(Trained):
    """Keyword-only inputs: ids, a mask that may be None, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.net = Layers(depth=3)

    def forward(self, *, ids: Tensor, mask: Tensor | None = None, scale: int = 2) -> Tensor:
        rows = self.table(ids).mean(1)
        if mask is not None:
            rows = rows * mask[:, None]
        assert scale == 3
        return self.net(rows) * scale

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(ids=batch["ids"], mask=batch.get("mask"), scale=3) - 1).square().mean()


class Unused(Layers):
    """A parameter that no step uses, one that only some batches use, and one whose gradient is always 0."""

    def __init__(self) -> None:
        super().__init__(adamw(0.1))
        self.unused = nn.Linear(3, 3)
        self.sometimes = nn.Linear(4, 4)
        self.zero = nn.Parameter(torch.ones(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        made = self(batch) + 0 * self.zero
        if batch_idx % 2:
            made = made + self.sometimes(batch)
        return made.square().mean()


class Frozen(Layers):
    """The first stage trains nothing."""

    def __init__(self, count: int = 4) -> None:
        super().__init__(adamw(0.1))
        self.layers[:count].requires_grad_(False)


class Expert(nn.Module):
    """Keeps an auxiliary loss in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.layer = nn.Linear(4, 2), nn.Linear(4, 4)
        self.balance: Any = None

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        self.balance = shares.square().mean()
        return x + self.layer(x) * shares[:, :1]


class Experts(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Sequential(*[Expert() for _ in range(5)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        made = self.experts(batch)
        balance = sum(expert.balance for expert in self.experts)
        self.log("balance", balance)
        return {"loss": made.square().mean() + 0.3 * balance, "balance": balance.detach()}


class Compiled(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = torch.compile(self.layers[1], backend="eager")
        self.layers[4].compile(backend="eager")


class Checkpointed(Trained):
    """The user's own activation checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Expert() for _ in range(5)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = checkpoint(block, batch, use_reentrant=False)
        return batch.square().mean()


class Dropping(Trained):
    """Half of many ones times ``w`` dropped, so that the gradient of ``w`` is the loss itself at ``w`` = 1."""

    def __init__(self) -> None:
        super().__init__(sgd(1.0))
        self.layers = nn.Sequential(Times(1), nn.Dropout(0.5), Times(1), Times(1), Times(1))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        made = self.layers(batch)
        return {"loss": made.mean(), "made": made.detach()}


class Noisy(Trained):
    """Noise that is drawn in the step and used before and behind every cut; more of it is drawn at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ModuleList([Times(0.5 + 0.2 * place) for place in range(5)])

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        noise, made = torch.randn_like(batch), batch
        for factor in self.factors:
            made = factor(made + noise)
        again = torch.rand(len(batch), 1)
        made = made * again
        return {"loss": (made - noise).square().mean(), "noise": noise, "again": again, "made": made.detach()}


def rows_of(batches: Sequence[Any]) -> DataLoader[Any]:
    """The batches as they are; the ranks of one pipeline all see all rows."""
    return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]


def trainer(strategy: Any, **settings: Any) -> pl.Trainer:
    """A Trainer over all ranks that writes nothing; a string that is no schedule's name is Lightning's own."""
    if isinstance(strategy, str):
        strategy = strategy_of(strategy)
    elif callable(strategy):
        strategy = strategy()
    return plain_trainer(strategy, **settings)


class Kept(pl.Callback):
    """Whole weights while the strategy is still set up."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        ours = isinstance(strategy, PipelineStrategy)
        state = strategy.full_state_dict() if ours else module.state_dict()
        self.weights = {name: value.detach().clone() for name, value in state.items()}


def fit(
    strategy: Any, module: pl.LightningModule, batches: Sequence[Any], *, callbacks: Any = (), **settings: Any
) -> dict[str, Tensor]:
    """Train, and return the whole weights."""
    kept = Kept()
    trainer(strategy, callbacks=[*callbacks, kept], **settings).fit(module, rows_of(batches))
    return kept.weights


def seeded(make: Callable[[], Found], seed: int = 11) -> Found:
    pl.seed_everything(seed, verbose=False)
    return make()


def alone(fn: Callable[[Any], Found], key: Any = "auto") -> Found:
    """``fn("auto")`` in one process."""
    return run_distributed(fn, 1, key, timeout=60.0)[0]


def on_ranks(
    fn: Callable[[Any], Found], keys: Iterable[Any] = ("1f1b",), ranks: int = 2, timeout: float = 90.0
) -> list[dict[Any, Found]]:
    """For every rank ``fn(key)`` of every key, in one start of the ranks."""
    return run_distributed(each, ranks, list(keys), fn, timeout=timeout)


def same_on_all_ranks(
    fn: Callable[[Any], Any], keys: Iterable[Any] = ("1f1b",), ranks: int = 2, timeout: float = 90.0
) -> Any:
    """Assert that ``fn(key)`` on every rank is what ``fn("auto")`` is in one process, and return that."""
    expected = alone(fn)
    for rank, found in enumerate(on_ranks(fn, keys, ranks, timeout)):
        for key, value in found.items():
            assert_close(value, expected, f"rank {rank}, {key}")
    return expected


def assert_close(found: Any, expected: Any, where: str, atol: float = 1e-6, rtol: float = 1e-5) -> None:
    """Assert that two structures of numbers and tensors are equal but for rounding."""
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), (where, sorted(found), sorted(expected))
        for key, value in expected.items():
            assert_close(found[key], value, f"{where}, {key!r}", atol, rtol)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), (where, found, expected)
        for place, value in enumerate(expected):
            assert_close(found[place], value, f"{where}[{place}]", atol, rtol)
    elif isinstance(expected, Tensor):
        assert isinstance(found, Tensor) and found.shape == expected.shape, (where, found, expected)
        assert found.dtype == expected.dtype, (where, found.dtype, expected.dtype)
        close = torch.allclose(found.double(), expected.double(), atol=atol, rtol=rtol)
        assert close, (where, found, expected)
    elif isinstance(expected, float):
        assert abs(found - expected) <= atol + rtol * abs(expected), (where, found, expected)
    else:
        assert found == expected, (where, found, expected)
