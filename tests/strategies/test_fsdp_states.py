"""What FSDP2 holds in bytes and moves in elements, per rank and step: exactly the formula, padding included.

The sizes are such that rows are cut unevenly: dimensions of 5, 7, 11 and 3 rows, and parameters of a single row, of
which all ranks but the first own nothing. A 0-dimensional scale stays whole on every rank.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import FSDP2Strategy
from lightning_shard.plan.arithmetic import own_rows, padded_rows, payload_elements
from lightning_shard.telemetry import (
    ExpectedModelStates,
    ModelStateBytes,
    expected_model_state_bytes,
    model_state_bytes,
    model_state_table,
)
from lightning_shard.telemetry.traffic import Collective, Operation, Traffic, count_traffic
from lightning_shard.testing import run_distributed
from tests.strategies.cases import each
from tests.strategies.zero_runs import loader, trainer

pytestmark = pytest.mark.ranks

WIDTH, HIDDEN, INPUTS, OUTPUTS, BLOCKS = 11, 7, 5, 3, 3
BLOCK = [(1, WIDTH), (HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,)]
ROOT = [(WIDTH, INPUTS), (WIDTH,), (OUTPUTS, WIDTH), (OUTPUTS,)]
UNITS = [*[BLOCK] * BLOCKS, ROOT]
SHAPES = [shape for unit in UNITS for shape in unit]
NAMED = ["fsdp2", "fsdp2_grad", "fsdp2_offload"]

MakeOptimizer = Callable[["Net"], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, WIDTH))
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x * self.gain)))


class Net(pl.LightningModule):
    def __init__(self, optimizer: str, frozen: bool = False) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.first = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.last = nn.Linear(WIDTH, OUTPUTS)
        self.scale = nn.Parameter(torch.tensor(0.5))
        for block in self.blocks if frozen else ():
            block.up.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.last(self.blocks(self.first(batch))) * self.scale).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        match self.optimizer:
            case "momentum":
                return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
            case "adam":
                return torch.optim.AdamW(parameters, lr=1e-3)
            case "groups":
                groups = [{"params": parameters[:3], "momentum": 0.0}, {"params": parameters[3:]}]
                return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        raise AssertionError(self.optimizer)


class Gan(pl.LightningModule):
    """Two optimizers of different kinds, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS))
        self.other = nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.Tanh())

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for part, optimizer in zip((self.one, self.other), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(part(batch).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.one.parameters()), torch.optim.SGD(self.other.parameters(), momentum=0.9)]


@dataclass(kw_only=True)
class Batch:
    """What one rank held and moved in one batch."""

    before_step: ModelStateBytes | None = None
    after_step: ModelStateBytes | None = None
    expected: ExpectedModelStates | None = None
    working: list[int] = field(default_factory=list)
    """Bytes that were whole at each start of a block's inside, recomputations among them."""
    forward: Counter[Collective] = field(default_factory=Counter)
    backward: Counter[Collective] = field(default_factory=Counter)
    rest: Counter[Collective] = field(default_factory=Counter)
    table: str = ""

    @property
    def calls(self) -> Counter[Collective]:
        return self.forward + self.backward + self.rest


