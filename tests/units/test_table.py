"""The table of units against counted storage and against the arithmetic of shards."""

import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import FSDP2Strategy, SizeUnits
from lightning_shard.plan.arithmetic import padded_rows
from lightning_shard.telemetry import model_state_bytes
from lightning_shard.testing import run_distributed
from lightning_shard.units.plan import PlannedUnits
from lightning_shard.units.table import units_table
from tests.strategies.zero_runs import loader, trainer

pytestmark = pytest.mark.ranks

WIDTH, OUTPUTS = 7, 3
LAYER = [(WIDTH, WIDTH), (WIDTH,)]
LAST = [(OUTPUTS, WIDTH), (OUTPUTS,)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Net(pl.LightningModule):
    def __init__(self, blocks: int, scaled: bool = True) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.last = nn.Linear(WIDTH, OUTPUTS)
        self.scale = nn.Parameter(torch.tensor(0.5)) if scaled else 0.5

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.last(self.blocks(batch)) * self.scale).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def table(make_strategy: Callable[[], FSDP2Strategy], make_module: Callable[[], Net]) -> tuple[str, int]:
    """The table, with a module that was rejected, and the bytes that this rank's parameters take."""

    class Ask(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            strategy = trainer.strategy
            assert isinstance(strategy, FSDP2Strategy)
            # The plan itself is not shown, but what was left out of it.
            planned = PlannedUnits(plan=None, rejected={"blocks.9": "it was never called"})  # type: ignore[arg-type]
            self.table = units_table(planned, strategy.running.layout, strategy.device_mesh)
            self.held = model_state_bytes(strategy).storage("parameters")

    ask = Ask()
    trainer(make_strategy(), callbacks=[ask]).fit(make_module(), loader([torch.randn(4, WIDTH)]))
    return ask.table, ask.held


def run(ranks: int, make_strategy: Callable[[], FSDP2Strategy], make_module: Callable[[], Net]) -> tuple[str, int]:
    first, *others = run_distributed(table, ranks, make_strategy, make_module)
    assert all(other == first for other in others), "every rank stores the same number of bytes"
    return first


def cells(text: str) -> dict[str, tuple[int, str]]:
    """Unit to its parameters and bytes."""
    found = re.finditer(r"^(.+?)  +([\d,]+)  +([\d.]+ \w+)$", text, re.MULTILINE)
    return {match[1]: (int(match[2].replace(",", "")), match[3]) for match in found}


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_are_the_units_and_their_storage(ranks: int) -> None:
    text, held = run(ranks, FSDP2Strategy, lambda: Net(2))
    rows = cells(text)
    layer, last = 4 * padded_rows(LAYER, ranks), 4 * padded_rows(LAST, ranks)
    assert rows == {
        "blocks.0": (56, f"{layer} B"),
        "blocks.1": (56, f"{layer} B"),
        "(the module itself)": (24, f"{last} B"),
        "(whole on every rank)": (1, "4 B"),
        "total": (137, f"{held} B"),
    }
    assert held == 2 * layer + last + 4
    assert f"3 units, sharded over {ranks} ranks." in text
    assert "Largest unit: blocks.0, 56 parameters" in text
    assert text.splitlines()[-1] == "Not a unit: blocks.9: it was never called"


def test_replicas_are_named_and_each_stores_a_model() -> None:
    text, held = run(4, lambda: FSDP2Strategy(replicas=2), lambda: Net(2, scaled=False))
    assert "sharded over 2 ranks, in 2 replicas." in text
    assert held == 4 * padded_rows([*LAYER, *LAYER, *LAST], 2)
    assert cells(text)["total"] == (136, f"{held} B")
    assert "(whole on every rank)" not in text


def test_long_tables_are_shortened_and_still_add_up() -> None:
    text, held = run(2, lambda: FSDP2Strategy(units=SizeUnits(min_params=50)), lambda: Net(20))
    rows = cells(text)
    middle = next(name for name in rows if name.startswith("..."))
    shown = [name for name in rows if name not in (middle, "total")]
    assert int(middle.split()[1]) + len(shown) == 20 + 2  # the module itself, and the scale
    assert sum(numel for name, (numel, _) in rows.items() if name != "total") == 20 * 56 + 24 + 1
    assert rows["total"] == (20 * 56 + 24 + 1, f"{held / 1024:.1f} KiB")
    assert rows[middle][0] == 56 * int(middle.split()[1])
