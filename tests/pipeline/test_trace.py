"""What a recorded step says of its calls, operations, values and parameters."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from lightning_shard.pipeline.record import NeedsValues, record_step
from tests.pipeline.replay_models import Chain, KeptInAttribute, Repeated, Step, rows
from tests.pipeline.replay_odd_models import Compiled, Mixture, ReadsItem
from tests.pipeline.replaying import CPU, trace_of

batch = rows()[0]


def operations(trace: Any, name: str) -> list[Any]:
    return [operation for operation in trace.operations if operation.name == name]


def test_calls_lie_in_each_other_as_the_modules_ran() -> None:
    trace = trace_of(Repeated(), batch)
    keys = [call.key for call in trace.calls]
    assert keys[0] == ("shared", 0) and ("shared", 2) in keys and ("block", 1) in keys
    inner = next(call for call in trace.calls if call.key == ("shared", 1))
    assert inner.parent is not None and inner.parent.key == ("block", 0)
    assert [call.name for call in inner.around()] == ["shared", "block"]
    for call in trace.calls:
        assert 0 < call.start < call.end <= trace.end
        assert call.parent is None or call.parent.start < call.start < call.end < call.parent.end
    assert [call.key for call in trace.calls if call.name == "shared"] == [("shared", place) for place in range(4)]


def test_each_use_of_a_parameter_is_seen_where_it_happens() -> None:
    class Uses(Step):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.own, self.unused = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def run(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) * self.own + self.a.weight.sum()

    trace = trace_of(Uses(), batch)
    uses: dict[str, list[str]] = {}
    for name, _, operation in trace.uses():
        uses.setdefault(name, []).append(f"{operation.call.name if operation.call else 'step'} {operation.name}")
    assert uses == {
        "a.weight": ["a linear", "b linear", "step sum"],
        "a.bias": ["a linear"],
        "b.bias": ["b linear"],
        "own": ["step mul"],
    }


def test_flops_and_kept_bytes_are_those_of_the_layers() -> None:
    class Two(Step):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 32, bias=False), nn.Linear(32, 4, bias=False)

        def run(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    first, second = operations(trace_of(Two(), batch), "linear")
    assert first.flops == second.flops == 2 * 2 * 4 * 32
    (tanh,) = operations(trace_of(Two(), batch), "tanh")
    assert tanh.saved == 2 * 32 * 4 and tanh.flops == 0


@pytest.mark.parametrize("fake", [True, False])
def test_values_say_whether_parameters_went_into_them(fake: bool) -> None:
    class Mixed(Step):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(4))

        def run(self, x: Tensor) -> Tensor:
            mask = torch.logical_not(x > 0)
            y = torch.sin(self.a(x * self.scale))
            return torch.cos(y.detach()) + torch.zeros_like(y) + mask

    trace = trace_of(Mixed(), batch, fake=fake)
    depends = {
        name: operations(trace, name)[0].results[0].depends
        for name in ("logical_not", "mul", "linear", "sin", "detach", "cos", "zeros_like")
    }
    assert depends == {
        "logical_not": False,
        "mul": False,
        "linear": True,
        "sin": True,
        "detach": True,
        "cos": True,
        "zeros_like": False,
    }
    assert trace.loss is not None and trace.loss.depends


def test_a_tensor_that_is_changed_in_place_becomes_another_value_and_so_do_its_views() -> None:
    class Changed(Step):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def run(self, x: Tensor) -> Tensor:
            mask = torch.zeros(2, 4)
            view = mask[0]
            mask += self.a(x)
            return torch.exp(view) + torch.cos(mask)

    trace = trace_of(Changed(), batch)
    (change,) = [operation for operation in trace.operations if operation.writes]
    for name in ("exp", "cos"):
        (value,) = operations(trace, name)[0].inputs
        assert value.depends and value.operation is change and value.born >= change.time
    (zeros,) = operations(trace, "__getitem__")[0].inputs
    assert not zeros.depends and zeros.mutated == change.time


def test_parameters_that_the_step_changes_are_named_with_their_line() -> None:
    class Moves(Step):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

        def run(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.a.weight.mul_(0.9)
                self.b.weight.data.add_(0.1)
                self.c.weight.detach().copy_(self.a.weight)
                self.c.bias.data = torch.zeros(4)
                self.d.weight[0].fill_(1.0)
            return self.d(self.c(self.b(self.a(x))))

    changed = trace_of(Moves(), batch).changed
    assert sorted(changed) == ["a.weight", "b.weight", "c.bias", "c.weight", "d.weight"]
    assert "test_trace.py:" in changed["b.weight"]


def test_random_draws_are_marked_and_attention_without_dropout_is_none() -> None:
    class Draws(Step):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.drop, self.none = nn.Linear(4, 4), nn.Dropout(0.5), nn.Dropout(0.0)

        def run(self, x: Tensor) -> Tensor:
            y = self.drop(self.none(self.a(x + torch.randn(4)))) * torch.rand_like(x)
            return nn.functional.scaled_dot_product_attention(y[None], y[None], y[None])

    drawn = [operation.name for operation in trace_of(Draws(), batch).operations if operation.random]
    assert drawn == ["randn", "dropout", "rand_like"]


def test_a_step_that_reads_values_needs_real_tensors() -> None:
    for module in (ReadsItem(), Mixture()):
        with pytest.raises(NeedsValues, match="reads values"):
            trace_of(module, rows(6)[0])
        trace = trace_of(module, rows(6)[0], fake=False)
        assert not trace.fake and trace.loss is not None
        guessed = trace_of(module, rows(6)[0], guess=True)
        assert guessed.guessed.startswith(__file__.replace("test_trace", "replay_odd_models"))


def test_an_error_of_the_step_itself_is_raised_by_the_real_trace() -> None:
    class Broken(Step):
        def run(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    with pytest.raises(NeedsValues, match="KeyError"):
        trace_of(Broken(), batch)
    with pytest.raises(KeyError, match="mine"):
        trace_of(Broken(), batch, fake=False)


@pytest.mark.parametrize("fake", [True, False])
def test_a_trace_changes_nothing(fake: bool, capsys: pytest.CaptureFixture[str]) -> None:
    class Leaves(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.metric = MeanMetric()
            self.seen: list[Any] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            print("shown")
            loss = self.norm(self.run(batch)).square().mean() + torch.randn(())
            self.seen.append(loss)
            self.metric.update(loss.detach())
            self.last = loss
            batch.add_(1.0)
            return loss

    module = Leaves()
    module.eval()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    given, state = batch.clone(), torch.get_rng_state()
    trace_of(module, given, fake=fake)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(given, batch) and torch.equal(torch.get_rng_state(), state)
    assert not module.training and not module.seen and not hasattr(module, "last")
    assert module.metric._update_count == 0
    assert not any("forward" in vars(each) for each in module.modules())
    assert capsys.readouterr().out == ""


def test_what_stays_in_an_attribute_is_located() -> None:
    trace = trace_of(KeptInAttribute(), batch)
    located = {value.location for value in trace.values if value.location}
    assert {("layers.0", "penalty"), ("layers.2", "penalty")} <= located


def test_a_module_on_the_meta_device_is_traced_without_values() -> None:
    with torch.device("meta"):
        module = Chain()
    assert trace_of(module, batch).loss is not None


def test_a_compiled_module_is_one_piece() -> None:
    names = {call.name for call in trace_of(Compiled(), batch).calls}
    assert {"a", "b", "c", "d"} <= names and not names & {"c.0", "b._orig_mod", "b._orig_mod.0", "b.0"}


def test_operations_under_a_checkpoint_share_a_region() -> None:
    class Checked(Chain):
        def run(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            x = checkpoint(self.layers[1], x, use_reentrant=False)
            x = checkpoint(lambda y: self.layers[3](self.layers[2](y)), x, use_reentrant=False)
            return x

    trace = trace_of(Checked(), batch)
    regions = {call.name: call.region for call in trace.calls}
    assert regions["layers.0"] == 0 and regions["layers.2"] == regions["layers.3"] != 0
    assert regions["layers.1"] not in (0, regions["layers.2"])


def test_a_step_without_a_loss_and_one_that_returns_a_dict() -> None:
    class Nothing(Chain):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.run(batch)

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return {"loss": self.run(batch).mean(), "rows": batch}

    trace = trace_of(Nothing(), batch, "validation_step")
    assert trace.loss is None and not trace.returns
    trace = trace_of(Nothing(), batch)
    assert trace.returns and trace.loss is not None and trace.loss.tensor.shape == ()


def test_the_precision_of_the_run_decides_dtypes() -> None:
    trace = record_step(Chain(), "training_step", batch, CPU, MixedPrecision("bf16-mixed", "cpu"), fake=True)
    assert {value.tensor.dtype for call in trace.calls for value in call.outputs} == {torch.bfloat16}
