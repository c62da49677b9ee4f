"""Modules that steps are known to consist of, besides layers in a row."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from tests.pipeline.replay_models import Step


class MaskAndCount(Step):
    """Masks and counts computed from a module's output cross, and a 0-dim one."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            y = self.linear(x)
            return y, y > 0, y.argmax(-1), y.abs().max()

    def __init__(self) -> None:
        super().__init__()
        self.router = MaskAndCount.Router()
        self.table = nn.Embedding(4, 4)
        self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4)

    def run(self, x: Tensor) -> Tensor:
        y, mask, index, largest = self.router(x)
        y = self.b(y.masked_fill(mask, 0.5))
        y = self.c(torch.where(mask, y, -y)) / largest
        return y + self.table(index) * largest


class BatchFunctions(Step):
    """Values that no parameter went into are computed by the batch between modules, and in modules without any."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.arange(1.0, 5.0), persistent=False)

        def forward(self, length: int) -> tuple[Tensor, Tensor]:
            angles = torch.outer(torch.arange(length).float(), self.frequencies)
            return angles.cos(), angles.sin()

    def __init__(self) -> None:
        super().__init__()
        self.rotary = BatchFunctions.Rotary()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def run(self, x: Tensor) -> Tensor:
        cos, sin = self.rotary(len(x))
        mask = x > 0
        for layer in self.layers:
            x = layer(x) * cos + torch.where(mask, x, 0.0) * sin
        return x


class Scale(Function):
    """A function of the user's own, with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, factor = ctx.saved_tensors
        return gradients[0] * factor * 3, (gradients[0] * x).sum() * 3


class CustomFunction(Step):
    """The user's own autograd functions between modules, also of a parameter, and in a module."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            return Scale.apply(x, self.factor)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.inside = CustomFunction.Inside()
        self.factor = nn.Parameter(torch.tensor(0.7))

    def run(self, x: Tensor) -> Tensor:
        x = Scale.apply(self.a(x), self.factor)
        x = self.inside(self.b(x))
        return self.c(Scale.apply(x, torch.tensor(0.3)))


class OwnParameters(Step):
    """Parameters used in the step itself, before, between and behind modules, and in its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(4))
        self.scale = nn.Parameter(torch.randn(4))
        self.end = nn.Parameter(torch.randn(4, 4))
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        x = self.a(batch + self.start)
        x = self.b(torch.tanh(x) * self.scale)
        loss = (x @ self.end).square().mean() + 0.1 * self.start.square().sum() + 0.1 * self.a.weight.abs().sum()
        return {"loss": loss}


class Normed(Step):
    """Weights that are computed from others each time they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(weight_norm(nn.Linear(4, 4)) for _ in range(3)))
        self.head = nn.Linear(4, 4)

    def run(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)) + self.layers[1].bias


class Recurrent(Step):
    """torch's own LSTM, whose state is handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 4)
        self.lstm = nn.LSTM(4, 4, num_layers=2, batch_first=True)
        self.second = nn.LSTM(4, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 4)

    def run(self, x: Tensor) -> Tensor:
        y, (h, c) = self.lstm(self.embed(x.reshape(-1, 2, 2)))
        y, _ = self.second(y, (h * 1.0, c))
        return self.head(y)


class Encoder(Step):
    """torch's own encoder with a mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 4)

    def run(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 2, 8)
        return self.head(self.encoder(x, mask=torch.tensor([[False, True], [False, False]])))


class Compiled(Step):
    """Compiled modules between others, by either way to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.d = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend="eager")
        self.c = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.c.compile(backend="eager")

    def run(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x).sin())) * 2)


class Frozen(Step):
    """Some layers take no gradient: the first, and one in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        for number in (0, 2):
            self.layers[number].requires_grad_(False)
        self.features = nn.Linear(4, 4)

    def run(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.features(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + features


class Detached(Step):
    """A value is used behind only without its gradient, and another one partly."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def run(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a)
        return self.d(self.c(b.detach()) * a) + b.square()


class Mixture(Step):
    """Rows go to experts by values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(4, 4), nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last = nn.Linear(4, 4)

    def run(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        weights = self.gate(x).softmax(-1)
        chosen = weights.argmax(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            here = torch.where(chosen == number)[0]
            result[here] = expert(x[here]) * weights[here, number, None]
        return self.last(result)


class MixtureModule(Step):
    """The same routing, inside a module."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 2)
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            weights = self.gate(x).softmax(-1)
            result = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                here = (weights.argmax(-1) == number).nonzero()[:, 0]
                if len(here):
                    result.index_add_(0, here, expert(x[here]) * weights[here, number, None])
            return result

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), MixtureModule.Layer(), nn.Linear(4, 4), MixtureModule.Layer())

    def run(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ReadsItem(Step):
    """The step reads a number of the batch, and one of its loss at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.shown: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        factor = batch.abs().max().item()
        loss = self.layers(batch / factor).square().mean()
        self.shown.append(loss.item())
        return loss


class Listed(Step):
    """Layers are reached by a plain list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.order = list(self.layers)[::-1]

    def run(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = layer(x).tanh()
        return x


class Hooked(Step):
    """Hooks change what modules return, and collect it for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.collected: list[Tensor] = []
        self.layers[0].register_forward_hook(lambda module, args, output: output * 2)
        self.layers[1].register_forward_pre_hook(lambda module, args: (args[0].sin(),))
        self.layers[1].register_forward_hook(self.collect)
        self.layers[2].register_full_backward_hook(lambda module, got, given: (got[0] * 0.5,))

    def collect(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.collected.append(output)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.collected.clear()
        loss = self.layers(batch).square().mean()
        return loss + self.collected[0].abs().mean()


class Functional(Step):
    """Modules whose weights other code uses: tied ones, and a functional call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.middle = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def run(self, x: Tensor) -> Tensor:
        y = self.middle(self.embed((x.abs() * 2).long().clamp(max=4)))
        y = F.linear(y, self.middle[0].weight)
        return self.head(y)


class GradientPenalty(Step):
    """A module asks for gradients itself."""

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
            return gradient

    def __init__(self) -> None:
        super().__init__()
        self.field = GradientPenalty.Field()
        self.after = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def run(self, x: Tensor) -> Tensor:
        gradient = self.field(x)
        return gradient + self.after(gradient)


class HookedValues(Step):
    """Gradient hooks on values that cross, put on between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01) * 0.9)
        return x


class HookedStream(HookedValues):
    """The same on a stream that every layer adds to: each side of a cut has a part of its gradient only."""

    def run(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = x + torch.tanh(layer(x))
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0.9)
        return x
