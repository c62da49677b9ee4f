"""Gradients of inputs first and weights later, against torch's own backward, on graphs of many shapes."""

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_shard.pipeline.boundary import Boundary
from lightning_shard.pipeline.split_backward import backward_inputs, backward_weights


def check(
    run: Any, inputs: list[Tensor], parameters: list[nn.Parameter], gradients: list[Tensor | None] | None = None
) -> None:
    """Both parts give what one backward gives; gradients that are there already are added to."""
    outputs = run()
    sent = gradients if gradients is not None else [torch.rand_like(output) for output in outputs]
    pairs = [
        (output, torch.ones_like(output) if gradient is None else gradient)
        for output, gradient in zip(outputs, sent, strict=True)
        if output.requires_grad
    ]
    wanted = [tensor for tensor in [*inputs, *parameters] if tensor.requires_grad]
    found = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    expected = {id(tensor): gradient for tensor, gradient in zip(wanted, found, strict=True)}
    before = {}
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 0.5) if number % 2 else None
        before[id(parameter)] = 0.5 if number % 2 else 0.0
    of_inputs, part = backward_inputs(run(), sent, inputs, parameters)
    assert all(p.grad is None or torch.equal(p.grad, torch.full_like(p, 0.5)) for p in parameters), "too early"
    backward_weights(part)
    for place, (tensor, gradient) in enumerate(zip(inputs, of_inputs, strict=True)):
        assert_equal(gradient, expected.get(id(tensor)), f"input {place}")
    for place, parameter in enumerate(parameters):
        gradient, start = expected.get(id(parameter)), before[id(parameter)]
        if gradient is None:
            assert parameter.grad is None or torch.equal(parameter.grad, torch.full_like(parameter, start)), place
        else:
            assert_equal(parameter.grad, gradient + start, f"parameter {place}")


def assert_equal(found: Tensor | None, expected: Tensor | None, what: str) -> None:
    if expected is None:
        assert found is None, what
    else:
        assert found is not None, what
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-8, msg=lambda text: f"{what}: {text}")


def tied_to(inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
    """Outputs as a stage gives them."""
    needed = [tensor for tensor in inputs if tensor.requires_grad]
    return list(Boundary.apply(len(needed), *needed, *outputs))


def weights(count: int, **settings: Any) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(3, 3, dtype=torch.float64), **settings) for _ in range(count)]


def values(count: int, gradient: bool = True) -> list[Tensor]:
    return [torch.randn(2, 3, dtype=torch.float64, requires_grad=gradient) for _ in range(count)]


