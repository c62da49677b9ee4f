"""Few blocks simulated, the others added up: exactly what all of them give."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lightning_shard  # noqa: F401  (registers the names)
from lightning_shard.plan.ledger import KINDS
from lightning_shard.plan.repeats import Repeats, extend, find_repeats
from lightning_shard.plan.simulate import SINGLE, SimulationOptions, simulate
from tests.plan.modules import Stack, tokens


def test_the_longest_list_of_equal_blocks_is_found() -> None:
    module = Stack(blocks=9)
    assert find_repeats(module) == Repeats(container="blocks", names=tuple(f"blocks.{place}" for place in range(9)))
    assert find_repeats(Stack(blocks=5)) is None  # nothing to gain


def test_blocks_that_differ_are_no_repeats() -> None:
    module = Stack(blocks=9)
    module.blocks[4].down = nn.Linear(72, 24, bias=False)
    assert find_repeats(module) is None
    frozen = Stack(blocks=9)
    frozen.blocks[0].requires_grad_(False)
    assert find_repeats(frozen) is None


@pytest.mark.parametrize(
    ("strategy", "settings", "ranks"),
    [
        (SINGLE, {}, 1),
        ("fsdp2", {}, 3),
        ("fsdp2", {"activation_checkpointing": True}, 4),
        ("fsdp2_grad", {}, 2),
    ],
)
def test_adding_up_gives_what_all_blocks_give(strategy: str, settings: dict[str, Any], ranks: int) -> None:
    module, batch = Stack(blocks=11), tokens()
    options = SimulationOptions(strategy=strategy, settings=settings, world_size=ranks)
    whole = simulate(module, batch, options)
    few = simulate(module, batch, replace(options, repeats=find_repeats(module)))
    assert few.peak == whole.peak
    assert few.held == whole.held
    assert few.payload_elements == whole.payload_elements
    assert few.optimizer_bytes == whole.optimizer_bytes
    assert few.optimizer_groups == whole.optimizer_groups
    assert few.reached == whole.reached == frozenset(name for name, _ in module.named_parameters())


NOTHING = (0,) * len(KINDS)


def moment(**kinds: int) -> tuple[int, ...]:
    return tuple(kinds.get(kind, 0) for kind in KINDS)


def test_steps_that_differ_by_more_than_a_block_are_refused() -> None:
    with pytest.raises(ValueError, match="5 blocks is not that of one with 4"):
        extend({"forward 0": [NOTHING]}, {"forward 0": [NOTHING], "head": [NOTHING]}, 9)


def test_each_moment_lies_on_its_own_line() -> None:
    """Also where another moment is the largest of the short models."""
    few = {"head": [moment(activations=10), moment(gradients=12)]}
    more = {"head": [moment(activations=14), moment(gradients=13)]}
    assert extend(few, more, 14) == {"head": [moment(activations=50), moment(gradients=22)]}


def test_of_parts_of_different_lengths_the_peak_does() -> None:
    few, more = {"optimizer": [moment(parameters=4)]}, {"optimizer": [NOTHING, moment(parameters=5)]}
    assert extend(few, more, 14) == {"optimizer": [moment(parameters=14)]}


def test_the_module_keeps_all_its_blocks() -> None:
    module = Stack(blocks=9)
    simulate(module, tokens(), SimulationOptions(strategy=SINGLE, world_size=1, repeats=find_repeats(module)))
    assert len(module.blocks) == 9 and isinstance(module.blocks[0].up.weight, torch.Tensor)
