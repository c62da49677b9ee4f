"""Checkpoints of FSDP2: folders of shards and single files, read by other numbers of ranks and by plain modules."""

import errno
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

from lightning_shard import FSDP2Strategy
from lightning_shard.checkpoint.assemble import load_whole
from lightning_shard.testing import RankFailed
from tests.strategies.fsdp_modules import (
    Outcome,
    Stack,
    assert_same_tensors,
    fit,
    on_ranks,
    reference,
    seeded,
    smallest_units,
)
from tests.strategies.test_fsdp_loop import FINETUNED, Backbone, Finetune, Gan, ValLosses
from tests.strategies.test_zero_checkpoint import Adapted, Counter, Everything, Noted, Scalar
from tests.strategies.test_zero_odd_models import TwoHeads
from tests.strategies.zero_modules import adamw, classes, numbers
from tests.strategies.zero_runs import loader, trainer, world

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


class HeadByEpoch(TwoHeads):
    """Another head in every epoch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, self.current_epoch)


def shards() -> FSDP2Strategy:
    return FSDP2Strategy()


def one_file() -> FSDP2Strategy:
    return FSDP2Strategy(save_distributed_checkpoint=False)


FORMATS = {"shards": shards, "one file": one_file}

SAVED: dict[str, Any] = {
    **FORMATS,
    "hybrid": lambda: FSDP2Strategy(replicas=2),
    "offload": lambda: FSDP2Strategy(cpu_offload=True, save_distributed_checkpoint=False),
}


def stack() -> Stack:
    return Stack(adamw(1e-2))


def saved_by_all(folder: Path) -> dict[str, Outcome]:
    """One epoch under every way to save."""
    return {
        name: fit(make(), seeded(stack), classes(3), save=folder / "a run" / f"{name}.ckpt")
        for name, make in SAVED.items()
    }


def resumed_from(paths: list[Path], strategies: list[Any]) -> list[Outcome]:
    """A second epoch, from other weights than those in the checkpoints."""
    return [
        fit(make(), seeded(stack, 99), classes(3), ckpt_path=path, max_epochs=2)
        for path in paths
        for make in strategies
    ]


def uninterrupted(make: Any, batches: list[Any], **settings: Any) -> Outcome:
    found: Outcome = reference(lambda: fit("auto", seeded(make), batches, max_epochs=2, **settings))
    return found


def read_shards(path: Path) -> dict[str, Tensor]:
    """Whole weights from a folder of shards, in this one process."""
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    wanted = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in metadata.items()
        if key.startswith("state_dict.") and hasattr(value, "size")
    }
    dcp.load(wanted, checkpoint_id=path, no_dist=True)
    return {key.removeprefix("state_dict."): value for key, value in wanted.items()}


# --- what is saved can be read ---


def test_saved_on_four_ranks_read_on_fewer_and_by_plain_modules(tmp_path: Path) -> None:
    saved = on_ranks(saved_by_all, tmp_path, ranks=4, timeout=120.0)[0]
    paths = [tmp_path / "a run" / f"{name}.ckpt" for name in SAVED]
    expected = uninterrupted(stack, classes(3))
    for ranks in (2, 1):
        for outcomes in on_ranks(resumed_from, paths, [shards], ranks=ranks, timeout=120.0):
            for resumed in outcomes:
                assert_same_tensors(resumed.weights, expected.weights)
                assert {int(state["step"]) for state in resumed.optimizer.values()} == {6}
    for outcome in on_ranks(resumed_from, paths[:1], [smallest_units, SAVED["offload"]])[0]:
        assert_same_tensors(outcome.weights, expected.weights)
    for name, path in zip(SAVED, paths, strict=True):
        plain = read_shards(path) if path.is_dir() else torch.load(path, weights_only=False)["state_dict"]
        assert path.is_dir() is (name in ("shards", "hybrid"))
        assert_same_tensors(plain, saved[name].weights, atol=0.0)
        stack().load_state_dict(plain, strict=True)
    assert plain["log_scale"].shape == ()
    file = Stack.load_from_checkpoint(paths[1])
    assert_same_tensors(dict(file.state_dict()), saved["one file"].weights, atol=0.0)


def test_files_go_from_and_to_one_plain_process(tmp_path: Path) -> None:
    expected = uninterrupted(stack, classes(3))

    def save(name: str) -> None:
        fit(one_file() if name == "fsdp2" else name, seeded(stack), classes(3), save=tmp_path / f"{name}.ckpt")

    def resume(name: str, path: Path) -> dict[str, Tensor]:
        return fit(name, seeded(stack, 99), classes(3), ckpt_path=path, max_epochs=2).weights

    reference(save, "auto")
    on_ranks(save, "fsdp2")
    for weights in on_ranks(resume, "fsdp2", tmp_path / "auto.ckpt"):
        assert_same_tensors(weights, expected.weights)
    assert_same_tensors(reference(resume, "auto", tmp_path / "fsdp2.ckpt"), expected.weights)


class EverythingBy(Everything):
    """Under another optimizer; the one of `Everything` has no states."""

    def __init__(self, optimizer: Any = None, frozen: float = 0.5) -> None:
        super().__init__(frozen)
        self.make_optimizer = optimizer or self.make_optimizer


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("optimizer", [None, adamw(1e-2)], ids=["without states", "with states"])
def test_everything_of_a_module_comes_back(kind: str, optimizer: Any, tmp_path: Path) -> None:
    """Tied, frozen and 0-dimensional parameters, buffers in and out of the state dict."""
    path, make = tmp_path / "c", FORMATS[kind]

    def both() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        saved = fit(make(), seeded(lambda: EverythingBy(optimizer)), numbers(2), save=path).weights
        module = EverythingBy(optimizer, frozen=0.1)
        resumed = fit(make(), module, numbers(2), ckpt_path=path, max_epochs=2).weights
        assert module.freqs.tolist() == [0, 1, 2, 3]
        assert module.head.weight is module.embed.weight
        return saved, resumed

    expected = uninterrupted(lambda: EverythingBy(optimizer), numbers(2)).weights
    outcomes = on_ranks(both)
    for _, resumed in outcomes:
        assert resumed["still.weight"].eq(0.5).all()
        assert int(resumed["count"]) == 4
        assert_same_tensors(resumed, expected)
    plain = load_whole(path)["state_dict"] if path.is_dir() else torch.load(path, weights_only=False)["state_dict"]
    assert plain.keys() == outcomes[0][0].keys()
    fresh = Everything(frozen=0.1)
    fresh.load_state_dict(plain, strict=True)
    assert fresh.still.weight.eq(0.5).all() and fresh.log_temperature.shape == ()


@pytest.mark.parametrize("kind", FORMATS)
def test_parameters_without_a_state_stay_so(kind: str, tmp_path: Path) -> None:
    """One head has not been used when the checkpoint is written: its first step comes later, with a first step's bias
    correction."""

    def both() -> Outcome:
        make = lambda: HeadByEpoch(adamw(1e-2))  # noqa: E731
        fit(FORMATS[kind](), seeded(make), numbers(2), save=tmp_path / "c")
        return fit(FORMATS[kind](), seeded(make, 99), numbers(2), ckpt_path=tmp_path / "c", max_epochs=2)

    expected = uninterrupted(lambda: HeadByEpoch(adamw(1e-2)), numbers(2))
    for resumed in on_ranks(both):
        assert_same_tensors(resumed.weights, expected.weights)
        assert int(resumed.optimizer["trunk.weight"]["step"]) == 4
        assert int(resumed.optimizer["heads.1.weight"]["step"]) == 2


def adagrad(module: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(module.parameters(), lr=0.1, initial_accumulator_value=0.1)


def test_optimizer_states_come_back(tmp_path: Path) -> None:
    """Adagrad has states before the first step; a GAN has two optimizers, and a scheduler for each."""
    makes: dict[str, Any] = {"adagrad": (lambda: Stack(adagrad), classes(3)), "gan": (Gan, numbers(3))}

    def both(make: Any, batches: list[Any], path: Path) -> list[Outcome]:
        found = []
        for key, strategy in FORMATS.items():
            fit(strategy(), seeded(make), batches, save=path / key)
            found.append(fit(strategy(), seeded(make, 99), batches, ckpt_path=path / key, max_epochs=2))
        return found

    for name, (make, batches) in makes.items():
        expected = uninterrupted(make, batches)
        for outcomes in on_ranks(both, make, batches, tmp_path / name):
            for resumed in outcomes:
                assert_same_tensors(resumed.weights, expected.weights)
                if name == "adagrad":
                    assert resumed.optimizer["first.weight"]["sum"].shape == (7, 13)


def test_adams_step_count_comes_back(tmp_path: Path) -> None:
    """Five steps with gradient 1, then one with 2; nothing of this module is large enough to be sharded."""

    def counted() -> list[tuple[float, int]]:
        found = []
        for kind in (torch.optim.Adam, torch.optim.AdamW):
            for key, strategy in FORMATS.items():
                make = lambda kind=kind: Scalar(lambda m: kind(m.parameters(), lr=0.1, weight_decay=0.0))  # noqa: E731
                path = tmp_path / kind.__name__ / key
                fit(strategy(), make(), [torch.ones(2)] * 5, save=path)
                last = fit(strategy(), make(), [torch.full((2,), 2.0)], ckpt_path=path, max_epochs=2)
                found.append((last.weights["w"].item(), int(last.optimizer["w"]["step"])))
        return found

    for found in on_ranks(counted):
        assert found == [(pytest.approx(-0.59903, abs=1e-5), 6)] * 4


class FillOwnSlices(pl.Callback):
    """Every rank writes another value into its own slice of the adapter."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        with torch.no_grad():
            for parameter in (module.down, module.up):
                parameter.to_local().fill_(1.0 + trainer.global_rank)


