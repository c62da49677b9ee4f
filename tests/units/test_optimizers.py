"""Optimizers that are not known are tried on shards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from lightning_shard.testing import run_distributed
from lightning_shard.units.optimizers import check_optimizers

pytestmark = pytest.mark.ranks


class Plain(Optimizer):
    """Gradient descent; ``by`` may look at more than one element."""

    def __init__(self, parameters: Any, by: Callable[[Tensor], Tensor] = lambda gradient: gradient) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.by = by

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(self.by(parameter.grad), alpha=-group["lr"])


def local_norm(gradient: Tensor) -> Tensor:
    """The norm of this rank's rows, where there are shards: what a careless optimizer takes for the whole's."""
    mine = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return gradient / (1.0 + float(mine.norm()))


def whole_norm(gradient: Tensor) -> Tensor:
    return gradient / (1.0 + gradient.norm())


def verdicts(makers: dict[str, Callable[[nn.Module], Optimizer]]) -> dict[str, str]:
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    found = {}
    for name, make in makers.items():
        module = nn.Linear(3, 2)
        state = torch.random.get_rng_state()
        try:
            check_optimizers([make(module)], module, mesh)
            found[name] = ""
        except MisconfigurationException as error:
            found[name] = str(error)
        assert torch.equal(torch.random.get_rng_state(), state)
        assert all(parameter.grad is None for parameter in module.parameters())
    return found


def test_what_is_right_on_shards_passes_and_what_is_not_is_refused_by_name() -> None:
    makers: dict[str, Callable[[nn.Module], Optimizer]] = {
        "known": lambda module: torch.optim.AdamW(module.parameters()),
        "elementwise": lambda module: Plain(module.parameters()),
        "whole norm": lambda module: Plain(module.parameters(), whole_norm),
        "local norm": lambda module: Plain(module.parameters(), local_norm),
        "rprop": lambda module: torch.optim.Rprop(module.parameters()),
        "lbfgs": lambda module: torch.optim.LBFGS(module.parameters()),
        "foreign": lambda module: torch.optim.SGD([nn.Parameter(torch.zeros(5, 4))], lr=0.1),
    }
    first, second = run_distributed(verdicts, 2, makers)
    assert first == second
    assert [name for name, message in first.items() if not message] == ["known", "elementwise", "whole norm"]
    assert "Plain trains shards otherwise than whole tensors" in first["local norm"]
    assert "Rprop cannot run on FSDP2's shards" in first["rprop"]
    assert "LBFGS cannot run" in first["lbfgs"]
    assert "shape [5, 4] (group 0, place 0) that is no parameter of the module" in first["foreign"]
