"""Modules for tests of `auto_shard`, and planners that say what they are told."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_shard import AutoShardStrategy
from lightning_shard.plan import search
from lightning_shard.plan.arithmetic import ModelStates
from lightning_shard.plan.results import Plan, StrategyPlan

WIDTH = 16


class Plain(pl.LightningModule):
    """Layers made in `__init__`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.first()

    def first(self) -> nn.Module:
        return layers()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch).square().mean(), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.layers(batch).square().mean(), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Later(Plain):
    """Layers made in `configure_model`."""

    def first(self) -> nn.Module:
        return nn.Identity()

    def configure_model(self) -> None:
        if isinstance(self.layers, nn.Identity):
            self.layers = layers()


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


class Planner:
    """In the place of `plan_module`: takes one name, whatever it is asked, and keeps what it was asked."""

    def __init__(self, name: str | None, settings: dict[str, Any] | None = None) -> None:
        self.name, self.settings = name, settings or {}
        self.asked: list[dict[str, Any]] = []

    def __call__(self, module: pl.LightningModule, batch: Any, **options: Any) -> Plan:
        self.asked.append({"module": module, "batch": batch, **options})
        rows = tuple(
            StrategyPlan(
                name=name,
                settings=self.settings if name == self.name else {},
                model_states=ModelStates(parameters=1e3 * (place + 2), gradients=0, master=0, optimizer=0),
                payload_elements=0,
                sent_elements=0,
                flops_fraction=1,
                fits=name == self.name,
                reason="it is what the test says",
            )
            for place, name in enumerate(options["strategies"])
        )
        return Plan(
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            devices=options["devices"],
            device=options["device"],
            strategies=rows,
            chosen=next((row for row in rows if row.name == self.name), None),
        )


def told(name: str | None, settings: dict[str, Any] | None = None) -> Planner:
    """From now on this process plans so; for a rank, which ends with its job."""
    planner = Planner(name, settings)
    search.plan_module = planner
    return planner


def taking(name: str, settings: dict[str, Any] | None = None) -> Callable[[], AutoShardStrategy]:
    """A function that makes a strategy which will become ``name``."""

    def make() -> AutoShardStrategy:
        told(name, settings)
        return AutoShardStrategy(memory="1GB")

    return make


def told_strategy(name: str | None, settings: dict[str, Any] | None = None, **arguments: Any) -> AutoShardStrategy:
    """A strategy that will become ``name``."""
    told(name, settings)
    return AutoShardStrategy(**{"memory": "1GB", **arguments})
