"""Ranks that wait for each other in different places."""

import time
from contextlib import nullcontext

import pytest
import torch

from lightning_shard.testing import run_distributed
from lightning_shard.units import standstill as module
from lightning_shard.units.standstill import Standstill, explain

pytestmark = pytest.mark.ranks


def test_the_explanation_names_ranks_places_and_units() -> None:
    text = explain([("a gather", "blocks.1"), ("the comparison after backward", "")])
    assert "rank 0 in a gather of unit 'blocks.1'; rank 1 in the comparison after backward." in text


def wait(places: list[tuple[str, str] | None], seconds: float) -> str | None:
    """Wait where this rank's place is, or work, for so long or until a verdict; then all leave together."""
    torch.distributed.init_process_group("gloo")
    module._TICK = 0.3  # this process runs nothing else
    standstill = Standstill()
    place = places[torch.distributed.get_rank()]
    ends = time.monotonic() + seconds
    with nullcontext() if place is None else standstill.waiting(*place):
        while time.monotonic() < ends and standstill.verdict is None:
            time.sleep(0.1)
    standstill.stop()
    torch.distributed.barrier()
    return standstill.verdict


def test_different_places_are_a_standstill_on_every_rank() -> None:
    verdicts = run_distributed(wait, 2, [("a gather", "a"), ("the reduction", "b")], 40.0, timeout=90.0)
    assert verdicts[0] is not None
    assert "rank 0 in a gather of unit 'a'; rank 1 in the reduction of unit 'b'" in verdicts[0]
    assert verdicts[1] == verdicts[0]


@pytest.mark.parametrize("other", [("a gather", "a"), None], ids=["same place", "at work"])
def test_the_same_place_or_a_rank_at_work_is_none(other: tuple[str, str] | None) -> None:
    assert run_distributed(wait, 2, [("a gather", "a"), other], 2.0, timeout=90.0) == [None, None]
