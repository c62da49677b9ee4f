"""The Trainer's loop around the engine: clipping, accumulation, loaders, results of a step."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_shard import ZeROStrategy
from lightning_shard.testing import RankFailed, run_distributed
from tests.strategies.cases import assert_all_same, each, under
from tests.strategies.test_zero_odd_models import TwoHeads
from tests.strategies.zero_modules import STAGES, Classifier, Trained, adamw, classes, numbers, sgd
from tests.strategies.zero_runs import in_one_process, loader, on_each_rank, trainer, weights, world

pytestmark = pytest.mark.ranks


class Keep(pl.Callback):
    """Whole weights at the end of training, and how often some hooks were called."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.calls: dict[str, int] = {}

    def _count(self, hook: str) -> None:
        self.calls[hook] = self.calls.get(hook, 0) + 1

    def on_before_zero_grad(self, *_: Any) -> None:
        self._count("on_before_zero_grad")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._count("on_before_optimizer_step")

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.weights = weights(trainer)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], case: str = "") -> None:
    assert found.keys() == expected.keys(), case
    for name, value in expected.items():
        told = lambda message, name=name: f"{case}: {name}: {message}"  # noqa: E731
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-5, msg=told)


class Slope(Trained):
    """The gradient is the mean of the batch's rows, whatever the weight."""

    def __init__(self, width: int) -> None:
        super().__init__(sgd(1.0))
        self.w = nn.Parameter(torch.zeros(width))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (batch @ self.w).mean()


# --- clipping ---


def clipped(strategy: Any, **settings: Any) -> list[float]:
    keep = Keep()
    norm_five = torch.tensor([[3.0, 4.0]]).expand(2, 2)
    trainer(strategy, callbacks=[keep], **settings).fit(Slope(2), loader([norm_five]))
    return keep.weights["w"].tolist()


def test_clipping_by_the_trainer_or_by_the_config() -> None:
    def both(stage: int) -> list[list[float]]:
        by_config = ZeROStrategy(stage, config={"gradient_clipping": 0.5})  # type: ignore[arg-type]
        return [clipped(f"zero{stage}", gradient_clip_val=0.5), clipped(by_config)]

    expected = [pytest.approx([-0.3, -0.4], abs=1e-6)] * 2
    assert run_distributed(each, 2, (1, 2, 3), both) == [dict.fromkeys((1, 2, 3), expected)] * 2


def test_clipping_by_both_must_agree() -> None:
    def both(value: str) -> list[float]:
        return clipped(ZeROStrategy(2, config={"gradient_clipping": float(value)}), gradient_clip_val=0.5)

    assert on_each_rank(both, "0.5")[0] == pytest.approx([-0.3, -0.4], abs=1e-6)
    with pytest.raises(RankFailed, match=r"gradient_clipping=1\.0.*gradient_clip_val=0\.5"):
        on_each_rank(both, "1.0")


def test_clipping_by_value_is_refused() -> None:
    with pytest.raises(RankFailed, match=r"gradient_clip_algorithm='value'.*'norm'"):
        on_each_rank(lambda name: clipped(name, gradient_clip_val=2.0, gradient_clip_algorithm="value"), "zero2")


# --- accumulation ---


def test_accumulation_counts_as_the_trainer_does() -> None:
    def train(name: str) -> tuple[float, int, dict[str, int]]:
        keep = Keep()
        run = trainer(name, callbacks=[keep], accumulate_grad_batches=4)
        run.fit(Slope(1), loader([torch.full((2, 1), float(x)) for x in range(1, 9)]))
        return keep.weights["w"].item(), run.global_step, keep.calls

    names = ["zero2", "zero2_offload", "zero3"]
    calls = {"on_before_zero_grad": 2, "on_before_optimizer_step": 2}
    wanted = (pytest.approx(-(2.5 + 6.5)), 2, calls)
    assert run_distributed(each, 2, names, train) == [dict.fromkeys(names, wanted)] * 2


def test_accumulation_with_a_short_last_window() -> None:
    settings = {"accumulate_grad_batches": 3, "max_epochs": 2}
    names = ["zero1", "zero2_offload", "zero3"]
    assert_all_same(under(names, lambda: Classifier(adamw()), classes(5), **settings))


# --- ranks that differ ---


class HeadOfTheRank(TwoHeads):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.heads[world()[0]](self.trunk(batch)).square().mean()


@pytest.mark.parametrize("name", [*STAGES, "zero2_offload"])
def test_ranks_that_use_different_parameters_are_told(name: str) -> None:
    """Both heads are alike, so the engine alone would mix their gradients without an error."""
    with pytest.raises(RankFailed, match=r"'heads\.0\.weight' got a gradient on ranks \[0\] but not on ranks \[1\]"):
        on_each_rank(lambda name: trainer(name).fit(HeadOfTheRank(), loader(numbers())), name)


