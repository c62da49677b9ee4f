"""Many trainings in one start of the ranks, which takes longer than a training does."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import lightning.pytorch as pl

from lightning_shard._parity import (
    Comparison,
    Recipe,
    Recording,
    StrategyChoice,
    Tolerance,
    compare,
    split_rows,
    train_and_record,
)
from lightning_shard.testing import run_distributed
from tests.strategies.zero_runs import forget_engines

Key = TypeVar("Key")
Found = TypeVar("Found")


def each(keys: Iterable[Key], fn: Callable[[Key], Found]) -> dict[Key, Found]:
    """``fn(key)`` for every key, in this process; an error names its key."""
    found = {}
    for key in keys:
        forget_engines()
        try:
            found[key] = fn(key)
        except Exception as error:
            error.add_note(f"(in the case {key!r})")
            raise
    return found


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training that must equal one process."""

    make: Callable[[], pl.LightningModule]
    """Makes the module; the same on each call after seeding."""

    batches: Sequence[Any]
    """The global batches of an epoch."""

    strategy: StrategyChoice = "fsdp2"
    """Under what it is trained."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of the Trainer, ``precision`` among them."""


def assert_all_same(
    cases: Mapping[str, Case], *, ranks: int = 2, atol: float = 5e-6, rtol: float = 1e-5
) -> dict[str, Comparison]:
    """`lightning_shard.testing.assert_same_training` for many cases, in one start of the ranks: a start takes longer
    than a case."""
    (expected,) = run_distributed(train_all, 1, cases, 0, timeout=120.0)
    found = run_distributed(train_all, ranks, cases, ranks, timeout=120.0)
    tolerance = Tolerance(absolute=atol, relative=rtol)
    compared = {key: compare([rank[key] for rank in found], expected[key], tolerance) for key in cases}
    failures = {key: comparison.failures for key, comparison in compared.items() if comparison.failures}
    assert not failures, "\n".join(f"{key}: {line}" for key, lines in failures.items() for line in lines[:6])
    assert all(expected[key].moved for key in cases)
    return compared


def train_all(cases: Mapping[str, Case], ranks: int) -> dict[str, Recording]:
    """Every case on this rank, one after the other; with no ranks, under no strategy."""

    def train(key: str) -> Recording:
        case, settings = cases[key], dict(cases[key].settings)
        recipe = Recipe(
            make_module=case.make,
            strategy=case.strategy if ranks else "auto",
            batches=case.batches,
            split=split_rows,
            world_size=ranks or 1,
            precision=settings.pop("precision", "32-true"),
            seed=0,
            trainer_kwargs=settings,
        )
        return train_and_record(recipe)

    return each(cases, train)


def under(
    strategies: Iterable[str] | Mapping[str, StrategyChoice],
    make: Callable[[], pl.LightningModule],
    batches: Sequence[Any],
    **settings: Any,
) -> dict[str, Case]:
    """One module under several strategies; the cases are named by both, and by the settings of the Trainer."""
    named = strategies if isinstance(strategies, Mapping) else {name: name for name in strategies}
    what = "".join([f"{make.__name__} under " if isinstance(make, type) else "", "{}"])
    what += "".join(f", {key}={value}" for key, value in settings.items())
    return {
        what.format(key): Case(make=make, batches=batches, strategy=strategy, settings=settings)
        for key, strategy in named.items()
    }
