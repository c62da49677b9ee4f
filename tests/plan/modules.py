"""Small modules to plan."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.down(F.gelu(self.up(self.norm(rows))))


class Stack(pl.LightningModule):
    """An embedding, equal blocks, and a head."""

    def __init__(self, blocks: int = 3, width: int = 24, vocabulary: int = 50) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rows = self.embedding(batch)
        for block in self.blocks:
            rows = block(rows)
        loss = F.cross_entropy(self.head(rows).flatten(0, 1), batch.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Late(Stack):
    """Its layers are made by ``configure_model``."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.made = 0

    def configure_model(self) -> None:
        self.made += 1
        stack = Stack()
        self.embedding, self.blocks, self.head = stack.embedding, stack.blocks, stack.head


def tokens(rows: int = 8, length: int = 16) -> Tensor:
    return torch.arange(rows * length).reshape(rows, length) % 50
