"""What :func:`lightning_shard.testing.assert_same_training` runs on each rank, and how two runs are compared.

The recording half needs Lightning's Trainer; the comparing half is arithmetic on what was recorded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader

StrategyChoice = str | Strategy | Callable[[], Strategy]
"""A name, an object, or a function that makes one on each rank."""

Split = Callable[[Any, int, int], Any]
"""``split(global_batch, rank, world_size)`` returns the rank's rows."""

OptimizerState = dict[str, dict[str, Tensor]]
"""Parameter name -> state name -> tensor in the parameter's full shape, or a scalar."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run, the same on every rank."""

    make_module: Callable[[], pl.LightningModule]
    """Makes the module; called after seeding."""

    strategy: StrategyChoice
    """The strategy to train under."""

    batches: Sequence[Any]
    """Global batches."""

    split: Split
    """Takes a rank's rows of a global batch."""

    world_size: int
    """Number of ranks."""

    precision: Any
    """The Trainer's ``precision``."""

    seed: int
    """Seed of every rank before the module is made."""

    trainer_kwargs: dict[str, Any]
    """Further arguments of the Trainer."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What one rank saw of a run."""

    losses: list[float]
    """The loss of each training batch on this rank's rows."""

    weights: dict[str, Tensor]
    """Full parameters and buffers by name after the last step."""

    optimizer: OptimizerState
    """Full optimizer states after the last step."""

    moved: bool
    """Whether training changed any weight."""


def split_rows(batch: Any, rank: int, world_size: int) -> Any:
    """This rank's rows of ``batch``: in every tensor the ``rank``-th of ``world_size`` equal blocks of dimension 0.

    Dicts, lists, tuples and dataclasses are walked; scalars and whatever is no tensor are the same on each rank.

    Raises:
        ValueError: If the rows cannot be divided evenly, or the tensors have different numbers of rows.

    """
    rows = {tensor.shape[0] for tensor in _tensors(batch)}
    if len(rows) > 1:
        raise ValueError(
            f"The tensors of a batch have different numbers of rows: {sorted(rows)}. Pass split=, a function"
            " (global_batch, rank, world_size) -> the rank's batch."
        )
    for count in rows:
        if count % world_size:
            raise ValueError(
                f"A batch of {count} rows cannot be divided evenly among {world_size} ranks: give batches whose size"
                f" is a multiple of {world_size}, or pass split=."
            )
    return _map(batch, lambda tensor: tensor.chunk(world_size)[rank])


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if batch.dim():
            yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value)
    elif is_dataclass(batch):
        for field in fields(batch):
            yield from _tensors(getattr(batch, field.name))


def _map(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return function(batch) if batch.dim() else batch
    if isinstance(batch, Mapping):
        mapped = {key: _map(value, function) for key, value in batch.items()}
        return mapped if type(batch) is dict else type(batch)(mapped)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(value, function) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_map(value, function) for value in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{field.name: _map(getattr(batch, field.name), function) for field in fields(batch)})
    return batch


class _Batches(pl.LightningDataModule):
    """Serves each rank its rows: by its data-parallel rank, since ranks of one pipeline see the same ones."""

    def __init__(self, batches: Sequence[Any], split: Split) -> None:
        super().__init__()
        self._batches = batches
        self._split = split

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        place = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        mine = [self._split(batch, place["rank"], place["num_replicas"]) for batch in self._batches]
        return DataLoader(mine, batch_size=1, collate_fn=_only)  # type: ignore[arg-type]


def _only(batches: list[Any]) -> Any:
    (batch,) = batches
    return batch


class _Recorder(Callback):
    """Keeps the losses, and the full state while the strategy is still set up."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.weights: dict[str, Tensor] = {}
        self.optimizer: OptimizerState = {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"{type(pl_module).__name__}.training_step returned {type(loss).__name__} for batch {batch_idx}; to be"
                " compared it must return its loss, or a dict with the key 'loss'."
            )
        self.losses.append(loss.detach().float().mean().item())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        if hasattr(strategy, "full_state_dict") and hasattr(strategy, "full_optimizer_state"):
            self.weights, self.optimizer = strategy.full_state_dict(), strategy.full_optimizer_state()
        elif isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)) and not isinstance(strategy, DeepSpeedStrategy):
            self.weights = {name: value.detach().cpu() for name, value in pl_module.state_dict().items()}
            self.optimizer = _optimizer_state(trainer, pl_module)
        else:
            raise TypeError(
                f"{type(strategy).__name__} does not say how its full weights are gathered: it needs the methods"
                " full_state_dict() and full_optimizer_state(), as the strategies of lightning_shard have them."
            )


def _optimizer_state(trainer: pl.Trainer, module: pl.LightningModule) -> OptimizerState:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    states: OptimizerState = {}
    for optimizer in trainer.optimizers:
        for parameter, values in optimizer.state.items():
            kept = {key: torch.as_tensor(value).detach().cpu() for key, value in values.items() if value is not None}
            if kept:
                states.setdefault(names[id(parameter)], {}).update(kept)
    return states


def train_and_record(recipe: Recipe) -> Recording:
    """Train on this rank as ``recipe`` says and return what happened."""
    pl.seed_everything(recipe.seed, verbose=False)
    module = recipe.make_module()
    strategy = recipe.strategy
    if not isinstance(strategy, (str, Strategy)):
        strategy = strategy()
    before = {name: value.detach().clone() for name, value in module.state_dict().items() if not value.is_meta}
    recorder = _Recorder()
    settings = {"max_epochs": 1, **recipe.trainer_kwargs}
    callbacks = settings.pop("callbacks", None) or []
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=recipe.world_size,
        strategy=strategy,
        precision=recipe.precision,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*(callbacks if isinstance(callbacks, list) else [callbacks]), recorder],
        **settings,
    )
    trainer.fit(module, datamodule=_Batches(recipe.batches, recipe.split))
    after = recorder.weights
    moved = any(name in after and not torch.equal(value, after[name].to(value)) for name, value in before.items())
    return Recording(
        losses=recorder.losses, weights=after, optimizer=recorder.optimizer, moved=moved or len(before) < len(after)
    )


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Two numbers agree if they differ by at most ``absolute + relative * |reference|``."""

    absolute: float
    """In the unit of the numbers."""

    relative: float
    """As a share of the reference."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The outcome of comparing one strategy's ranks with one process."""

    losses: tuple[float, ...]
    """The loss of each step, mean over the ranks."""

    loss: float
    """The largest difference of a step's loss."""

    weight: float
    """The largest difference of a weight or buffer, over all ranks."""

    optimizer: float
    """The largest difference of an optimizer state, over all ranks."""

    failures: tuple[str, ...]
    """One line for each thing that differs by more than the tolerance."""