class Watch(pl.Callback):
    """Counts around the last batch."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        batch = Batch()
        self.batches.append(batch)
        self.gathers = [
            block.up.register_forward_pre_hook(
                lambda *_: batch.working.append(model_state_bytes(trainer.strategy).storage("gathered"))
            )
            for block in getattr(pl_module, "blocks", ())
        ]
        self.context = count_traffic()
        self.counter = self.context.__enter__()
        self.seen = self.counter.traffic

    def _since(self) -> Counter[Collective]:
        before, self.seen = self.seen, self.counter.traffic
        return Counter(dict((self.seen - before).calls))

    def on_before_backward(self, *_: Any) -> None:
        self.batches[-1].forward += self._since()

    def on_after_backward(self, *_: Any) -> None:
        self.batches[-1].backward += self._since()

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        self.batches[-1].before_step = model_state_bytes(trainer.strategy)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        batch = self.batches[-1]
        batch.rest = self._since()
        self.context.__exit__(None, None, None)
        for hook in self.gathers:
            hook.remove()
        batch.after_step = model_state_bytes(trainer.strategy)
        batch.expected = expected_model_state_bytes(trainer.strategy)
        if batch.before_step is not None:
            batch.table = model_state_table([batch.before_step], batch.expected)


def train(strategy: Any, module: Callable[[], pl.LightningModule], settings: dict[str, Any]) -> list[Batch]:
    watch = Watch()
    steps = 2 * settings.get("accumulate_grad_batches", 1)
    batches = [torch.randn(8, INPUTS) for _ in range(steps)]
    trainer(strategy() if callable(strategy) else strategy, callbacks=[watch], **settings).fit(
        module(), loader(batches)
    )
    return watch.batches


def to_two() -> FSDP2Strategy:
    return FSDP2Strategy(reshard_after_forward=2)


def checkpointed() -> FSDP2Strategy:
    return FSDP2Strategy(activation_checkpointing=True)


@dataclass(frozen=True)
class Run:
    """What one training is made of."""

    strategy: Any
    optimizer: str = "adam"
    frozen: bool = False
    settings: tuple[tuple[str, Any], ...] = ()
    """Of the Trainer, in the order of their names."""


def settings(**given: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(given.items()))


RUNS = {
    2: [
        *(Run(name) for name in (*NAMED, "fsdp2_hybrid", checkpointed)),
        Run("fsdp2", "momentum"),
        Run("fsdp2", "groups"),
        Run("fsdp2", frozen=True),
        *(Run("fsdp2", settings=settings(precision=precision)) for precision in ("bf16-mixed", "bf16-true")),
        Run("fsdp2", settings=settings(accumulate_grad_batches=2)),
        *(Run(name, settings=settings(accumulate_grad_batches=3)) for name in ("fsdp2", "fsdp2_grad")),
        Run("fsdp2", settings=settings(gradient_clip_val=0.1)),
        Run("fsdp2", settings=settings(gradient_clip_val=0.1, gradient_clip_algorithm="value")),
    ],
    4: [
        *(Run(name) for name in (*NAMED, "fsdp2_hybrid", to_two)),
        *(Run(name, "momentum") for name in ("fsdp2_grad", "fsdp2_hybrid")),
        Run("fsdp2_hybrid", settings=settings(accumulate_grad_batches=3)),
    ],
}
"""By number of ranks, every training that a test looks at."""


@cache
def all_runs(ranks: int) -> list[dict[Run, list[Batch]]]:
    """The batches of every run on every rank; in one start of the ranks, which takes longer than a run."""
    runs = RUNS[ranks]

    def one(index: int) -> list[Batch]:
        each_run = runs[index]
        return train(each_run.strategy, lambda: Net(each_run.optimizer, each_run.frozen), dict(each_run.settings))

    found = run_distributed(each, ranks, range(len(runs)), one)
    return [{runs[index]: batches for index, batches in rank.items()} for rank in found]


def run(ranks: int, strategy: Any, optimizer: str = "adam", frozen: bool = False, **more: Any) -> list[list[Batch]]:
    """The batches of every rank."""
    wanted = Run(strategy, optimizer, frozen, settings(**more))
    return [rank[wanted] for rank in all_runs(ranks)]


def group_of(strategy: str, ranks: int) -> int:
    """Ranks that share one model."""
    return ranks // 2 if strategy == "fsdp2_hybrid" else ranks


# --- bytes ---


@pytest.mark.parametrize(
    ("strategy", "ranks", "optimizer", "states"),
    [
        ("fsdp2", 2, "momentum", 1),
        ("fsdp2", 4, "adam", 2),
        ("fsdp2_grad", 2, "adam", 2),
        ("fsdp2_grad", 4, "momentum", 1),
        ("fsdp2_offload", 2, "adam", 2),
        ("fsdp2_hybrid", 2, "adam", 2),
        ("fsdp2_hybrid", 4, "momentum", 1),
    ],
)
def test_bytes_are_the_formula_and_its_padding(strategy: str, ranks: int, optimizer: str, states: int) -> None:
    group = group_of(strategy, ranks)
    padded = padded_rows(SHAPES, group) + 1  # the scale is whole
    for rank, batches in enumerate(run(ranks, strategy, optimizer)):
        before, after, expected = batches[-1].before_step, batches[-1].after_step, batches[-1].expected
        assert before is not None and after is not None and expected is not None
        own = sum(own_rows(shape, group, rank % group) for shape in SHAPES) + 1
        assert before.storage("parameters") == after.storage("parameters") == 4 * padded == expected.states.parameters
        assert before.storage("gradients") == 4 * padded == expected.states.gradients
        assert after.storage("optimizer") == 4 * states * own == expected.states.optimizer
        for held in (before, after):
            assert held.storage("gathered") == held.storage("buckets") == held.storage("master") == 0
            assert held.parameters["cpu"].elements == 4 * own
        assert (expected.ranks, expected.stage, expected.states.master) == (group, 3, 0)
        assert expected.parameters_total == sum(torch.Size(shape).numel() for shape in SHAPES) + 1


def test_frozen_parameters_and_groups_of_an_optimizer() -> None:
    """Frozen parameters are stored as others are, and have neither gradients nor states."""
    trained = [shape for shape in SHAPES if shape not in ((HIDDEN, WIDTH), (HIDDEN,))]
    for rank, batches in enumerate(run(2, "fsdp2", "adam", frozen=True)):
        before, after, expected = batches[-1].before_step, batches[-1].after_step, batches[-1].expected
        own = sum(own_rows(shape, 2, rank) for shape in trained) + 1
        assert after.storage("parameters") == 4 * (padded_rows(SHAPES, 2) + 1) == expected.states.parameters
        assert before.storage("gradients") == 4 * (padded_rows(trained, 2) + 1) == expected.states.gradients
        assert after.storage("optimizer") == 8 * own == expected.states.optimizer
    # Parameters come in the order of the module: the scale, then those of `first`, which is two of them.
    for rank, batches in enumerate(run(2, "fsdp2", "groups")):
        own = sum(own_rows(shape, 2, rank) for shape in [*[BLOCK] * BLOCKS, ROOT[2:]] for shape in shape)
        assert batches[-1].after_step.storage("optimizer") == 4 * own == batches[-1].expected.states.optimizer


def test_two_optimizers_in_manual_optimization() -> None:
    one, other = [(HIDDEN, INPUTS), (HIDDEN,), (OUTPUTS, HIDDEN), (OUTPUTS,)], [(OUTPUTS, INPUTS), (OUTPUTS,)]
    for rank, batches in enumerate(run_distributed(train, 2, "fsdp2", Gan, {})):
        after, expected = batches[-1].after_step, batches[-1].expected
        own = [sum(own_rows(shape, 2, rank) for shape in part) for part in (one, other)]
        assert after.storage("parameters") == 4 * padded_rows([*one, *other], 2) == expected.states.parameters
        assert after.storage("optimizer") == 8 * own[0] + 4 * own[1] == expected.states.optimizer
        # Nothing has set these to None yet, and there are no others.
        assert after.storage("gradients") == 4 * padded_rows([*one, *other], 2) == expected.states.gradients
        assert after.storage("gathered") == after.storage("buckets") == 0


@pytest.mark.parametrize(("precision", "size"), [("bf16-true", 2), ("bf16-mixed", 4)])
def test_bytes_follow_the_precision(precision: str, size: int) -> None:
    """Mixed: shards, gradients and states are fp32; what is gathered is bf16."""
    for rank, batches in enumerate(run(2, "fsdp2", precision=precision)):
        before, after, expected = batches[-1].before_step, batches[-1].after_step, batches[-1].expected
        own = sum(own_rows(shape, 2, rank) for shape in SHAPES) + 1
        assert after.storage("parameters") == size * (padded_rows(SHAPES, 2) + 1) == expected.states.parameters
        assert before.storage("gradients") == size * (padded_rows(SHAPES, 2) + 1) == expected.states.gradients
        assert after.storage("optimizer") == 2 * size * own == expected.states.optimizer
        whole = 2 * 2 * padded_rows([*BLOCK, *ROOT], 2)  # bf16, times the ranks
        assert batches[-1].working == [whole] * BLOCKS


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_whole_within_a_step(ranks: int) -> None:
    """The module itself and the block at work; where nothing is released after forward, all blocks so far."""
    block, root = (4 * ranks * padded_rows(unit, ranks) for unit in (BLOCK, ROOT))
    for batches in run(ranks, "fsdp2"):
        assert batches[-1].working == [root + block] * BLOCKS
    for batches in run(ranks, "fsdp2_grad"):
        assert batches[-1].working == [root + block * (place + 1) for place in range(BLOCKS)]


def test_gradients_that_are_accumulated_without_communication_are_whole() -> None:
    for batches in run(2, "fsdp2", accumulate_grad_batches=2):
        accumulating, stepping = batches[-2:]
        numel = sum(torch.Size(shape).numel() for shape in SHAPES) + 1
        assert accumulating.after_step.storage("gradients") == 4 * numel
        assert stepping.before_step.storage("gradients") == stepping.expected.states.gradients


def test_table_of_model_states() -> None:
    rank = run(2, "fsdp2")[1][-1]
    lines = {line[:20].strip(): line.split() for line in rank.table.splitlines()[2:]}
    assert "N = 2 ranks" in rank.table
    assert lines["parameters"][1] == lines["gradients"][1] == "4Ψ/N"
    assert lines["optimizer states"][2] == "8Ψ/N"
    stored = f"{4 * (padded_rows(SHAPES, 2) + 1):,}"
    assert lines["parameters"].count(stored) == lines["gradients"].count(stored) == 2
    assert lines["optimizer states"].count(f"{rank.expected.states.optimizer:,}") == 2


# --- elements ---


def call(operation: Operation, elements: int, ranks: int, dtype: torch.dtype = torch.float32) -> Collective:
    return Collective(operation=operation, elements=elements, dtype=dtype, ranks=ranks)


def small_messages(ranks: int, parameters: int = len(SHAPES) + 1) -> dict[str, Collective]:
    """All that is moved besides model states, by what it is for."""
    return {
        "which gradients there are": call("all_reduce", 2 + parameters, ranks, torch.int64),  # after each backward
        "the whole scale's gradient": call("all_reduce", 1, ranks),
        "the logged loss": call("all_reduce", 1, ranks),
    }


def per_unit(operation: Operation, group: int, dtype: torch.dtype = torch.float32) -> Counter[Collective]:
    """One call for each unit, of its parameters with their padding."""
    if group == 1:
        return Counter()
    return Counter(call(operation, group * padded_rows(unit, group), group, dtype) for unit in UNITS)


def psi_and_padding(group: int) -> tuple[int, int]:
    psi = sum(torch.Size(shape).numel() for shape in SHAPES)
    return psi, group * padded_rows(SHAPES, group) - psi


@pytest.mark.parametrize("strategy", NAMED)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_costs_one_call_a_unit_and_3_psi(ranks: int, strategy: str) -> None:
    """One gather in forward, one in backward unless the unit was kept, and one reduction; nothing else of that size."""
    reshards = strategy != "fsdp2_grad"
    small = small_messages(ranks)
    agreement, scale, loss = small.values()
    psi, padding = psi_and_padding(ranks)
    assert padding > 0
    for batches in run(ranks, strategy):
        for batch in batches:
            assert batch.forward == per_unit("all_gather", ranks) + Counter([loss])
            gathered_again = per_unit("all_gather", ranks) if reshards else Counter()
            assert batch.backward == gathered_again + per_unit("reduce_scatter", ranks) + Counter([agreement, scale])
            assert batch.rest == Counter()
            times = 3 if reshards else 2
            states = Traffic(calls=batch.calls).where(lambda each: each not in small.values())
            assert states.payload == payload_elements(psi, 3, reshard=reshards) + times * padding
            assert states.payload_bytes == 4 * states.payload
            assert states.sent == states.payload * (ranks - 1) / ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_replicas_add_one_all_reduce_a_unit(ranks: int) -> None:
    """Of the shard that a rank keeps, between two; a group of one rank has nothing to gather."""
    group = ranks // 2
    agreement, scale, loss = small_messages(ranks).values()
    between = Counter(call("all_reduce", padded_rows(unit, group), 2) for unit in UNITS)
    psi, padding = psi_and_padding(group)
    for batches in run(ranks, "fsdp2_hybrid"):
        batch = batches[-1]
        assert batch.forward == per_unit("all_gather", group) + Counter([loss])
        reduced = per_unit("reduce_scatter", group) + between
        assert batch.backward == per_unit("all_gather", group) + reduced + Counter([agreement, scale])
        assert batch.rest == Counter()
        moved = Traffic(calls=batch.calls).payload - Traffic(calls=Counter([agreement, scale, loss])).payload
        inside = 3 * (psi + padding) if group > 1 else 0
        assert moved == inside + 2 * (psi + padding) // group


def test_resharding_to_fewer_ranks_gathers_the_second_time_among_them() -> None:
    """As many elements as the first time, between two ranks; at rest nothing of that smaller world is left."""
    agreement, scale, _ = small_messages(4).values()
    among_two = Counter(call("all_gather", 4 * padded_rows(unit, 4), 2) for unit in UNITS)
    for batches in run(4, to_two):
        batch = batches[-1]
        assert batch.backward == among_two + per_unit("reduce_scatter", 4) + Counter([agreement, scale])
        assert batch.after_step is not None and batch.after_step.storage("gathered") == 0
        assert batch.after_step.storage("parameters") == 4 * (padded_rows(SHAPES, 4) + 1)


def test_recomputing_activations_moves_nothing_more() -> None:
    plain, recomputing = run(2, "fsdp2"), run(2, checkpointed)
    for rank in range(2):
        assert len(recomputing[rank][-1].working) == 2 * BLOCKS, "the inside of each block ran twice"
        for phase in ("forward", "backward", "rest"):
            assert getattr(recomputing[rank][-1], phase) == getattr(plain[rank][-1], phase)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2_grad", "fsdp2_hybrid"])
def test_accumulation_reduces_only_in_the_batch_that_steps(strategy: str) -> None:
    ranks = 4 if strategy == "fsdp2_hybrid" else 2
    once = run(ranks, strategy)
    loss = small_messages(ranks)["the logged loss"]
    group = group_of(strategy, ranks)
    for rank, batches in enumerate(run(ranks, strategy, accumulate_grad_batches=3)):
        again = Counter() if strategy == "fsdp2_grad" else per_unit("all_gather", group)
        for accumulating in (*batches[:2], *batches[3:5]):
            assert accumulating.forward == per_unit("all_gather", group) + Counter([loss])
            assert accumulating.backward == again
            assert accumulating.rest == Counter()
        for stepping in (batches[2], batches[5]):
            assert stepping.calls == once[rank][-1].calls


def test_clipping_adds_one_small_message() -> None:
    """By norm: a number for each parameter, of which every rank has a part. By value: nothing."""
    plain = run(2, "fsdp2")
    by_value: dict[str, Any] = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
    for settings, added in (({"gradient_clip_val": 0.1}, [call("all_reduce", len(SHAPES), 2)]), (by_value, [])):
        for rank, batches in enumerate(run(2, "fsdp2", **settings)):
            assert batches[-1].rest == Counter(added)
            assert batches[-1].calls == plain[rank][-1].calls + Counter(added)


def test_mixed_precision_gathers_half_the_bytes() -> None:
    agreement, scale, loss = small_messages(2).values()
    for batches in run(2, "fsdp2", precision="bf16-mixed"):
        halved = per_unit("all_gather", 2, torch.bfloat16)
        assert batches[-1].forward == halved + Counter([loss])
        assert batches[-1].backward == halved + per_unit("reduce_scatter", 2) + Counter([agreement, scale])
    scale = call("all_reduce", 1, 2, torch.bfloat16)
    for batches in run(2, "fsdp2", precision="bf16-true"):
        halved, reduced = (per_unit(kind, 2, torch.bfloat16) for kind in ("all_gather", "reduce_scatter"))
        assert batches[-1].forward == halved + Counter([loss])
        assert batches[-1].backward == halved + reduced + Counter([agreement, scale])


def test_frozen_parameters_are_gathered_and_not_reduced() -> None:
    trained = [[shape for shape in unit if shape not in ((HIDDEN, WIDTH), (HIDDEN,))] for unit in UNITS]
    reduced = Counter(call("reduce_scatter", 2 * padded_rows(unit, 2), 2) for unit in trained)
    for batches in run(2, "fsdp2", frozen=True):
        calls = batches[-1].calls
        assert Counter({each: n for each, n in calls.items() if each.operation == "reduce_scatter"}) == reduced
        gathered = Counter({each: n for each, n in calls.items() if each.operation == "all_gather"})
        assert gathered == per_unit("all_gather", 2) + per_unit("all_gather", 2)
