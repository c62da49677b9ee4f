"""Known ways in which checkpoints lose something: step counts, names, slices of ranks, hooks' edits."""

import itertools
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recomputed

import lightning_shard  # noqa: F401  (folders are read in one process too)
from lightning_shard.testing import RankFailed, run_distributed
from tests.checkpoint.runs import ALL, SHARDED, Small, assert_same, message_of, own_rows, rows, run, seeded, strategy_of
from tests.strategies.cases import each
from tests.strategies.zero_modules import Trained
from tests.strategies.zero_runs import trainer, world

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def stored_names(path: Path) -> set[str]:
    """The keys of all tensors in a checkpoint's folder, as torch itself reads them."""
    return set(FileSystemReader(path).read_metadata().state_dict_metadata)


# --- step counts ---


class Scalar(Trained):
    """One number, whose gradient is the batch."""

    def __init__(self, kind: Any, shape: tuple[int, ...]) -> None:
        super().__init__(lambda module: kind(module.parameters(), lr=0.1, betas=(0.9, 0.999), weight_decay=0.0))
        self.w = nn.Parameter(torch.zeros(shape))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.w * batch.mean()).sum()


ADAMS = {kind.__name__: kind for kind in (torch.optim.Adam, torch.optim.AdamW)}
SHAPES: dict[str, tuple[int, ...]] = {"Adam": (), "AdamW": (1,)}
"""Of the number: without dimensions its states are values in a checkpoint, and not tensors."""


def five_steps(names: list[str], folder: Path) -> None:
    def one(key: tuple[str, str]) -> None:
        name, kind = key
        run(name, Scalar(ADAMS[kind], SHAPES[kind]), [torch.ones(4)] * 5, save=folder / f"{name} {kind}")

    each(itertools.product(names, ADAMS), one)


def sixth_step(names: list[str], sources: list[str], folder: Path) -> list[tuple[str, float, float]]:
    def one(key: tuple[str, str, str]) -> tuple[str, float, float]:
        name, kind, source = key
        batches, path = [torch.full((4,), 2.0)], folder / f"{source} {kind}"
        found = run(name, Scalar(ADAMS[kind], SHAPES[kind]), batches, ckpt_path=path, max_epochs=2)
        return " ".join(key), float(found.weights["w"]), float(found.optimizer["w"]["step"])

    cases = [key for key in itertools.product(names, ADAMS, sources) if key[0] in ("zero3", "auto", key[2])]
    return list(each(cases, one).values())


def test_adams_step_count_comes_back(tmp_path: Path) -> None:
    """Five steps with gradient 1, then one with 2; with a count that starts afresh it would be -0.68968."""
    run_distributed(five_steps, 2, SHARDED, tmp_path)
    run_distributed(five_steps, 1, ["auto"], tmp_path)
    sources = [*SHARDED, "auto"]
    found = [
        *itertools.chain(*run_distributed(sixth_step, 2, SHARDED, sources, tmp_path)),
        *run_distributed(sixth_step, 1, ["auto"], sources, tmp_path)[0],
    ]
    wrong = [(case, w, step) for case, w, step in found if abs(w + 0.59903) > 2e-5 or step != 6]
    assert not wrong, wrong
    assert len(found) == 2 * (2 * (3 + 5) + 5)


# --- names ---