def compare(ranks: Sequence[Recording], reference: Recording, tolerance: Tolerance) -> Comparison:
    """Compare every rank's recording with that of one process."""
    failures: list[str] = []
    if len({len(rank.losses) for rank in ranks} | {len(reference.losses)}) > 1:
        counts = [len(rank.losses) for rank in ranks]
        failures.append(f"batches trained, by rank: {counts}; one process: {len(reference.losses)}")
    losses = tuple(sum(step) / len(step) for step in zip(*(rank.losses for rank in ranks), strict=False))
    loss = _compare_losses(losses, reference.losses, tolerance, len(ranks), failures)
    weight = optimizer = 0.0
    largest = _largest_by_state(reference.optimizer)
    for number, rank in enumerate(ranks):
        where = f"rank {number}: "
        for name in _shared(rank.weights, reference.weights, where, "weight", failures):
            difference = _compare(
                rank.weights[name], reference.weights[name], tolerance, f"{where}weight {name!r}", failures
            )
            weight = max(weight, difference)
        for name in _shared(rank.optimizer, reference.optimizer, where, "optimizer state of", failures):
            states, expected = rank.optimizer[name], reference.optimizer[name]
            for key in _shared(states, expected, f"{where}{name!r}: ", "optimizer state", failures):
                # Squared gradients are tiny: what counts as equal follows the size of this kind of state.
                scaled = replace(tolerance, absolute=tolerance.absolute * min(1.0, largest[key]))
                what = f"{where}optimizer state {key!r} of {name!r}"
                optimizer = max(optimizer, _compare(states[key], expected[key], scaled, what, failures))
    return Comparison(losses=losses, loss=loss, weight=weight, optimizer=optimizer, failures=tuple(failures))


def _compare_losses(
    losses: Sequence[float], reference: Sequence[float], tolerance: Tolerance, world_size: int, failures: list[str]
) -> float:
    largest = 0.0
    for step, (value, expected) in enumerate(zip(losses, reference, strict=False)):
        difference = abs(value - expected)
        allowed = tolerance.absolute + tolerance.relative * abs(expected)
        if not difference <= allowed:
            failures.append(
                f"loss of step {step}: {value:.9g} (mean of {world_size} ranks), one process has {expected:.9g};"
                f" difference {difference:.3g}, allowed {allowed:.3g}"
            )
        largest = max(largest, difference if difference == difference else float("inf"))
    return largest


def _largest_by_state(states: OptimizerState) -> dict[str, float]:
    largest: dict[str, float] = {}
    for values in states.values():
        for key, value in values.items():
            if value.numel():
                largest[key] = max(largest.get(key, 0.0), value.abs().max().item())
    return largest


def _shared(
    found: Mapping[str, Any], reference: Mapping[str, Any], where: str, what: str, failures: list[str]
) -> list[str]:
    for name in sorted(reference.keys() - found.keys()):
        failures.append(f"{where}{what} {name!r} is missing")
    for name in sorted(found.keys() - reference.keys()):
        failures.append(f"{where}{what} {name!r} is unknown to one process")
    return [name for name in reference if name in found]


def _compare(found: Tensor, reference: Tensor, tolerance: Tolerance, what: str, failures: list[str]) -> float:
    """The largest difference, infinite at NaN; beyond the tolerance a line is added to ``failures``."""
    if found.shape != reference.shape:
        failures.append(f"{what}: shape {list(found.shape)}, one process has {list(reference.shape)}")
        return float("inf")
    if not reference.numel():
        return 0.0
    a, b = found.detach().double().flatten(), reference.detach().double().flatten()
    difference = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))  # Equal infinities are equal.
    allowed = tolerance.absolute + tolerance.relative * b.abs().nan_to_num(posinf=0.0)
    if not reference.is_floating_point():
        allowed = torch.zeros_like(b)
    wrong = difference > allowed
    if wrong.any():
        worst = int(torch.where(wrong, difference, -1.0).argmax())
        place = [int(i) for i in torch.unravel_index(torch.tensor(worst), reference.shape)]
        failures.append(
            f"{what}{place if place else ''}: {a[worst]:.9g}, one process has {b[worst]:.9g}; difference"
            f" {difference[worst]:.3g}, allowed {allowed[worst]:.3g}; {int(wrong.sum())} of {len(a)} elements differ"
        )
    return float(difference.max())
