"""Small modules on which ZeRO's partitions are uneven: sizes are prime-like, unequal, and no multiple of any world."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ZERO_NAMES = [
    "zero1",
    "zero2",
    "zero3",
    "zero1_offload",
    "zero2_offload",
    "zero3_offload",
    "zero3_offload_params",
]
"""Every registered ZeRO name that needs no compiled op."""

STAGES = ["zero1", "zero2", "zero3"]

MakeOptimizer = Callable[[pl.LightningModule], Any]


def sgd(lr: float = 0.1, **settings: Any) -> MakeOptimizer:
    return lambda module: torch.optim.SGD(module.parameters(), lr=lr, **settings)


def adamw(lr: float = 1e-3, **settings: Any) -> MakeOptimizer:
    return lambda module: torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.1, **settings)


class Trained(pl.LightningModule):
    """A module whose optimizer is given from outside."""

    def __init__(self, optimizer: MakeOptimizer | None = None) -> None:
        super().__init__()
        self.make_optimizer = optimizer or sgd()

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self)


class Classifying(Trained):
    """Every step of a classifier, on whatever its forward is."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


class Classifier(Classifying):
    """Three linear layers of unequal size and one 0-dimensional scale."""

    def __init__(self, optimizer: MakeOptimizer | None = None) -> None:
        super().__init__(optimizer)
        self.net = nn.Sequential(nn.Linear(13, 17), nn.GELU(), nn.Linear(17, 29), nn.GELU(), nn.Linear(29, 3))
        self.log_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.log_scale.exp()


class Upcast(Classifier):
    """Takes the loss in fp32, as careful bf16 modules do: the engine computes all of a bf16 module in bf16, and a loss
    of about 1 would be rounded to multiples of 1/128."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x).float(), y)


def classes(count: int = 5, rows: int = 8, seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Global batches for `Classifier`: ``rows`` rows each."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rows, 13, generator=generator), torch.randint(0, 3, (rows,), generator=generator))
        for _ in range(count)
    ]


def numbers(count: int = 4, rows: int = 8, width: int = 4, seed: int = 5) -> list[Tensor]:
    """Global batches of plain rows."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, width, generator=generator) for _ in range(count)]
