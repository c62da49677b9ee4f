"""What each stage's plan says: what it receives, leaves out, keeps and sends."""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_shard.pipeline.absent import AbsentError
from lightning_shard.pipeline.replay import Replay, StepMismatch
from lightning_shard.pipeline.seeds import mix, seed_everything
from lightning_shard.pipeline.stages import plan_stages
from tests.pipeline import replay_models as models
from tests.pipeline import replay_rare_models as rare
from tests.pipeline import replay_side_models as side
from tests.pipeline.replay_models import Step, rows
from tests.pipeline.replay_odd_models import MaskAndCount
from tests.pipeline.replaying import CPU, Case, alone, cuts_of, stages_of, trace_of

batch = rows()[0]


def named(module: Any, *names: str, given: Tensor = batch) -> tuple[Any, list[Any]]:
    """The trace, and the cuts behind the first calls of modules."""
    trace = trace_of(module, given)
    found = {key: cut for cut in cuts_of(trace) for key in cut.keys}
    return trace, [found[name, 0] for name in names]


def test_wires_fit_from_stage_to_stage() -> None:
    plans = plan_stages(*named(models.Skips(), "down.1", "middle", "up.1"))
    assert [plan.stage for plan in plans] == [0, 1, 2, 3] and {plan.stages for plan in plans} == {4}
    assert plans[0].receives == () and plans[-1].sends == ()
    for before, behind in itertools.pairwise(plans):
        assert before.sends == behind.receives != ()
        assert all(wire.shape == (2, 4) and wire.dtype == torch.float32 and wire.gradient for wire in before.sends)
    assert [plan.is_last for plan in plans] == [False, False, False, True]
    assert [plan.exit for plan in plans] == [("down.1", 0), ("middle", 0), ("up.1", 0), None]


def test_a_stage_leaves_out_the_outermost_calls_before_it() -> None:
    class Nested(Step):
        def __init__(self) -> None:
            super().__init__()
            self.front = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
            self.back = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def run(self, x: Tensor) -> Tensor:
            return self.back(self.front(x))

    first, middle, last = plan_stages(*named(Nested(), "front", "back.0"))
    assert first.stubs == {} and set(middle.stubs) == {("front", 0)}
    assert set(last.stubs) == {("front", 0), ("back.0", 0)}, "the module around the cut runs on"
    assert middle.stubs["front", 0].inner == {"front.0": 1, "front.1": 1, "front.1.0": 1, "front.1.1": 1}


def test_what_is_handed_through_is_kept_by_the_stage_that_makes_it_only() -> None:
    plans = plan_stages(*named(models.Skips(), "down.0", "down.2", "up.0"))
    kept = [{key[0] for key in plan.captures} for plan in plans]
    assert kept == [{"down.0"}, {"down.1", "down.2"}, {"up.0"}, set()]
    assert [len(plan.sends) for plan in plans] == [1, 3, 3, 0]


def test_integers_and_masks_take_no_gradient_and_numbers_of_type_complex_do() -> None:
    wires = {wire.dtype: wire.gradient for wire in plan_stages(*named(MaskAndCount(), "router"))[1].receives}
    assert wires == {torch.float32: True, torch.bool: False, torch.int64: False}
    (wire,) = plan_stages(*named(side.Complex(), "a"))[1].receives
    assert wire.dtype == torch.complex64 and wire.gradient


def test_what_is_changed_in_place_is_a_copy() -> None:
    first, _ = plan_stages(*named(models.InPlace(models.add_in_place), "a"))
    assert [wire.written for wire in first.sends] == [True]
    (capture,) = first.captures["a", 0]
    assert not capture.copy, "it changes behind the cut only"
    first, _ = plan_stages(*named(models.InPlace(models.add_in_place), "b"))
    assert any(entry.copy for entries in first.captures.values() for entry in entries)


def test_frozen_parts_send_no_gradient() -> None:
    module = models.Chain()
    module.layers[0].requires_grad_(False)
    plans = plan_stages(*named(module, "layers.0", "layers.1"))
    assert [wire.gradient for plan in plans for wire in plan.receives] == [False, True]


def run_all(case: Case, *names: str, drawn: bool = True) -> list[Any]:
    """Run all stages of the first microbatch; returns their modules."""
    trace, cuts = named(case.build(), *names, given=case.microbatches[0])
    with alone():
        plans, modules, replays = stages_of(case, trace, cuts)
    found: Any = ()
    seed = 5
    for plan, module, replay in zip(plans, modules, replays, strict=True):
        seed_everything(seed)
        found = replay.run(
            plan,
            lambda module=module: module.training_step(case.microbatches[0], 0),
            [each.detach().requires_grad_() for each in found],
            CPU,
            lambda point: seed_everything(mix(seed, point)),
        )
    return modules


