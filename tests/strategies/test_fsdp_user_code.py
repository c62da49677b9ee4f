"""What users' modules and callbacks do, and what they hold, beside what a textbook module does."""

import subprocess
import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from lightning_shard import FSDP2Strategy, MixedPrecision
from lightning_shard.testing import RankFailed, run_distributed
from lightning_shard.units import standstill
from tests.strategies.fsdp_modules import NAMES, Block, Case, Stack, assert_all_same, fit, seeded
from tests.strategies.zero_modules import Trained, classes, numbers, sgd
from tests.strategies.zero_runs import loader, trainer

pytestmark = pytest.mark.ranks


# --- what bf16-mixed gathers in bf16, and what it must not ---


class Normalised(Trained):
    """Fp32 features meet normalisations; running statistics and an iterated vector are buffers."""

    def __init__(self) -> None:
        super().__init__(sgd(0.05))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 11, dropout=0.0, batch_first=True), 2)
        self.spectral = parametrizations.spectral_norm(nn.Linear(6, 5))
        self.groups, self.root_mean_square = nn.GroupNorm(1, 5), nn.RMSNorm(5)
        self.statistics = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.encoder(x[:, :12].view(-1, 2, 6)).mean(1)
        return F.cross_entropy(self.last(self.statistics(self.root_mean_square(self.groups(self.spectral(x))))), y)


class TogglesInTheStep(Stack):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.blocks[1].requires_grad_(batch_idx % 2 == 1)
        return super().training_step(batch, batch_idx)


def test_bf16_mixed_takes_what_one_process_takes() -> None:
    # Both ranks see the same rows, so that statistics of a batch are those of one process.
    doubled = [(x.repeat(2, 1), y.repeat(2)) for x, y in classes(4, rows=32)]
    settings = {"precision": "bf16-mixed"}
    cases = {
        f"{kind.__name__}, {name}": Case(make=kind, batches=batches, strategy=name, settings=settings)
        for name in NAMES
        for kind, batches in ((Normalised, doubled), (TogglesInTheStep, classes(4, rows=64)))
    }
    for key, comparison in assert_all_same(cases, atol=2e-2, rtol=5e-2).items():
        assert comparison.loss <= 1e-3, key


# --- weights that a step reads where no forward runs ---


class PenalisedBefore(Stack):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        penalty = sum((parameter**2).sum() for parameter in self.parameters())
        return super().training_step(batch, batch_idx) + 0.01 * penalty


class PenalisedAfter(Stack):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for name, parameter in self.named_parameters():
            if name.endswith("weight"):
                loss = loss + 0.01 * parameter.norm()
        return loss


class UsedBothWays(Stack):
    """A weight of a block is used by itself, and then the block runs."""

    def forward(self, x: Tensor) -> Tensor:
        block = self.blocks[1]
        assert isinstance(block, Block)
        x = F.linear(self.first(x), block.up.weight.T @ block.up.weight)
        return self.last(block(x)) * self.log_scale


class Empty(Stack):
    """Holds a parameter without elements, as a model of no classes or an adapter of rank 0 does."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.nothing.sum()


def test_weights_read_in_a_step_and_weights_of_no_elements() -> None:
    kinds = (PenalisedBefore, PenalisedAfter, UsedBothWays, Empty)
    assert_all_same(
        {
            f"{kind.__name__}, {name}": Case(make=kind, batches=classes(4), strategy=name)
            for kind in kinds
            for name in NAMES
        }
    )


# --- two backwards through one graph, recomputed ---


class TwiceThroughOneGraph(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(0.5 * loss)
        optimizer.step()  # type: ignore[union-attr]
        return loss.detach()


def recomputing() -> FSDP2Strategy:
    return FSDP2Strategy(activation_checkpointing=True)


def test_two_backwards_through_a_recomputed_graph() -> None:
    strategies = {"kept": "fsdp2", "recomputed": recomputing}
    assert_all_same(
        {key: Case(make=TwiceThroughOneGraph, batches=classes(3), strategy=each) for key, each in strategies.items()}
    )


# --- refused at setup ---


class Holds(Trained):
    """Something that cannot be sharded, beside a layer that can."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.layer = part, nn.Linear(4, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).sum()