def test_every_ranks_slice_of_an_adapter_comes_back(tmp_path: Path) -> None:
    batches = numbers(1, width=8)

    def save() -> list[dict[str, Tensor]]:
        return [
            fit(make(), seeded(Adapted), batches, save=tmp_path / key, callbacks=[FillOwnSlices()]).weights
            for key, make in FORMATS.items()
        ]

    def again() -> list[dict[str, Tensor]]:
        return [
            fit(make(), Adapted(), batches, ckpt_path=tmp_path / key, max_epochs=2).weights
            for key, make in FORMATS.items()
        ]

    saved = on_ranks(save)[0]
    assert saved[0]["down"].unique().tolist() == [1.0, 2.0]
    for ranks in (2, 1):
        for found in on_ranks(again, ranks=ranks):
            for weights, wanted in zip(found, saved, strict=True):
                assert_same_tensors(weights, wanted, atol=0.0)


def test_averages_come_back(tmp_path: Path) -> None:
    """The checkpoint holds the averages as the module's weights, and the trained weights beside them."""

    def make_callbacks(path: Path) -> list[pl.Callback]:
        saver = ModelCheckpoint(dirpath=path, filename="c", save_top_k=-1, every_n_epochs=1)
        return [EMAWeightAveraging(decay=0.7), saver]

    settings: dict[str, Any] = {"validate": classes(1), "enable_checkpointing": True, "num_sanity_val_steps": 0}

    def whole(path: Path) -> tuple[list[float], dict[str, Tensor]]:
        seen = ValLosses()
        callbacks = [*make_callbacks(path), seen]
        outcome = fit("auto", seeded(stack), classes(3), max_epochs=2, callbacks=callbacks, **settings)
        return seen.losses, outcome.weights

    def interrupted() -> list[tuple[list[float], dict[str, Tensor]]]:
        found = []
        for key, make in FORMATS.items():
            path, seen = tmp_path / key, ValLosses()
            fit(make(), seeded(stack), classes(3), callbacks=make_callbacks(path), **settings)
            more: dict[str, Any] = {"max_epochs": 2, "ckpt_path": path / "c.ckpt", **settings}
            callbacks = [EMAWeightAveraging(decay=0.7), seen]
            outcome = fit(make(), seeded(stack, 99), classes(3), callbacks=callbacks, **more)
            found.append((seen.losses, outcome.weights))
        return found

    losses, weights = reference(whole, tmp_path / "auto")
    for found in on_ranks(interrupted):
        for last, final in found:
            assert last == pytest.approx(losses[1:], abs=5e-6)
            assert_same_tensors(final, weights)


