"""From what a step does to which modules become units."""

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_shard.config import SizeUnits
from lightning_shard.units.plan import choose_checkpointed, manual_roots, settle_changes
from lightning_shard.units.usage import Usage, agree


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


class Student(nn.Module):
    """Blocks, and a moving average of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.mean = nn.ModuleList([Block(), Block()])
        self.head, self.mean_head = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.blocks[0](x)))


BLOCKS = ("blocks.0", "blocks.1", "mean.0", "mean.1")


def seen(changed: dict[str, frozenset[str] | None], outside: dict[str, str] | None = None) -> Usage:
    ran = frozenset(name for name, _ in Student().named_modules())
    return Usage(ran=ran, outside=outside or {}, changed=changed, complete=True, reason="")


def test_an_average_of_units_stays_sharded_and_one_of_the_rest_is_whole() -> None:
    changed = {
        "mean.0.one.weight": frozenset({"blocks.0.one.weight"}),
        "mean_head.weight": frozenset({"head.weight"}),
    }
    units, whole = settle_changes(Student(), "blocks", seen(changed), sharded_at_rest=True)
    assert units.names == BLOCKS
    assert whole == {"mean_head.weight"}


def test_what_a_whole_average_follows_is_no_unit() -> None:
    changed = {"mean_head.weight": frozenset({"blocks.0.one.weight"})}
    units, whole = settle_changes(Student(), "blocks", seen(changed), sharded_at_rest=True)
    assert units.names == ("blocks.1", "mean.0", "mean.1")
    assert "blocks.0.one.weight" in units.rejected["blocks.0"]
    assert whole == {"mean_head.weight"}


def test_losing_a_unit_may_make_another_average_whole() -> None:
    """The head's average follows block 0, which is no unit then, so the average of block 0 cannot stay sharded."""
    changed = {
        "mean_head.weight": frozenset({"blocks.0.one.weight"}),
        "mean.0.one.weight": frozenset({"blocks.0.one.weight"}),
    }
    units, whole = settle_changes(Student(), "blocks", seen(changed), sharded_at_rest=True)
    assert "blocks.0" not in units.names
    assert whole == {"mean_head.weight", "mean.0.one.weight"}


def test_units_that_stay_whole_after_forward_take_no_average() -> None:
    changed = {"mean.0.one.weight": frozenset({"blocks.0.one.weight"})}
    units, whole = settle_changes(Student(), "blocks", seen(changed), sharded_at_rest=False)
    assert whole == {"mean.0.one.weight"}
    assert "blocks.0" not in units.names


def test_a_change_from_within_a_forward_needs_the_whole() -> None:
    units, whole = settle_changes(Student(), "blocks", seen({"blocks.0.one.weight": None}), sharded_at_rest=True)
    assert units.names == BLOCKS and whole == {"blocks.0.one.weight"}


def test_a_module_that_only_some_ranks_run_has_not_run() -> None:
    everything, one = seen({}), Usage(ran=frozenset({"blocks.0"}), outside={"head": "h"}, complete=False, reason="why")
    both = agree([everything, one])
    assert both.ran == {"blocks.0"} and both.outside == {"head": "h"} and not both.complete and both.reason == "why"


def test_in_manual_optimization_the_outermost_parts_are_roots() -> None:
    assert list(manual_roots(Student(), seen({}))) == ["head", "mean_head", "blocks.0", "blocks.1", "mean.0", "mean.1"]
    without = seen({}, outside={"blocks.0": "blocks.0.one.weight", "blocks.0.one": "blocks.0.one.weight"})
    assert "blocks.0" not in list(manual_roots(Student(), without))
    assert "blocks.0.two" in list(manual_roots(Student(), without))


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        (False, []),
        (True, list(BLOCKS)),
        (
            ["torch.nn.Linear"],
            [f"{block}.{part}" for block in BLOCKS for part in ("one", "two")] + ["head", "mean_head"],
        ),
        ([f"{__name__}.Block", "torch.nn.Linear"], [*BLOCKS, "head", "mean_head"]),
    ],
)
def test_modules_whose_activations_are_recomputed(wanted: bool | list[str], chosen: list[str]) -> None:
    assert choose_checkpointed(Student(), list(BLOCKS), wanted) == chosen


def test_nothing_to_recompute_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"activation_checkpointing=True.*there is none"):
        choose_checkpointed(Student(), [], True)
    with pytest.raises(MisconfigurationException, match=r"no module is of these classes.*Block, Linear, ModuleList"):
        choose_checkpointed(Student(), [], ["torch.nn.LSTM"])


def test_size_units_take_the_same_way() -> None:
    units, whole = settle_changes(Student(), SizeUnits(min_params=40), seen({}), sharded_at_rest=True)
    assert units.names == BLOCKS and not whole
