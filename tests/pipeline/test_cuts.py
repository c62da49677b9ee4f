"""Where a step can be cut, what crosses there, and why it cannot be cut elsewhere."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_shard.pipeline.cuts import parameter_stages, spans, stage_of
from lightning_shard.pipeline.find_cuts import CutFinder
from tests.pipeline import replay_models as models
from tests.pipeline import replay_odd_models as odd
from tests.pipeline import replay_rare_models as rare
from tests.pipeline.replay_models import Step, rows
from tests.pipeline.replaying import cuts_of, trace_of

batch = rows()[0]


def keys(module: Any, given: Tensor = batch, **settings: Any) -> list[tuple[tuple[str, int], ...]]:
    return [cut.keys for cut in cuts_of(trace_of(module, given, **settings))]


def refusals(module: Any, given: Tensor = batch, **settings: Any) -> dict[str, str]:
    return {entry.name: entry.reason for entry in CutFinder(trace_of(module, given, **settings)).find()[1]}


def behind(module: Any, name: str) -> Any:
    """The cut at the end of a module's first call."""
    (found,) = [cut for cut in cuts_of(trace_of(module, batch)) if (name, 0) in cut.keys]
    return found


def test_a_chain_can_be_cut_behind_each_layer() -> None:
    assert keys(models.Chain()) == [(("layers.0", 0),), (("layers.1", 0),), (("layers.2", 0),), (("layers.3", 0),)]


def test_the_end_of_an_outer_module_is_the_same_cut_as_that_of_its_last_one() -> None:
    class Nested(Step):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))

        def run(self, x: Tensor) -> Tensor:
            return self.net(x)

    found = keys(Nested())
    assert found == [(("net.0.0", 0),), (("net.0.1", 0), ("net.0", 0)), (("net.1", 0), ("net", 0))]


def test_crossing_bytes_count_every_value_once() -> None:
    cut = behind(models.Skips(), "down.1")
    assert cut.crossing_bytes == 2 * 2 * 4 * 4  # two values of 2 x 4 floats
    assert behind(models.Skips(), "up.2").crossing_bytes == 2 * 4 * 4


def test_a_skip_crosses_until_it_is_used_and_no_longer() -> None:
    found = {
        cut.call.name: sorted(relay.source for relay in cut.relays) for cut in cuts_of(trace_of(models.Skips(), batch))
    }
    assert found["down.0"] == ["down.0"]
    assert found["middle"] == ["down.0", "down.1", "down.2", "middle"]
    assert found["up.0"] == ["down.0", "down.1", "up.0"]
    assert found["up.2"] == ["up.2"]


def test_values_of_the_batch_and_of_modules_without_parameters_do_not_cross() -> None:
    for cut in cuts_of(trace_of(odd.BatchFunctions(), batch)):
        assert cut.relays and all(relay.value.depends for relay in cut.relays)


def test_what_is_computed_between_modules_crosses_itself_or_is_computed_again() -> None:
    cut = behind(models.BiasForAll(), "inner.blocks.0")
    sources = [relay.source for relay in cut.relays]
    assert len(sources) == 2 and "inner.blocks.0" in sources
    (direct,) = [relay for relay in cut.relays if relay.operation is not None]
    assert direct.source.startswith("sigmoid at ") and "replay_models.py:" in direct.source
    assert direct.value.tensor.shape == (4,) and not cut.parameters


def test_parameters_belong_to_the_stages_that_use_them() -> None:
    trace = trace_of(odd.OwnParameters(), batch)
    first, second = (next(cut for cut in cuts_of(trace) if cut.call.name == name) for name in "ab")
    stages = parameter_stages(trace, [first, second])
    assert stages["start"] == {0, 2} and stages["a.weight"] == {0, 2}
    assert stages["scale"] == {1} and stages["b.bias"] == {1} and stages["end"] == {2} and stages["a.bias"] == {0}


def test_times_belong_to_stages_up_to_their_cut() -> None:
    trace = trace_of(models.Chain(), batch)
    cuts = cuts_of(trace)[:2]
    assert [stage_of(time, cuts) for time in (0, cuts[0].time, cuts[0].time + 1, cuts[1].time, trace.end)] == [
        0,
        0,
        1,
        1,
        2,
    ]
    assert list(spans(trace, cuts)) == [(0, cuts[0].time), (cuts[0].time, cuts[1].time), (cuts[1].time, trace.end)]


