"""Trainings that are saved under one strategy and go on under another: the modules, the strategies, and one run."""

import gc
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import PipelineStrategy
from lightning_shard.testing import split_rows

SAVED_AFTER, STEPS = 3, 5
ROWS = 8
"""Rows of a global batch."""

# --- what is trained ---


class Stack(pl.LightningModule):
    """Residual blocks between two linear layers, in three parameter groups, with the rarer kinds of entries.

    A parameter without dimensions, frozen parameters (a block, and a bias), and two buffers that the result depends on:
    one that is saved and counts the steps, and one that is not.
    """

    counted: Tensor
    tilt: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)) for _ in range(8))
        self.last = nn.Linear(5, 1, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(0.1))
        self.register_buffer("counted", torch.zeros(()))
        self.register_buffer("tilt", torch.linspace(0.5, 1.5, 5), persistent=False)
        self.first.bias.requires_grad_(False)
        self.blocks[2].requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Loss of a batch ``[rows, 3]``."""
        x = self.first(batch)
        for block in self.blocks:
            x = x + block(x * self.tilt)
        out: Tensor = self.last(x) * self.log_scale.exp() + 0.1 * self.counted
        return out.square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        """Count."""
        self.counted += 1

    def configure_optimizers(self) -> Any:
        """Groups of another rate, and of another decay."""
        inner = [parameter for parameter in self.blocks.parameters() if parameter.requires_grad]
        ends = [self.first.weight, *self.last.parameters()]
        return adamw({"params": ends, "lr": 2e-2}, {"params": inner, "weight_decay": 0.1}, {"params": [self.log_scale]})

    @staticmethod
    def batch(generator: torch.Generator) -> Tensor:
        """A global batch."""
        return torch.randn(ROWS, 3, generator=generator)


class Tied(pl.LightningModule):
    """A language model in small, whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()) for _ in range(8))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Loss of tokens ``[rows, 5]``."""
        x = self.embedding(batch[:, :-1])
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        """All in one group."""
        return adamw({"params": list(self.parameters())})

    @staticmethod
    def batch(generator: torch.Generator) -> Tensor:
        """A global batch."""
        return torch.randint(11, (ROWS, 5), generator=generator)


class Adapted(nn.Module):
    """A frozen linear layer and a trained change of rank 2 (LoRA, Hu et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(8, 2) / 8)
        self.up = nn.Parameter(torch.randn(2, 8) / 8)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[rows, 8]`` to the same shape."""
        out: Tensor = self.base(x) + x @ self.down @ self.up
        return out


class LoRA(pl.LightningModule):
    """Adapters train; everything else is frozen, and the optimizer never sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(8))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Loss of a batch ``[rows, 8]``."""
        x = batch
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        """The adapters."""
        return adamw({"params": [parameter for parameter in self.parameters() if parameter.requires_grad]})

    @staticmethod
    def batch(generator: torch.Generator) -> Tensor:
        """A global batch."""
        return torch.randn(ROWS, 8, generator=generator)


def adamw(*groups: dict[str, Any]) -> Any:
    """AdamW, and a rate that is halved after every second step."""
    optimizer = torch.optim.AdamW(list(groups), lr=1e-2)
    return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


MODELS: dict[str, Any] = {"plain": Stack, "tied": Tied, "LoRA": LoRA}
"""The modules, by name."""


class Batches(pl.LightningDataModule):
    """A global batch an epoch, of which each rank gets its rows: Lightning cannot go on within an epoch."""

    def __init__(self, model: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self._batches = [MODELS[model].batch(generator) for _ in range(STEPS)]

    def train_dataloader(self) -> DataLoader[Any]:
        """The batch of this epoch."""
        trainer = self.trainer
        assert trainer is not None
        place = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        rows = split_rows(self._batches[trainer.current_epoch], place["rank"], place["num_replicas"])
        return DataLoader(rows, batch_size=len(rows))


# --- under what ---

ONE = "one process"
PIPELINES_OF_SHARDS = "pipeline x shard"
STRATEGIES: dict[str, Callable[[], Any]] = {
    ONE: lambda: "auto",
    "ddp": lambda: "ddp",
    "zero1": lambda: "zero1",
    "zero2": lambda: "zero2",
    "zero3": lambda: "zero3",
    "zero3_offload": lambda: "zero3_offload",
    "fsdp2": lambda: "fsdp2",
    "fsdp2_grad": lambda: "fsdp2_grad",
    "pipeline_1f1b": lambda: "pipeline_1f1b",
    "pipeline_interleaved": lambda: "pipeline_interleaved",
    PIPELINES_OF_SHARDS: lambda: PipelineStrategy(stages=2, data_parallel="shard"),
}
"""What saves and resumes, by name."""


@dataclass(frozen=True, kw_only=True, order=True)
class Under:
    """A strategy on a number of ranks."""

    ranks: int
    """Number of ranks."""

    strategy: str
    """A key of `STRATEGIES`."""

    def __str__(self) -> str:
        return self.strategy if self.strategy == ONE else f"{self.strategy}, {self.ranks}"


def all_under(*ranks: int) -> list[Under]:
    """Every strategy on each of these numbers of ranks that it can be on."""
    least = {name: 2 if name.startswith("pipeline") else 1 for name in STRATEGIES} | {PIPELINES_OF_SHARDS: 4}
    return [
        Under(strategy=name, ranks=count)
        for count in ranks
        for name in STRATEGIES
        if (count == 1 if name == ONE else count >= least[name])
    ]


# --- one run ---


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a training has at its end, whole on every rank."""

    losses: list[float]
    """Of each step, of this rank's rows."""

    weights: dict[str, Tensor]
    """Parameters, and buffers of both kinds, by name."""

    optimizer: dict[str, dict[str, Tensor]]
    """Optimizer states by parameter and state name."""


class Recorder(pl.Callback):
    """Keeps losses, and at the end weights and optimizer states."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self.ended: Ended

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss."""
        self._losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the states. Collective."""
        strategy: Any = trainer.strategy
        if hasattr(strategy, "full_state_dict"):
            weights, optimizer = strategy.full_state_dict(), strategy.full_optimizer_state()
        else:
            names: dict[Any, str] = {parameter: name for name, parameter in pl_module.named_parameters()}
            states = trainer.optimizers[0].state
            weights = pl_module.state_dict()
            optimizer = {names[parameter]: dict(state) for parameter, state in states.items()}
        # A buffer that is not saved is the fresh module's own; no checkpoint may change it.
        weights = {**dict(pl_module.named_buffers()), **weights}
        self.ended = Ended(
            losses=self._losses,
            weights={name: value.detach().clone() for name, value in weights.items()},
            optimizer={
                name: {key: torch.as_tensor(value).detach().clone() for key, value in state.items()}
                for name, state in optimizer.items()
            },
        )


def train(model: str, under: Under, steps: int, load: str | None = None, save: str | None = None) -> Ended:
    """One training up to ``steps``, on this rank."""
    gc.collect()  # engines of earlier runs end now, not in the middle of an import
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(0 if load is None else 99, verbose=False)
    recorder = Recorder()
    trainer = pl.Trainer(
        strategy=STRATEGIES[under.strategy](),
        accelerator="cpu",
        devices=under.ranks,
        max_epochs=steps,
        reload_dataloaders_every_n_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recorder],
        use_distributed_sampler=False,
    )
    trainer.fit(MODELS[model](), datamodule=Batches(model), ckpt_path=load)
    assert trainer.global_step == steps, (trainer.global_step, steps)
    if save is not None:
        trainer.save_checkpoint(save)
    return recorder.ended
