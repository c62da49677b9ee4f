"""Copies without data: what belongs together in the original belongs together in the copy."""

import functools
import types
from typing import Any

import pytest
import torch
from torch import nn

from lightning_shard._compat.dry_run import fake_mode
from lightning_shard.units.dry_copy import DryCopier


class Holder(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.optimizer = kind(self.parameters(), lr=0.1)


def copy_of(module: Any) -> Any:
    return DryCopier(fake_mode(), torch.device("cpu"), [])(module)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_an_optimizer_has_the_copys_parameters_and_no_states(kind: Any) -> None:
    module = Holder(kind)
    module.layer(torch.ones(1, 3)).sum().backward()
    module.optimizer.step(lambda: torch.zeros(()))
    states = dict(module.optimizer.state)
    clone = copy_of(module)
    held = clone.optimizer.param_groups[0]["params"]
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in clone.parameters()}
    assert type(clone.optimizer) is kind and not clone.optimizer.state
    assert dict(module.optimizer.state) == states
    assert module.optimizer.param_groups[0]["params"][0] is module.layer.weight
    if kind is torch.optim.LBFGS:
        assert clone.optimizer._params[0] is clone.layer.weight


def test_a_bound_partial_function_holds_copies_and_keeps_what_it_wraps() -> None:
    def configure(module: Any, optimizer: Any) -> Any:
        return optimizer

    module = Holder(torch.optim.SGD)
    function = functools.partial(configure, optimizer=module.optimizer)
    functools.update_wrapper(function, configure)
    module.configure = types.MethodType(function, module)
    clone = copy_of(module)
    assert clone.configure() is clone.optimizer
    assert clone.configure.__wrapped__ is configure
    assert module.configure() is module.optimizer
