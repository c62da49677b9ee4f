"""`auto_shard` with the real planner: what it becomes as memory shrinks, and that it trains the same all the way."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_shard import AutoShardStrategy
from lightning_shard.testing import run_distributed
from tests.strategies.cases import Case, assert_all_same
from tests.strategies.zero_runs import loader, trainer

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

WIDTH, BLOCKS = 64, 4
PSI = BLOCKS * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)
"""Parameters: the model states are 16 bytes for each, and activations are small beside them."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Deep(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Expects(pl.Callback):
    """Fails if the Trainer's strategy is not of the family."""

    def __init__(self, family: str) -> None:
        self.family = family

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.world_size > 1:
            assert family(trainer.strategy) == self.family, trainer.strategy


def family(strategy: Any) -> str:
    """What a strategy does with model states."""
    if type(strategy) is DDPStrategy:
        return "whole"
    offload = getattr(getattr(strategy, "_options", None), "offload", None)
    if offload is not None or getattr(strategy, "_cpu_offload", False):
        return "on the host"
    return "partitioned" if type(strategy).__name__ in ("ZeROStrategy", "FSDP2Strategy") else type(strategy).__name__


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, WIDTH, generator=generator) for _ in range(4)]


LIMITS = {"whole": 40 * PSI, "partitioned": 18 * PSI, "on the host": 6 * PSI}
"""Bytes of a device, and what fits them."""


def test_as_memory_shrinks_it_partitions_and_then_offloads_and_trains_as_one_process() -> None:
    assert sum(parameter.numel() for parameter in Deep().parameters()) == PSI
    assert_all_same(
        {
            f"{family}, {limit} bytes": Case(
                make=Deep,
                batches=batches(),
                strategy=lambda limit=limit: AutoShardStrategy(memory=limit, margin=0, simulate=1),
                settings={"callbacks": [Expects(family)]},
            )
            for family, limit in LIMITS.items()
        }
    )


def test_in_the_end_it_says_what_is_missing() -> None:
    def refused() -> str:
        run = trainer(AutoShardStrategy(memory=PSI, margin=0, simulate=1))
        with pytest.raises(pl.utilities.exceptions.MisconfigurationException) as caught:
            run.fit(Deep(), loader(batches()))
        assert run.global_step == 0
        return str(caught.value)

    first, second = run_distributed(refused, 2)
    assert first == second and first.startswith(f"No strategy fits {PSI:,} parameters on 2 x cpu")
    shown = [line for line in first.splitlines() if line.startswith("  ")]
    assert len(shown) == 3 and all("needs" in line and "too much" in line for line in shown)
    assert "offload" in shown[0] and "in host memory" in shown[0]


def test_layers_of_configure_model_and_an_example_are_planned_as_layers_and_a_batch_are() -> None:
    class Later(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.example_input_array = None, torch.ones(4, WIDTH)  # type: ignore[assignment]

        def configure_model(self) -> None:
            if self.blocks is None:
                self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x)

    def plan(later: bool) -> Any:
        from lightning_shard.plan import search

        planned = search.plan_module
        plans = []

        def keep(*args: Any, **options: Any) -> Any:
            plans.append(planned(*args, **options))
            return plans[0]

        search.plan_module = keep
        strategy = AutoShardStrategy(memory="1GB", strategies=["ddp", "fsdp2"])
        run = trainer(strategy, max_steps=1)
        # Rows that can only be iterated are no batch.
        run.fit(Later() if later else Deep(), iter(batches()[0].split(4)) if later else loader(batches()))
        return plans[0] if plans else None

    here, there = (run_distributed(plan, 2, later)[0] for later in (False, True))
    assert here.parameters == there.parameters == PSI
    for name in ("ddp", "fsdp2"):
        assert here.named(name).model_states == there.named(name).model_states
        assert here.named(name).memory.activations == pytest.approx(there.named(name).memory.activations, rel=0.2)
    assert there.named("fsdp2").simulated
