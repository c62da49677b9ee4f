"""What the planner's figures are measured on: three modules, and the strategies that train them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn

from lightning_shard.registry import NAMES

ROWS = 8
"""Rows of a batch on one rank: a pipeline of four stages cuts it into eight."""

# --- what is trained ---


class Trained(pl.LightningModule):
    """The step and the optimizer that all three have."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Loss of inputs and classes."""
        inputs, targets = batch
        out = self(inputs)
        return nn.functional.cross_entropy(out.flatten(0, -2).float(), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with its defaults."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    @staticmethod
    def batch() -> tuple[Tensor, Tensor]:
        """What one rank gets for a step."""
        raise NotImplementedError


class Attention(nn.Module):
    """Causal attention with four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[rows, tokens, width]`` to the same shape."""
        rows, tokens, width = x.shape
        q, k, v = self.qkv(x).view(rows, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[rows, tokens, width]`` to the same shape."""
        x = x + self.attention(self.norm1(x))
        change: Tensor = self.mlp(self.norm2(x))
        return x + change


class GPT(Trained):
    """A decoder of four blocks: 3.4 million parameters, 32 tokens a row."""

    WIDTH, BLOCKS, WORDS, TOKENS = 256, 4, 512, 32

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(self.WORDS, self.WIDTH)
        self.places = nn.Embedding(self.TOKENS, self.WIDTH)
        self.blocks = nn.ModuleList(Block(self.WIDTH) for _ in range(self.BLOCKS))
        self.norm = nn.LayerNorm(self.WIDTH)
        self.head = nn.Linear(self.WIDTH, self.WORDS, bias=False)
        self.register_buffer("positions", torch.arange(self.TOKENS))

    def forward(self, words: Tensor) -> Tensor:
        """Logits ``[rows, tokens, words]``."""
        x = self.words(words) + self.places(self.positions)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out

    @staticmethod
    def batch() -> tuple[Tensor, Tensor]:
        """Words, and the words that follow."""
        words = torch.randint(GPT.WORDS, (ROWS, GPT.TOKENS + 1), generator=torch.Generator().manual_seed(1))
        return words[:, :-1].clone(), words[:, 1:].clone()


class Residual(nn.Module):
    """Two convolutions, and a third around them where the number of channels changes."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, padding=1)
        self.norm1 = nn.GroupNorm(2, after)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.norm2 = nn.GroupNorm(2, after)
        self.around = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[rows, before, height, width]`` to ``[rows, after, height, width]``."""
        change = self.norm2(self.second(torch.relu(self.norm1(self.first(x)))))
        return torch.relu(self.around(x) + change)


class CNN(Trained):
    """Residual blocks of unequal widths, no multiples of the ranks: 0.9 million parameters, images of 24 × 24."""

    CHANNELS = (18, 30, 50, 50, 86, 130)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, self.CHANNELS[0], 3, padding=1)
        pairs = zip(self.CHANNELS[:-1], self.CHANNELS[1:], strict=True)
        self.blocks = nn.Sequential(*(Residual(before, after) for before, after in pairs))
        self.last = Residual(130, 130)
        self.head = nn.Linear(130, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[rows, 10]``."""
        x = nn.functional.max_pool2d(self.stem(images), 2)
        x = self.last(nn.functional.avg_pool2d(self.blocks(x), 2))
        out: Tensor = self.head(x.mean((2, 3)))
        return out

    @staticmethod
    def batch() -> tuple[Tensor, Tensor]:
        """Images and their classes."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(ROWS, 3, 24, 24, generator=generator), torch.randint(10, (ROWS,), generator=generator)


class MLP(Trained):
    """Linear layers of unequal sizes: 1.8 million parameters, of which the largest layer has a third."""

    SIZES = (301, 510, 703, 902, 455, 253, 610, 10)

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in zip(self.SIZES[:-1], self.SIZES[1:], strict=True):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, rows: Tensor) -> Tensor:
        """Logits ``[rows, 10]``."""
        out: Tensor = self.layers(rows)
        return out

    @staticmethod
    def batch() -> tuple[Tensor, Tensor]:
        """Rows and their classes: 16 times as many as elsewhere, since they are cheap."""
        generator = torch.Generator().manual_seed(1)
        rows = 16 * ROWS
        return torch.randn(rows, MLP.SIZES[0], generator=generator), torch.randint(10, (rows,), generator=generator)


class Many(Trained):
    """200 layers of 8 x 8 and one of 512 x 512: tensors too small to divide, and one that outweighs them all."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Sequential(*(nn.Linear(8, 8) for _ in range(200)))
        self.large = nn.Linear(512, 512)

    def forward(self, rows: Tensor) -> Tensor:
        """Logits ``[rows, 512]``."""
        out: Tensor = self.large(self.small(rows).repeat(1, 64))
        return out

    @staticmethod
    def batch() -> tuple[Tensor, Tensor]:
        """Rows and their classes."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(ROWS, 8, generator=generator), torch.randint(512, (ROWS,), generator=generator)


MODELS: dict[str, type[Trained]] = {"gpt": GPT, "cnn": CNN, "mlp": MLP, "many": Many}
"""The modules, by name."""

TABLE = ("gpt", "cnn", "mlp")
"""Those of the table."""

# --- under what ---

ZERO = ("zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload")
CLOSED = ("ddp", *ZERO)
"""Those whose code the planner cannot run without data."""

FSDP2 = ("fsdp2", "fsdp2_grad", "fsdp2_hybrid", "fsdp2_offload")
PIPELINES = ("pipeline_gpipe", "pipeline_1f1b", "pipeline_interleaved")
STRATEGIES = ("ddp", *ZERO, *FSDP2, *PIPELINES)
RANKS = (2, 4)
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training."""

    model: str
    """A key of :data:`MODELS`."""

    strategy: str
    """A registered name."""

    ranks: int
    """Number of ranks."""

    precision: str
    """As in ``Trainer(precision=...)``."""

    checkpointing: bool = False
    """Whether activations are recomputed."""

    @property
    def settings(self) -> dict[str, Any]:
        """Constructor arguments on top of those that the name stands for."""
        return {"activation_checkpointing": True} if self.checkpointing else {}

    def make_strategy(self) -> Strategy:
        """The strategy."""
        if self.strategy == "ddp":
            return DDPStrategy()
        entry = NAMES[self.strategy]
        return entry.make(**{**entry.settings, **self.settings})

    def __str__(self) -> str:
        return f"{self.model} {self.strategy}{'+ac' * self.checkpointing} x{self.ranks} {self.precision}"


def all_cases(
    models: Sequence[str] = TABLE,
    strategies: Sequence[str] = STRATEGIES,
    ranks: Sequence[int] = RANKS,
    precisions: Sequence[str] = PRECISIONS,
) -> Iterator[Case]:
    """The whole table, or the part of it that is asked for."""
    for precision in precisions:
        for model in models:
            for strategy in strategies:
                for count in ranks:
                    if strategy == "fsdp2_hybrid" and count < 4:
                        continue
                    for checkpointing in (False,) if strategy in CLOSED else (False, True):
                        yield Case(
                            model=model,
                            strategy=strategy,
                            ranks=count,
                            precision=precision,
                            checkpointing=checkpointing,
                        )
