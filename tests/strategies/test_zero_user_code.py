"""What user code does to weights, gradients and state dicts behind the engine's back: right, or refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard import ZeROStrategy
from lightning_shard.testing import RankFailed, run_distributed
from tests.strategies.cases import assert_all_same, under
from tests.strategies.zero_modules import STAGES, Classifier, Trained, adamw, classes, numbers, sgd
from tests.strategies.zero_runs import loader, on_each_rank, trainer

pytestmark = pytest.mark.ranks


class Clamped(Classifier):
    """Clamps a weight after every batch, as a critic does, and starts from other weights than it was built with."""

    def on_train_start(self) -> None:
        with torch.no_grad():
            self.net[0].weight.mul_(0.5)

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.net[2].weight.clamp_(-0.1, 0.1)


def test_changes_in_place_reach_the_master_weights() -> None:
    class ClampedBeforeStep(Clamped):
        def on_train_batch_end(self, *args: Any) -> None:
            if self.trainer.global_step < 4:  # the last one would come after the engine's last look
                super().on_train_batch_end()

    assert_all_same(under(["zero1", "zero2", "zero2_offload"], ClampedBeforeStep, classes(5)))


def test_at_stage_3_a_change_in_place_is_refused_by_name() -> None:
    with pytest.raises(RankFailed, match=r"'net\.0\.weight' was changed in place.*whole_parameters"):
        on_each_rank(lambda name: trainer(name, max_epochs=1).fit(Clamped(), loader(classes(2))), "zero3")


class Teacher(Trained):
    """A frozen teacher follows the student by a moving average."""

    def __init__(self) -> None:
        super().__init__(sgd())
        self.student = nn.Linear(4, 5)
        self.teacher = nn.Linear(4, 5)
        self.teacher.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.student(batch) - self.teacher(batch).tanh()).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        strategy = self.trainer.strategy
        if not isinstance(strategy, ZeROStrategy):
            self.follow()
            return
        with strategy.whole_parameters(self.parameters()):
            self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.lerp_(its, 0.5)
        self.student.bias.clamp_(-0.05, 0.05)


def test_whole_parameters_moves_a_teacher_and_clamps() -> None:
    assert_all_same(under([*STAGES, "zero3_offload"], Teacher, numbers(5)))


class ClipsByHand(Classifier):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.trainer.global_step % 2 == 0:  # every other step only: the value must not stay
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class ClipsManually(Classifier):
    def __init__(self) -> None:
        super().__init__(sgd())
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()
        return loss


def test_clip_gradients_reaches_the_engine() -> None:
    names = [*STAGES, "zero3_offload"]
    assert_all_same(under(names, ClipsByHand, classes(5)) | under(names, ClipsManually, classes(5)))


class Wide(Trained):
    """A complex rotary table and a float64 counter."""

    def __init__(self) -> None:
        super().__init__(sgd())
        self.net = nn.Linear(4, 4)
        self.register_buffer("turn", torch.polar(torch.ones(2), torch.tensor([0.5, 2.0])), persistent=False)
        self.register_buffer("count", torch.tensor(2.0**24, dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.count += 1
        turned = torch.view_as_real(torch.view_as_complex(self.net(batch).view(-1, 2, 2)) * self.turn)
        return (turned * (self.count - 2.0**24).float()).sin().mean()


def test_wide_buffers_keep_their_values() -> None:
    assert_all_same(under(STAGES, Wide, numbers(3)))


def test_a_state_dict_after_stage_3_is_no_dictionary_of_empty_tensors() -> None:
    def run(name: str) -> tuple[str, int, bool]:
        module = Classifier(adamw())
        run = trainer(name, max_epochs=1)
        run.fit(module, loader(classes(2)))
        try:
            module.net.state_dict()
            message = "no error"
        except RuntimeError as error:
            message = str(error)
        whole = run.strategy.full_state_dict()
        run.validate(module, loader(classes(2)), verbose=False)
        return message, whole["net.0.weight"].numel(), bool(whole["net.0.weight"].abs().sum() > 0)

    for message, elements, filled in on_each_rank(run, "zero3"):
        assert "'0.weight' is empty on every rank" in message and "full_state_dict" in message
        assert elements == 17 * 13 and filled


class OverridesBackward(Classifier):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 2).backward()


class Sparse(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3, sparse=True)


class NoElements(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        (OverridesBackward, "zero2", "overrides `backward`"),
        (Sparse, "zero1", "'embed' makes sparse gradients"),
        (NoElements, "zero3", "'nothing' has no elements"),
    ],
)
def test_refused_before_the_first_step(model: type[Trained], name: str, message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        run_distributed(lambda: trainer(name, max_epochs=1).fit(model(), loader(classes(1))), 2)


def test_reordered_partitions_are_refused() -> None:
    config = {"zero_optimization": {"round_robin_gradients": True}}
    with pytest.raises(RankFailed, match=r"round_robin_gradients=True.*mixed up"):
        run_distributed(
            lambda: trainer(ZeROStrategy(stage=2, config=config), max_epochs=1).fit(Classifier(), loader(classes(1))),
            2,
        )


@pytest.mark.parametrize(
    "arguments",
    [
        {"stage": True},
        {"stage": 3.0},
        {"stage": "3"},
        {"offload": "cpu"},
        {"offload": {"optimizer": "cpu"}},
        {"activation_checkpointing": True},
        {"zero_plus_plus": True},
        {"bucket_elements": 1e6},
        {"bucket_elements": "5"},
        {"overlap_comm": "no"},
    ],
    ids=str,
)
def test_arguments_of_another_kind_are_refused_when_the_strategy_is_made(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(Exception, match=rf"ZeROStrategy\({name}="):
        ZeROStrategy(**arguments)
