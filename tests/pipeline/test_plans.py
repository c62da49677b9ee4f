"""Plans are made once for each kind of microbatch, fit the layout, and are remembered in a bounded number."""

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn

from lightning_shard.pipeline import plans as room
from lightning_shard.pipeline.layout import Layout, lay_out
from lightning_shard.pipeline.ownership import keep_own
from lightning_shard.pipeline.plans import Plans
from lightning_shard.pipeline.replay import Replay
from lightning_shard.pipeline.tracer import Tracer
from tests.pipeline.replay_models import Chain, Step
from tests.pipeline.replay_odd_models import ReadsItem
from tests.pipeline.replaying import CPU, alone, trace_of


class Counted(Tracer):
    """Counts the traces that it makes."""

    def trace(self, step: str, batch: Any) -> Any:
        vars(self)["made"] = [*vars(self).get("made", []), (step, tuple(batch.shape))]
        return super().trace(step, batch)


def plans_of(module: Any, batch: Tensor | None = None, split: Any = "auto") -> tuple[Plans, Counted, Layout, Replay]:
    batch = torch.ones(2, 4) if batch is None else batch
    tracer = Counted(module=module, device=CPU, precision=Precision())
    layout = lay_out(module, [trace_of(module, batch, fake=False)], 2, split, "flops", lambda stage: stage)
    replay = Replay(module)
    return Plans(layout, tracer, replay), tracer, layout, replay


def test_a_kind_is_traced_once() -> None:
    plans, tracer, _, replay = plans_of(Chain())
    first = plans.find("training_step", [torch.ones(2, 4), torch.zeros(2, 4), torch.ones(1, 4)])
    assert first[0] is first[1] is not first[2]
    assert plans.find("training_step", [torch.ones(1, 4)])[0] is first[2]
    assert vars(tracer)["made"] == [("training_step", (2, 4)), ("training_step", (1, 4))]
    assert first[0][0].sends[0].shape == (2, 4) and first[2][0].sends[0].shape == (1, 4)
    assert "forward" in vars(replay.module.layers[1])


def test_a_trace_that_was_made_already_is_used() -> None:
    module = Chain()
    plans, tracer, _, _ = plans_of(module)
    plans.add("training_step", torch.ones(2, 4), trace_of(module, torch.ones(2, 4)))
    plans.find("training_step", [torch.zeros(2, 4)])
    assert "made" not in vars(tracer)


def test_another_step_dtype_or_frozen_parameter_is_another_kind() -> None:
    module = Chain()
    plans, tracer, _, _ = plans_of(module)
    plans.find("training_step", [torch.ones(2, 4)])
    (evaluation,) = plans.find("validation_step", [torch.ones(2, 4)])
    assert not evaluation[1].receives[0].gradient
    assert len(vars(tracer)["made"]) == 2
    module.layers[0].requires_grad_(False)
    (half,) = plans.find("training_step", [torch.ones(2, 4)])
    assert half[1].receives[0].gradient
    module.layers[1].requires_grad_(False)
    (frozen,) = plans.find("training_step", [torch.ones(2, 4)])
    assert not frozen[1].receives[0].gradient
    assert len(vars(tracer)["made"]) == 4


def test_the_least_recently_used_kinds_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_MOST", 2)
    plans, tracer, _, _ = plans_of(Chain())
    for count in (1, 2, 1, 3, 1, 2):
        plans.find("training_step", [torch.ones(count, 4)])
    assert [shape[0] for _, shape in vars(tracer)["made"]] == [1, 2, 3, 2]


def test_new_shapes_are_traced_with_the_parameters_of_one_stage_only() -> None:
    for make in (Chain, ReadsItem):
        module = make()
        plans, _, layout, _ = plans_of(module)
        with alone():
            keep_own(module, layout, [1], CPU)
        (found,) = plans.find("training_step", [torch.ones(3, 4)])
        assert found[1].receives[0].shape == (3, 4) and found[1].receives[0].gradient


def test_a_parameter_that_a_later_batch_uses_elsewhere_is_named() -> None:
    class Grows(Step):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def run(self, x: Tensor) -> Tensor:
            y = self.c(self.b(self.a(x)))
            return self.a(y) if len(x) > 2 else y

    plans, _, _, _ = plans_of(Grows(), split=["b"])
    with pytest.raises(MisconfigurationException, match=r"'a\.weight' on stage 1.*it is on stage 0"):
        plans.find("training_step", [torch.ones(3, 4)])