class Graph:
    """A random graph: each node mixes earlier ones with each other and with weights, which it may share."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        torch.manual_seed(seed)
        self.parameters = weights(self.choose.randint(1, 4))
        if seed % 3 == 0:
            self.parameters[0].requires_grad_(False)
        self.inputs = values(self.choose.randint(1, 3))
        if seed % 4 == 0 and len(self.inputs) > 1:
            self.inputs[-1].requires_grad_(False)
        self.program = [self._line() for _ in range(self.choose.randint(3, 12))]
        self.shown = self.choose.randint(1, 3)

    def _line(self) -> tuple[str, float, float, int, int]:
        kinds = ["matmul", "linear", "add", "multiply", "weights alone", "aside", "two results", "norm"]
        draw = self.choose.random
        return self.choose.choice(kinds), draw(), draw(), *self.choose.choices(range(len(self.parameters)), k=2)

    def run(self) -> list[Tensor]:
        made = [tensor * 1.0 for tensor in self.inputs]
        for kind, one, other, w, v in self.program:
            x, y = made[int(one * len(made))], made[int(other * len(made))]
            first, second = self.parameters[w], self.parameters[v]
            match kind:
                case "matmul":
                    made.append(torch.tanh(x @ first))
                case "linear":
                    made.append(F.linear(x, first, second[0]))
                case "add":
                    made.append(x + y)
                case "multiply":
                    made.append(torch.sin(x) * y)
                case "weights alone":
                    made.append(torch.exp(first[:2] * 0.1) + second[1:])
                case "aside":
                    made.append(x * (first @ second).mean() + (first * second)[:2])
                case "two results":
                    large, small = torch.cat([x, y @ first], -1).chunk(2, -1)
                    made += [large, small.cos()]
                case "norm":
                    made.append(F.layer_norm(x, (3,), first[0], second[1]))
        return tied_to(self.inputs, [made[-1 - place] for place in range(min(self.shown, len(made)))])


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_random_graphs_get_the_gradients_of_one_backward(start: int) -> None:
    tried = 0
    for seed in range(start, start + 50):
        graph = Graph(seed)
        if any(output.requires_grad for output in graph.run()):
            check(graph.run, graph.inputs, graph.parameters)
            tried += 1
    assert tried > 40


def test_a_weight_used_at_several_nodes_counts_once_for_each() -> None:
    (x,), (w,) = values(1), weights(1)
    check(lambda: [torch.tanh(x @ w) @ w @ w.T + (w.sum() * x)], [x], [w])


def test_nodes_that_share_a_weight_and_lead_to_each_other() -> None:
    (x,), (w, v) = values(1), weights(2)

    def run() -> list[Tensor]:
        shared = w @ v
        first = x @ shared
        return [first * 2.0, torch.sin(first) @ shared + (first @ v)]

    check(run, [x], [w, v])


def test_an_output_that_does_not_depend_on_the_inputs_gives_its_weights_gradients() -> None:
    # The boundary ties every output to every input, so that all weights are found by way of the inputs.
    (x,), (w, v) = values(1), weights(2)
    check(lambda: tied_to([x], [x @ w, v.square().sum(0)]), [x], [w, v])


def test_an_input_that_takes_no_gradient_gets_none() -> None:
    (x,), (mask,), (w,) = values(1), values(1, gradient=False), weights(1)
    number = torch.tensor([1, 2])
    check(lambda: [(x * mask) @ w], [x, mask, number], [w])


def test_an_input_that_is_not_used_gets_none() -> None:
    (x, unused), (w,) = values(2), weights(1)
    check(lambda: [x @ w], [x, unused], [w])


def test_frozen_and_unused_weights_get_no_gradient() -> None:
    (x,), (w, frozen, unused) = values(1), weights(3)
    frozen.requires_grad_(False)
    check(lambda: [x @ w @ frozen], [x], [w, frozen, unused])


def test_a_loss_needs_no_gradient_of_its_own() -> None:
    (x,), (w,) = values(1), weights(1)
    check(lambda: [(x @ w).square().mean()], [x], [w], [None])


def test_outputs_without_gradients_are_left_out() -> None:
    (x,), (w,) = values(1), weights(1)
    check(lambda: [x @ w, (x > 0).double(), torch.ones(2)], [x], [w])


def test_an_output_that_is_given_twice_counts_twice() -> None:
    (x,), (w,) = values(1), weights(1)

    def run() -> list[Tensor]:
        y = x @ w
        return tied_to([x], [y, y, y[0]])

    check(run, [x], [w])


def test_layers_with_checkpoints_convolutions_and_norms() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(3, 3, 1), nn.GroupNorm(1, 3), nn.Conv1d(3, 3, 1, bias=False)).double()
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    check(lambda: [net(x)], [x], list(net.parameters()))
    check(lambda: [net[2](checkpoint(net[:2], x, use_reentrant=False))], [x], list(net.parameters()))


def test_an_lstm_of_two_layers() -> None:
    torch.manual_seed(0)
    net = nn.LSTM(3, 3, num_layers=2).double()
    x, state = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True), torch.randn(2, 2, 3).double()
    state.requires_grad_()
    check(lambda: list(net(x, (state, state * 2))[1]), [x, state], list(net.parameters()))


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "convolution_backward")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [True, False])
def test_each_product_of_a_linear_layer_is_computed_once(bias: bool) -> None:
    layers = nn.Sequential(*(nn.Linear(3, 3, bias=bias) for _ in range(4)))
    x = torch.randn(2, 3, requires_grad=True)
    outputs = [layers(x)]
    with Products() as first:
        _, part = backward_inputs(outputs, [torch.ones(2, 3)], [x], layers.parameters())
    with Products() as second:
        backward_weights(part)
    assert (first.count, second.count) == (4, 4)


def test_a_shared_layer_costs_no_more_than_the_way_between_its_uses_again() -> None:
    layer = nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    outputs = [layer(torch.tanh(layer(layer(x))))]
    with Products() as first:
        _, part = backward_inputs(outputs, [torch.ones(2, 3)], [x], layer.parameters())
    with Products() as second:
        backward_weights(part)
    # Three weights' products; from use to use torch computes the two of the inputs again.
    assert (first.count, second.count) == (3, 5)


def test_nothing_is_kept_after_the_weights_turn() -> None:
    layer = nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    hidden = torch.tanh(layer(x))
    kept = weakref.ref(hidden)
    outputs = [layer(hidden).sum()]
    del hidden
    _, part = backward_inputs(outputs, [None], [x], layer.parameters())
    backward_weights(part)
    del outputs
    gc.collect()
    assert kept() is None
