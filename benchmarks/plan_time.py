"""How long planning takes, and how much memory: Llama-shaped modules of 7 and of 405 billion parameters.

Every plan runs in a process of its own, so that the largest memory of it and of its children is known.

    python benchmarks/plan_time.py
    python benchmarks/plan_time.py --cases 7b-8 405b-4096
"""

import argparse
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

# As a script this file is in no package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama's numbers."""

    width: int
    blocks: int
    heads: int
    groups: int
    inner: int
    words: int
    tokens: int


SHAPES = {
    "7b": Shape(width=4096, blocks=32, heads=32, groups=32, inner=11008, words=32000, tokens=2048),
    "405b": Shape(width=16384, blocks=126, heads=128, groups=8, inner=53248, words=128256, tokens=8192),
}
"""Touvron et al. 2023, *Llama 2*, and Dubey et al. 2024, *The Llama 3 Herd of Models*."""

CASES = {"7b-8": ("7b", 8, 1), "7b-512": ("7b", 512, 1), "7b-8-rows": ("7b", 8, 16), "405b-4096": ("405b", 4096, 1)}
"""Shape, ranks and rows of a rank's batch."""


class Block(nn.Module):
    """Attention of grouped queries and a gated MLP, each behind a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, head = shape, shape.width // shape.heads
        self.norm1, self.norm2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.groups * head, bias=False)
        self.value = nn.Linear(shape.width, shape.groups * head, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[rows, tokens, width]`` to the same shape."""
        rows, tokens, width = x.shape
        y = self.norm1(x)
        query, key, value = (
            part(y).view(rows, tokens, heads, -1).transpose(1, 2)
            for part, heads in (
                (self.query, self.shape.heads),
                (self.key, self.shape.groups),
                (self.value, self.shape.groups),
            )
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        y = self.norm2(x)
        change: Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + change


class Llama(pl.LightningModule):
    """A decoder."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm, self.head = nn.RMSNorm(shape.width), nn.Linear(shape.width, shape.words, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss of the next word."""
        x = self.words(batch)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters())


def plan(case: str) -> str:
    """Plan one case here; a line of the table."""
    from lightning_shard.plan.search import plan_module

    name, ranks, rows = CASES[case]
    shape = SHAPES[name]
    with torch.device("meta"):
        module = Llama(shape)
    batch = torch.zeros(rows, shape.tokens, dtype=torch.long)
    began = time.monotonic()
    found = plan_module(module, batch, devices=ranks, nodes=max(1, ranks // 8), device="h100", precision="bf16-mixed")
    seconds = time.monotonic() - began
    simulated = sum(each.simulated for each in found.strategies)
    kilobytes = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return (
        f"| {found.parameters / 1e9:.1f} billion | {ranks} | {rows} x {shape.tokens} | {len(found.strategies)} |"
        f" {simulated} | {seconds:.0f} | {max(kilobytes) / 1e6:.2f} |"
    )


def main(arguments: list[str] | None = None) -> None:
    """Plan every case in a process of its own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--here", choices=list(CASES), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.here:
        print(plan(given.here))
        return
    print("| parameters | ranks | batch of a rank | forms | simulated | seconds | GB of the largest process |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for case in given.cases:
        done = subprocess.run([sys.executable, __file__, "--here", case], check=True, capture_output=True, text=True)
        print(done.stdout.strip().splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