class Dropped(Noted):
    """Leaves a buffer out of what it saves, and does not miss it."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.register_buffer("cache", torch.zeros(3))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["state_dict"]["extra"] = torch.ones(2)
        del checkpoint["state_dict"]["cache"]


@pytest.mark.parametrize("kind", FORMATS)
def test_hooks_and_callbacks_states_come_back(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "c"

    def train(phase: int) -> tuple[int, int]:
        module, counter = Dropped(), Counter(5 if phase == 1 else 0)
        more: dict[str, Any] = {"save" if phase == 1 else "ckpt_path": path, "max_epochs": phase}
        fit(FORMATS[kind](), module, classes(2), callbacks=[counter], **more)
        return getattr(module, "note", 0), counter.count

    on_ranks(train, 1)
    keys = (read_shards(path) if path.is_dir() else torch.load(path, weights_only=False)["state_dict"]).keys()
    assert "extra" in keys and "cache" not in keys
    assert on_ranks(train, 2) == [(7, 5)] * 2


def test_a_run_goes_on_with_the_groups_that_a_callback_has_added(tmp_path: Path) -> None:
    def train(names: list[str], ranks: str) -> list[dict[str, Tensor]]:
        found = []
        for name in names:
            for key, optimizer in FINETUNED.items():
                path = tmp_path / f"{ranks} {name} {key}"
                make = lambda made=optimizer: Backbone(made)  # noqa: E731
                fit(name, seeded(make), numbers(3), callbacks=[Finetune()], max_epochs=2, save=path)
                again: dict[str, Any] = {"callbacks": [Finetune()], "max_epochs": 3, "ckpt_path": path}
                found.append(fit(name, seeded(make, 99), numbers(3), **again).weights)
        return found

    expected = reference(train, ["auto"], "one")
    for found in on_ranks(train, ["fsdp2"], "two"):
        for weights, wanted in zip(found, expected, strict=True):
            assert_same_tensors(weights, wanted)


# --- weights only, folders that come and go ---


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_only(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "w.ckpt"

    def save() -> dict[str, Tensor]:
        saver = ModelCheckpoint(dirpath=tmp_path, filename="w", save_weights_only=True)
        return fit(FORMATS[kind](), seeded(stack), classes(3), callbacks=[saver], enable_checkpointing=True).weights

    def validate(name: str) -> float:
        run, module = trainer(name), seeded(stack, 99)
        if name == "auto":
            module.load_state_dict(saved)
        return run.validate(module, loader(classes(2)), ckpt_path=path if name == "fsdp2" else None, verbose=False)[0][
            "val_loss"
        ]

    def resume() -> None:
        fit("fsdp2", seeded(stack, 99), classes(3), ckpt_path=path, max_epochs=2)

    saved = on_ranks(save)[0]
    if path.is_dir():
        names = set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
        assert not [name for name in names if "exp_avg" in name]
        assert_same_tensors(read_shards(path), saved, atol=0.0)
    else:
        assert "optimizer_states" not in torch.load(path, weights_only=False)
    assert on_ranks(validate, "fsdp2") == [pytest.approx(reference(validate, "auto"), abs=5e-6)] * 2
    with pytest.raises(RankFailed, match="holds weights only"):
        on_ranks(resume)


def test_the_checkpoint_callback_keeps_the_best_and_the_last(tmp_path: Path) -> None:
    def train() -> tuple[list[str], float, dict[str, Tensor], dict[str, Tensor]]:
        saver = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", monitor="val_loss", save_last=True)
        settings: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saver], "max_epochs": 3}
        run = trainer("fsdp2", **settings)
        module = seeded(stack)
        run.fit(module, loader(classes(3)), loader(classes(3)))
        names = sorted(path.name for path in tmp_path.iterdir())
        best = run.validate(ckpt_path="best", dataloaders=loader(classes(3)), verbose=False)[0]["val_loss"]
        assert saver.best_model_score is not None
        assert best == pytest.approx(saver.best_model_score.item(), abs=1e-6)
        more = fit("fsdp2", seeded(stack, 99), classes(3), ckpt_path=tmp_path / "last.ckpt", max_epochs=4).weights
        again = fit("fsdp2", module, classes(3), ckpt_path=tmp_path / "last.ckpt", max_epochs=4).weights
        return names, best, more, again

    for names, _, more, again in on_ranks(train):
        assert names == ["epoch=2.ckpt", "last.ckpt"]
        assert_same_tensors(more, again, atol=0.0)


# --- what cannot be read is refused ---


def test_wrong_paths_are_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "c"
    (tmp_path / "empty").mkdir()
    (tmp_path / "part").mkdir()

    def save() -> None:
        fit("fsdp2", Stack(), classes(1), save=path)

    def messages(paths: list[Path]) -> list[str]:
        found = []
        for wrong in paths:
            try:
                fit("fsdp2", Stack(), classes(1), ckpt_path=wrong, max_epochs=2)
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
        return found

    on_ranks(save)
    for part in path.iterdir():
        if part.suffix == ".distcp":
            (tmp_path / "part" / part.name).write_bytes(part.read_bytes())
    inner = next(part for part in path.iterdir() if part.suffix == ".distcp")
    (path / "inner").mkdir()
    wrong = {
        tmp_path / "missing": "no checkpoint at",
        tmp_path / "empty": "is no checkpoint",
        tmp_path / "part": "is no checkpoint",
        path / "inner": f"lies inside the checkpoint {re.escape(str(path))}",
        inner: f"lies inside the checkpoint {re.escape(str(path))}",
    }
    for found in on_ranks(messages, list(wrong)):
        for (at, message), error in zip(wrong.items(), found, strict=True):
            assert re.match(rf"(FileNotFoundError|MisconfigurationException): .*{message}", error, re.S), (at, error)


class Several(pl.LightningModule):
    """As many optimizers as one asks for."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.count = count

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers = self.optimizers()
        loss = self.layers[1](self.layers[0](batch)).square().mean()
        self.manual_backward(loss)
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        parts = [list(self.parameters())] if self.count == 1 else [list(layer.parameters()) for layer in self.layers]
        return [torch.optim.Adam(part) for part in parts]


