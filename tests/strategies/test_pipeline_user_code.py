"""Users' own code in a pipeline: batches of any kind, hooks, normalisation, chance, and what changes between epochs."""

import warnings
from collections import UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.strategies.pipeline_modules import (
    SCHEDULES,
    Dropping,
    Layers,
    Noisy,
    alone,
    assert_close,
    fit,
    on_ranks,
    pipeline,
    rows_of,
    same_on_all_ranks,
    seeded,
    trainer,
)
from tests.strategies.zero_modules import Trained, adamw, numbers

pytestmark = pytest.mark.ranks


class Hooked(nn.Module):
    """Puts a hook on what comes in, in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.firings = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(self.fired)
        return torch.tanh(self.layer(x))

    def fired(self, gradient: Tensor) -> None:
        self.firings += 1


class Watched(Trained):
    """Counts the firings of such hooks, and watches every layer by forward hooks of the user."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Hooked(), nn.Linear(4, 4), nn.Linear(4, 4))
        self.means: dict[int, list[float]] = {place: [] for place in range(5)}
        self.counts: list[int] = []
        for place, block in enumerate(self.blocks):
            block.register_forward_hook(lambda _, args, made, place=place: self.means[place].append(float(made.mean())))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.blocks(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.blocks(batch).square().mean())

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts.append(self.blocks[2].firings)  # type: ignore[arg-type]


class Normed(Trained):
    """Batch normalisation first."""

    def __init__(self, mean: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, momentum=0.1)
        self.norm.running_mean.fill_(mean)  # type: ignore[union-attr]
        self.layer, self.last = nn.Linear(1, 1), nn.Linear(1, 1)
        self.firings = 0
        self.norm.register_forward_hook(self.fired)

    def fired(self, *_: Any) -> None:
        self.firings += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.last(self.layer(self.norm(batch))).square().mean()


# --- batches of any kind ---


class Named(NamedTuple):
    x: Tensor
    names: list[str]


@dataclass
class Derived:
    x: Tensor
    half: Any = field(init=False)

    def __post_init__(self) -> None:
        self.half = self.x / 2


class OwnDict(UserDict):  # type: ignore[type-arg]
    """Like a dict, but none."""


class Checking(Layers):
    """Checks what it is given."""

    def __init__(self) -> None:
        super().__init__(adamw(1e-2))
        self.kinds: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kinds.append(type(batch).__name__)
        if isinstance(batch, Named):
            assert len(batch.names) == len(batch.x) and batch.names[0].startswith("row")
            x = batch.x
        elif isinstance(batch, Derived):
            assert torch.equal(batch.half, batch.x / 2)
            x = batch.x
        elif isinstance(batch, tuple):
            (x, _), (_, number) = batch
            assert number == 3
        else:
            x = batch["x"]
            assert batch.get("none") is None and len(batch["ids"]) == len(x) and batch["word"] == "constant"
        loss = self.loss(x)
        self.log("loss", loss)
        return loss


def containers() -> list[Any]:
    made: list[Any] = []
    for x in numbers(2):
        ids = [f"row {place}" for place in range(len(x))]
        plain = {"x": x, "none": None, "ids": ids, "word": "constant"}
        made += [plain, OwnDict(plain), Named(x, ids), Derived(x), ((x, x), (x.sum(1), 3))]
    return made


def test_batches_in_any_container() -> None:
    def run(key: str) -> Any:
        module = seeded(Checking)
        loader = DataLoader(containers(), batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]
        run = trainer(key)
        run.fit(module, loader)
        return sorted(set(module.kinds)), float(run.callback_metrics["loss"]), run.global_step

    assert same_on_all_ranks(run)[0] == ["Derived", "Named", "OwnDict", "dict", "tuple"]


# --- hooks, normalisation, chance ---


def test_hooks_of_the_user_fire_once_for_each_microbatch() -> None:
    def run(key: Any) -> Any:
        module = seeded(Watched)
        way = pipeline(key, microbatches=2, split=["blocks.1"]) if key != "auto" else key
        one = trainer(way, num_sanity_val_steps=0)
        one.fit(module, rows_of(numbers(3)), rows_of(numbers(1)))
        return module.counts, module.means

    counts, means = alone(run)
    assert counts == [1, 2, 3] and len(means[0]) == 4
    first, last = on_ranks(run, ["1f1b", "gpipe"])
    for key in ("1f1b", "gpipe"):
        assert last[key][0] == [2, 4, 6], key
        for rank, places in ((first, (0, 1)), (last, (3, 4))):
            for place in places:
                found = torch.tensor(rank[key][1][place]).view(4, -1)  # a batch has one value, or one a microbatch
                assert_close(found.mean(1), torch.tensor(means[place]), f"{key}, {place}")


def test_batch_normalisation_sees_each_row_once() -> None:
    def run(key: str) -> Any:
        found = []
        for mean in (0.0, 10.0):
            module = seeded(lambda mean=mean: Normed(mean))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                weights = fit(pipeline(microbatches=2), module, [torch.tensor([[0.0], [2.0], [4.0], [6.0]])])
            warned = [str(each.message) for each in caught if "batch normalisation" in str(each.message)]
            found.append((weights, module.firings, warned))
        return found

    for rank, ranks in enumerate(on_ranks(run)):
        (cold, firings, warned), (warm, _, _) = ranks["1f1b"]
        assert cold["norm.running_mean"].item() == pytest.approx(0.59)  # 0.1 * 1, then 0.9 * that + 0.1 * 5
        assert warm["norm.running_mean"].item() == pytest.approx(0.81 * 10 + 0.59)
        assert cold["norm.num_batches_tracked"].item() == 2
        assert firings == 2 or rank > 0
        assert rank > 0 or ("norm" in warned[0] and "microbatch" in warned[0])


