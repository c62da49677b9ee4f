"""Optimizers that nobody knows, judged by trial: flat slices must train as whole tensors do."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR

from lightning_shard.zero.optimizers import check_elementwise
from tests.zero.test_optimizers import CPU, matrix, refusal


class Custom(Optimizer):
    """A step of ``self.update(parameter, group, state)`` for each parameter."""

    def __init__(self, params: Any, lr: Any = 0.1, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(self.update(parameter, group, self.state[parameter]), alpha=-float(group["lr"]))

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return parameter.grad


class Lion(Custom):
    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        average = state.setdefault("average", torch.zeros_like(parameter))
        sign = average.lerp(parameter.grad, 0.1).sign()
        average.lerp_(parameter.grad, 0.01)
        return sign + 0.1 * parameter


class TinyLion(Lion):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-7)


class Counting(Custom):
    """Counts in attributes of its own, of which one is shared by a shallow copy."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = 0
        self.history: list[int] = []
        self.buffers = {"sum": torch.zeros(1)}

    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.history.append(self.count)
        self.buffers["sum"] += 1
        super().step()


class SinglePrecision(Custom):
    """Keeps its moments in fp32 whatever the weights are."""

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        average = state.setdefault("average", torch.zeros(parameter.shape))
        average.mul_(0.9).add_(parameter.grad.float())
        return average


class NoDouble(Custom):
    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        if parameter.dtype == torch.float64:
            raise RuntimeError("no kernel for Double")
        return parameter.grad.sign()


class LambdaSGD(Custom):
    """Its name holds another optimizer's."""


class CamelPolars(Custom):
    """Likewise."""


@pytest.mark.parametrize("kind", [Custom, Lion, TinyLion, Counting, SinglePrecision, NoDouble, LambdaSGD, CamelPolars])
def test_an_elementwise_optimizer_is_accepted(kind: type[Optimizer]) -> None:
    check_elementwise(kind(matrix()), CPU)


class NeedsMatrices(Custom):
    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        if parameter.dim() != 2:
            raise ValueError("only matrices")
        return parameter.grad


class WantsWholeShape(Custom):
    """Fits vectors and matrices, but by their rows."""

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return parameter.grad - parameter.grad.mean(dim=-1, keepdim=True)


class Trusting(Custom):
    """Scales by the norm of each tensor."""

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return parameter.grad * (parameter.norm() / parameter.grad.norm())


class EstimatesStepSize(Custom):
    """As Prodigy does: how far the whole model has come sets the size of every step, from a tiny start."""

    START = 1e-6

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            size = group.setdefault("size", self.START)
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(first=parameter.clone(), total=torch.zeros_like(parameter))
                gain = float((parameter.grad * (state["first"] - parameter)).sum())
                group["gain"] = group.get("gain", 0.0) + size / self.START * size * group["lr"] * gain
                state["total"] += size / self.START * size * group["lr"] * parameter.grad
                parameter -= size * group["lr"] * parameter.grad.sign()
            total = sum(float(self.state[parameter]["total"].abs().sum()) for parameter in group["params"])
            group["size"] = max(size, group["gain"] / total)


class EveryTenth(Custom):
    """Elementwise but for every tenth step."""

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        return parameter.grad if state["step"] % 10 else parameter.grad / parameter.grad.norm()


class SAM(Custom):
    """Needs the loss again, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM needs a closure"
        closure()
        super().step(closure)


class ClippedAdamW(torch.optim.AdamW):
    """AdamW by name, but clips each tensor by its own norm."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                nn.utils.clip_grad_norm_([parameter], 1.0)
        super().step()


class Lookahead(Optimizer):
    """Wraps another optimizer."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


REFUSED: dict[Callable[[Iterable[nn.Parameter]], Optimizer], str] = {
    NeedsMatrices: "only matrices",
    WantsWholeShape: "not elementwise",
    Trusting: "not elementwise",
    EstimatesStepSize: "not elementwise",
    EveryTenth: "not elementwise",
    SAM: "SAM needs a closure",
    ClippedAdamW: "not elementwise",
    lambda params: Lookahead(torch.optim.SGD(params, lr=0.1)): "wraps another",
}


@pytest.mark.parametrize(("make", "reason"), REFUSED.items(), ids=lambda value: str(value)[:60])
def test_an_optimizer_that_needs_more_than_elements_is_refused(make: Any, reason: str) -> None:
    assert reason in refusal(make(matrix()))


@pytest.mark.parametrize("name", "FusedLAMB Lamb8bit LARS DistributedShampoo SOAP GaLoreAdamW CAME KFAC MuonW".split())
def test_well_known_optimizers_are_refused_by_name(name: str) -> None:
    # Under these names even an elementwise update is refused: at other settings it would not be one.
    assert "flat slices" in refusal(type(name, (Custom,), {})(matrix()))


@pytest.mark.parametrize("lr", [0.0, 1e-9, torch.tensor(0.0)], ids=str)
def test_a_small_learning_rate_hides_nothing(lr: Any) -> None:
    refusal(Trusting(matrix(), lr=lr))
    check_elementwise(Lion(matrix(), lr=lr), CPU)


def test_a_warm_up_from_zero_hides_nothing() -> None:
    optimizer = Trusting(matrix())
    LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    refusal(optimizer)


class TwoRules(Custom):
    """Groups with ``trust`` set go by norms."""

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return parameter.grad / parameter.grad.norm() if group["trust"] else parameter.grad


def test_every_groups_rule_is_tried() -> None:
    groups = [{"params": matrix(), "trust": False}, {"params": matrix(), "trust": True}]
    refusal(TwoRules(groups))
    check_elementwise(TwoRules(groups[:1]), CPU)


def test_the_trial_changes_nothing() -> None:
    parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = Counting([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.3, "name": "second"}])
    calls: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    scheduler = StepLR(optimizer, 1)
    groups = [{**group, "params": [p.clone() for p in group["params"]]} for group in optimizer.param_groups]
    attributes = set(vars(optimizer))
    torch_state, python_state = torch.get_rng_state(), random.getstate()

    check_elementwise(optimizer, CPU)

    assert (optimizer.count, optimizer.history, optimizer.buffers["sum"].item()) == (0, [], 0)
    assert (len(optimizer.state), calls, set(vars(optimizer))) == (0, [], attributes)
    for before, after in zip(groups, optimizer.param_groups, strict=True):
        assert {k: v for k, v in before.items() if k != "params"} == {k: v for k, v in after.items() if k != "params"}
        assert all(torch.equal(old, new) for old, new in zip(before["params"], after["params"], strict=True))
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in parameters)
    assert torch.equal(torch.get_rng_state(), torch_state) and random.getstate() == python_state
    # The scheduler made before still counts and steers.
    optimizer.step()
    scheduler.step()
    assert optimizer.count == 1 and calls.count("before") == calls.count("after") > 0
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.03)


class Noisy(Custom):
    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return parameter.grad + torch.randn_like(parameter)


def test_a_random_optimizer_leaves_the_random_state() -> None:
    optimizer = Noisy(matrix())
    before = torch.get_rng_state()
    refusal(optimizer)
    assert torch.equal(torch.get_rng_state(), before)
