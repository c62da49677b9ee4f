"""What a step moves, per rank, in payload elements: exactly what each stage is said to move, padding included.

A reduction or a gather of n elements counts n, an all-reduce 2n. The network's parameters have 3909 elements. Stages 1
and 2 reduce them as they are and gather them as one flat tensor, padded to a multiple of twice the ranks: 3912 on 2 and
on 4 ranks. Stage 3 gathers and reduces each parameter padded to a multiple of the ranks.

All-reduces are control messages here: the norm and a logged loss, one element each, and two integers by which the ranks
compare what they are about to reduce. Model states never go through one.
Stage 3 needs two steps to learn the order of the modules, and compares it among the ranks: the third step is counted.
"""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import Offload, ZeROStrategy
from lightning_shard.telemetry import model_state_bytes
from lightning_shard.telemetry.traffic import Traffic, count_traffic
from lightning_shard.testing import run_distributed
from tests.strategies.cases import each
from tests.strategies.zero_runs import loader, trainer

pytestmark = pytest.mark.ranks

SIZES = [(13, 17), (17, 29), (29, 31), (31, 37), (37, 23), (23, 7)]
NUMELS = [numel for width, out in SIZES for numel in (width * out, out)][:-1]  # the last layer has no bias
PARAMETERS = 3909
FLAT = 3912
ENGINES_CHOICE = {"zero_optimization": {"use_multi_rank_bucket_allreduce": True}}


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(width, out, bias=out != 7) for width, out in SIZES]
        self.net = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Watch(pl.Callback):
    """The traffic of every batch, and the most parameter elements that were whole at once."""

    def __init__(self) -> None:
        self.batches: list[Traffic] = []
        self.whole = 0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Net, batch: Any, batch_idx: int) -> None:
        def look(*_: Any) -> None:
            gathered = model_state_bytes(trainer.strategy).gathered
            self.whole = max(self.whole, sum(part.elements for part in gathered.values()) // 4)

        self.whole = 0
        self.hooks = [layer.register_forward_pre_hook(look) for layer in pl_module.net]
        self.context = count_traffic()
        self.counter = self.context.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.context.__exit__(None, None, None)
        self.batches.append(self.counter.traffic)
        for hook in self.hooks:
            hook.remove()


def train(strategy: dict[str, Any], settings: dict[str, Any]) -> tuple[list[dict[str, int]], int]:
    """Payload by operation of each batch, and the most whole elements in the last."""
    watch = Watch()
    steps = 3 * settings.get("accumulate_grad_batches", 1)
    batches = [torch.randn(8, 13) for _ in range(steps)]
    trainer(ZeROStrategy(**strategy), callbacks=[watch], **settings).fit(Net(), loader(batches))
    for traffic in watch.batches:
        assert all(call.elements <= 2 for call in traffic.calls if call.operation == "all_reduce")
    payload = [traffic.where(lambda call: call.operation != "all_reduce").by_operation for traffic in watch.batches]
    return payload, watch.whole


def run_all(ranks: int, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[tuple[list[dict[str, int]], int]]:
    """Of each case, a strategy's arguments and the Trainer's; the same on every rank."""
    first, *others = run_distributed(each, ranks, range(len(cases)), lambda index: train(*cases[index]))
    assert all(other == first for other in others)
    return list(first.values())


def run(ranks: int, strategy: dict[str, Any], **settings: Any) -> tuple[list[dict[str, int]], int]:
    return run_all(ranks, [(strategy, settings)])[0]


def gathered(ranks: int, numels: list[int] = NUMELS) -> int:
    """Elements that a gather of parameters moves at stage 3."""
    return sum(-(-numel // ranks) * ranks for numel in numels)


def test_the_numbers_above() -> None:
    assert sum(NUMELS) == PARAMETERS
    assert [gathered(ranks) - PARAMETERS for ranks in (1, 2, 4)] == [0, 11, 23]


@pytest.mark.parametrize("ranks", [2, 4])
def test_stages_1_and_2_move_twice_the_parameters(ranks: int) -> None:
    cases = [{"stage": stage, "offload": offload} for stage in (1, 2) for offload in (None, Offload(optimizer="cpu"))]
    for case, (batches, _) in zip(cases, run_all(ranks, [(case, {}) for case in cases]), strict=True):
        assert batches == [{"reduce": PARAMETERS, "all_gather": FLAT}] * 3, case


def test_small_buckets_and_bf16_move_the_same() -> None:
    """500 elements: less than three of the parameters have."""
    cases: list[Any] = []
    for stage in (1, 2):
        cases.append(({"stage": stage, "bucket_elements": 500}, {"gradient_clip_val": 0.1}))
        cases.append(({"stage": stage}, {"precision": "bf16-mixed"}))
    for case, (batches, _) in zip(cases, run_all(2, cases), strict=True):
        assert batches == [{"reduce": PARAMETERS, "all_gather": FLAT}] * 3, case


@pytest.mark.parametrize("offload", [None, Offload(optimizer="cpu")], ids=["device", "offload"])
def test_accumulation(offload: Offload | None) -> None:
    """Stage 1 reduces once a step; the others, which hold no whole gradient, after every backward."""
    settings: dict[str, Any] = {"accumulate_grad_batches": 2}
    reduce, gather = {"reduce": PARAMETERS}, {"all_gather": FLAT}
    if offload is None:
        batches, _ = run(2, {"stage": 1, "offload": offload}, **settings)
        assert batches == [{}, {**reduce, **gather}] * 3
    batches, _ = run(2, {"stage": 2, "offload": offload}, **settings)
    assert batches == [reduce, {**reduce, **gather}] * 3
    batches, _ = run(
        2, {"stage": 3, "offload": offload, "persistence_elements": 20, "prefetch_elements": 0}, **settings
    )
    small, large = gathered(2, [17]), gathered(2) - gathered(2, [17])
    each = {"all_gather": 2 * large, "reduce_scatter": gathered(2)}
    assert batches[-2:] == [each, {**each, "all_gather": 2 * large + small}]


@pytest.mark.parametrize("ranks", [2, 4])
def test_both_ends_of_stage_3(ranks: int) -> None:
    """Gathered for forward and again for backward: 3Ψ. Kept in between: 2Ψ, and all parameters are whole at once."""
    least = {"stage": 3, "reshard_after_forward": True, "prefetch_elements": 0, "persistence_elements": 0}
    kept = {"stage": 3, "reshard_after_forward": False, "persistence_elements": 0}
    (batches, whole), (kept_batches, kept_whole) = run_all(ranks, [(least, {}), (kept, {})])
    once = gathered(ranks)
    assert batches[-1] == {"all_gather": 2 * once, "reduce_scatter": once}
    assert whole == max(a * b + b for a, b in SIZES)  # the layer at work

    assert kept_batches[-1] == {"all_gather": once, "reduce_scatter": once}
    assert kept_whole == PARAMETERS


def test_persistent_parameters_are_gathered_once_after_the_step() -> None:
    batches, whole = run(2, {"stage": 3, "prefetch_elements": 0, "persistence_elements": 30})
    small = [17, 29, 23]
    once = gathered(2, small)
    assert batches[-1] == {"all_gather": 2 * (gathered(2) - once) + once, "reduce_scatter": gathered(2)}
    assert whole == 31 * 37 + 37 + sum(small)


def test_by_default_stage_3_gathers_again_all_but_the_end_of_the_model() -> None:
    """Prefetching for the backward finds the last layers still there, and keeps them, up to twice its window."""
    batches, whole = run(2, {"stage": 3})
    window, largest = PARAMETERS // 10, max(NUMELS)
    kept = 2 * gathered(2) - batches[-1]["all_gather"]
    assert batches[-1]["reduce_scatter"] == gathered(2)
    assert 0 < kept <= 2 * window + largest
    assert whole <= 2 * window + max(a * b + b for a, b in SIZES) < PARAMETERS

    # The engine's own limit of a billion would keep all layers but the first.
    unlimited = {"zero_optimization": {"stage3_max_live_parameters": 10**9}}
    batches, whole = run(2, {"stage": 3, "config": unlimited})
    assert batches[-1]["all_gather"] < 1.1 * gathered(2)
    assert whole > 0.9 * PARAMETERS


def test_offload_at_stage_3_moves_the_same() -> None:
    offloads = (Offload(optimizer="cpu"), Offload(optimizer="cpu", parameters="cpu"))
    least = {"stage": 3, "prefetch_elements": 0, "persistence_elements": 0}
    for batches, _ in run_all(2, [({**least, "offload": offload}, {}) for offload in offloads]):
        assert batches[-1] == {"all_gather": 2 * gathered(2), "reduce_scatter": gathered(2)}


@pytest.mark.parametrize("wasteful", [{"config": ENGINES_CHOICE}, {"contiguous_gradients": False}], ids=str)
def test_what_costs_an_all_reduce(wasteful: dict[str, Any]) -> None:
    """The engine's own bucket setting, and gradients that are not contiguous: 3Ψ, for nothing."""

    def job() -> dict[str, int]:
        watch = Watch()
        batches = [torch.randn(8, 13) for _ in range(2)]
        trainer(ZeROStrategy(stage=2, **wasteful), callbacks=[watch]).fit(Net(), loader(batches))
        return watch.batches[-1].where(lambda call: call.elements > 2).by_operation

    assert run_distributed(job, 2) == [{"all_reduce": 2 * PARAMETERS, "all_gather": FLAT}] * 2
