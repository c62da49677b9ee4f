"""The demo: a strategy's training beside the same training in one process.

It trains ``ByteGPT`` on two CPU ranks, after the same training in one process, and shows the losses side by side, where
the bytes of the model states live, beside the formula, and a sample of text from the trained model.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from examples.byte_gpt import ByteGPT, ByteText
from lightning_shard.telemetry import (
    ModelStateBytes,
    expected_model_state_bytes,
    gather_model_state_bytes,
    model_state_bytes,
    model_state_table,
)


class Recorder(pl.Callback):
    """Keeps what the demo shows: each step's loss and, of the last step, the bytes held and a sample of text."""

    def __init__(self, sample_bytes: int) -> None:
        self.sample_bytes = sample_bytes
        self.losses: list[float] = []
        self.before_step: ModelStateBytes | None = None
        self.table = self.text = ""

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        """Count the bytes between the last backward and its step, where gradients are alive."""
        if trainer.global_step == trainer.max_steps - 1:
            self.before_step = model_state_bytes(trainer.strategy)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Keep the loss of the global batch; after the last step, count all that is at rest."""
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        if self.before_step is not None:
            mine = replace(model_state_bytes(trainer.strategy), gradients=self.before_step.gradients)
            expected = expected_model_state_bytes(trainer.strategy)
            self.table = model_state_table(gather_model_state_bytes(mine), expected)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sample while the strategy is still there, on every rank: partitioned weights are gathered on the way."""
        assert isinstance(pl_module, ByteGPT)
        self.text = pl_module.sample("def ", self.sample_bytes)


def reference_losses() -> list[float]:
    """The losses of this very command in one process, run in an interpreter of its own."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "NODE_RANK", "MASTER_", "TORCHELASTIC_", "SLURM_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    with tempfile.TemporaryDirectory() as folder:
        losses = Path(folder) / "losses.json"
        command = [sys.executable, *sys.argv, "--devices=1", "--strategy=auto", f"--losses={losses}"]
        if code := subprocess.run(command, env=environment, check=False).returncode:
            sys.exit(f"The one-process run failed with exit code {code}; its own message is above.")
        return list(json.loads(losses.read_text()))


def compare(losses: list[float], reference: list[float], tolerance: float) -> bool:
    """Print two runs' losses side by side; whether they differ by no more than ``tolerance`` at every step."""
    differences = [abs(ours - theirs) for ours, theirs in zip(losses, reference, strict=True)]
    print(f"\n{'step':>6}{'parallel':>12}{'one process':>14}{'difference':>13}")
    for step in range(len(losses)):
        if step % 5 == 0 or step == len(losses) - 1:
            print(f"{step + 1:>6}{losses[step]:>12.6f}{reference[step]:>14.6f}{differences[step]:>13.1e}")
    equal = max(differences) <= tolerance
    verdict = "the same training" if equal else "NOT the same training"
    print(f"Largest difference over {len(losses)} steps: {max(differences):.1e} (allowed {tolerance:.0e}): {verdict}.")
    return equal


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--strategy", default="zero3_offload", help="any name of the Trainer's strategy argument")
    parser.add_argument("--devices", type=int, default=2, help="number of ranks")
    parser.add_argument("--accelerator", default="cpu", help="cpu, gpu or auto")
    parser.add_argument("--precision", default="32-true", help="precision of the Trainer")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=8, help="windows per step over all ranks")
    parser.add_argument("--context", type=int, default=64, help="bytes per window")
    for name, value in (("layers", 6), ("heads", 6), ("width", 384)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{name} of the model")
    parser.add_argument("--sample", type=int, default=80, help="bytes of text to sample at the end")
    parser.add_argument("--no-reference", action="store_true", help="leave the one-process run out")
    parser.add_argument("--losses", type=Path, help="only train, and write the losses to this JSON file")
    return parser.parse_args()


def main() -> None:
    """Train, compare and report; the exit code is 1 where the two runs differ."""
    options = parse()
    compared = not (options.no_reference or options.losses or options.devices == 1)
    reference: list[float] = []
    if compared and os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        print(f"One process, {options.steps} steps, for comparison:", flush=True)
        reference = reference_losses()
        print(f"{options.devices} ranks under {options.strategy}, the same global batches:", flush=True)

    pl.seed_everything(0, verbose=False)
    recorder = Recorder(sample_bytes=0 if options.losses else options.sample)
    trainer = pl.Trainer(
        strategy=options.strategy,
        devices=options.devices,
        accelerator=options.accelerator,
        precision=options.precision,
        max_steps=options.steps,
        limit_val_batches=0,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = ByteGPT(options.context, options.layers, options.heads, options.width)
    trainer.fit(model, datamodule=ByteText(options.context, options.batch_size))
    if not trainer.is_global_zero:
        return
    if options.losses:
        options.losses.write_text(json.dumps(recorder.losses))
        return
    # Sums of the same numbers in another order differ in the last bits, and training lets that grow.
    tolerance = 1e-4 if options.precision == "32-true" else 2e-2
    equal = compare(recorder.losses, reference, tolerance) if compared else True
    print(f"\n{recorder.table}\n\nA sample after {options.steps} steps:\n{recorder.text}", flush=True)
    sys.exit(0 if equal else 1)
