"""Models that partitions, gather hooks or flat buffers have broken elsewhere; each must train as in one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.strategies.cases import assert_all_same, under
from tests.strategies.zero_modules import STAGES, ZERO_NAMES, Classifier, Trained, adamw, classes, numbers, sgd

pytestmark = pytest.mark.ranks


class TwoHeads(Trained):
    """Head A in even steps, head B in odd ones: a head without a gradient must not move."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.trunk = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.heads[batch_idx % 2](self.trunk(batch)).square().mean()


def test_alternating_heads() -> None:
    assert_all_same(under(ZERO_NAMES, TwoHeads, numbers(6)))


class Tied(Trained):
    """Embedding and output head share one weight."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.embed = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tokens = (batch[:, 0].abs() * 5).long() % 7
        return F.cross_entropy(self.head(self.middle(self.embed(tokens)).tanh()), (tokens + 1) % 7)


class Frozen(Trained):
    """The first layer is frozen, the optimizer lists it all the same."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.first = nn.Linear(4, 5)
        self.first.requires_grad_(False)
        self.last = nn.Linear(5, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.last(self.first(batch).tanh()).square().mean()


class WeightNorm(Trained):
    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.net = nn.Sequential(nn.Linear(4, 4), parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()


class SpectralNorm(WeightNorm):
    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.net = nn.Sequential(nn.Linear(4, 4), parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 1))


class UsedTwice(Trained):
    """One layer twice in a forward, a frozen one twice, and once more after the main loss."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.layer = nn.Linear(4, 4)
        self.still = nn.Linear(4, 4)
        self.still.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.still(self.layer(self.still(self.layer(batch))))
        loss = hidden.square().mean()
        return loss + 0.1 * self.layer(batch).sin().mean()


class OtherMethods(Trained):
    """encode() and decode() in place of forward, a parameter of the module itself, and a weight in the loss."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.encoder = nn.Linear(4, 6)
        self.decoder = nn.Linear(6, 4)
        self.shift = nn.Parameter(torch.zeros(6))

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x) + self.shift

    def decode(self, hidden: Tensor) -> Tensor:
        return self.decoder(hidden.tanh())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.decode(self.encode(batch)), batch) + 0.01 * self.encoder.weight.norm()


class Memory(nn.Module):
    """Holds parameters in a list and uses another module's weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(3, 4))])
        self.out_proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.cat([x @ row.t() for row in self.rows], dim=1).softmax(1)
        return F.linear(scores @ torch.cat(list(self.rows)), self.out_proj.weight, self.out_proj.bias)


class Lists(Trained):
    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.memory = Memory()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.memory(batch)
        return self.attention(hidden[:, None], hidden[:, None], hidden[:, None])[0].square().mean()


class NotContiguous(Trained):
    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.weight = nn.Parameter(torch.randn(5, 4).t())
        self.last = nn.Linear(5, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.last((batch @ self.weight).tanh()).square().mean()


class Unused(Trained):
    """Two parameters never get a gradient; the second is larger than all others."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.used = nn.Linear(4, 3)
        self.small = nn.Parameter(torch.ones(2))
        self.large = nn.Linear(40, 41)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.used(batch).square().mean()


class Buffers(Trained):
    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.net = nn.Linear(4, 3)
        self.register_buffer("freqs", torch.arange(4.0), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.count += 1
        assert self.freqs.tolist() == [0, 1, 2, 3]
        return self.net(batch + self.freqs).square().mean()


ODD = [Tied, Frozen, WeightNorm, SpectralNorm, UsedTwice, OtherMethods, Lists, NotContiguous, Unused, Buffers]


OFFLOADED = [Tied, Frozen, Unused]


def test_odd_models() -> None:
    cases = {}
    for model in ODD:
        cases |= under(STAGES, model, numbers())
    for model in OFFLOADED:
        names = ["zero1_offload", "zero2_offload", "zero3_offload", "zero3_offload_params"]
        cases |= under(names, model, numbers())
    assert_all_same(cases)


def two_groups(module: Any) -> torch.optim.Optimizer:
    net = list(module.net.parameters())
    groups = [{"params": net[:3], "lr": 0.2, "name": "first"}, {"params": [*net[3:], module.log_scale], "name": "rest"}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def adagrad_groups(module: Any) -> torch.optim.Optimizer:
    net = list(module.net.parameters())
    groups = [
        {"params": net[:3], "lr": 0.2, "initial_accumulator_value": 0.5},
        {"params": [*net[3:], module.log_scale]},
    ]
    return torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1)


def test_parameter_groups() -> None:
    names = ["zero1", "zero2_offload", "zero3", "zero3_offload"]
    for groups in (two_groups, adagrad_groups):
        assert_all_same(under(names, lambda made=groups: Classifier(made), classes()))


class OneGroupFrozen(Classifier):
    """The first group is frozen as a whole, so that groups and partitions are counted differently."""

    def __init__(self) -> None:
        super().__init__(two_groups)
        for parameter in list(self.net.parameters())[:3]:
            parameter.requires_grad_(False)


def test_a_whole_group_frozen() -> None:
    assert_all_same(under(STAGES, OneGroupFrozen, classes()))


class OwnSeed(Classifier):
    """Each rank would start from other weights; rank 0's are everybody's."""

    def __init__(self) -> None:
        super().__init__(adamw())
        import os

        if os.environ.get("RANK", "0") != "0":
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.add_(1.0)


def test_ranks_start_from_the_weights_of_rank_0() -> None:
    assert_all_same(under(STAGES, OwnSeed, classes()))


class DeferredClassifier(Trained):
    """Builds its layers in configure_model, under the strategy's context."""

    def __init__(self) -> None:
        super().__init__(sgd())
        self.inner: Classifier | None = None

    def configure_model(self) -> None:
        if self.inner is None:
            torch.manual_seed(1)
            self.inner = Classifier()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.inner(x), y)


def test_configure_model() -> None:
    assert_all_same(under(["zero1", "zero2_offload", "zero3", "zero3_offload_params"], DeferredClassifier, classes()))


class HeadByRow(TwoHeads):
    """Which head a batch uses does not follow the accumulation window: a head may come first, last or not at all."""

    PATTERN = (0, 1, 1, 0, 0, 0, 1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.heads[self.PATTERN[batch_idx]](self.trunk(batch)).square().mean()


def test_alternating_heads_while_accumulating() -> None:
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    assert_all_same(under(ZERO_NAMES, HeadByRow, numbers(8), **settings))