class Net(nn.Module):
    """Three layers; ``recompute`` runs the middle one again in backward."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self._recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = recomputed(self.middle, x, use_reentrant=False) if self._recompute else self.middle(x)
        return self.last(torch.tanh(x))


class Compiled(Trained):
    """A net that is compiled as a whole, in a part, or not."""

    def __init__(self, how: str = "plain", recompute: bool = False) -> None:
        super().__init__(lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2))
        self.net: Any = Net(recompute)
        if how == "compiled":
            self.net = torch.compile(self.net, backend="eager")
        elif how == "a part":
            self.net.middle = torch.compile(self.net.middle, backend="eager")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) - 1).square().mean()


CASES = [("plain", False), ("compiled", False), ("a part", False)]


def test_names_of_compiled_modules_are_the_plain_ones(tmp_path: Path) -> None:
    def both(name: str) -> dict[str, Any]:
        found = {}
        # stages of a pipeline recompute by activation_checkpointing=True
        for how, recompute in [*CASES, ("compiled", True)] if name != "1f1b" else CASES:
            path = tmp_path / f"{name} {how} {recompute}"
            run(name, seeded(Compiled, how, recompute), rows(2), save=path)
            for other in ("compiled",) if how == "plain" else ("plain",):
                again = run(name, seeded(Compiled, other, False, seed=99), rows(2), ckpt_path=path, max_epochs=2)
                weights = {key.replace("_orig_mod.", ""): value for key, value in again.weights.items()}
                found[f"{path.name} to {other}"] = (weights, again.optimizer)
        return found

    def alone() -> Any:
        once = run("auto", seeded(Compiled), rows(2), max_epochs=2)
        return once.weights, once.optimizer

    expected = run_distributed(alone, 1)[0]
    plain = dict(Compiled().named_parameters())
    for rank in run_distributed(each, 2, ["zero2", "fsdp2", "1f1b"], both):
        for found in rank.values():
            for case, (weights, optimizer) in found.items():
                assert weights.keys() == plain.keys(), case
                assert_same(weights, expected[0])
                states = {key.replace("_orig_mod.", ""): value for key, value in optimizer.items()}
                assert_same(states, expected[1])
    for path in tmp_path.iterdir():
        weights = {key.removeprefix("state_dict.") for key in stored_names(path) if key.startswith("state_dict.")}
        assert weights == plain.keys(), path
        assert not [key for key in stored_names(path) if "_orig_mod" in key or "_checkpoint_wrapped" in key]


# --- slices of ranks ---


class Adapted(Trained):
    """A frozen layer with an adapter, whose forward is of no matter."""

    def __init__(self, fill: float | None = None) -> None:
        super().__init__(lambda module: torch.optim.SGD([module.down, module.up], lr=0.0))
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))
        if fill is not None:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.fill_(fill)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.frozen(batch) + batch @ self.down @ self.up).square().mean()


class FillOwnSlices(pl.Callback):
    """Every rank writes another number into its own slice of the adapter."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        with torch.no_grad():
            for parameter in (module.down, module.up):
                if isinstance(parameter, DTensor):
                    parameter.to_local().fill_(1.0 + trainer.global_rank)
                else:  # ZeRO-3's partition and the master weights
                    for held in trainer.strategy.training_states().hold_parameter(parameter).boxes:
                        held.tensor.fill_(1.0 + trainer.global_rank)


def test_every_ranks_slice_of_an_adapter_comes_back(tmp_path: Path) -> None:
    batches = rows(1, width=8)

    def save(name: str) -> None:
        settings: dict[str, Any] = {"callbacks": [FillOwnSlices()], "save": tmp_path / name}
        run(name, seeded(Adapted), batches, **settings)

    def load(source: str) -> dict[str, Any]:
        names = ["auto"] if world()[1] == 1 else ["zero2", "zero3", "fsdp2"]
        return {
            name: run(name, Adapted(0.0), batches, ckpt_path=tmp_path / source, max_epochs=2).weights for name in names
        }

    frozen = seeded(Adapted).frozen.weight
    names = ["zero1", "zero3", "fsdp2"]
    run_distributed(each, 2, names, save)
    for ranks in (2, 1):
        for rank in run_distributed(each, ranks, names, load):
            for source, found in rank.items():
                for name, weights in found.items():
                    assert torch.equal(weights["frozen.weight"], frozen), (source, name)
                    values = torch.cat([weights["down"].flatten(), weights["up"].flatten()])
                    assert values.unique().tolist() == [1.0, 2.0], (source, name)


def test_a_checkpoint_without_frozen_parameters_says_so(tmp_path: Path) -> None:
    batches = rows(1, width=8)

    def save(name: str) -> None:
        run(name, seeded(Adapted), batches, save=tmp_path / name, settings={"exclude_frozen_parameters": True})

    def load(name: str) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = run(name, Adapted(0.5), batches, ckpt_path=tmp_path / "zero3", max_epochs=2).weights
        assert found["frozen.weight"].eq(0.5).all() and not found["down"].eq(0.5).any()
        return [str(warning.message) for warning in caught]

    run_distributed(each, 2, ["zero2", "zero3"], save)
    for name in ("zero2", "zero3"):
        assert not [key for key in stored_names(tmp_path / name) if "frozen" in key]
    rank, _ = run_distributed(each, 2, ["zero3", "fsdp2", "1f1b"], load)
    for name, messages in rank.items():
        said = [message for message in messages if "without its 2 frozen parameters" in message]
        assert len(said) == 1 and "'frozen.bias' among them" in said[0], (name, messages)


# --- edits by hooks ---


class Edited(Small):
    """Notes something in its checkpoint, and changes the weights there and back."""

    def __init__(self, drop: str = "cache", load: bool = True) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(3))
        self.strict_loading = False
        self.note, self._drop, self._load = 0, drop, load

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = 7
        del checkpoint["state_dict"][self._drop]
        checkpoint["state_dict"]["added"] = torch.arange(4.0)
        checkpoint["state_dict"]["scale"] = torch.full((3,), 5.0)
        checkpoint["state_dict"]["renamed"] = checkpoint["state_dict"].pop("last.bias")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"]
        weights = checkpoint["state_dict"]
        self.names = sorted(weights)
        weights["last.bias"] = weights.pop("renamed")
        del weights["added"]
        if self._load:
            del weights["first.bias"]
            weights["scale"] = torch.full((3,), 9.0)


