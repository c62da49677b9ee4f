"""A module with all that is odd about names and shapes, and the checkpoints that each format makes of it."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_shard.checkpoint.assemble import assemble
from lightning_shard.checkpoint.convert import open_any
from lightning_shard.checkpoint.places import place_of
from tests.checkpoint.runs import own_rows, rows, run, seeded
from tests.strategies.zero_runs import trainer

PORTABLE = ["fsdp2", "zero3", "1f1b"]
ENGINE = ["engine1", "engine2", "engine3"]
FORMATS = [*PORTABLE, *ENGINE, "sharded", "plain.ckpt"]


class Odd(pl.LightningModule):
    """Tied, frozen and 0-dim parameters, a buffer, and two parameter groups in another order than the module's."""

    def __init__(self, width: int = 5, note: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.up = nn.Linear(3, width)
        self.down = nn.Linear(width, 3, bias=False)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.tied = nn.Linear(3, width, bias=False)
        self.tied.weight = self.up.weight
        self.register_buffer("shift", torch.full((3,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(torch.tanh(self.up(x + self.shift)))
        result: Tensor = self.tied(self.frozen(hidden * self.scale))
        return result

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [*self.down.parameters(), self.scale], "lr": 0.02},
            {"params": list(self.up.parameters()), "weight_decay": 0.1},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class OddSharded(Odd):
    """The same as Lightning's own strategy wants it."""

    def configure_model(self) -> None:
        fully_shard(self.down, mesh=self.device_mesh["data_parallel"])


def save_in_every_format(folder: Path) -> None:
    """On every rank of two: the same training under each strategy, saved in its format."""
    for name in PORTABLE:
        run(name, seeded(Odd), rows(), save=folder / name)
    for stage in (1, 2, 3):
        settings = {"checkpoint_format": "engine"}
        run(f"zero{stage}", seeded(Odd), rows(), save=folder / f"engine{stage}", settings=settings)
    run("ddp", seeded(Odd), rows(), save=folder / "plain.ckpt")
    own = trainer(ModelParallelStrategy(save_distributed_checkpoint=True))
    own.fit(seeded(OddSharded), own_rows("fsdp2", rows()))
    own.save_checkpoint(folder / "sharded")


def read(path: Path) -> dict[str, Any]:
    """A checkpoint of any kind, in memory, in Lightning's layout."""
    return assemble(open_any(place_of(path), trusted=False))
