"""Parameters that every rank keeps whole."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_shard.testing import run_distributed
from lightning_shard.units.full import full_tensor
from lightning_shard.units.whole import WholeParameters, clip_by_norm, clip_by_value, split_kinds

pytestmark = pytest.mark.ranks


def averaged() -> list[Tensor | None]:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    parameters = {
        "both": nn.Parameter(torch.zeros(3)),
        "one": nn.Parameter(torch.zeros(2, 2)),
        "scalar": nn.Parameter(torch.tensor(0.0, dtype=torch.float64)),
        "frozen": nn.Parameter(torch.zeros(1), requires_grad=False),
    }
    parameters["both"].grad = torch.arange(3.0) * (rank + 1)
    parameters["scalar"].grad = torch.tensor(float(rank), dtype=torch.float64)
    if rank == 0:
        parameters["one"].grad = torch.ones(2, 2)
    WholeParameters(parameters).average_gradients()
    return [parameter.grad for parameter in parameters.values()]


def test_gradients_become_their_mean_and_a_missing_one_counts_as_zero() -> None:
    for both, one, scalar, frozen in run_distributed(averaged, 2):
        assert torch.equal(both, torch.tensor([0.0, 1.5, 3.0]))
        assert torch.equal(one, torch.full((2, 2), 0.5))
        assert torch.equal(scalar, torch.tensor(0.5, dtype=torch.float64))
        assert frozen is None


def clipped(by: str) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients after clipping: of a mixture, and of the same tensors whole by torch."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for shape in [(5, 3), (1,), (), (4,)]]
    plain = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    mixed = [nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)])), *map(_zeros_like, gradients[1:])]
    for index, gradient in enumerate(gradients):
        plain[index].grad = gradient.clone()
        sharded = index == 0
        mixed[index].grad = distribute_tensor(gradient, mesh, [Shard(0)]) if sharded else gradient.clone()
    assert [len(kind) for kind in split_kinds(mixed)] == [1, 3]
    if by == "norm":
        torch.nn.utils.clip_grad_norm_(plain, 0.7)
        clip_by_norm(mixed, 0.7)
    else:
        torch.nn.utils.clip_grad_value_(plain, 0.2)
        clip_by_value(mixed, 0.2)
    return [full_tensor(_gradient(p)) for p in mixed], [_gradient(p) for p in plain]


def _zeros_like(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.zeros_like(tensor))


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("by", ["norm", "value"])
def test_clipping_a_mixture_is_clipping_it_whole(by: str) -> None:
    for mixed, plain in run_distributed(clipped, 2, by):
        for found, expected in zip(mixed, plain, strict=True):
            torch.testing.assert_close(found, expected)
