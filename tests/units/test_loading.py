"""What is checked before anything is loaded."""

from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard.units.checkpoints import OnRankZero, check_loadable, check_optimizer_count
from lightning_shard.units.loading import check_names


def test_names_that_differ_are_both_told() -> None:
    check_names(Path("c.ckpt"), {"a", "b"}, {"b", "a"})
    with pytest.raises(MisconfigurationException, match=r"c\.ckpt.*Missing in it: 'b'; unknown to this module: 'c'"):
        check_names(Path("c.ckpt"), {"a", "b"}, {"a", "c"})


def test_many_names_are_cut_short() -> None:
    wanted = {f"layer{index}" for index in range(8)}
    with pytest.raises(MisconfigurationException, match="'layer4' and 3 more; unknown to this module: nothing"):
        check_names(Path("c.ckpt"), wanted, set())


def test_numbers_of_optimizers() -> None:
    check_optimizer_count(Path("c.ckpt"), 2, 2)
    with pytest.raises(
        MisconfigurationException, match="states of 2 optimizers, but `configure_optimizers` returned 1"
    ):
        check_optimizer_count(Path("c.ckpt"), 2, 1)
    with pytest.raises(MisconfigurationException, match="weights only"):
        check_optimizer_count(Path("c.ckpt"), 0, 1)


def test_paths(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "meta.pt").touch()
    (whole / "__0_0.distcp").touch()
    check_loadable(whole)
    for path, message in {
        tmp_path / "none": "no checkpoint at",
        tmp_path: "no whole checkpoint",
        whole / "__0_0.distcp": "lies inside the checkpoint",
    }.items():
        with pytest.raises(FileNotFoundError, match=message):
            check_loadable(path)


def test_a_rank_that_saves_nothing_can_edit_what_it_does_not_have() -> None:
    weights = OnRankZero()
    del weights["cache"]
    assert weights.pop("cache") is None and weights.pop("cache", 3) == 3
    assert not weights
