"""A Hugging Face model in a pipeline, as an ordinary LightningModule.

GPT-2's architecture from transformers, built from a small configuration, so that nothing is downloaded. The training
step is the one of any tutorial, with the library's own loss and the tied embedding; ``strategy="pipeline_1f1b"`` is all
that makes two stages of it. As a script this file trains on two CPU ranks, after the same training in one process, and
shows the stages and the losses side by side: ``python examples/pipeline_any_module.py --help``.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import lightning_shard  # noqa: F401 - registers the names


class GPT2(pl.LightningModule):
    """transformers' GPT-2 on bytes; its head is tied to its embedding, so the first and the last stage share a weight.

    Args:
        context: Longest text the model sees, in bytes.
        layers: Number of transformer blocks.
        heads: Attention heads per block; must divide ``width``.
        width: Size of the activations.
        lr: Learning rate of AdamW.

    """

    def __init__(self, context: int = 64, layers: int = 4, heads: int = 4, width: int = 128, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        # Without dropout, since each microbatch draws masks of its own, and the two runs are to be compared.
        config = GPT2Config(
            vocab_size=256,
            n_positions=context + 1,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = GPT2LMHeadModel(config)
        self.model.loss_type = "ForCausalLM"  # the default, of which transformers would warn

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte of windows ``[batch, context + 1]``, int64; the library shifts them."""
        loss: Tensor = self.model(input_ids=windows, labels=windows).loss
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Train on windows ``[batch, context + 1]``, int64."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Validate on windows ``[batch, context + 1]``, int64."""
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW; a rank keeps the moments of its own stage's parameters only."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Losses(pl.Callback):
    """Keeps the loss of each global batch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Every rank has the loss, although only the last stage computes it."""
        self.values.append(float(trainer.callback_metrics["train_loss"]))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--strategy", default="pipeline_1f1b", help="any name of the Trainer's strategy argument")
    parser.add_argument("--devices", type=int, default=2, help="number of ranks")
    parser.add_argument("--accelerator", default="cpu", help="cpu, gpu or auto")
    parser.add_argument("--precision", default="32-true", help="precision of the Trainer")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=8, help="windows per step over all pipelines")
    for name, value in (("context", 64), ("layers", 4), ("heads", 4), ("width", 128)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{name} of the model")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--no-reference", action="store_true", help="leave the one-process run out")
    parser.add_argument("--losses", type=Path, help="only train, and write the losses to this JSON file")
    return parser.parse_args()


def main() -> None:
    """Train, and compare; the exit code is 1 where the two runs differ."""
    from examples.byte_gpt import ByteText
    from examples.demo import compare, reference_losses

    options = parse()
    compared = not (options.no_reference or options.losses or options.devices == 1)
    reference: list[float] = []
    if compared and os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        print(f"One process, {options.steps} steps, for comparison:", flush=True)
        reference = reference_losses()
        print(f"{options.devices} ranks under {options.strategy}, the same global batches:", flush=True)

    pl.seed_everything(0, verbose=False)
    losses = Losses()
    trainer = pl.Trainer(
        strategy=options.strategy,
        devices=options.devices,
        accelerator=options.accelerator,
        precision=options.precision,
        max_steps=options.steps,
        limit_val_batches=0,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = GPT2(options.context, options.layers, options.heads, options.width, options.lr)
    trainer.fit(model, datamodule=ByteText(options.context, options.batch_size))
    if not trainer.is_global_zero:
        return
    if options.losses:
        options.losses.write_text(json.dumps(losses.values))
    elif compared:
        # Sums of the same numbers in another order differ in the last bits, and training lets that grow.
        sys.exit(0 if compare(losses.values, reference, 1e-4 if options.precision == "32-true" else 2e-2) else 1)


if __name__ == "__main__":
    # As a script this is module __main__ of no package; the text and the comparison are found by their package's name.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
