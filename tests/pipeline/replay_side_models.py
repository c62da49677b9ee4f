"""Modules whose calls do more than to return something new: they write into what they are given, count, and hook."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.pipeline.replay_models import Step


class Complex(Step):
    """Complex values cross."""

    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.rfft(self.linear(x)) * self.weight

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Complex.Spectrum(), nn.Linear(4, 4), nn.Linear(4, 4)

    def run(self, x: Tensor) -> Tensor:
        spectrum = self.a(x)
        y = self.c(self.b(torch.fft.irfft(spectrum, n=4)))
        return y * spectrum.abs().sum()


class WritesArgument(Step):
    """A layer writes into a tensor that the step made, and returns it, too; the step goes on with its own name."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, memory: Tensor, place: int) -> Any:
            y = self.linear(x)
            memory[place] = y
            return y.tanh(), memory

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WritesArgument.Layer() for _ in range(3))
        self.head = nn.Linear(4, 4)

    def run(self, x: Tensor) -> Tensor:
        memory = torch.zeros(3, *x.shape)
        for place, layer in enumerate(self.layers):
            x, _ = layer(x, memory, place)
        return self.head(x) + memory.sum(0)


class CountsInArgument(Step):
    """Layers count themselves in an object that they are given, and the step divides by the count."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, seen: dict[str, int], names: list[str]) -> Tensor:
            seen["depth"] = seen.get("depth", 0) + 1
            names.append("layer")
            return self.linear(x) / seen["depth"]

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(CountsInArgument.Layer() for _ in range(3))
        self.last = nn.Linear(4, 4)

    def run(self, x: Tensor) -> Tensor:
        seen: dict[str, int] = {}
        names: list[str] = []
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, seen, names)
        return self.last(x) * seen["depth"] + len(names)


class HookWithModule(Step):
    """A hook adds to a layer's result what a small network makes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.down, self.up = nn.Linear(4, 2), nn.Linear(2, 4)
        for layer in self.layers:
            layer.register_forward_hook(self.add)

    def add(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + self.up(self.down(args[0])).tanh()

    def run(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ReturnsNumber(Step):
    """A layer returns a number and a decision that follow from values, and keeps another number for the step."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.kept = 0.0

        def forward(self, x: Tensor, kind: str) -> Any:
            y = self.linear(x)
            if kind == "number":
                return y, y.abs().max().item()
            if kind == "decision":
                return y, 2.0 if bool((y[0, 0] > 0).any()) else 3.0
            self.kept = float(y.mean())
            return y, None

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.scaled, self.b, self.c = nn.Linear(4, 4), ReturnsNumber.Layer(), nn.Linear(4, 4), nn.Linear(4, 4)

    def run(self, x: Tensor) -> Tensor:
        y, number = self.scaled(self.a(x), self.kind)
        return self.c(self.b(y).tanh()) * (self.scaled.kept if number is None else number)


class RunningStatistics(Step):
    """Normalizations with running statistics, whose buffers each stage keeps for its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        )

    def run(self, x: Tensor) -> Tensor:
        return self.net(x)