@pytest.mark.parametrize("names", [("a",), ("drop",), ("b",), ("a", "b"), ("a", "drop", "b")])
def test_noise_that_the_step_draws_is_the_same_on_all_stages(names: tuple[str, ...]) -> None:
    modules = run_all(Case(make=rare.Noise, microbatches=rows(), cuts=3), *names)
    last = modules[-1].drawn
    assert len(last) == 2 and not torch.equal(last[0], last[1])
    for module in modules[:-1]:
        assert module.drawn
        for noise, other in zip(module.drawn, last, strict=False):
            assert torch.equal(noise, other)


class SharedAfterOwn(Step):
    """A draw for all follows a functional dropout of a value that one stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def run(self, x: Tensor) -> Tensor:
        h = F.dropout(self.a(x), 0.5)
        noise = torch.randn(x.shape)
        return self.c(self.b(h + noise) * 2) + noise


def test_noise_that_cannot_be_made_equal_is_refused_with_both_lines() -> None:
    trace, cuts = named(SharedAfterOwn(), "b")
    with pytest.raises(ValueError, match=r"randn at .*test_stages\.py:\d+ draws random numbers .* after dropout at"):
        plan_stages(trace, cuts)


def test_noise_on_one_side_only_needs_nothing() -> None:
    trace, cuts = named(SharedAfterOwn(), "a")
    assert all(not plan.reseeds for plan in plan_stages(trace, cuts))


def test_a_step_that_calls_other_modules_than_its_trace_is_told_so() -> None:
    class Branches(models.Chain):
        skips = False

        def run(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                if number != 1 or not self.skips:
                    x = layer(x)
            return x

    module = Branches()
    trace, cuts = named(module, "layers.1")
    plans = plan_stages(trace, cuts)
    replay = Replay(module)
    replay.wrap(plans[0].modules)
    module.skips = True
    with pytest.raises(StepMismatch, match=r"(?s)Stage 0 of 2 .*without reaching 'layers\.1'.*split=\["):
        replay.run(plans[0], lambda: module.training_step(batch, 0), (), CPU)
    module.skips = False
    (sent,) = replay.run(plans[0], lambda: module.training_step(batch, 0), (), CPU)
    assert torch.equal(sent, module.layers[1](module.layers[0](batch)))


def test_another_shape_than_in_the_trace_is_told_with_both() -> None:
    module = models.Chain()
    trace, cuts = named(module, "layers.1")
    plan = plan_stages(trace, cuts)[0]
    replay = Replay(module)
    replay.wrap(plan.modules)
    with pytest.raises(StepMismatch, match=r"'layers\.1' returned shape \(3, 4\) .* not \(2, 4\)"):
        replay.run(plan, lambda: module.training_step(torch.ones(3, 4), 0), (), CPU)


def test_wrappers_change_nothing_outside_of_a_stage_and_come_off() -> None:
    module = models.Chain()
    expected = module.run(batch)
    replay = Replay(module)
    replay.wrap({"layers.0", "layers.2"})
    replay.wrap({"layers.0", "layers.3"})
    assert torch.equal(module.run(batch), expected)
    twin = Case(make=lambda: module, microbatches=[batch], cuts=1).build()
    assert twin is module
    replay.unwrap()
    assert not any("forward" in vars(layer) for layer in module.modules())


def test_a_copy_of_a_wrapped_module_is_free_and_a_pickle_is_refused() -> None:
    module = models.Chain()
    replay = Replay(module)
    replay.wrap({"layers.1"})
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(twin.run(batch), torch.zeros(2, 4)) and not torch.equal(module.run(batch), torch.zeros(2, 4))
    with pytest.raises(AbsentError, match=r"layers\.1.*save_checkpoint"):
        pickle.dumps(module.layers)


def test_a_step_that_catches_everything_still_ends_at_its_cut() -> None:
    class Catches(models.Chain):
        def run(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                try:
                    x = layer(x)
                except BaseException:
                    x = x * 0.0
            return x

    module = Catches()
    trace, cuts = named(module, "layers.1")
    plan = plan_stages(trace, cuts)[0]
    replay = Replay(module)
    replay.wrap(plan.modules)
    (sent,) = replay.run(plan, lambda: module.training_step(batch, 0), (), CPU)
    assert torch.equal(sent, module.layers[1](module.layers[0](batch)))


def test_random_values_that_stages_would_draw_apart_are_refused_with_both_lines() -> None:
    class Noisy(Step):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def run(self, x: Tensor) -> Tensor:
            h = nn.functional.dropout(self.a(x), 0.5)
            noise = torch.randn_like(x)
            return self.c(self.b(h + noise)) - noise

    trace = trace_of(Noisy(), torch.randn(2, 4))
    cut = next(cut for cut in cuts_of(trace) if cut.call.name == "b")
    with pytest.raises(ValueError, match=r"randn_like at .* after dropout at .*nn.Dropout instead"):
        plan_stages(trace, [cut])
