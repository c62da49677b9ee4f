"""How much memory gradients take, with the buckets they pass through, at the moment of a backward when it is most.

The network has 34 layers of 512 x 512 without bias, 8.9 million parameters, so that the default bucket is a sixteenth
of the model, as it is for every larger one.
"""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import Offload, ZeROStrategy
from lightning_shard.telemetry import model_state_bytes
from lightning_shard.testing import run_distributed
from tests.strategies.cases import assert_all_same, under
from tests.strategies.zero_modules import Classifier, classes
from tests.strategies.zero_runs import loader, trainer

pytestmark = pytest.mark.ranks

LARGEST = 512 * 512
PARAMETERS = 34 * LARGEST
BUCKET = PARAMETERS // 16


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(34)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Watch(pl.Callback):
    """Elements of gradients and buckets: the most within backward, and before the step. Everything is fp32."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.peak = 0

        def look(_: Tensor) -> None:
            held = model_state_bytes(trainer.strategy)
            self.peak = max(self.peak, (held.storage("gradients") + held.storage("buckets")) // 4)

        for parameter in pl_module.parameters():
            parameter.register_post_accumulate_grad_hook(look)

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        held = model_state_bytes(trainer.strategy)
        self.before_step = (held.storage("gradients") + held.storage("buckets")) // 4


def measure(stage: int, ranks: int, accumulate: int = 1, **settings: Any) -> tuple[int, int]:
    """Elements of gradients and buckets on the rank that holds most: within backward, and before the step."""

    def job() -> tuple[int, int]:
        watch = Watch()
        strategy = ZeROStrategy(stage=stage, **settings)
        batches = [torch.randn(4, 512) for _ in range(2 * accumulate)]
        trainer(strategy, callbacks=[watch], accumulate_grad_batches=accumulate).fit(Net(), loader(batches))
        return watch.peak, watch.before_step

    peaks, rests = zip(*run_distributed(job, ranks), strict=True)
    return max(peaks), max(rests)


@pytest.mark.parametrize(("stage", "accumulate"), [(2, 1), (2, 2), (3, 1)])
def test_stages_2_and_3_shrink_with_the_ranks(stage: int, accumulate: int) -> None:
    """A rank's share, one bucket, and what has just been made: never the whole gradient."""
    peaks = {}
    for ranks in (2, 4):
        peaks[ranks], _ = measure(stage, ranks, accumulate)
        share = PARAMETERS // ranks
        # With accumulation stage 2 keeps the sum beside the gradients of this backward.
        shares = 2 if stage == 2 and accumulate > 1 else 1
        edges = 2 * shares * LARGEST  # parameters that two ranks share count whole on both
        assert share < peaks[ranks] <= shares * share + BUCKET + edges + LARGEST
    assert peaks[4] < 0.7 * peaks[2]


def test_stage_1_holds_whole_gradients_on_any_number_of_ranks() -> None:
    for ranks in (1, 4):
        peak, before_step = measure(1, ranks)
        assert PARAMETERS < peak <= PARAMETERS + BUCKET + LARGEST
        assert before_step <= PARAMETERS // ranks + 2 * LARGEST


def test_offload_keeps_gradients_of_the_share_only() -> None:
    peak, _ = measure(2, 4, offload=Offload(optimizer="cpu"))
    # On CPU the optimizer's copy of the gradients and the buffers for a parameter on its way are in the same memory.
    assert peak <= PARAMETERS // 4 + BUCKET + 8 * LARGEST + PARAMETERS // 4


def test_parameters_larger_than_the_bucket() -> None:
    """Most parameters here have more elements than the bucket, which they then bypass."""
    stages = {f"stage {stage}": partial(ZeROStrategy, stage, bucket_elements=100) for stage in (1, 2, 3)}
    assert_all_same(under(stages, Classifier, classes()))