class Counter(pl.Callback):
    """Counts batches, and the seen values in a tensor."""

    def __init__(self) -> None:
        self.count, self.seen = 0, torch.zeros(2)

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1
        self.seen += 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": self.seen, "nested": [{"a": (1, self.seen[:1])}]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count, self.seen = state_dict["count"], state_dict["seen"].clone()
        assert state_dict["nested"][0]["a"][1].tolist() == [self.count / 2]


class AtStart(pl.Callback):
    """The weights when training starts, as far as this rank can see them."""

    def on_train_start(self, trainer: Any, module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        full = strategy.full_state_dict() if hasattr(strategy, "full_state_dict") else module.state_dict()
        self.weights = {name: value.detach().clone() for name, value in full.items()}


def edits(folder: Path, name: str) -> dict[str, Any]:
    saved = run(name, seeded(Edited), rows(3), callbacks=[Counter()], save=folder / name)
    counter, start, module = Counter(), AtStart(), seeded(Edited, seed=99)
    fresh = {key: value.clone() for key, value in module.state_dict().items()}
    run(name, module, rows(1), callbacks=[counter, start], ckpt_path=folder / name, max_epochs=2)
    assert (module.note, counter.count, counter.seen.tolist()) == (7, 4, [2.0, 2.0])
    assert "cache" not in module.names and {"added", "renamed"} <= set(module.names)
    expected = {**saved.weights, "first.bias": fresh["first.bias"], "scale": torch.full((3,), 9.0)}
    assert_same(start.weights, expected, atol=1e-7)
    unedited = seeded(Edited, "cache", False, seed=99)
    run(name, unedited, rows(1), callbacks=[start], ckpt_path=folder / name, max_epochs=2)
    assert_same(start.weights, {**saved.weights, "scale": torch.full((3,), 5.0)}, atol=1e-7)
    return {}


def test_hooks_edits_are_honoured_on_every_rank(tmp_path: Path) -> None:
    run_distributed(each, 2, ALL, lambda name: edits(tmp_path, name))
    run_distributed(edits, 1, tmp_path, "auto")
    for name in ALL:
        names = {key for key in stored_names(tmp_path / name) if key.startswith("state_dict.")}
        assert {"state_dict.added", "state_dict.renamed"} <= names
        assert not {"state_dict.cache", "state_dict.last.bias"} & names


# --- weights only ---


def test_weights_only_holds_no_moments_and_is_no_training_to_go_on_with(tmp_path: Path) -> None:
    def both(name: str) -> str:
        saver = ModelCheckpoint(dirpath=tmp_path / name, filename="w", save_weights_only=True)
        saved = run(name, seeded(Small), rows(3), callbacks=[saver], enable_checkpointing=True)
        module = seeded(Small, seed=99)
        before = {key: value.clone() for key, value in module.state_dict().items()}
        path = tmp_path / name / "w.ckpt"
        message = message_of(lambda: run(name, module, rows(1), ckpt_path=path, max_epochs=2))
        if name in ("zero1", "zero2"):
            assert_same(dict(module.state_dict()), before, atol=0.0)
        evaluated = seeded(Small, seed=99)
        trainer(strategy_of(name)).validate(evaluated, own_rows(name, rows(2)), ckpt_path=path, verbose=False)
        assert saved.weights.keys() == before.keys()
        return message

    for rank in run_distributed(each, 2, ALL, both):
        for name, message in rank.items():
            assert message.startswith("MisconfigurationException"), (name, message)
            assert "weights only" in message and str(tmp_path / name / "w.ckpt") in message
    for name in ALL:
        names = stored_names(tmp_path / name / "w.ckpt")
        assert names == {f"state_dict.{key}" for key in Small().state_dict()}, name


# --- paths ---


class Plain(Small):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch), torch.ones(len(batch), 1, device=batch.device))


