"""Bytes in live storage against the formula, and against numbers worked out by hand.

The network has 9 layers of unequal, odd sizes, so that both kinds of padding occur: each ``Linear(65, 65)`` has
65 * 65 + 65 = 4290 parameters, the last ``Linear(65, 7)`` 65 * 7 + 7 = 462, in all 8 * 4290 + 462 = 34782.
"""

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_shard import Offload, ZeROStrategy
from lightning_shard.telemetry import (
    ExpectedModelStates,
    ModelStateBytes,
    expected_model_state_bytes,
    gather_model_state_bytes,
    model_state_bytes,
    model_state_table,
)
from lightning_shard.testing import run_distributed

NUMELS = [*([4225, 65] * 8), 455, 7]
PARAMETERS = 34782
OFFLOADS = {
    "none": None,
    "optimizer": Offload(optimizer="cpu"),
    "both": Offload(optimizer="cpu", parameters="cpu"),
}
CASES = [(1, "none"), (1, "optimizer"), (2, "none"), (2, "optimizer"), (3, "none"), (3, "optimizer"), (3, "both")]
RUNS = [
    *((stage, offload, precision, 2) for stage, offload in CASES for precision in ("32-true", "bf16-mixed")),
    *((stage, "none", "32-true", 4) for stage in (1, 2, 3)),
]


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [part for _ in range(8) for part in (torch.nn.Linear(65, 65), torch.nn.GELU())]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(65, 7))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclass(kw_only=True)
class Counted:
    """What one rank held, and the most it held for gradients at any moment of a backward."""

    before_step: ModelStateBytes | None = None
    after_step: ModelStateBytes | None = None
    expected: ExpectedModelStates | None = None
    backward_peak: int = 0
    everyone: tuple[int, ...] = ()


class Counter(pl.Callback):
    def __init__(self) -> None:
        self.counted = Counted()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def count(_: torch.Tensor) -> None:
            held = model_state_bytes(trainer.strategy)
            now = held.storage("gradients") + held.storage("buckets")
            self.counted.backward_peak = max(self.counted.backward_peak, now)

        for parameter in pl_module.parameters():
            parameter.register_post_accumulate_grad_hook(count)

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        self.counted.before_step = model_state_bytes(trainer.strategy)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.counted.after_step = model_state_bytes(trainer.strategy)
        self.counted.expected = expected_model_state_bytes(trainer.strategy)
        self.counted.everyone = tuple(states.rank for states in gather_model_state_bytes(self.counted.after_step))


