"""One file that rank 0 writes."""

from lightning_shard.units.one_file import OnRankZero


def test_a_rank_that_saves_nothing_can_edit_what_it_does_not_have() -> None:
    weights = OnRankZero()
    del weights["cache"]
    assert weights.pop("cache") is None and weights.pop("cache", 3) == 3
    assert not weights