def test_wrong_paths_are_one_clear_line(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    (tmp_path / "empty").mkdir()

    def save(name: str) -> None:
        run(name, seeded(Plain), rows(2), save=folder / name)
        if name == "zero2":
            run(name, seeded(Plain), rows(2), save=folder / "engine", settings={"checkpoint_format": "engine"})

    def load(name: str) -> dict[str, str]:
        wrong = {
            "missing": tmp_path / "missing.ckpt",
            "empty": tmp_path / "empty",
            "inner file": folder / "fsdp2" / "lightning.pt",
            "inner shard": folder / "fsdp2" / "__0_0.distcp",
            "engine's inner": folder / "engine" / "checkpoint",
            "text": tmp_path / "text.ckpt",
        }
        if name != "zero2":
            wrong["engine"] = folder / "engine"
        return {
            key: message_of(lambda path=path: run(name, Plain(), rows(1), ckpt_path=path, max_epochs=3))
            for key, path in wrong.items()
        }

    (tmp_path / "text.ckpt").write_text("no checkpoint")
    run_distributed(each, 2, ["fsdp2", "zero2"], save)
    found = [rank for ranks in (2, 1) for rank in run_distributed(each, ranks, ALL if ranks == 2 else ["auto"], load)]
    for rank in found:
        for name, messages in rank.items():
            for key, message in messages.items():
                where = (name, key, message)
                if (name, key) == ("auto", "text"):
                    continue  # a file, under Lightning's own strategy
                kind, _, text = message.partition(": ")
                assert kind not in ("", "KeyError", "IsADirectoryError", "AssertionError", "UnpicklingError"), where
                assert str(tmp_path) in text and "\n" not in text.partition(" (raised on")[0], where
                if name == "auto" and key in ("missing", "inner file", "inner shard", "text"):
                    continue  # Lightning's own words for a file
                if key.startswith("inner") or key == "engine's inner":
                    inside = folder / ("engine" if key.startswith("engine") else "fsdp2")
                    assert f"inside the checkpoint {inside}: give that path" in text, where
                elif key == "engine":
                    assert "lightning-shard convert" in text and "engine" in text, where
                elif key == "missing":
                    assert "There is no checkpoint" in text, where
                elif key == "empty":
                    assert "is no checkpoint: the folder is empty" in text, where


def test_a_folder_gives_a_module_and_a_file_goes_into_every_strategy(tmp_path: Path) -> None:
    def file(name: str) -> Any:
        ran = run(name, seeded(Plain), rows(2), save=tmp_path / f"{name}.ckpt")
        return ran.weights, run(name, seeded(Plain), rows(2), max_epochs=2)

    def go_on(name: str) -> Any:
        ran = run(name, seeded(Plain, seed=99), rows(2), ckpt_path=tmp_path / "auto.ckpt", max_epochs=2)
        run(name, seeded(Plain), rows(2), save=tmp_path / name)
        return ran.weights, ran.optimizer

    def alone() -> Any:
        saved, whole = file("auto")
        return saved, whole.weights, whole.optimizer

    saved, weights, optimizer = run_distributed(alone, 1)[0]
    for rank in run_distributed(each, 2, [*ALL, "ddp"], go_on):
        for found in rank.values():
            assert_same(found[0], weights)
            assert_same(found[1], optimizer)
    for name in ALL:
        module = Plain.load_from_checkpoint(tmp_path / name)
        assert_same(dict(module.state_dict()), saved)
        with pytest.raises(FileNotFoundError, match="is no checkpoint: the folder holds"):
            Plain.load_from_checkpoint(tmp_path)


def test_a_rank_that_fails_alone_does_not_hang_the_others(tmp_path: Path) -> None:
    def load() -> None:
        run("fsdp2", Plain(), rows(1), ckpt_path=tmp_path / f"only rank {world()[0]}", max_epochs=2)

    with pytest.raises(RankFailed, match="There is no checkpoint"):
        run_distributed(load, 2, timeout=30.0)


def test_two_ranks_save_and_three_or_one_go_on(tmp_path: Path) -> None:
    """Numbers of ranks that no size of the module is divided by."""
    batches = rows(5, size=12)

    def save(name: str) -> None:
        run(name, seeded(Small), batches[:3], save=tmp_path / name)

    def resume(name: str) -> dict[str, Any]:
        found = {}
        for source in SHARDED:
            ran = run(name, seeded(Small, seed=99), batches[3:], ckpt_path=tmp_path / source, max_epochs=2)
            found[source] = (ran.weights, ran.optimizer)
        return found

    run_distributed(each, 2, SHARDED, save)

    def uninterrupted() -> Any:
        ran = run("auto", seeded(Small), batches)
        return ran.weights, ran.optimizer

    (expected,) = run_distributed(uninterrupted, 1)
    for ranks, names in ((3, SHARDED), (1, ["auto"])):
        for rank in run_distributed(each, ranks, names, resume):
            for name, by_source in rank.items():
                for source, (weights, states) in by_source.items():
                    assert_same(weights, expected[0])
                    assert {float(state["step"]) for state in states.values()} == {5.0}, (name, source)
                    for parameter, state in states.items():
                        assert_same(state, expected[1][parameter])
