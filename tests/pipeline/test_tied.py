"""Gradients of parameters on several stages are summed, on those that have them, in one message a type."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_shard.pipeline.layout import Layout
from lightning_shard.pipeline.tied import local_part, reduce_gradients, sum_gradients, tied_groups
from lightning_shard.testing import run_distributed
from tests.pipeline.replaying import alone


def parameter(value: float | None, *shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(shape, dtype=dtype))
    made.grad = None if value is None else torch.full(shape, value, dtype=dtype)
    return made


def test_parameters_of_several_stages_are_tied() -> None:
    layout = Layout(cuts=[], owners={"a": (0,), "b": (0, 2), "c": (1, 2, 3)})
    assert layout.tied() == {"b": (0, 2), "c": (1, 2, 3)}


def test_alone_gradients_stay_as_they_are() -> None:
    weights = [parameter(2.0, 3), parameter(None, 2), parameter(1.0, dtype=torch.float64)]
    with alone():
        reduce_gradients(weights, dist.group.WORLD, average=True)
        assert tied_groups({"a": (0,), "b": (1,)}, [[0, 1]], 0) == []
    assert weights[0].grad is not None and weights[0].grad.tolist() == [2.0] * 3
    assert weights[1].grad is None
    assert weights[2].grad is not None and float(weights[2].grad) == 1.0


def test_the_local_part_of_a_plain_tensor_is_itself_without_its_graph() -> None:
    value = torch.ones(2, requires_grad=True)
    part = local_part(value)
    assert not part.requires_grad and part.data_ptr() == value.data_ptr()


@pytest.mark.ranks
def test_sums_and_means_over_ranks() -> None:
    def run() -> dict[str, Any]:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        found: dict[str, Any] = {}

        # Two pipelines of two ranks: {0, 2} and {1, 3}.
        ranks_of = {"both": (0, 1), "reversed": (1, 0), "first": (0,), "other": (0, 1)}
        groups = tied_groups(ranks_of, [[0, 2], [1, 3]], rank)
        found["groups"] = [(tied.names, tied.ranks) for tied in groups]

        frozen = parameter(1.0, 2)
        frozen.requires_grad_(False)
        weights = {
            "both": parameter(float(rank), 2, 3),
            "other": parameter(float(rank), 2) if rank < 2 else parameter(None, 2),
            "reversed": parameter(None, 2),
            "first": parameter(float(rank), 2),
        }
        sum_gradients(groups, weights)
        found["sums"] = {name: None if w.grad is None else w.grad.unique().tolist() for name, w in weights.items()}

        several = [
            parameter(float(rank), 2),
            parameter(float(rank + 1), 3, dtype=torch.float64),
            parameter(None, 2) if rank else parameter(8.0, 2),
            parameter(None, 1),
            frozen,
        ]
        transposed = nn.Parameter(torch.zeros(3, 2).T)
        transposed.grad = (torch.arange(6.0).view(3, 2) * rank).T
        several.append(transposed)
        reduce_gradients(several, dist.group.WORLD, average=True)
        found["means"] = [None if w.grad is None else w.grad.unique().tolist() for w in several[:5]]
        found["transposed"] = transposed.grad.tolist()
        return found

    results = run_distributed(run, 4)
    for rank, found in enumerate(results):
        pipeline = [0, 2] if rank in (0, 2) else [1, 3]
        assert sorted(found["groups"]) == [
            (("both", "other"), tuple(pipeline)),
            (("reversed",), tuple(reversed(pipeline))),
        ]
        assert found["sums"]["both"] == [float(sum(pipeline))]
        assert found["sums"]["other"] == [float(pipeline[0])], "a rank without a gradient gets the others'"
        assert found["sums"]["reversed"] is None, "what has no gradient anywhere keeps none"
        assert found["sums"]["first"] == [float(rank)]
        assert found["means"] == [[1.5], [2.5], [2.0], None, [1.0]]
        assert found["transposed"] == (torch.arange(6.0).view(3, 2) * 1.5).T.tolist()
