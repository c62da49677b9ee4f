"""Tests on several ranks, for users' own modules: no launcher, no GPU, no leftovers.

* :func:`run_distributed` runs a function on every rank of a small world and returns what each rank returned.
* :func:`assert_same_training` trains a module in one process and under each strategy, and compares.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy

from lightning_shard import _pool
from lightning_shard._parity import (
    Comparison,
    Recipe,
    Split,
    StrategyChoice,
    Tolerance,
    compare,
    split_rows,
    train_and_record,
)

__all__ = [
    "RankFailed",
    "SameTraining",
    "StrategyFigures",
    "TrainingDiffers",
    "assert_same_training",
    "preload",
    "run_distributed",
    "split_rows",
]

T = TypeVar("T")

SHOWN_FAILURES = 8
"""Lines of differences that one strategy's part of an error shows."""

_OWN_SETTINGS = (
    "accelerator",
    "devices",
    "num_nodes",
    "strategy",
    "precision",
    "use_distributed_sampler",
    "logger",
    "enable_checkpointing",
    "enable_progress_bar",
    "enable_model_summary",
)
"""Trainer arguments that :func:`assert_same_training` sets itself."""


class RankFailed(RuntimeError):
    """A rank raised, exited, was killed, or did not finish in time. The message shows why.

    Args:
        message: What happened, with the failing rank's traceback or stack and its last output.
        ranks: The ranks that failed (or had not finished), the first to fail first.

    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    @property
    def rank(self) -> int:
        """The rank that failed first."""
        return self.ranks[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.ranks)


class TrainingDiffers(AssertionError):
    """A strategy trained otherwise than one process did."""


def preload(*modules: str) -> None:
    """Import heavy modules once instead of on each rank of each job; for ``conftest.py``, before the first job.

    torch, Lightning, DeepSpeed and this package are loaded anyway. The modules must not start threads at import.

    Raises:
        ModuleNotFoundError: If there is no such module.
        RuntimeError: If ranks were started already.

    """
    _pool.preload(*modules)


def run_distributed(
    fn: Callable[..., T], world_size: int, *args: Any, timeout: float = 120.0, **kwargs: Any
) -> list[T]:
    """Call ``fn(*args, **kwargs)`` on every rank of a world on this machine; return the results by rank.

    The ranks are fresh CPU processes of one thread each, forked from a server that has torch, Lightning and DeepSpeed
    loaded: the first call takes some seconds to start it, later ones a few hundredths of a second. They see the
    caller's environment, working directory and import path, and besides what ``torchrun`` would set, so that a
    ``Trainer(accelerator="cpu", devices=world_size, strategy=...)`` or ``init_process_group("gloo")`` in ``fn`` just
    works. No state reaches a later call, and no process outlives the call or the caller.

    What ``fn`` prints is kept, and shown only if its rank fails. ``fn`` may be a closure, a lambda or a nested
    function; values that it finds in its module are those of a fresh import (a value patched in the caller's module
    is not sent). Tensors in the results come back detached, on CPU, by value.

    Example::

        def test_ranks_agree():
            def total():
                torch.distributed.init_process_group("gloo")
                ones = torch.ones(3)
                torch.distributed.all_reduce(ones)
                return ones

            for result in run_distributed(total, 2):
                assert result.tolist() == [2, 2, 2]

    Args:
        fn: The function.
        world_size: Number of ranks.
        *args: Its positional arguments, the same on each rank (a rank knows itself by ``os.environ["RANK"]``).
        timeout: Hard limit in seconds, without the start of the server.
        **kwargs: Its keyword arguments.

    Raises:
        RankFailed: As soon as one rank raises, exits or is killed (its peers are ended), or at the time limit; then
            with the stacks of the ranks that had not finished.
        TypeError: If the function, an argument or a result cannot be sent between processes.
        ValueError: If ``world_size`` or ``timeout`` is not positive.

    """
    if world_size < 1:
        raise ValueError(f"run_distributed(world_size={world_size}): at least one rank is needed.")
    if not timeout > 0:
        raise ValueError(f"run_distributed(timeout={timeout}): seconds, more than 0.")
    try:
        return _pool.run(_pool.Job(function=fn, args=args, kwargs=kwargs), world_size, timeout)
    except _pool.TimedOut as error:
        ranks = sorted(error.stacks)
        stacks = "\n".join(f"Rank {rank} was here:\n{error.stacks[rank].rstrip()}" for rank in ranks)
        raise RankFailed(
            f"{_plural(ranks)} of {world_size} had not finished after {timeout:g} s.\n{stacks}", ranks
        ) from None
    except _pool.Failed as error:
        first, *others = error.reports
        ranks = [report.rank for report in error.reports]
        also = f" ({_plural(sorted(report.rank for report in others))} failed too)" if others else ""
        output = error.logs[first.rank].strip()
        raise RankFailed(
            f"Rank {first.rank} of {world_size} failed{also}:\n{(first.failure or '').rstrip()}"
            + (f"\nLast output of rank {first.rank}:\n{output}" if output else ""),
            ranks,
        ) from None


def _plural(ranks: Sequence[int]) -> str:
    return f"{'Rank' if len(ranks) == 1 else 'Ranks'} {', '.join(map(str, ranks))}"


@dataclass(frozen=True, kw_only=True)
class StrategyFigures:
    """How one strategy's run compares with one process."""

    losses: tuple[float, ...]
    """The loss of each step, mean over the ranks."""

    loss_difference: float
    """The largest difference of a step's loss."""

    weight_difference: float
    """The largest difference of a weight or buffer, over all ranks."""

    optimizer_difference: float
    """The largest difference of an optimizer state, over all ranks."""


