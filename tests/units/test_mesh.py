"""Ranks as a mesh."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard.testing import run_distributed
from lightning_shard.units.mesh import check_ranks, make_mesh


@pytest.mark.parametrize(
    ("world_size", "replicas", "reshard"), [(1, 1, True), (4, 2, True), (4, 4, False), (8, 2, 2), (8, 1, 4)]
)
def test_numbers_that_divide_each_other_pass(world_size: int, replicas: int, reshard: bool | int) -> None:
    check_ranks(world_size, replicas, reshard)


def test_replicas_that_do_not_divide_the_ranks_are_refused_with_those_that_do() -> None:
    with pytest.raises(MisconfigurationException, match=r"replicas=4\) does not divide the 6 ranks.*1, 2, 3, 6"):
        check_ranks(6, 4, True)


@pytest.mark.parametrize("reshard", [3, 4, 8])
def test_resharding_to_a_number_that_is_no_proper_divisor_of_a_group_is_refused(reshard: int) -> None:
    with pytest.raises(MisconfigurationException, match=rf"={reshard}\).*the 4 ranks .*Use one of 2"):
        check_ranks(8, 2, reshard)


def groups(replicas: int) -> tuple[tuple[str, ...], list[list[int]]]:
    """The mesh's axes, and on each the ranks of this rank's group."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    mesh = make_mesh(torch.device("cpu"), 4, replicas, True)
    names = mesh.mesh_dim_names
    assert names is not None
    return names, [torch.distributed.get_process_group_ranks(mesh.get_group(name)) for name in names]


@pytest.mark.ranks
def test_ranks_of_one_shard_group_are_neighbours() -> None:
    plain = run_distributed(groups, 4, 1)
    assert plain == [(("dp_shard",), [[0, 1, 2, 3]])] * 4
    hybrid = run_distributed(groups, 4, 2)
    assert [by_axis for _, by_axis in hybrid] == [
        [[0, 2], [0, 1]],
        [[1, 3], [0, 1]],
        [[0, 2], [2, 3]],
        [[1, 3], [2, 3]],
    ]
    assert hybrid[0][0] == ("dp_replicate", "dp_shard")
