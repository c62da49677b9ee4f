"""A microbatch of each step to come, taken without taking it from the run."""

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_shard.pipeline.samples import sample_microbatches
from tests.pipeline.replay_models import Chain

rows = torch.arange(48.0).view(12, 4)


class Sampling(Chain):
    """Takes samples before its run, and notes what it is given."""

    def __init__(self, microbatches: int = 4) -> None:
        super().__init__()
        self.microbatches = microbatches
        self.samples: list[tuple[str, Any]] = []
        self.given: list[Any] = []
        self.state: Tensor | None = None

    def take(self) -> None:
        if self.trainer.training:
            self.trainer.fit_loop.setup_data()  # draws the loaders' seeds, in any run
        before = torch.get_rng_state()
        self.samples = list(sample_microbatches(self.trainer, self, self.microbatches))
        assert torch.equal(torch.get_rng_state(), before), "the run's random numbers would change"

    on_fit_start = on_validation_start = on_test_start = on_predict_start = take

    def note(self, batch: Any) -> Tensor:
        self.given.append(batch)
        return self.run(
            batch["x"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch
        ).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.note(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note(batch)

    test_step = predict_step = validation_step


def trainer(**settings: Any) -> pl.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(accelerator="cpu", max_epochs=1, num_sanity_val_steps=0, **quiet, **settings)


def loader(size: int = 8, **settings: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(rows), batch_size=size, **settings)


class Stream(IterableDataset[Tensor]):
    """Begins anew each time; counts how many items were read."""

    def __init__(self, count: int = 12) -> None:
        self.count, self.read = count, 0

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.count):
            self.read += 1
            yield rows[number]


def test_a_fit_gives_a_microbatch_for_training_and_one_for_each_validation_loader() -> None:
    module = Sampling()
    trainer().fit(module, loader(8), [loader(4), loader(12)])
    assert [(step, sample.rows, sample.batch[0].shape) for step, sample in module.samples] == [
        ("training_step", 2, (2, 4)),
        ("validation_step", 1, (1, 4)),
        ("validation_step", 3, (3, 4)),
    ]
    assert torch.equal(module.samples[0][1].batch[0], rows[:2])
    assert len(module.given) == 2 + 3 + 1, "no batch is missed in the run"
    assert torch.equal(module.given[0][0], rows[:8])


@pytest.mark.parametrize("step", ["validate", "test", "predict"])
def test_other_runs_give_their_own_step(step: str) -> None:
    module = Sampling()
    getattr(trainer(), step)(module, loader(), **({} if step == "predict" else {"verbose": False}))
    assert [name for name, _ in module.samples] == [f"{'validation' if step == 'validate' else step}_step"]


def test_a_fit_without_validation_asks_no_validation_loader() -> None:
    module = Sampling()
    trainer(limit_val_batches=0).fit(module, loader(), loader())
    assert [step for step, _ in module.samples] == ["training_step"]


def test_a_loader_without_batches_is_left_out_as_the_trainer_leaves_its_loop_out() -> None:
    module = Sampling()
    empty: DataLoader[Any] = DataLoader(TensorDataset(rows[:0]), batch_size=4)
    trainer().fit(module, loader(), empty)
    assert [step for step, _ in module.samples] == ["training_step"]


def test_a_batch_that_does_not_divide_gives_a_microbatch_of_each_size() -> None:
    module = Sampling()
    trainer(limit_val_batches=0).fit(module, loader(6))
    assert [sample.rows for _, sample in module.samples] == [2, 1]


def test_a_stream_is_read_apart_from_the_run() -> None:
    module, stream = Sampling(2), Stream()
    trainer().fit(module, DataLoader(stream, batch_size=6))
    ((step, sample),) = module.samples
    assert step == "training_step" and torch.equal(sample.batch, rows[:3])
    assert torch.equal(torch.cat(module.given), rows), "the run sees the stream from its beginning"


def test_a_stream_of_whole_batches_is_taken_as_it_is() -> None:
    class Batches(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield {"x": rows[:8], "name": "first"}
            yield {"x": rows[8:], "name": "second"}

    module = Sampling()
    trainer().fit(module, DataLoader(Batches(), batch_size=None))
    ((_, sample),) = module.samples
    assert sample.batch["name"] == "first" and sample.rows == 2
    assert [batch["name"] for batch in module.given] == ["first", "second"]


def test_anything_that_gives_batches_anew_is_a_loader_too() -> None:
    class Batches:
        def __iter__(self) -> Iterator[Tensor]:
            yield from (rows[:6], rows[6:])

    module = Sampling(3)
    trainer().fit(module, Batches())
    assert module.samples[0][1].batch.tolist() == rows[:2].tolist() and len(module.given) == 2


def test_batches_go_through_the_modules_own_hooks_and_the_precision() -> None:
    class Moves(Sampling):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return {"x": batch[0] * 2.0}

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {"x": batch["x"] + 1.0}

    module = Moves()
    trainer(precision="64-true").fit(module, loader())
    sample = module.samples[0][1].batch["x"]
    assert sample.dtype == torch.float64 and torch.equal(sample, rows[:2].double() * 2 + 1)


def test_a_shuffled_loader_gives_its_first_items() -> None:
    module = Sampling()
    trainer().fit(module, loader(shuffle=True))
    assert module.samples[0][1].rows == 2


def once() -> Iterator[Tensor]:
    yield rows[:8]


class Empty(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(())


@pytest.mark.parametrize(
    ("make", "kind"), [(once, "generator"), (lambda: DataLoader(Empty(), batch_size=4), "DataLoader")]
)
def test_a_stream_that_can_be_read_only_once_is_refused(make: Callable[[], Any], kind: str) -> None:
    with pytest.raises(MisconfigurationException, match=rf"(?s)training_step.*\({kind}\).*new\s+iterator"):
        trainer().fit(Sampling(), make())


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    uneven = loader(collate_fn=lambda items: [torch.stack([item[0] for item in items]), torch.ones(3)])
    with pytest.raises(MisconfigurationException, match=r"batch\[0\] has 8 rows and batch\[1\] has 3"):
        trainer().fit(Sampling(), uneven)