@dataclass(frozen=True, kw_only=True)
class SameTraining:
    """The figures of :func:`assert_same_training`; printing it gives a table."""

    losses: tuple[float, ...]
    """The loss of each step in one process."""

    strategies: dict[str, StrategyFigures]
    """Each strategy's figures."""

    def __str__(self) -> str:
        width = max(len("one process"), *map(len, self.strategies))
        lines = [f"{'':{width}}  {'last loss':>12}  {'loss diff.':>10}  {'weights':>10}  {'optimizer':>10}"]
        lines.append(f"{'one process':{width}}  {self.losses[-1]:12.6g}")
        for name, run in self.strategies.items():
            lines.append(
                f"{name:{width}}  {run.losses[-1]:12.6g}  {run.loss_difference:10.2g}  {run.weight_difference:10.2g}"
                f"  {run.optimizer_difference:10.2g}"
            )
        return "\n".join(lines)


def assert_same_training(
    make_module: Callable[[], pl.LightningModule],
    strategies: Sequence[StrategyChoice] | Mapping[str, StrategyChoice],
    batches: Sequence[Any] | Callable[[], Sequence[Any]],
    *,
    world_size: int = 2,
    precision: Any = "32-true",
    atol: float = 5e-6,
    rtol: float = 1e-5,
    seed: int = 0,
    split: Split = split_rows,
    trainer_kwargs: Mapping[str, Any] | None = None,
    timeout: float = 120.0,
) -> SameTraining:
    """Assert that each strategy trains as one process does, on the same global batches.

    One process trains on whole batches; each rank of a strategy on its own rows of them. Then agree, to
    ``atol + rtol * |reference|``: the loss of every step (mean over the ranks), every weight and buffer as gathered on
    *every* rank, and every optimizer state by parameter name (for these ``atol`` shrinks with the largest value of
    that state). Integer buffers must be equal. Where a module draws random numbers in its step (dropout), or its loss
    is no mean over rows (batch normalization), the runs differ by right.

    Example::

        def test_my_module():
            batches = [torch.randn(8, 32) for _ in range(5)]
            print(assert_same_training(MyModule, ["ddp", "zero2", "zero3_offload"], batches))

    Args:
        make_module: Makes the module, the same on each call after seeding; usually its class.
        strategies: Names, objects or functions that make one; a mapping gives them labels.
        batches: The global batches of one epoch, or a function that makes them (called once, seeded). The default
            ``split`` cuts tensors along dimension 0, also inside dicts, lists, tuples and dataclasses.
        world_size: Number of ranks for each strategy.
        precision: The Trainer's precision, for one process too. Below 32 bits, widen the tolerances.
        atol: Absolute tolerance.
        rtol: Relative tolerance.
        seed: Seed for modules and batches.
        split: ``(global_batch, rank, world_size) -> batch of the rank``.
        trainer_kwargs: More arguments for every Trainer, such as ``accumulate_grad_batches`` or ``callbacks``.
        timeout: Limit for each run, in seconds.

    Returns:
        The losses and the largest differences.

    Raises:
        TrainingDiffers: An AssertionError that names strategy, rank, step or parameter, and both values.
        RankFailed: If a run fails.
        ValueError: If there is nothing to compare: no batch, no strategy, or one process changes no weight or has a
            loss that is not finite; or if ``trainer_kwargs`` holds what this function sets itself.

    """
    named = _named(strategies)
    settings = dict(trainer_kwargs or {})
    for key in _OWN_SETTINGS:
        if key in settings:
            raise ValueError(f"trainer_kwargs holds {key!r}, which assert_same_training sets itself.")
    if callable(batches):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            batches = batches()
    if not batches:
        raise ValueError("assert_same_training: no batches to train on.")

    def train(strategy: StrategyChoice, ranks: int) -> list[Any]:
        recipe = Recipe(
            make_module=make_module,
            strategy=strategy,
            batches=list(batches),
            split=split,
            world_size=ranks,
            precision=precision,
            seed=seed,
            trainer_kwargs=settings,
        )
        return run_distributed(train_and_record, ranks, recipe, timeout=timeout)

    (reference,) = train("auto", 1)
    if not all(map(math.isfinite, reference.losses)):
        raise ValueError(f"One process alone has losses that are not finite: {reference.losses}.")
    if not reference.moved:
        raise ValueError("One process alone changes no weight, so that there is nothing to compare.")
    tolerance = Tolerance(absolute=atol, relative=rtol)
    outcomes = {label: compare(train(choice, world_size), reference, tolerance) for label, choice in named.items()}
    report = SameTraining(
        losses=tuple(reference.losses),
        strategies={label: _figures(outcome) for label, outcome in outcomes.items()},
    )
    parts = [_explain(label, outcome.failures) for label, outcome in outcomes.items() if outcome.failures]
    if parts:
        raise TrainingDiffers("\n".join([*parts, str(report)]))
    return report


