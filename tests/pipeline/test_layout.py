"""Where a module is cut, which stage has which parameter, and how other steps fit to it."""

import warnings
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_shard.pipeline.layout import Layout, lay_out, matching_cuts
from tests.pipeline import replay_models as models
from tests.pipeline import replay_rare_models as rare
from tests.pipeline.replay_models import Step, rows
from tests.pipeline.replaying import cuts_of, trace_of

batch = rows()[0]


def layout_of(module: Any, stages: int = 2, *, steps: Any = ("training_step",), **settings: Any) -> Layout:
    traces = [trace_of(module, batch, step) for step in steps]
    chosen = {"split": "auto", "balance": "flops", "rank_of": lambda stage: stage, **settings}
    return lay_out(module, traces, stages, **chosen)


class Uneven(Step):
    """Layers of very unequal sizes, one without parameters that keeps much, and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.spare = nn.Linear(4, 4, bias=False)
        self.wide = nn.Linear(4, 512, bias=False)
        self.act = nn.Sequential(*(nn.Tanh() for _ in range(40)))
        self.narrow = nn.Linear(512, 4, bias=False)
        self.table = nn.Embedding(9000, 4)
        self.end = nn.Linear(4, 4, bias=False)

    def run(self, x: Tensor) -> Tensor:
        x = self.narrow(self.act(self.wide(self.a(x))))
        return self.end(x + self.table(torch.arange(len(x))))


def test_each_parameter_belongs_to_the_stages_that_use_it() -> None:
    layout = layout_of(models.Chain())
    assert layout.cuts == [(("layers.1", 0),)] and layout.stages == 2
    assert layout.owners == {
        **{f"layers.{number}.{kind}": (0,) for number in (0, 1) for kind in ("weight", "bias")},
        **{f"layers.{number}.{kind}": (1,) for number in (2, 3) for kind in ("weight", "bias")},
    }
    assert layout.tied() == {}


def test_an_unused_parameter_stays_with_the_one_before_it() -> None:
    layout = layout_of(Uneven(), split=["wide"])
    assert layout.owners["spare.weight"] == layout.owners["a.weight"] == (0,)
    assert layout.owners["end.weight"] == (1,)


@pytest.mark.parametrize(("balance", "last"), [("flops", "wide"), ("parameters", "narrow"), ("memory", "narrow")])
def test_the_automatic_split_evens_out_what_it_is_told_to(balance: str, last: str) -> None:
    (keys,) = layout_of(Uneven(), balance=balance).cuts
    assert keys[-1][0] == last if last != "wide" else keys[-1][0] in ("wide", "act", *(f"act.{n}" for n in range(40)))


def test_memory_counts_what_autograd_keeps() -> None:
    class Keeps(Step):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.expand = nn.Linear(4, 64)
            self.acts = nn.Sequential(*(nn.Tanh() for _ in range(200)))
            self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

        def run(self, x: Tensor) -> Tensor:
            return self.layers(self.acts(self.expand(self.first(x))))

    given = torch.ones(64, 4)
    module = Keeps()
    for balance, prefix in (("parameters", "layers."), ("memory", "acts.")):
        layout = lay_out(module, [trace_of(module, given)], 2, "auto", balance, lambda stage: stage)
        assert layout.cuts[0][0][0].startswith(prefix), balance


def test_named_cuts_are_taken_and_wrong_names_are_told_with_near_ones_and_reasons() -> None:
    layout = layout_of(models.Skips(), 3, split=["down.0", "middle"])
    assert [keys[-1][0] for keys in layout.cuts] == ["down.0", "middle"]
    with pytest.raises(MisconfigurationException, match=r"down\.O.*down\.0"):
        layout_of(models.Skips(), 2, split=["down.O"])
    with pytest.raises(MisconfigurationException, match=r"no stage can end behind 'layers\.1'.*keeps as an attribute"):
        layout_of(rare.Collects(), 2, split=["layers.1"])


def test_the_name_of_an_inner_module_means_the_cut_at_the_same_place() -> None:
    class Nested(Step):
        def __init__(self) -> None:
            super().__init__()
            self.front = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.back = nn.Linear(4, 4)

        def run(self, x: Tensor) -> Tensor:
            return self.back(self.front(x))

    for name in ("front", "front.1"):
        assert layout_of(Nested(), split=[name]).cuts == [(("front.1", 0), ("front", 0))]


def test_too_few_places_are_told_with_what_there_is_and_why_not_more() -> None:
    with pytest.raises(MisconfigurationException, match=r"(?s)5.*layers\.0"):
        layout_of(models.Chain(), 6)
    with pytest.raises(MisconfigurationException, match="neither returns nor keeps"):
        layout_of(rare.Collects(), 4)


def test_a_step_that_calls_modules_more_often_is_cut_where_its_parameters_allow() -> None:
    class EachTwice(models.Chain):
        def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = batch
            for layer in self.layers:
                x = layer(layer(x))
            return x

    module = EachTwice()
    layout = layout_of(module, steps=("training_step", "validation_step"))
    (cut,) = matching_cuts(trace_of(module, batch, "validation_step"), layout)
    assert cut.call.key == ("layers.1", 1)
    assert not layout.tied()


def test_a_step_in_the_opposite_order_costs_copies_and_a_warning() -> None:
    class Opposite(models.Chain):
        def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = batch
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    with pytest.warns(UserWarning, match="are used on several pipeline stages and kept on each"):
        layout = layout_of(Opposite(), steps=("training_step", "validation_step"))
    stages = {name: layout.owners[f"{name}.weight"] for name in ("layers.0", "layers.1", "layers.2", "layers.3")}
    assert stages == {"layers.0": (0, 1), "layers.1": (0,), "layers.2": (0, 1), "layers.3": (0, 1)}


def test_a_step_without_such_a_place_is_refused_with_both_steps_places() -> None:
    class Apart(models.Chain):
        def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layers[3](batch)

    with pytest.raises(
        MisconfigurationException, match=r"validation_step cannot be cut where stage 0 ends, behind 'layers\.1'"
    ):
        layout_of(Apart(), 3, steps=("training_step", "validation_step"), split=["layers.1", "layers.2"])


def test_matching_cuts_follow_each_other() -> None:
    module = models.Chain(6)
    layout = layout_of(module, 3)
    cuts = matching_cuts(trace_of(module, batch, "validation_step"), layout)
    assert [cut.keys for cut in cuts] == layout.cuts and cuts[0].time < cuts[1].time


def test_many_copies_are_warned_about_with_the_largest() -> None:
    class Twice(Step):
        def __init__(self) -> None:
            super().__init__()
            self.big, self.small = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

        def run(self, x: Tensor) -> Tensor:
            return self.big(self.small(self.big(x)))

    with pytest.warns(UserWarning, match=r"2 parameters, such as 'big\.weight'.*20 elements beyond the module's 36"):
        layout = layout_of(Twice(), split=["small"])
    assert layout.tied() == {"big.weight": (0, 1), "big.bias": (0, 1)}
    with warnings.catch_warnings(action="error"):
        layout_of(models.Chain())


def test_a_stage_without_parameters_is_warned_about() -> None:
    class Thin(Step):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.act, self.b = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)

        def run(self, x: Tensor) -> Tensor:
            return self.b(self.act(self.a(x)))

    with pytest.warns(UserWarning, match="stage 1 has no parameters"):
        layout_of(Thin(), 3, split=["a", "act"])


def test_buffers_belong_to_the_last_stage_that_calls_their_module() -> None:
    class Normed(Step):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.first = nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.b, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.register_buffer("steps", torch.zeros(()))

        def run(self, x: Tensor) -> Tensor:
            return self.second(self.b(self.first(self.a(x))))

    buffers = layout_of(Normed(), split=["first"]).buffers
    assert buffers["first.running_mean"] == 0 and buffers["second.running_var"] == 1 and buffers["steps"] == 1


def test_a_buffer_changed_behind_a_cut_and_read_before_it_is_refused() -> None:
    class Center(Step):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("center", torch.zeros(4))

        def run(self, x: Tensor) -> Tensor:
            y = self.b(self.a(x - self.center))
            self.center.mul_(0.9).add_(y.detach().mean(0))
            return y

    with pytest.raises(MisconfigurationException, match=r"'center' is changed on stage 1 and read on stage 0"):
        layout_of(Center(), split=["a"])


def test_layouts_that_differ_have_other_digests() -> None:
    one, same, other = layout_of(models.Chain()), layout_of(models.Chain()), layout_of(models.Chain(6))
    assert one.digest() == same.digest() != other.digest()
    assert layout_of(models.Chain(), split=["layers.0"]).digest() != one.digest()


def test_the_table_shows_every_stage() -> None:
    layout = layout_of(models.Skips(), 3, split=["down.0", "middle"], rank_of=lambda stage: stage % 2)
    lines = layout.table.splitlines()
    assert len(lines) == 4
    shown = [line.split() for line in lines[1:]]
    assert [(row[0], row[1], row[2], row[3]) for row in shown] == [
        ("0", "0", "down.0", "down.0"),
        ("1", "1", "down.1", "middle"),
        ("2", "0", "up.0", "up.2"),
    ]
    parameters = {cut.call.name: cut for cut in cuts_of(trace_of(models.Skips(), batch))}
    assert str(parameters["middle"].crossing_bytes) in lines[2]