def test_another_number_of_optimizers_is_refused(tmp_path: Path) -> None:
    def messages() -> list[str]:
        found = []
        for key, make in FORMATS.items():
            fit(make(), Several(2), numbers(1), save=tmp_path / key)
            try:
                fit(make(), Several(1), numbers(1), ckpt_path=tmp_path / key, max_epochs=2)
            except Exception as error:
                found.append(str(error))
        return found

    for found in on_ranks(messages):
        assert len(found) == 2
        for message in found:
            assert "states of 2 optimizers, but `configure_optimizers` returned 1" in message


@pytest.mark.parametrize("overwrite", [True, False], ids=["over the old one", "to a new path"])
def test_a_failed_write_leaves_the_old_checkpoint_or_none(overwrite: bool, tmp_path: Path) -> None:
    path = tmp_path / "c"
    target = path if overwrite else tmp_path / "new"
    before = on_ranks(lambda: fit("fsdp2", seeded(Stack), classes(3), save=path))[0]

    def fail() -> None:
        def full_disk(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        if world()[0] == 1:
            dcp.FileSystemWriter.write_data = full_disk  # type: ignore[assignment]
        fit("fsdp2", Stack(), classes(3), ckpt_path=path, save=target, max_epochs=2)

    with pytest.raises(RankFailed, match="No space left on device"):
        on_ranks(fail)
    assert overwrite or not target.exists()
    assert_same_tensors(read_shards(path), before.weights, atol=0.0)
    assert [each.name for each in tmp_path.iterdir() if not each.name.startswith(".")] == ["c"]