def _named(strategies: Sequence[StrategyChoice] | Mapping[str, StrategyChoice]) -> dict[str, StrategyChoice]:
    if isinstance(strategies, str):
        strategies = [strategies]
    if isinstance(strategies, Mapping):
        named = dict(strategies)
    else:
        named = {}
        for choice in strategies:
            label = choice if isinstance(choice, str) else getattr(choice, "__name__", type(choice).__name__)
            named[label if label not in named else f"{label} #{len(named)}"] = choice
    if not named:
        raise ValueError("assert_same_training: no strategy to compare.")
    for label, choice in named.items():
        if not isinstance(choice, (str, Strategy)) and not callable(choice):
            raise TypeError(f"strategy {label!r} is {choice!r}: give a name, a Strategy, or a function that makes one.")
    return named


def _figures(outcome: Comparison) -> StrategyFigures:
    return StrategyFigures(
        losses=outcome.losses,
        loss_difference=outcome.loss,
        weight_difference=outcome.weight,
        optimizer_difference=outcome.optimizer,
    )


def _explain(label: str, failures: Sequence[str]) -> str:
    shown = [f"  {line}" for line in failures[:SHOWN_FAILURES]]
    if len(failures) > SHOWN_FAILURES:
        shown.append(f"  and {len(failures) - SHOWN_FAILURES} more")
    return "\n".join([f"{label} trains otherwise than one process:", *shown])
