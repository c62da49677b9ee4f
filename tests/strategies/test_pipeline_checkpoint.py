"""Checkpoints of a pipeline, which hold what those of one process hold."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shard.checkpoint.assemble import load_whole
from tests.strategies.pipeline_modules import (
    Layers,
    alone,
    assert_close,
    on_ranks,
    pipeline,
    rows_of,
    seeded,
    trainer,
)
from tests.strategies.zero_modules import Trained, adamw, numbers

pytestmark = pytest.mark.ranks


def wide() -> Layers:
    return Layers(adamw(1e-2), width=5, depth=6)


ROWS = numbers(3, width=5)


class States(pl.Callback):
    """Weights and optimizer states at the end, whole."""

    def __init__(self) -> None:
        self.found: tuple[dict[str, Tensor], dict[str, Any]] = ({}, {})

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        if hasattr(strategy, "full_optimizer_state"):
            self.found = (strategy.full_state_dict(), strategy.full_optimizer_state())
            return
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        (optimizer,) = trainer.optimizers
        states = {names[id(parameter)]: dict(values) for parameter, values in optimizer.state.items()}
        self.found = (dict(module.state_dict()), states)


def train(
    strategy: Any, module: pl.LightningModule, epochs: int, *, load: Any = None, save: Any = None, **settings: Any
) -> Any:
    """Train to the end of ``epochs`` epochs, and save."""
    states = States()
    run = trainer(strategy, callbacks=[states], max_epochs=epochs, **settings)
    run.fit(module, rows_of(ROWS), ckpt_path=load)
    if save is not None:
        run.save_checkpoint(save)
    return states.found


# --- from any number of stages to any other ---

TWO: dict[str, Any] = {
    "1f1b": pipeline(),
    "zbv": pipeline("zbv"),
    "interleaved": pipeline("interleaved"),
}
FOUR: dict[str, Any] = {
    "four stages": pipeline(),
    "two by two": pipeline(stages=2),
    "sharded": pipeline(stages=2, data_parallel="shard"),
}


def saving(ways: dict[str, Any], folder: Path) -> Any:
    return lambda key: train(ways.get(key, key), seeded(wide), 1, save=folder / f"{key}.ckpt")


def resuming(ways: dict[str, Any], folder: Path, sources: list[str]) -> Any:
    def run(key: str) -> dict[str, Any]:
        made = ways.get(key, key)
        return {name: train(made, seeded(wide, 99), 2, load=folder / f"{name}.ckpt") for name in sources}

    return run


def test_resuming_on_any_number_of_stages(tmp_path: Path) -> None:
    expected = alone(lambda key: train(key, seeded(wide), 2))
    assert {int(state["step"]) for state in expected[1].values()} == {6}
    saved = alone(saving({}, tmp_path))
    for found in [*on_ranks(saving(TWO, tmp_path), TWO), *on_ranks(saving(FOUR, tmp_path), FOUR, ranks=4)]:
        for key, states in found.items():
            assert_close(states, saved, key)
    sources = ["auto", *TWO, *FOUR]
    for found in on_ranks(resuming(TWO, tmp_path, sources), TWO):
        assert_close(found, {key: dict.fromkeys(sources, expected) for key in TWO}, "two ranks")
    for found in on_ranks(resuming(FOUR, tmp_path, ["auto", "1f1b", "four stages", "sharded"]), FOUR, ranks=4):
        for key, states in found.items():
            assert_close(states, dict.fromkeys(states, expected), f"four ranks, {key}")
    assert_close(alone(resuming({}, tmp_path, sources)), dict.fromkeys(sources, expected), "one process")
    for key in sources:
        plain = Layers.load_from_checkpoint(tmp_path / f"{key}.ckpt", optimizer=None, width=5, depth=6)
        assert_close(dict(plain.state_dict()), saved[0], key)


# --- what else is in a file ---


class Noted(Layers):
    """Edits its checkpoint, has a buffer that its steps count up, and a compiled layer."""

    def __init__(self, compiled: bool = True) -> None:
        super().__init__(adamw(1e-2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("dropped", torch.ones(2))
        self.note = 0
        if compiled:
            self.layers[1] = torch.compile(self.layers[1], backend="eager")
            self.layers[4].compile(backend="eager")

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = 7
        checkpoint.get("state_dict", {}).pop("dropped", None)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"]
        checkpoint["state_dict"]["dropped"] = torch.full((2,), 5.0)


class Counter(pl.Callback):
    """A callback with a state."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


def noted(path: Path) -> Any:
    def run(key: str) -> Any:
        rows = rows_of(numbers(2))
        trainer(key, callbacks=[saver := Counter()]).fit(module := seeded(Noted), rows)
        assert saver.batches == 2
        module.trainer.save_checkpoint(path / f"{key}.ckpt")
        resumed, counter, states = seeded(Noted, 99), Counter(), States()
        run = trainer(key, callbacks=[counter, states], max_epochs=2)
        run.fit(resumed, rows, ckpt_path=path / f"{key}.ckpt")
        return resumed.note, counter.batches, states.found[0]

    return run


def test_hooks_callbacks_buffers_and_compiled_layers(tmp_path: Path) -> None:
    expected = alone(noted(tmp_path))
    assert expected[:2] == (7, 4) and int(expected[2]["count"]) == 4 and expected[2]["dropped"].tolist() == [5.0, 5.0]
    for found in on_ranks(noted(tmp_path), ["1f1b", "zbv"]):
        for key, value in found.items():
            assert_close(value, expected, key)
    written = {key: load_whole(tmp_path / f"{key}.ckpt") for key in ("auto", "1f1b", "zbv")}
    for key, checkpoint in written.items():
        assert checkpoint["state_dict"].keys() == written["auto"]["state_dict"].keys(), key
        assert checkpoint.keys() == written["auto"].keys(), key
        assert_close(checkpoint["optimizer_states"], written["auto"]["optimizer_states"], key)


class Tied(Trained):
    """First and last layer share a weight."""

    def __init__(self) -> None:
        super().__init__(adamw(1e-2))
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.between = Layers(depth=4)
        self.last.weight = self.first.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.last(self.between(self.first(batch))) - 1).square().mean()


def test_tied_weights_are_saved_as_one_process_saves_them(tmp_path: Path) -> None:
    def run(key: str) -> Any:
        states = States()
        one = trainer(key, callbacks=[states])
        one.fit(seeded(Tied), rows_of(numbers(3)))
        one.save_checkpoint(tmp_path / f"{key}.ckpt")
        return states.found

    expected = alone(run)
    for found in on_ranks(run, ["1f1b", "zbv"]):
        for key, value in found.items():
            assert_close(value, expected, key)
    files = [load_whole(tmp_path / f"{key}.ckpt") for key in ("auto", "1f1b", "zbv")]
    for file in files[1:]:
        assert_close(file["state_dict"], files[0]["state_dict"], "weights")
        assert_close(file["optimizer_states"], files[0]["optimizer_states"], "optimizer")


# --- paths ---


def test_wrong_paths(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    alone(lambda key: train(key, Layers(adamw(1e-2), width=5, depth=3), 1, save=tmp_path / "other.ckpt"))

    def run(key: str) -> str:
        try:
            train("1f1b", seeded(wide), 2, load=tmp_path / key)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "trained"

    for found in on_ranks(run, ["missing.ckpt", "empty", "other.ckpt"]):
        print(found)
        assert "missing.ckpt" in found["missing.ckpt"]
        assert "layers.3.weight" in found["other.ckpt"]
        assert "empty" in found["empty"] and "IsADirectory" not in found["empty"], found["empty"]
