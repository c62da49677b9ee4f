"""fit, validate, test and predict on one Trainer, each also alone; and what is left of the engine afterwards."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shard.testing import RankFailed, run_distributed
from tests.strategies.cases import each
from tests.strategies.zero_modules import Classifier, adamw, classes
from tests.strategies.zero_runs import in_one_process, loader, on_each_rank, trainer, world

pytestmark = pytest.mark.ranks

NAMES = ["zero1", "zero2", "zero3", "zero3_offload_params"]


class Watched(Classifier):
    """Counts calls of a forward hook that the user has put on a layer."""

    def __init__(self) -> None:
        super().__init__(adamw())
        self.calls = 0
        self.net[2].register_forward_hook(self._called)

    def _called(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.calls += 1


def assert_same_rows(by_rank: list[list[Tensor]], predicted: list[Tensor], name: str) -> None:
    """Every rank's rows of each batch, put together again, are those of one process."""
    together = torch.cat([torch.cat(parts) for parts in zip(*by_rank, strict=True)])
    torch.testing.assert_close(together, torch.cat(predicted), msg=lambda message: f"{name}: {message}")


def test_all_stages_on_one_trainer_and_a_second_fit() -> None:
    def run(name: str) -> tuple[list[float], list[Tensor], list[int]]:
        pl.seed_everything(0, verbose=False)
        module, batches = Watched(), loader(classes(3))
        linear = nn.functional.linear
        one = trainer(name, num_sanity_val_steps=0)
        one.fit(module, batches, batches)
        values = [one.callback_metrics["val_loss"].item()]
        calls = [module.calls]
        values += [metrics[0]["val_loss"] for metrics in [one.validate(module, batches, verbose=False)]]
        values += [metrics[0]["test_loss"] for metrics in [one.test(module, batches, verbose=False)]]
        predicted = one.predict(module, batches)
        calls.append(module.calls)
        one.fit_loop.max_epochs = 2
        one.fit(module, batches, batches)
        values += [metrics[0]["val_loss"] for metrics in [one.validate(module, batches, verbose=False)]]
        calls.append(module.calls)
        assert nn.functional.linear is linear, "the engine's replacement of F.linear outlives the run"
        assert "zero_grad" not in vars(module)
        return values, predicted, calls

    values, predicted, calls = in_one_process(run)
    assert calls == [6, 15, 24]
    ranks = run_distributed(each, 2, NAMES, run)
    for name in NAMES:
        for found, _, counted in (rank[name] for rank in ranks):
            assert found == pytest.approx(values, abs=1e-6, rel=1e-5), name
            assert counted == calls, name
        assert_same_rows([rank[name][1] for rank in ranks], predicted, name)


def test_each_stage_without_a_fit() -> None:
    def run(name: str) -> tuple[list[float], list[Tensor]]:
        def module() -> Classifier:
            pl.seed_everything(0, verbose=False)
            return Classifier()

        batches = loader(classes(2))
        values = [
            trainer(name).validate(module(), batches, verbose=False)[0]["val_loss"],
            trainer(name).test(module(), batches, verbose=False)[0]["test_loss"],
        ]
        return values, trainer(name).predict(module(), batches)

    values, predicted = in_one_process(run)
    ranks = run_distributed(each, 2, NAMES, run)
    for name in NAMES:
        for rank in ranks:
            assert rank[name][0] == pytest.approx(values, abs=1e-6, rel=1e-5), name
        assert_same_rows([rank[name][1] for rank in ranks], predicted, name)


@pytest.mark.parametrize("name", ["zero1", "zero2_offload"])
def test_a_module_trains_on_under_other_strategies(name: str) -> None:
    """Nothing of the engine is in the way of a later plain loop over the same module."""

    def run(name: str) -> float:
        pl.seed_everything(0, verbose=False)
        module, batches = Classifier(), loader(classes(3))
        alone = world()[1] == 1
        for strategy in (name, "ddp", "zero3"):
            trainer("auto" if alone else strategy).fit(module, batches)
        return trainer("auto" if alone else "zero3").validate(module, batches, verbose=False)[0]["val_loss"]

    expected = in_one_process(run)
    assert on_each_rank(run, name) == [pytest.approx(expected, abs=1e-6, rel=1e-5)] * 2


def test_partitions_of_stage_3_are_not_taken_for_weights() -> None:
    def run(name: str) -> None:
        module, batches = Classifier(), loader(classes(2))
        trainer("zero3").fit(module, batches)
        trainer(name).fit(module, batches)

    with pytest.raises(RankFailed, match=r"'log_scale' is still partitioned by an earlier stage-3 run"):
        on_each_rank(run, "zero2")


def test_device_contexts_work_after_a_run_that_used_one_inside() -> None:
    """The engine swaps torch's factory functions while a module is built, and torch caches what it finds then."""

    def run(name: str) -> bool:
        class Inside(Classifier):
            def configure_model(self) -> None:
                with torch.device("cpu"):
                    self.shift = nn.Linear(3, 3)

        trainer(name, max_epochs=1).fit(Inside(), loader(classes(1)))
        with torch.device("meta"):
            return nn.MultiheadAttention(4, 2).in_proj_weight.is_meta

    assert on_each_rank(run, "zero3") == [True, True]