class Kept(pl.Callback):
    """What each step returned."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.outputs.append({name: value.detach().clone() for name, value in outputs.items()})


def test_dropout_and_recomputation_see_one_mask() -> None:
    def run(key: Any) -> Any:
        schedule, recompute, epochs = key
        way = pipeline(schedule, microbatches=4, activation_checkpointing=recompute)
        kept = Kept()
        weights = fit(way, seeded(Dropping), [torch.ones(8, 500)], callbacks=[kept], max_epochs=epochs)
        return [value.item() for value in weights.values()], kept.outputs

    keys = [(name, recompute, 1) for name in ("1f1b", "zbv") for recompute in (False, True)]
    for found in on_ranks(run, [*keys, ("1f1b", False, 2)]):
        once = found[keys[0]][1][0]["made"]
        for key in keys:
            values, (output,) = found[key]
            loss = output["loss"].item()
            assert values == pytest.approx([1 - loss] * 4, abs=1e-5), key  # dL/dw is the loss
            assert loss == pytest.approx(1, abs=0.1) and loss != 1
            assert torch.equal(output["made"], once), key  # the same seed, the same run
        rows = once.view(8, 500)
        assert not any(torch.equal(rows[0], row) for row in rows[1:])
        _, (first, second) = found["1f1b", False, 2]
        assert torch.equal(first["made"], once) and not torch.equal(first["made"] != 0, second["made"] != 0)


def test_noise_used_on_both_sides_of_cuts_is_the_same() -> None:
    def run(key: str) -> float:
        kept, (batch,) = Kept(), numbers(1)
        fit(key, seeded(Noisy), [batch], callbacks=[kept])
        (output,) = kept.outputs
        made = batch
        for place in range(5):
            made = (0.5 + 0.2 * place) * (made + output["noise"])
        return (made * output["again"] - output["made"]).abs().max().item()

    assert alone(run) < 1e-5
    for found in on_ranks(run, SCHEDULES):
        for key, difference in found.items():
            assert difference < 1e-5, key


# --- what changes between epochs, and what comes twice ---


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.layers[:4])  # type: ignore[index]

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers[:4], optimizer, lr=0.01)  # type: ignore[index]


class Stream(IterableDataset[Tensor]):
    """Batches without a length."""

    def __iter__(self) -> Any:
        return iter(numbers(3))


def trained_only(module: pl.LightningModule) -> Any:
    return torch.optim.SGD([parameter for parameter in module.parameters() if parameter.requires_grad], lr=0.1)


def test_finetuning_streams_and_second_trainers() -> None:
    def run(key: str) -> Any:
        tuned = fit(key, seeded(lambda: Layers(trained_only)), numbers(2), callbacks=[Unfreeze()], max_epochs=2)
        stream = trainer(key, max_epochs=2, limit_train_batches=2)
        stream.fit(streamed := seeded(Layers), DataLoader(Stream(), batch_size=None))
        again = trainer(key)
        again.fit(streamed, rows_of(numbers(2)))
        (tested,) = again.test(streamed, rows_of(numbers(1)), verbose=False)
        return tuned, tested

    same_on_all_ranks(run, ["1f1b", "zero_bubble"])


# --- precision ---

DTYPES = {
    "32-true": torch.float32,
    "bf16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
    "64-true": torch.float64,
}


class Returning(Layers):
    """Hands out what it made."""

    def __init__(self) -> None:
        super().__init__(adamw(1e-3))
        self.inside: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        made = self(batch)
        return {"loss": (made - 1).square().mean(), "made": made.detach()}


class Types(pl.Callback):
    """The dtypes of outputs, gradients and optimizer states."""

    def __init__(self) -> None:
        self.seen: dict[str, set[str]] = {"made": set(), "state": set(), "gradient": set()}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = [parameter.grad for parameter in module.parameters()]
        self.seen["gradient"].update(str(gradient.dtype) for gradient in gradients if gradient is not None)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen["made"].add(str(outputs["made"].dtype))
        for values in trainer.optimizers[0].state.values():
            self.seen["state"].update(str(value.dtype) for value in values.values() if value.dim())


def test_precisions() -> None:
    def run(key: str) -> Any:
        found = {}
        for precision in DTYPES:
            types = Types()
            batches = [batch.double() if precision == "64-true" else batch for batch in numbers(2)]
            weights = fit(key, seeded(Returning), batches, callbacks=[types], precision=precision)
            found[precision] = (types.seen, weights)
        return found

    expected = alone(run)
    for found in on_ranks(run, ["1f1b", "zbv"]):
        for key, by_precision in found.items():
            for precision, (seen, weights) in by_precision.items():
                rough = 2e-2 if precision.startswith("bf16") else 1e-6
                assert seen == expected[precision][0], (key, precision)
                assert_close(weights, expected[precision][1], f"{key}, {precision}", atol=rough, rtol=rough)
                assert {value.dtype for value in weights.values()} == {DTYPES[precision]}
