"""Fit, validate, test and predict under a pipeline, and in one process: what must agree, and how far it does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard._parity import split_rows
from lightning_shard.testing import run_distributed
from tests.strategies.cases import each
from tests.strategies.pipeline_models import MODELS, STEPS

ABSOLUTE, RELATIVE = 5e-6, 1e-5


@dataclass(frozen=True, kw_only=True)
class Run:
    """One model under one strategy."""

    model: str
    """A key of `MODELS`."""

    strategy: Callable[[], Strategy] | None
    """Makes the strategy; ``None`` for one process."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of the Trainer."""


class _Losses(pl.Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(float(outputs["loss"]))


def numbers(run: Run, ranks: int) -> dict[str, Tensor]:
    """Everything that a run gives, by name: losses, weights, metrics, predictions."""
    make, make_batch = MODELS[run.model]
    pl.seed_everything(7, verbose=False)
    module = make()
    losses = _Losses()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks or 1,
        strategy="auto" if run.strategy is None else run.strategy(),
        max_steps=STEPS,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **run.settings,
    )
    place = (trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}) if ranks else None

    def loader(steps: Sequence[int]) -> DataLoader[Any]:
        batches = [make_batch(step) for step in steps]
        if place is not None:
            batches = [split_rows(batch, place["rank"], place["num_replicas"]) for batch in batches]
        return DataLoader(batches, batch_size=1, collate_fn=lambda items: items[0])  # type: ignore[arg-type]

    trainer.fit(module, loader(range(STEPS)), loader([20, 21]))
    strategy: Any = trainer.strategy
    weights = strategy.full_state_dict() if run.strategy is not None else module.state_dict()
    found = {f"weight {name}": value.detach().clone() for name, value in weights.items()}
    found["losses"] = torch.tensor(losses.found)
    found["logged"] = torch.as_tensor(trainer.callback_metrics["train_loss_epoch"]).detach().cpu()
    found["validated in fit"] = torch.as_tensor(trainer.callback_metrics["val_loss"]).cpu()
    for verb in ("validate", "test"):
        (metrics,) = getattr(trainer, verb)(module, loader([30, 31]), verbose=False)
        found.update({f"{verb} {name}": torch.tensor(value) for name, value in metrics.items()})
    predictions = trainer.predict(module, loader([40, 41]))
    assert predictions is not None
    found["predictions"] = torch.cat(predictions)
    return found


def runs_on_rank(runs: Mapping[str, Run], ranks: int) -> dict[str, dict[str, Tensor]]:
    return each(runs, lambda key: numbers(runs[key], ranks))


def largest_differences(runs: Mapping[str, Run], ranks: int, replicas: int = 1) -> dict[str, float]:
    """For each run its largest difference from one process, as a factor of the tolerance: 1 is the limit.

    Args:
        runs: The runs.
        ranks: Ranks of each.
        replicas: Pipelines beside each other; losses and predictions are then those of each pipeline's rows.

    """
    models = {run.model: Run(model=run.model, strategy=None, settings=run.settings) for run in runs.values()}
    (expected,) = run_distributed(runs_on_rank, 1, models, 0, timeout=200.0)
    found = run_distributed(runs_on_rank, ranks, runs, ranks, timeout=280.0)
    return {
        key: max(_excess([rank[key] for rank in found], expected[run.model], replicas)) for key, run in runs.items()
    }


def _excess(ranks: Sequence[dict[str, Tensor]], expected: dict[str, Tensor], replicas: int) -> list[float]:
    factors = []
    for name, value in expected.items():
        if replicas > 1 and not name.startswith("weight "):
            continue  # means over ranks with the same weights; weights tell
        for rank in ranks:
            assert rank[name].shape == value.shape, (name, rank[name].shape, value.shape)
            limit = ABSOLUTE + RELATIVE * value.double().abs()
            factor = ((rank[name].double() - value.double()).abs() / limit).max() if value.numel() else torch.zeros(())
            factors.append(float(factor.nan_to_num(nan=float("inf"))))
    return factors
