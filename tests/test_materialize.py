"""A module built on the meta device gets real values, or a refusal that names what nothing fills."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_shard.materialize import has_meta_tensors, materialize
from lightning_shard.testing import run_distributed
from tests.strategies.zero_modules import STAGES, Classifier, Trained, adamw, classes, numbers, sgd
from tests.strategies.zero_runs import loader, trainer, weights, world

CPU = torch.device("cpu")


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def refusal(make: Callable[[], nn.Module]) -> str:
    with pytest.raises(MisconfigurationException) as caught:
        materialize(on_meta(make), CPU)
    return str(caught.value)


@pytest.fixture(autouse=True)
def plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's demo of a transformer gives torch's attention a ``reset_parameters`` when it is imported."""
    monkeypatch.delattr(nn.MultiheadAttention, "reset_parameters", raising=False)


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(3, 4),
    lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.GroupNorm(1, 3)),
    lambda: nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm(3), nn.RMSNorm(3)),
    lambda: nn.LSTM(3, 4, num_layers=2),
    lambda: nn.BatchNorm1d(3, affine=False),
    lambda: nn.Linear(3, 4, dtype=torch.bfloat16),
    lambda: nn.ReLU(),
]


@pytest.mark.parametrize("make", LAYERS, ids=range(len(LAYERS)))
def test_layers_of_torch_get_the_values_that_they_would_have(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(7)
    expected = make()
    module = on_meta(make)
    assert has_meta_tensors(module) is bool(expected.state_dict())
    torch.manual_seed(7)
    materialize(module, CPU)
    assert not has_meta_tensors(module)
    state = module.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(state[name], value) and state[name].dtype == value.dtype, name
    assert [p.requires_grad for p in module.parameters()] == [p.requires_grad for p in expected.parameters()]


def test_what_is_real_is_left_alone() -> None:
    module = nn.Sequential(nn.Linear(2, 2), on_meta(lambda: nn.Linear(2, 2)))
    before = module[0].weight
    values = before.clone()
    called: list[nn.Module] = []
    materialize(module, CPU, called.append)
    assert module[0].weight is before and torch.equal(before, values)
    assert called == [module[1]]
    materialize(module, CPU, called.append)
    assert called == [module[1]]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.again = self.head


def test_ties_stay_ties() -> None:
    module = on_meta(Tied)
    materialize(module, CPU)
    assert module.head.weight is module.embed.weight and module.again is module.head
    assert len(list(module.parameters())) == 2
    assert module.head.bias.isfinite().all()


class Rotary(nn.Module):
    """Buffers with values of their own, persistent and not, of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("freqs", torch.arange(4.0), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("codes", torch.arange(3, dtype=torch.uint8))


class RotaryWithReset(Rotary):
    def reset_parameters(self) -> None:
        self.freqs.copy_(torch.arange(4.0))
        self.count.zero_()
        self.mask.copy_(torch.tensor([True, False]))
        self.phase.fill_(1)
        self.codes.copy_(torch.arange(3))


class HalfReset(RotaryWithReset):
    def reset_parameters(self) -> None:
        self.freqs[:3] = torch.arange(3.0)
        self.count.zero_()
        self.phase.fill_(1)
        self.codes[:2] = 0


def test_buffers_that_a_reset_fills() -> None:
    module = on_meta(lambda: nn.Sequential(RotaryWithReset()))[0]
    materialize(module, CPU)
    assert module.freqs.tolist() == [0, 1, 2, 3] and module.count.item() == 0
    assert module.mask.tolist() == [True, False] and module.codes.tolist() == [0, 1, 2]
    assert set(module.state_dict()) == {"count", "phase", "codes"}


def test_every_tensor_that_nothing_fills_is_named() -> None:
    message = refusal(lambda: nn.ModuleDict({"a": Rotary(), "b": nn.Linear(2, 2), "c": HalfReset()}))
    for name in ("a.freqs", "a.count", "a.mask", "a.phase", "a.codes"):
        assert name in message
    assert "Rotary has no reset_parameters()" in message
    assert "c.freqs, c.mask, c.codes (HalfReset.reset_parameters() leaves them unset)" in message
    assert "b.weight" not in message and "c.count" not in message
    assert "configure_model" in message


def test_a_parameter_of_the_module_itself_is_named() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.scale = nn.Parameter(torch.ones(()))

    assert "scale (Scaled has no reset_parameters())" in refusal(Scaled)
    assert "net.in_proj_weight" in refusal(lambda: nn.ModuleDict({"net": nn.MultiheadAttention(4, 2)}))


def test_a_module_that_is_half_real_is_named() -> None:
    module = on_meta(lambda: nn.Linear(2, 2))
    module.bias = nn.Parameter(torch.ones(2))
    with pytest.raises(MisconfigurationException, match=r"weight \(Linear mixes meta and real tensors\)"):
        materialize(module, CPU)
    assert module.bias.tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the garbage collector holds deprecated objects of torch
def test_one_submodules_tensors_live_at_a_time() -> None:
    """With a callback that frees them, as stage 3 does, no two layers are whole at once."""
    module = on_meta(lambda: nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)]))
    made, most = 0, 0
    others = {id(tensor) for tensor in gc.get_objects() if isinstance(tensor, nn.Parameter)}

    def free(submodule: nn.Module) -> None:
        nonlocal made, most
        gc.collect()
        alive = [
            tensor
            for tensor in gc.get_objects()
            if isinstance(tensor, nn.Parameter)
            and not tensor.is_meta
            and tensor.shape == (64, 64)
            and id(tensor) not in others
        ]
        made, most = made + 1, max(most, len(alive))
        for parameter in submodule.parameters(recurse=False):
            parameter.data = torch.empty(0)

    materialize(module, CPU, free)
    assert (made, most) == (6, 1)


# --- under ZeRO, on ranks ---


class MetaNet(Trained):
    """Built on the meta device but for one layer, with ties, batch norm and a buffer of values."""

    def __init__(self) -> None:
        super().__init__(adamw())
        with torch.device("meta"):
            self.body = nn.Sequential(
                nn.Linear(13, 16), nn.GELU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
            )
            self.tied = Tied()
            self.rotary = RotaryWithReset()
        self.real = nn.Linear(3, 3)
        self.begun: dict[str, Tensor] = {}

    def on_train_start(self) -> None:
        assert self.rotary.count == 0
        self.begun = weights(self.trainer)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        assert self.rotary.freqs.tolist() == [0, 1, 2, 3]
        self.rotary.count += 1
        tokens = self.tied.head(self.tied.embed(y)).square().mean()
        return F.cross_entropy(self.real(self.body(x)), y) + 0.1 * tokens

    def on_train_end(self) -> None:
        self.ended = weights(self.trainer)


@pytest.mark.ranks
@pytest.mark.parametrize("name", STAGES)
def test_a_meta_module_trains(name: str) -> None:
    batches = classes(3)

    def run() -> Any:
        rank, _ = world()
        torch.manual_seed(rank)  # a rank's own draws must not survive
        module = MetaNet()
        trainer(name).fit(module, loader(batches))
        return module.begun, module.ended, module.tied.head.weight is module.tied.embed.weight

    results = run_distributed(run, 2, timeout=60)
    torch.manual_seed(0)
    reference = MetaNet()
    materialize(reference, CPU)
    for begun, ended, tied in results:
        assert tied and ended["rotary.count"] == len(batches)
        # Rank 0's draws, as one process would have made them, in every half of every tensor of every rank.
        assert begun.keys() == reference.state_dict().keys()
        for key, value in reference.state_dict().items():
            if torch.is_floating_point(value):
                assert torch.equal(begun[key], value), key
                assert ended[key].isfinite().all() and not torch.equal(ended[key], value), key
    halves = results[0][0]["body.2.weight"].reshape(2, -1)
    assert not torch.equal(halves[0], halves[1])


@pytest.mark.ranks
@pytest.mark.parametrize("name", STAGES)
def test_a_meta_module_that_nothing_fills_is_refused_on_every_rank(name: str) -> None:
    batches = numbers(1)

    class Unfilled(Trained):
        def __init__(self) -> None:
            super().__init__(sgd())
            with torch.device("meta"):
                self.net = nn.Linear(4, 4)
                self.rotary = Rotary()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).mean()

    def run() -> str:
        try:
            trainer(name).fit(Unfilled(), loader(batches))
        except MisconfigurationException as error:
            return str(error)
        return "trained"

    for message in run_distributed(run, 2, timeout=60):
        assert "rotary.freqs" in message and "rotary.mask" in message


@pytest.mark.ranks
def test_stage_3_never_holds_a_second_layer_whole() -> None:
    layers, width = 6, 128
    batches = numbers(1, width=width)

    class Stack(Trained):
        def __init__(self) -> None:
            super().__init__(sgd())
            with torch.device("meta"):
                self.net = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).square().mean()

    def run() -> int:
        from lightning_shard.zero import engine

        most = 0

        def count(module: nn.Module, device: torch.device, partition: Any) -> None:
            def counted(submodule: nn.Module) -> None:
                nonlocal most
                whole = [p for p in module.parameters() if not p.is_meta and p.numel() == width * width]
                most = max(most, len(whole))
                partition(submodule)
                assert all(p.numel() == 0 for p in submodule.parameters(recurse=False))

            materialize(module, device, counted)

        engine.materialize = count
        trainer("zero3").fit(Stack(), loader(batches))
        return most

    assert run_distributed(run, 2, timeout=60) == [1, 1]


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:.*init_module.*")
@pytest.mark.parametrize(("name", "empty"), [("zero2", None), ("zero2", False), ("zero3", None), ("zero3", True)])
def test_a_module_of_init_module_trains_from_the_values_that_it_would_have(name: str, empty: bool | None) -> None:
    batches = classes(2)

    def run() -> Any:
        run = trainer(name)
        torch.manual_seed(1)
        with run.init_module(empty_init=empty):
            module = Classifier()
        begun: list[dict[str, Tensor]] = []
        module.on_train_start = lambda: begun.append(weights(run))
        run.fit(module, loader(batches))
        return begun[0]

    torch.manual_seed(1)
    reference = Classifier().state_dict()
    for begun in run_distributed(run, 2, timeout=60):
        assert begun.keys() == reference.keys()
        assert all(torch.equal(begun[key], value) for key, value in reference.items())