def train(strategy: Any, precision: str = "32-true", ranks: int = 1) -> Counted:
    counter = Counter()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        precision=precision,
        max_steps=2,
        callbacks=[counter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.utils.data.TensorDataset(torch.randn(16, 65))
    trainer.fit(Net(), torch.utils.data.DataLoader(rows, batch_size=2))
    return counter.counted


def run(stage: int, offload: str, precision: str, ranks: int, **knobs: Any) -> list[Counted]:
    def job() -> Counted:
        return train(ZeROStrategy(stage=stage, offload=OFFLOADS[offload], **knobs), precision, ranks)

    return run_distributed(job, ranks)


@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "offload", "precision", "ranks"), RUNS)
def test_live_storage_is_the_formula(stage, offload, precision, ranks):
    size = 4 if precision == "32-true" else 2
    if stage == 3:  # each parameter padded to a multiple of the ranks
        share = sum(-(-numel // ranks) for numel in NUMELS)
        parameters = share
    else:  # the sum padded to a multiple of twice the ranks
        parameters = 34784
        share = parameters // ranks
    for rank, counted in enumerate(run(stage, offload, precision, ranks)):
        held, expected = counted.after_step, counted.expected
        assert held.rank == rank
        assert counted.everyone == tuple(range(ranks))
        assert held.storage("parameters") == parameters * size == expected.states.parameters
        assert held.storage("master") == share * 4 == expected.states.master
        assert held.storage("optimizer") == share * 8 == expected.states.optimizer
        assert expected.parameters_total == PARAMETERS
        if stage == 3 or offload != "none":
            own = (size if stage == 3 else 0) + (4 if offload != "none" else 0)
            assert counted.before_step.storage("gradients") == share * own == expected.states.gradients


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_of_stages_1_and_2_are_those_of_the_parameters_that_the_partition_touches(stage, ranks):
    share = 34784 // ranks
    ends = [sum(NUMELS[: index + 1]) for index in range(len(NUMELS))]
    for rank, counted in enumerate(run(stage, "none", "32-true", ranks)):
        touched = [
            n for n, end in zip(NUMELS, ends, strict=True) if end > rank * share and end - n < (rank + 1) * share
        ]
        padding = 2 if rank == ranks - 1 else 0  # 34784 - 34782
        assert counted.before_step.storage("gradients") == 4 * (sum(touched) + padding)
        assert sum(part.elements for part in counted.before_step.gradients.values()) == 4 * share
        assert counted.before_step.storage("gradients") <= 4 * (share + 2 * max(NUMELS))
        assert counted.after_step.storage("gradients") == 0


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_shrink_with_the_ranks_and_the_bucket_is_the_rest(stage):
    bucket = 5000
    two, four = (run(stage, "none", "32-true", ranks, bucket_elements=bucket) for ranks in (2, 4))
    most = {
        ranks: max(counted.before_step.storage("gradients") for counted in runs)
        for ranks, runs in ((2, two), (4, four))
    }
    assert most[4] < 0.62 * most[2]
    for runs in (two, four):
        for counted in runs:
            # During backward a rank holds its gradients, the bucket, and the gradient that has just been made.
            held = counted.before_step.storage("gradients")
            assert held < counted.backward_peak <= held + 4 * (bucket + max(NUMELS))
    # The whole gradient never exists on a rank.
    assert max(counted.backward_peak for counted in four) < 4 * PARAMETERS * 0.6


@pytest.mark.ranks
def test_stage_1_holds_the_whole_gradient_in_backward():
    for counted in run(1, "none", "32-true", 2, bucket_elements=5000):
        assert counted.backward_peak >= 4 * PARAMETERS


@pytest.mark.ranks
def test_small_parameters_stay_whole_after_a_step():
    for counted in run(3, "none", "32-true", 2, persistence_elements=100):
        # Eight biases of 65 elements, gathered into 66, and one of 7, gathered into 8.
        assert counted.expected.gathered == 4 * (8 * 65 + 7)
        assert sum(part.elements for part in counted.after_step.gathered.values()) == 4 * (8 * 65 + 7)
        assert counted.after_step.storage("gathered") == 4 * (8 * 66 + 8)


def test_one_process_holds_the_whole():
    counted = train("auto")
    held, expected = counted.after_step, counted.expected
    assert held.storage("parameters") == 4 * PARAMETERS == expected.states.parameters
    assert held.storage("optimizer") == 8 * PARAMETERS == expected.states.optimizer
    assert counted.before_step.storage("gradients") == 4 * PARAMETERS == expected.states.gradients
    assert held.storage("master") == held.storage("buckets") == expected.states.master == 0
    assert list(held.parameters) == ["cpu"]


def test_table_shows_every_rank_beside_the_formula():
    counted = train("auto")
    lines = model_state_table([counted.before_step, counted.before_step], counted.expected).splitlines()
    assert "Ψ = 34,782" in lines[0]
    rows = {line[:20].strip(): line.split() for line in lines[2:]}
    assert rows["parameters"][1:3] == ["4Ψ", "139,128"]
    assert rows["parameters"].count("139,128") == 3
    assert "master copy (fp32)" not in rows
    assert rows["optimizer states"][2:4] == ["8Ψ", "278,256"]


def test_unknown_optimizer_is_refused_by_name():
    class Mystery(torch.optim.SGD):
        pass

    class Other(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Mystery(self.parameters(), lr=0.1)

    trainer = pl.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    rows = torch.utils.data.TensorDataset(torch.randn(4, 65))
    trainer.fit(Other(), torch.utils.data.DataLoader(rows))
    with pytest.raises(ValueError, match="Mystery"):
        expected_model_state_bytes(trainer.strategy)
    states = expected_model_state_bytes(trainer.strategy, optimizer_elements_per_parameter=3).states
    assert states.optimizer == 12 * PARAMETERS


class Scaled(Net):
    """Two optimizers of different kinds, a 0-dimensional parameter, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.net[0].requires_grad_(False)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.manual_backward((self.net(batch[0]) * self.scale).square().mean())
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        net = self.net.parameters()
        return [torch.optim.SGD(net, lr=0.1, momentum=0.9), torch.optim.NAdam([self.scale], lr=0.1)]


def test_several_optimizers_and_a_single_number_as_a_parameter():
    """Counters are not counted, though they have the scale's shape; frozen parameters have no states."""
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Scaled(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4, 65))))
    held, expected = model_state_bytes(trainer.strategy), expected_model_state_bytes(trainer.strategy)
    trained = PARAMETERS - NUMELS[0] - NUMELS[1]
    assert held.storage("parameters") == 4 * (PARAMETERS + 1) == expected.states.parameters
    assert held.storage("gradients") == 4 * (trained + 1) == expected.states.gradients
    assert held.storage("optimizer") == 4 * (trained + 2) == expected.states.optimizer
    assert (expected.stage, expected.ranks, expected.parameters_total) == (0, 1, PARAMETERS + 1)
    assert expected.per_parameter.parameters == expected.per_parameter.gradients == 4


def sharded_along_columns() -> str:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    strategy = pl.strategies.SingleDeviceStrategy(device="cpu")
    strategy.model = torch.nn.Linear(4, 6, bias=False)
    torch.distributed.fsdp.fully_shard(
        strategy.model, mesh=mesh, shard_placement_fn=lambda _: torch.distributed.tensor.Shard(1)
    )
    with pytest.raises(ValueError) as raised:
        expected_model_state_bytes(strategy)
    assert model_state_bytes(strategy).storage("parameters") == 4 * 6 * 2
    return str(raised.value)


@pytest.mark.ranks
def test_a_module_sharded_otherwise_is_counted_but_not_expected():
    for message in run_distributed(sharded_along_columns, 2):
        assert "shape [6, 4]" in message and "along their first dimension" in message