class HeadOfTheRankInTurn(TwoHeads):
    """Within one accumulation window every rank uses both heads."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.heads[(world()[0] + batch_idx) % 2](self.trunk(batch)).square().mean()


def test_stage_1_compares_whole_accumulation_windows() -> None:
    def train(name: str) -> dict[str, Tensor]:
        pl.seed_everything(0, verbose=False)
        keep = Keep()
        trainer(name, callbacks=[keep], accumulate_grad_batches=2).fit(HeadOfTheRankInTurn(), loader(numbers()))
        return keep.weights

    expected = on_each_rank(train, "ddp_find_unused_parameters_true")[0]
    for found in on_each_rank(train, "zero1"):
        assert_equal(found, expected)


# --- what a step returns, and what it gets ---


class Dropping(Trained):
    """Activation checkpointing must draw the same dropout mask twice; then the gradient is the loss, w being 1."""

    def __init__(self) -> None:
        super().__init__(sgd(1.0))
        self.w = nn.Parameter(torch.ones(1))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = checkpoint(lambda ones: nn.functional.dropout(self.w * ones, 0.5), batch[0], use_reentrant=False)
        loss = hidden.mean()
        self.losses.append(loss.item())
        return loss


def test_activation_checkpointing_draws_the_same_dropout() -> None:
    def train(name: str) -> tuple[float, float]:
        pl.seed_everything(world()[0], verbose=False)
        keep, module = Keep(), Dropping()
        trainer(name, callbacks=[keep]).fit(module, loader([torch.ones(2, 1000)]))
        return module.losses[0], keep.weights["w"].item()

    ranks = run_distributed(each, 2, STAGES, train)
    for name in STAGES:
        results = [rank[name] for rank in ranks]
        gradient = sum(loss for loss, _ in results) / 2
        assert results[0][0] != results[1][0], name
        assert all(weight == pytest.approx(1 - gradient, abs=1e-6) for _, weight in results), name


class ReturnsDict(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "extra": batch_idx}


class Compiled(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net[2] = torch.compile(self.net[2], backend="eager")


def test_dict_results() -> None:
    assert_all_same(under(STAGES, ReturnsDict, classes(3)))


def test_compiled_submodules() -> None:
    assert_all_same(under(["zero1", "zero2"], Compiled, classes(3)))
    with pytest.raises(RankFailed, match=r"'net\.2' comes from torch\.compile.*stage 3"):
        on_each_rank(lambda name: trainer(name).fit(Compiled(), loader(classes(2))), "zero3")


class ReturnsNone(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None


@pytest.mark.parametrize("ranks", [1, 2])
def test_none_is_refused(ranks: int) -> None:
    with pytest.raises(RankFailed, match=r"returning .?None"):
        on_each_rank(lambda name: trainer(name).fit(ReturnsNone(), loader(classes(2))), "zero2", ranks)


def test_a_gradient_that_is_not_finite_is_skipped_and_told() -> None:
    class NotFinite(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) * (float("nan") if batch_idx == 1 else 1.0)

    def train(name: str, skip: bool = False) -> tuple[dict[str, Tensor], list[str]]:
        pl.seed_everything(0, verbose=False)
        keep, batches = Keep(), classes(3)
        module = Classifier() if skip else NotFinite()
        run = trainer(name, callbacks=[keep])
        with pytest.warns() as caught:
            run.fit(module, loader([batches[0], batches[2]] if skip else batches))
        return keep.weights, [str(entry.message) for entry in caught]

    expected, _ = in_one_process(lambda name: train(name, skip=True))
    for rank, outcomes in enumerate(run_distributed(each, 2, ["zero1", "zero3", "zero2_offload"], train)):
        for name, (found, messages) in outcomes.items():
            assert_equal(found, expected, name)
            told = sum("at global step 1: the engine left this optimizer step out" in text for text in messages)
            assert told == (rank == 0), name


@dataclass
class Derived:
    x: Tensor
    sum: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.sum = self.x.sum()


class Pair(NamedTuple):
    x: Tensor
    y: Any


class Custom(dict[str, Any]):
    pass


def containers(x: Tensor) -> list[Any]:
    return [{"x": x, "none": None, "ids": ["a", "b"]}, Pair(x, None), Derived(x), Custom(x=x), (x, (x, "text"))]


class Containers(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"] if isinstance(batch, dict) else batch[0] if isinstance(batch, tuple) else batch.x
        assert repr(batch) == repr(containers(x)[batch_idx]), "another container than the loader gave"
        assert type(batch) is type(containers(x)[batch_idx])
        return self.net(x).square().mean()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(loader(numbers(5)))


class Streamed(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            batch = batch["a"] + batch["b"]
        return self.net(batch).square().mean()


def as_it_is(batch: Any) -> Any:
    return batch


def contained() -> DataLoader[Any]:
    x = next(iter(loader(numbers(1))))
    return DataLoader(containers(x), batch_size=None, collate_fn=as_it_is)  # type: ignore[arg-type]


LOADERS: dict[str, Any] = {
    "containers": (Containers, contained),
    "iterable": (Streamed, lambda: DataLoader(Stream(), batch_size=None)),
    "combined": (Streamed, lambda: CombinedLoader({"a": loader(numbers(4)), "b": loader(numbers(3, seed=9))})),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_loaders(kind: str) -> None:
    model, make = LOADERS[kind]

    def train(name: str) -> dict[str, Tensor]:
        pl.seed_everything(0, verbose=False)
        keep = Keep()
        trainer(name, callbacks=[keep]).fit(model(), make())
        return keep.weights

    expected = in_one_process(train)
    for found in run_distributed(each, 2, STAGES, train):
        for name, kept in found.items():
            assert_equal(kept, expected, name)


def test_one_process() -> None:
    names = ["zero1", "zero2_offload", "zero3", "zero3_offload_params"]
    assert_all_same(under(names, lambda: Classifier(adamw()), classes(3)), ranks=1)
