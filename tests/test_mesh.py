"""The expected groups are written out."""

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard.mesh import Mesh


@pytest.mark.parametrize(
    ("mesh", "pipelines", "groups"),
    [
        (Mesh(), [[0]], [[0]]),
        (Mesh(pp=3), [[0, 1, 2]], [[0], [1], [2]]),
        (Mesh(dp_shard=2), [[0], [1]], [[0, 1]]),
        (Mesh(pp=2, dp_replicate=2), [[0, 2], [1, 3]], [[0, 1], [2, 3]]),
        (Mesh(pp=2, dp_shard=2), [[0, 2], [1, 3]], [[0, 1], [2, 3]]),
        (Mesh(pp=2, dp_replicate=2, dp_shard=2), [[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_pipelines_and_data_parallel_groups(mesh, pipelines, groups):
    assert mesh.pipelines() == pipelines
    assert mesh.data_parallel_groups() == groups


def test_dp_shard_is_innermost_and_pp_outermost():
    mesh = Mesh(pp=2, dp_replicate=3, dp_shard=4)
    assert mesh.world_size == 24 and mesh.data_parallel_size == 12
    assert mesh.coordinates(1) == (0, 0, 1)
    assert mesh.coordinates(4) == (0, 1, 0)
    assert mesh.coordinates(12) == (1, 0, 0)
    assert mesh.coordinates(23) == (1, 2, 3)
    assert mesh.rank(pp=1, dp_replicate=2, dp_shard=3) == 23 and mesh.rank() == 0


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pp=2, dp_replicate=3, dp_shard=4), Mesh(pp=3, dp_shard=2)])
def test_every_rank_has_one_place(mesh):
    for rank in range(mesh.world_size):
        place = mesh.coordinates(rank)
        assert mesh.rank(**place._asdict()) == rank
        assert mesh.pipelines()[mesh.data_parallel_rank(rank)][place.pp] == rank
        assert mesh.data_parallel_groups()[place.pp][mesh.data_parallel_rank(rank)] == rank


@pytest.mark.parametrize(
    ("world_size", "stages", "data_parallel", "expected"),
    [
        (4, "auto", "replicate", Mesh(pp=4)),
        (4, 4, "shard", Mesh(pp=4)),
        (4, 2, "replicate", Mesh(pp=2, dp_replicate=2)),
        (4, 2, "shard", Mesh(pp=2, dp_shard=2)),
        (6, 1, "shard", Mesh(dp_shard=6)),
    ],
)
def test_the_mesh_of_a_strategy(world_size, stages, data_parallel, expected):
    mesh = Mesh.of(world_size, stages, data_parallel)
    assert mesh == expected and mesh.world_size == world_size


@pytest.mark.parametrize(("world_size", "stages"), [(6, 4), (2, 4), (3, 2)])
def test_ranks_that_are_no_multiple_of_the_stages_are_refused_with_both_numbers(world_size, stages):
    with pytest.raises(MisconfigurationException) as refusal:
        Mesh.of(world_size, stages, "replicate")
    text = str(refusal.value)
    assert f"stages={stages}" in text and f"{world_size} ranks" in text and f"multiple of {stages}" in text


def test_the_numbers_that_are_proposed_fit():
    with pytest.raises(MisconfigurationException, match="stages=1 or 2 or 3 or 6"):
        Mesh.of(6, 4, "replicate")


@pytest.mark.parametrize("size", [0, -1, 1.0, "2", True, None])
@pytest.mark.parametrize("name", ["pp", "dp_replicate", "dp_shard"])
def test_sizes_are_positive_whole_numbers(name, size):
    with pytest.raises(MisconfigurationException, match=rf"Mesh\({name}="):
        Mesh(**{name: size})


def test_other_words_are_refused():
    with pytest.raises(MisconfigurationException, match="data_parallel='both'"):
        Mesh.of(4, 2, "both")
    with pytest.raises(MisconfigurationException, match="pp='all'"):
        Mesh.of(4, "all", "shard")