def test_a_step_without_parameters_before_a_call_is_not_cut_there() -> None:
    class Late(Step):
        def __init__(self) -> None:
            super().__init__()
            self.flat, self.a, self.b = nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 4)

        def run(self, x: Tensor) -> Tensor:
            return self.b(self.a(self.flat(x)))

    assert keys(Late()) == [(("a", 0),), (("b", 0),)]


def test_each_call_of_a_shared_module_is_a_cut_of_its_own() -> None:
    found = [each[-1] for each in keys(models.Repeated())]
    assert found[0] == ("shared", 0) and ("block", 0) in found and ("block", 1) in found and ("shared", 3) in found


def test_places_that_need_the_graph_in_one_piece_are_refused() -> None:
    class Penalty(models.Chain):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = batch.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.layers[1](self.layers[0](x)).sum(), x, create_graph=True)
            return self.layers[3](self.layers[2](gradient)).square().mean()

    assert keys(Penalty()) == []
    reasons = refusals(Penalty())
    assert set(reasons) >= {f"layers.{number}" for number in range(4)}
    assert all("torch.autograd.grad" in reason for reason in reasons.values())


def test_the_inside_of_an_activation_checkpoint_is_refused() -> None:
    reasons = refusals(models.TwoInOneCheckpoint(reentrant=False))
    assert "activation checkpoint" in reasons["blocks.0"]
    assert (("blocks.1", 0),) in [each[-1:] for each in keys(models.TwoInOneCheckpoint(reentrant=False))]


def test_a_re_entrant_checkpoint_is_refused_with_the_way_out() -> None:
    module = models.Checkpointed(reentrant=True)
    reasons = refusals(module)
    assert set(reasons) >= {"blocks.0", "blocks.1", "blocks.2"}
    assert all("use_reentrant=False" in reason for name, reason in reasons.items() if name == "blocks.0")
    assert (("first", 0),) in keys(module)


def test_modules_with_backward_hooks_do_not_end_a_stage() -> None:
    module = odd.Hooked()
    assert "backward hooks" in refusals(module)["layers.2"]
    assert all(("layers.2", 0) not in each for each in keys(module))
    module.layers.register_full_backward_pre_hook(lambda *_: None)
    assert "layers.0" in refusals(module), "the hook's module spans the cut"


def test_what_a_layer_hides_from_its_caller_is_refused_with_its_line() -> None:
    reasons = refusals(rare.Collects())
    assert "'layers.0' neither returns nor keeps as an attribute" in reasons["layers.0"]
    assert "mean at " in reasons["layers.0"] and "replay_rare_models.py:" in reasons["layers.0"]


@pytest.mark.parametrize("make", [odd.Mixture, odd.MixtureModule])
def test_what_has_as_many_rows_as_values_say_does_not_cross(make: Any) -> None:
    trace = trace_of(make(), rows(6)[0], fake=False)
    for cut in cuts_of(trace):
        assert "experts." not in cut.call.name
        assert all(relay.value.tensor.shape[0] == 6 for relay in cut.relays)


def test_functional_dropout_between_modules_crosses_as_it_fell() -> None:
    class Dropped(models.Chain):
        def run(self, x: Tensor) -> Tensor:
            x = F.dropout(self.layers[0](x), 0.5)
            return self.layers[2](self.layers[1](x)) + x

    sources = [relay.source for relay in behind(Dropped(), "layers.1").relays]
    assert any(source.startswith("dropout at ") for source in sources)


def test_a_loss_in_parts_can_be_cut_between_its_modules() -> None:
    class Losses(models.Chain):
        def __init__(self) -> None:
            super().__init__(2)
            self.first, self.second = nn.MSELoss(), nn.L1Loss()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            y = self.run(batch)
            return self.first(y, batch) + self.second(y, batch)

    names = [cut.call.name for cut in cuts_of(trace_of(Losses(), batch))]
    assert names[:3] == ["layers.0", "layers.1", "first"]


def test_a_frozen_network_is_cut_like_a_trained_one_and_sends_no_gradient() -> None:
    module = models.Chain()
    module.layers[0].requires_grad_(False)
    first = cuts_of(trace_of(module, batch))[0]
    assert first.call.name == "layers.0" and not first.relays[0].value.expects_gradient
    second = cuts_of(trace_of(module, batch))[1]
    assert second.relays[0].value.expects_gradient
