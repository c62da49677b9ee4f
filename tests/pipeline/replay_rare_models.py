"""Modules that hand values on in ways that are easily forgotten."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call
from torch.nn import functional as F

from tests.pipeline.replay_models import Step


class Identities(Step):
    """Modules that return what they are given, or a view of it: dropout that drops nothing, flatten, identity."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.drop, self.same, self.flat = nn.Dropout(0.0), nn.Identity(), nn.Flatten()

    def run(self, x: Tensor) -> Tensor:
        h = self.drop(F.gelu(self.a(x)))
        g = self.same(h + x)
        y = self.flat(self.b(self.drop(g)))
        return self.c(self.same(y.sin())) + g * h


class HandsThrough(Step):
    """Layers return, besides their result, a mask that they were given, a buffer of theirs and the batch."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))

        def forward(self, x: Tensor, mask: Tensor) -> Any:
            return self.linear(x).masked_fill(mask, 0.1), mask, self.scale

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HandsThrough.Layer() for _ in range(3))
        self.head = nn.Linear(4, 4)

    def run(self, x: Tensor) -> Tensor:
        mask = x > 0.5
        for layer in self.layers:
            x, mask, scale = layer(x, mask)
        return self.head(x * mask + scale)


class ReturnsParameter(Step):
    """Modules that return a parameter, or a view of one, which is used much later."""

    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = nn.Parameter(torch.randn(4))

        def forward(self, whole: bool) -> Tensor:
            return self.prompt if whole else self.prompt[:4]

    def __init__(self) -> None:
        super().__init__()
        self.prompt = ReturnsParameter.Prompt()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def run(self, x: Tensor) -> Tensor:
        prompt, part = self.prompt(whole=True), self.prompt(whole=False)
        x = torch.tanh(self.a(x))
        return self.b(x + prompt) * part


class InPlaceModules(Step):
    """An inplace module in a row changes what the module before returned, and others in a hidden list."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Hardtanh(inplace=True))
        self.head = nn.Linear(4, 4)

    def run(self, x: Tensor) -> Tensor:
        first = self.net[0](x)
        again = self.net[1](first)  # `first` is changed, too
        second = self.net[2](first + again)
        return self.head(self.net[3](second)) + second


class Collects(Step):
    """Layers append what they computed to a list that they are given."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
            y = self.linear(x)
            kept.append(y.square().mean())
            return y.tanh()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Collects.Layer() for _ in range(3))
        self.head = nn.Linear(4, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        kept: list[Tensor] = []
        x = batch
        for layer in self.layers:
            x = layer(x, kept)
        return self.head(x).square().mean() + torch.stack(kept).sum()


class Counts(Step):
    """A layer keeps a plain number of what it saw, which a later one reads."""

    class Layer(nn.Module):
        def __init__(self, before: Any = None) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.before = [before]
            self.factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            if self.before[0] is not None:
                x = x * self.before[0].factor
            self.factor = x.shape[1] / 8
            return self.linear(x).tanh()

    def __init__(self) -> None:
        super().__init__()
        self.first = Counts.Layer()
        self.second = Counts.Layer(self.first)
        self.third = Counts.Layer(self.second)

    def run(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)))


class Several(Step):
    """Functions with several results between modules: split, unbind, max, topk, sort."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(4, 4), nn.Linear(4, 4)

    def run(self, x: Tensor) -> Tensor:
        one, two = self.a(x).chunk(2, -1)
        values, places = two.sort(-1)
        y = self.b(one * values)
        best = y.max(-1, keepdim=True)
        y = self.c(y - best.values) * values
        return torch.take_along_dim(y, places, -1) + F.one_hot(best.indices[:, 0], 4)


class Teacher(Step):
    """A copy of the network runs without gradients, and both outputs meet in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.predictor = nn.Linear(4, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch.flip(0))
        return F.mse_loss(self.predictor(self.student(batch)), target)


class Round(Function):
    """A function of the user's own whose second result takes no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        mask = x > 0
        ctx.mark_non_differentiable(mask)
        return x.round(), mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 0.9


class OwnFunctions(Step):
    """The user's own functions between modules and in modules without parameters, with results of other types."""

    class Activation(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Round.apply(x)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.activation = OwnFunctions.Activation()

    def run(self, x: Tensor) -> Tensor:
        x, mask = Round.apply(self.a(x) * 3)
        x, other = self.activation(self.b(torch.where(mask, x, -x)))
        return self.c(x) * mask + other


class OwnFunctionAndShared(Step):
    """A function of the user's own runs before a value that all layers use is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.table = nn.Parameter(torch.randn(4))

    def run(self, x: Tensor) -> Tensor:
        x, _ = Round.apply(self.a(x) * 3)
        gate = torch.exp(self.table) + torch.cos(self.table)
        return self.c(self.b(x * gate)) * gate


class FunctionalCall(Step):
    """A module called with other weights, computed from its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(4, 4) for _ in range(3))

    def run(self, x: Tensor) -> Tensor:
        x = self.first(x)
        doubled = {name: 2 * each for name, each in self.inner.named_parameters()}
        x = functional_call(self.inner, doubled, (torch.tanh(x),))
        return self.last(self.inner(x))


class Views(Step):
    """A view taken before what it looks at is changed in place, between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def run(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1.0
        row = h[0]
        h.mul_(torch.arange(1.0, 5.0))
        y = self.b(row * 2.0)
        row += 1.0
        return self.c(h + y)


class RequiresGradBranch(Step):
    """The step does something more where a tensor takes a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.table = nn.Parameter(torch.randn(4))

    def run(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.requires_grad:
            h = h.sin() * 1.5
        g = torch.exp(self.table) + torch.cos(self.table)
        y = self.b(h + g)
        return self.c(y) * g


class Noise(Step):
    """Random numbers drawn in the step, before the first module and between modules, used again at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.drop = nn.Dropout(0.5)
        self.drawn: list[Tensor] = []

    def draw(self, like: Tensor) -> Tensor:
        noise = torch.randn(like.shape)
        self.drawn.append(noise)
        return noise

    def run(self, x: Tensor) -> Tensor:
        first = self.draw(x)
        h = self.drop(self.a(x + first))
        second = self.draw(x)
        y = self.b(torch.tanh(h) + second)
        return self.c(y * second) - first
