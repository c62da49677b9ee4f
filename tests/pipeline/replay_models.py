"""Modules whose values cross between modules in many ways."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Step(pl.LightningModule):
    """A step that is the mean of squares of what ``run`` gives."""

    def run(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.run(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows(count: int = 2, width: int = 4) -> list[Tensor]:
    """Two microbatches."""
    made = torch.Generator().manual_seed(1)
    return [torch.randn(count, width, generator=made) for _ in range(2)]


class Chain(Step):
    """Linear layers one after the other."""

    def __init__(self, layers: int = 4, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.between = between

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return x


class Skips(Step):
    """What early layers gave is needed again in reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.middle = nn.Linear(4, 4)
        self.up = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def run(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            kept.append(x)
        x = self.middle(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, kept.pop()], -1)))
        return x


class Seq2Seq(Step):
    """An encoder's output feeds every layer of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(
            8, 2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=8, dropout=0.0, batch_first=True
        )

    def run(self, x: Tensor) -> Tensor:
        source = x.reshape(-1, 2, 8)
        return self.transformer(source, source.flip(1))


class BiasForAll(Step):
    """A bias computed from a parameter in the outer forward is used by every block."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.table = nn.Parameter(torch.randn(4))
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            bias = torch.sigmoid(self.table) * 2
            for block in self.blocks:
                x = torch.tanh(block(x) + bias)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.inner = BiasForAll.Inner()
        self.last = nn.Linear(4, 4)

    def run(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))


class BiasOfOutput(BiasForAll):
    """What is computed from a module's output between modules is used by all that follow."""

    def run(self, x: Tensor) -> Tensor:
        x = self.inner.first(x)
        gate = torch.sigmoid(x.mean(1, keepdim=True)) + self.inner.table
        for block in self.inner.blocks:
            x = torch.tanh(block(x)) * gate
        return self.last(x)


class InPlace(Step):
    """What crosses is changed in place before it does, and after."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.change = change

    def run(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = self.change(h, x)
        y = self.b(torch.tanh(h))
        y = self.change(y, h)
        return self.c(torch.sin(y)) + y + h


def add_in_place(value: Tensor, other: Tensor) -> Tensor:
    value += other
    return value


def set_item(value: Tensor, other: Tensor) -> Tensor:
    value[:, 0] = other[:, 1].tanh()
    return value


def set_view(value: Tensor, other: Tensor) -> Tensor:
    value.view(-1)[:3] = other.reshape(-1)[:3] * 2
    return value


def out_of_place(value: Tensor, other: Tensor) -> Tensor:
    return value.clone().mul_(2.0).relu_() + other


class InPlaceReLU(Step):
    """Residual blocks of inplace ReLUs, which change what the block before returned."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU(inplace=True)
            self.linear = nn.Linear(4, 4)
            self.norm = nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.linear(self.relu(x)))
            y += x
            return y

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), *(InPlaceReLU.Block() for _ in range(3)), nn.ReLU(inplace=True))
        self.head = nn.Linear(4, 4)

    def run(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))


Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Result:
    hidden: Tensor
    extra: dict[str, Any]
    name: str = "result"


class Cache:
    """A cache as language models hand it from layer to layer."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.seen = 0

    def update(self, key: Tensor) -> Tensor:
        self.keys.append(key)
        self.seen += key.shape[0]
        return torch.stack(self.keys).sum(0)


class Containers(Step):
    """Modules that return dicts, dataclasses, namedtuples and lists."""

    class Layer(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            y = self.linear(x)
            match self.kind:
                case "dict":
                    return {"hidden": y.tanh(), "extra": {"skip": y, "none": None, "rows": len(y)}}
                case "dataclass":
                    return Result(hidden=y.tanh(), extra={"skip": [y, (y.sin(),)]})
                case "namedtuple":
                    return Pair(first=y.tanh(), second=Pair(first=y, second="text"))
            return [y.tanh(), [y]]

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (self.Layer(k) for k in ("dict", "dataclass", "namedtuple", "list"))
        self.head = nn.Linear(4, 4)

    def run(self, x: Tensor) -> Tensor:
        a = self.a(x)
        assert a["extra"]["rows"] == len(x)
        b = self.b(a["hidden"])
        assert b.name == "result"
        c = self.c(b.hidden + b.extra["skip"][1][0])
        d = self.d(c.first * c.second.first)
        return self.head(d[0]) + a["extra"]["skip"] + d[1][0] + b.extra["skip"][0]


class Cached(Step):
    """Layers append to a cache object that they are given, and return it."""

    class Layer(nn.Module):
        def __init__(self, returns: bool) -> None:
            super().__init__()
            self.returns = returns
            self.linear, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, cache: Cache) -> Any:
            y = self.linear(x) + cache.update(self.key(x))
            return (y, cache) if self.returns else y

    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.returns = returns
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Cached.Layer(returns) for _ in range(3))
        self.head = nn.Linear(4, 4)

    def run(self, x: Tensor) -> Tensor:
        x, cache = self.first(x), Cache()
        for layer in self.layers:
            if self.returns:
                x, cache = layer(x, cache)
            else:
                x = layer(x, cache)
        assert cache.seen == 3 * len(x)
        return self.head(x) + cache.keys[0]


class Repeated(Step):
    """One module is called several times, with others in between, and inside a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), self.shared)
        self.other = nn.Linear(4, 4)

    def run(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        x = self.other(self.block(x).tanh())
        return self.shared(self.block(x))


class OverTime(Step):
    """A recurrent cell called once a time step, and what it gave at all of them read out together."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)
        self.head = nn.Linear(4, 4)

    def run(self, x: Tensor) -> Tensor:
        state, states = torch.zeros_like(x), []
        for time in range(4):
            state = self.cell(x.roll(time, 1), state)
            states.append(self.head(state))
        return torch.stack(states, 1)


class KeptInAttribute(Step):
    """A layer keeps a value as an attribute of itself, which the step reads at its end."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.penalty: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.penalty = y.square().mean()
            return y.tanh()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(KeptInAttribute.Layer() for _ in range(3)))
        self.head = nn.Linear(4, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.head(self.layers(batch)).square().mean()
        return loss + 0.5 * sum(layer.penalty for layer in self.layers)


class Checkpointed(Step):
    """Blocks under torch's own activation checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.reentrant = reentrant

    def run(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class TwoInOneCheckpoint(Checkpointed):
    """One checkpoint spans two modules and a function between them."""

    def run(self, x: Tensor) -> Tensor:
        x = self.first(x)

        def both(y: Tensor) -> Tensor:
            return self.blocks[1](F.gelu(self.blocks[0](y)))

        return self.blocks[2](checkpoint(both, x, use_reentrant=self.reentrant))