PARTS = {
    "has no shape yet": ("part.weight", lambda: nn.LazyLinear(3)),
    r"max_norm=1\.0": ("part", lambda: nn.Embedding(5, 3, max_norm=1.0)),
    "compiled to TorchScript": ("part", lambda: torch.jit.script(nn.Linear(4, 4))),
}


def hold(message: str) -> None:
    fit("fsdp2", Holds(PARTS[message][1]()), numbers(2))


@pytest.mark.parametrize("message", PARTS)
def test_parts_that_cannot_be_sharded_are_named(message: str) -> None:
    with pytest.raises(RankFailed, match=rf"MisconfigurationException: .*'{PARTS[message][0]}'.*{message}"):
        run_distributed(hold, 2, message, timeout=60.0)


def normalise_together() -> None:
    fit("fsdp2", Normalised(), classes(2), sync_batchnorm=True)


def test_synchronised_batch_norms_need_a_gpu() -> None:
    with pytest.raises(RankFailed, match=r"MisconfigurationException: Trainer\(sync_batchnorm=True\) needs GPUs"):
        run_distributed(normalise_together, 2, timeout=60.0)


class Answers(Stack):
    """Keeps the dtype of what leaves a step."""

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        assert outputs["loss"].dtype == torch.float32 and outputs["logits"].dtype == torch.float32

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        assert logits.dtype == torch.bfloat16
        return {"loss": F.cross_entropy(logits.float(), y), "logits": logits.detach()}


def pure_policy() -> FSDP2Strategy:
    return FSDP2Strategy(mixed_precision=MixedPrecision(compute="bf16", reduce="fp32", output="fp32"))


def answer() -> list[float]:
    return fit(pure_policy(), seeded(Answers), classes(3)).losses


def test_outputs_of_a_step_are_cast() -> None:
    for losses in run_distributed(answer, 2, timeout=60.0):
        assert len(losses) == 3


WITHOUT_DEEPSPEED = """
import sys
sys.modules["deepspeed"] = None  # as if it were not installed
import lightning.pytorch as pl
import lightning_shard
from lightning.pytorch.demos.boring_classes import BoringModel

pl.Trainer(strategy="fsdp2", accelerator="cpu", devices=1, max_steps=2, logger=False, enable_checkpointing=False).fit(
    BoringModel()
)
print("trained")
"""


def test_fsdp2_needs_no_deepspeed() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_DEEPSPEED], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stdout.splitlines()[-1] == "trained", run.stderr


def test_replicas_that_are_no_number_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="replicas='2'"):
        FSDP2Strategy(replicas="2")  # type: ignore[arg-type]


# --- a module that one rank calls alone ---


class Alone(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            pl_module(torch.ones(2, 13))


def call_alone() -> None:
    standstill._TICK, standstill._GRACE = 0.3, 1.0
    trainer("fsdp2", callbacks=[Alone()]).fit(seeded(Stack), loader(classes(2)))
    torch.distributed.barrier()


def test_a_module_that_one_rank_calls_alone_ends_the_run_and_says_so() -> None:
    with pytest.raises(
        RankFailed, match=r"rank 0 in a gather of unit '\(root\)'; rank 1 in torch\.distributed\.barrier \(from"
    ):
        run_distributed(call_alone, 2, timeout=60.0)


class CallsTogether(pl.Callback):
    """On every rank, in between steps; once with a result of nothing, once with an error that it survives."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        with torch.no_grad():
            assert pl_module(None) is None
            with pytest.raises(ZeroDivisionError):
                pl_module(0)


class SometimesNothing(Stack):
    def forward(self, x: Any) -> Any:
        if x is None:
            return None
        if not isinstance(x, Tensor):
            return 1 / x
        return super().forward(x)


def test_calls_in_between_that_return_nothing_or_fail() -> None:
    settings = {"callbacks": [CallsTogether()]}
    assert_all_same({"": Case(make=SometimesNothing, batches=classes(3), settings=settings)})
