"""A strategy's own code on one rank of many: exact states and traffic, no trace left, failures told."""

import os
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_shard  # noqa: F401  (registers the names)
from lightning_shard.plan.arithmetic import own_rows, padded_rows
from lightning_shard.plan.simulate import SINGLE, SimulationFailed, SimulationOptions, simulate, simulate_each
from lightning_shard.telemetry.allocator import track_allocator
from lightning_shard.units.dry_copy import DryCopier
from tests.plan.modules import Late, Stack, tokens


def run(strategy: str, ranks: int, module: Any = None, **options: Any) -> Any:
    return simulate(
        module if module is not None else Stack(),
        tokens(),
        SimulationOptions(strategy=strategy, world_size=ranks, **options),
    )


@pytest.mark.parametrize("ranks", [2, 5, 64])
def test_shards_and_traffic_of_any_number_of_ranks_are_exact(ranks: int) -> None:
    shapes = [tuple(parameter.shape) for parameter in Stack().parameters()]
    found = run("fsdp2", ranks)
    held = 4 * padded_rows(shapes, ranks)
    assert found.held.parameters == found.held.gradients == held
    counters = 4 * len(shapes)
    assert found.held.optimizer == 8 * sum(own_rows(shape, ranks, 0) for shape in shapes) + counters
    assert found.payload_elements == pytest.approx(3 * ranks * padded_rows(shapes, ranks), abs=32)


def test_what_is_kept_from_forward_to_backward_is_gathered_once_and_held() -> None:
    released, kept = run("fsdp2", 4), run("fsdp2_grad", 4)
    assert kept.payload_elements == pytest.approx(released.payload_elements * 2 / 3, rel=1e-3)
    assert kept.peak.gathered > released.peak.gathered


def test_every_schedule_runs() -> None:
    names = ["gpipe", "1f1b", "interleaved", "looped_bfs", "zero_bubble", "zbv", "dualpipev"]
    wanted = [
        SimulationOptions(strategy=f"pipeline_{name}", settings={"microbatches": 4}, world_size=2, rank=1)
        for name in names
    ]
    found = simulate_each(Stack(blocks=4), tokens(), wanted)
    peaks = dict(zip(names, found, strict=True))
    assert not [answer for answer in found if isinstance(answer, SimulationFailed)]
    assert peaks["gpipe"].peak.activations > peaks["1f1b"].peak.activations  # type: ignore[union-attr]


def test_replicas_of_a_pipeline_reduce_gradients() -> None:
    found = run("pipeline_1f1b", 4, settings={"stages": 2, "microbatches": 4})
    alone = run("pipeline_1f1b", 2, settings={"microbatches": 4})
    assert found.payload_elements > alone.payload_elements + found.held.gradients / 4


def test_a_step_for_the_optimizer_states_is_not_needed_where_it_is_known_what_backward_reaches() -> None:
    module = Stack()
    reached = run(SINGLE, 1, module).reached
    for strategy, ranks in ((SINGLE, 1), ("fsdp2", 4), ("pipeline_1f1b", 2)):
        two, one = run(strategy, ranks, module), run(strategy, ranks, module, reached=reached)
        assert one.peak.total == two.peak.total
        assert one.payload_elements == two.payload_elements


def test_parameters_that_backward_does_not_reach_have_no_states() -> None:
    module = Stack()
    module.unused = nn.Linear(7, 7)
    found = run(SINGLE, 1, module)
    assert "unused.weight" not in found.reached and "unused.weight" not in found.optimizer_bytes
    assert found.optimizer_bytes["head.weight"] == 2 * 4 * 50 * 24


def test_accumulation_keeps_gradients_and_gathers_each_time() -> None:
    once, twice = run("fsdp2", 4), run("fsdp2", 4, accumulate_grad_batches=2)
    psi = sum(parameter.numel() for parameter in Stack().parameters())
    assert twice.payload_elements - once.payload_elements == pytest.approx(2 * psi, rel=0.02)
    assert twice.peak.total > once.peak.total


def test_nothing_of_the_module_or_of_this_process_changes() -> None:
    module = Stack()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random = torch.get_rng_state()
    run("fsdp2", 4, module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not torch.distributed.is_initialized()
    assert all(type(parameter) is nn.Parameter and parameter.grad is None for parameter in module.parameters())


def test_layers_may_be_missing_or_without_memory() -> None:
    expected = run("fsdp2", 2).peak.total
    assert run("fsdp2", 2, Late()).peak.total == expected
    with torch.device("meta"):
        meta = Stack()
    assert run("fsdp2", 2, meta).peak.total == expected


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_precision_is_the_trainers(precision: str) -> None:
    full, low = run(SINGLE, 1), run(SINGLE, 1, precision=precision)
    assert low.peak.activations < 0.9 * full.peak.activations
    assert low.held.parameters == full.held.parameters / (2 if precision == "bf16-true" else 1)


class Reads(Stack):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else -loss


class Dies(Stack):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        os._exit(7)


class Sleeps(Stack):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(60)
        return super().training_step(batch, batch_idx)


def test_failures_are_told_and_end() -> None:
    with pytest.raises(SimulationFailed, match="DataDependentOutput"):
        run(SINGLE, 1, Reads())
    with pytest.raises(SimulationFailed, match="ended with"):
        run(SINGLE, 1, Dies())
    began = time.monotonic()
    with pytest.raises(SimulationFailed, match="too long"):
        run(SINGLE, 1, Sleeps(), timeout=3.0)
    assert time.monotonic() - began < 20


def test_one_failure_leaves_the_others_alone() -> None:
    good = SimulationOptions(strategy=SINGLE, world_size=1)
    bad = replace(good, strategy="fsdp2", settings={"units": 3})
    first, second = simulate_each(Stack(), tokens(), [bad, good])
    assert isinstance(first, SimulationFailed) and not isinstance(second, SimulationFailed)


def test_the_peak_is_that_of_the_allocator() -> None:
    """The same two steps in this process, on memory: within 2 percent."""
    import lightning.pytorch as pl

    module, batch = Stack(blocks=4, width=96), tokens(rows=32, length=32)
    predicted = simulate(module, batch, SimulationOptions(strategy=SINGLE, world_size=1)).peak

    class Watch(pl.Callback):
        peak = 0

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self.phase = tracker.phase("step")
            self.measured = self.phase.__enter__()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.phase.__exit__(None, None, None)
            self.peak = self.measured.bytes.peak_bytes

    watch = Watch()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=3,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with track_allocator() as tracker:
        trainer.fit(module, torch.utils.data.DataLoader([batch] * 3, batch_size=None))
    psi = sum(parameter.numel() for parameter in module.parameters())
    base = 4 * psi * 4 + batch.nbytes  # parameters, gradients of the last step, two moments, and the batch
    assert predicted.total == pytest.approx(base + watch.peak, rel=0.02)


def test_a_copy_of_a_copy_without_data_belongs_to_its_own_mode() -> None:
    """Else every operator would first copy the weights into its mode, and count them."""
    from lightning_shard._compat.dry_run import fake_mode

    module = Stack()
    first = DryCopier(fake_mode(), torch.device("cpu"), [])(module)
    mode = fake_mode()
    second = DryCopier(mode, torch.device("cpu"), [])(first)
    assert {parameter.fake_mode for parameter in second.parameters()} == {mode}
    assert run(SINGLE, 1, first).peak == run(SINGLE, 1, module).peak
