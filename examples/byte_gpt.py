"""A GPT on bytes, as an ordinary LightningModule and LightningDataModule.

Nothing in them knows of shards, stages or DeepSpeed: ``Trainer(strategy="zero3_offload")`` is all it takes. Run as a
script, this file is the demo of ``demo.py``: ``python examples/byte_gpt.py --help``.
"""

import math
import sys
import sysconfig
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY = 256  # a token is a byte


class Block(nn.Module):
    """A pre-norm transformer block: causal self-attention, then a feed-forward network."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations ``[batch, time, width]`` to the same shape."""
        batch, time, width = x.shape
        qkv = self.attention_in(self.attention_norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + F.dropout(self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width)), dropout)
        return x + F.dropout(self.feed_out(F.gelu(self.feed_in(self.feed_norm(x)))), dropout)


class ByteGPT(pl.LightningModule):
    """A byte-level GPT: it predicts the next byte of a text.

    Args:
        context: Longest text the model sees, in bytes.
        layers: Number of transformer blocks.
        heads: Attention heads per block; must divide ``width``.
        width: Size of the activations.
        dropout: Share of activations dropped in training, in [0, 1).
        tied: Use the embedding's weight as the head's weight too.
        lr: Learning rate of AdamW.
        weight_decay: Weight decay of AdamW, on matrices only (biases and norms are not decayed).

    Raises:
        ValueError: If ``heads`` does not divide ``width``.

    """

    def __init__(
        self,
        context: int = 256,
        layers: int = 6,
        heads: int = 6,
        width: int = 384,
        dropout: float = 0.0,
        tied: bool = False,
        lr: float = 3e-4,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} does not split into heads={heads} equal parts: make it a multiple.")
        self.save_hyperparameters()
        self.context, self.lr, self.weight_decay = context, lr, weight_decay
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What a block adds to the residual stream is scaled down, so that the sum keeps its size with depth.
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers if "_out." in name else 1))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the next byte at each place.

        Args:
            tokens: Bytes, ``[batch, time]`` int64, ``time <= context``.

        Returns:
            Logits, ``[batch, time, 256]``.

        Raises:
            ValueError: If the text is longer than the context.

        """
        if tokens.shape[1] > self.context:
            raise ValueError(
                f"A text of {tokens.shape[1]} bytes is longer than the model's context={self.context}: give the model"
                " and the data the same context."
            )
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(tokens) + self.position(places))))
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte of windows ``[batch, time + 1]``, int64."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Train on windows ``[batch, context + 1]``, int64."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Validate on windows ``[batch, context + 1]``, int64."""
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW that decays matrices only."""
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))

    @torch.no_grad()
    def sample(self, prompt: str, length: int, temperature: float = 0.8, seed: int = 0) -> str:
        """Continue ``prompt`` by ``length`` bytes. Call it on every rank: partitioned weights are gathered as needed.

        Returns:
            The prompt and its continuation, the same text on every rank.

        """
        was_training = self.training
        self.eval()
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt.encode())
        for _ in range(length):
            logits = self(torch.tensor([text[-self.context :]], device=self.device))[0, -1]
            odds = torch.softmax(logits.float().cpu() / temperature, dim=0)
            text.append(int(torch.multinomial(odds, 1, generator=generator)))
        self.train(was_training)
        return bytes(text).decode(errors="replace")


class Windows(Dataset[Tensor]):
    """A text cut into windows of ``context + 1`` bytes, each starting where the one before predicts its last byte."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return max(0, len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.text[start : start + self.context + 1].long()


class ByteText(pl.LightningDataModule):
    """Text as bytes: by default the source of Python's standard library, which every machine has.

    A step's *global* batch is the same rows for any number of ranks; each rank reads its own part of it.

    Args:
        context: Bytes that the model sees; a window is one byte longer.
        batch_size: Windows per step over *all* ranks; must be a multiple of their number.
        folder: Folder whose ``*.py`` files are read in the order of their names; None is the standard library.
        max_bytes: Read no more than this.
        val_share: Share of the text, at its end, that is kept for validation.
        seed: Decides the order of the training windows.

    """

    def __init__(
        self,
        context: int = 256,
        batch_size: int = 16,
        folder: str | None = None,
        max_bytes: int = 4_000_000,
        val_share: float = 0.05,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.context, self.batch_size, self.max_bytes = context, batch_size, max_bytes
        self.folder = Path(folder or sysconfig.get_path("stdlib"))
        self.val_share, self.seed = val_share, seed

    def setup(self, stage: str) -> None:
        """Read the text.

        Raises:
            ValueError: If the folder has too little text for one batch of training and one of validation.

        """
        text = bytearray()
        for path in sorted(self.folder.glob("*.py")):
            text += path.read_bytes()
            if len(text) >= self.max_bytes:
                break
        tokens = torch.frombuffer(text or bytearray(1), dtype=torch.uint8)[: self.max_bytes]
        split = int(len(tokens) * (1 - self.val_share))
        self.train_windows, self.val_windows = (Windows(part, self.context) for part in tokens.tensor_split([split]))
        fewest = min(len(self.train_windows), len(self.val_windows))
        if fewest < self.batch_size:
            raise ValueError(
                f"The *.py files of {self.folder} hold {len(text):,} bytes, which leaves {fewest} windows of"
                f" {self.context} bytes for training or validation, fewer than batch_size={self.batch_size}: choose"
                " another folder, a shorter context or a smaller batch."
            )

    def _loader(self, windows: Windows, shuffle: bool) -> DataLoader[Tensor]:
        assert self.trainer is not None
        # Always this sampler, for one process too: its order depends on the seed alone, and rank r of N takes every
        # Nth row, so that N ranks together read the batches that one process reads.
        place = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        ranks = place["num_replicas"]
        if self.batch_size % ranks:
            raise ValueError(f"batch_size={self.batch_size} is not a multiple of the {ranks} ranks that share it.")
        sampler: DistributedSampler[Tensor] = DistributedSampler(
            windows, shuffle=shuffle, seed=self.seed, drop_last=True, **place
        )
        return DataLoader(windows, batch_size=self.batch_size // ranks, sampler=sampler, drop_last=True)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Windows ``[batch_size / ranks, context + 1]``, int64, in an order set by the seed."""
        return self._loader(self.train_windows, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Windows ``[batch_size / ranks, context + 1]``, int64, in the order of the text."""
        return self._loader(self.val_windows, shuffle=False)


if __name__ == "__main__":
    # As a script this is module __main__ of no package; the demo finds it by its name, as tests and YAML files do.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from examples.demo import main

    main()
