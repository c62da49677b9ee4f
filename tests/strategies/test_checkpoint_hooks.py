"""How checkpoints are made in a run: by the checkpoint callback, in the background, and on other file systems."""

import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import lightning_shard  # noqa: F401  (folders are read in one process too)
from lightning_shard.checkpoint import background
from lightning_shard.checkpoint import save as saving
from lightning_shard.testing import run_distributed
from tests.checkpoint.runs import (
    Ran,
    Small,
    assert_same,
    message_of,
    own_rows,
    rows,
    run,
    seeded,
    strategy_of,
)
from tests.strategies.cases import each
from tests.strategies.zero_runs import trainer, world

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

FEW = ["zero2", "zero3", "fsdp2", "1f1b"]


def weights_in(path: Any) -> dict[str, Tensor]:
    return dict(Small.load_from_checkpoint(path).state_dict())


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- the checkpoint callback ---


class Scored(Small):
    """Its validation loss is what it is told, epoch by epoch."""

    SCORES = (3.0, 1.0, 2.0, 0.5)

    def on_validation_epoch_end(self) -> None:
        self.log("score", self.SCORES[min(self.current_epoch, 3)], sync_dist=True)


def test_the_best_and_the_last_are_kept(tmp_path: Path) -> None:
    def keep(name: str) -> tuple[list[str], str, Any]:
        folder = tmp_path / name
        saver = ModelCheckpoint(folder, "{epoch}", monitor="score", save_top_k=2, save_last=True)
        settings: dict[str, Any] = {"callbacks": [saver], "enable_checkpointing": True, "validate": rows(1)}
        ran = run(name, seeded(Scored), rows(2), max_epochs=4, num_sanity_val_steps=0, **settings)
        kept = names_in(folder)
        # "best" and "last" are the same state; validation with it is like validation at the end of training
        evaluated = ran.trainer.validate(ran.module, own_rows(name, rows(1)), ckpt_path="best", verbose=False)
        logged = float(ran.trainer.callback_metrics["val_loss"])
        assert evaluated[0]["val_loss"] == pytest.approx(logged)
        again = ModelCheckpoint(folder, "{epoch}", monitor="score", save_top_k=2, save_last=True)
        more = trainer(strategy_of(name), callbacks=[again], enable_checkpointing=True, max_epochs=4)
        more.fit(seeded(Scored, seed=9), own_rows(name, rows(2)), own_rows(name, rows(1)), ckpt_path="last")
        return kept, saver.best_model_path, (ran.weights, again.best_model_score, again.last_model_path)

    for rank in run_distributed(each, 2, ["zero3", "fsdp2", "1f1b"], keep):
        for name, (kept, best, (weights, score, last)) in rank.items():
            assert kept == ["epoch=1.ckpt", "epoch=3.ckpt", "last.ckpt"], name
            assert best == str(tmp_path / name / "epoch=3.ckpt") and last == str(tmp_path / name / "last.ckpt")
            assert float(score) == 0.5
            assert_same(weights_in(best), weights, atol=1e-7)
            assert_same(weights_in(last), weights, atol=1e-7)


def test_last_is_overwritten_every_few_steps_as_a_folder_and_as_a_link(tmp_path: Path) -> None:
    def keep(case: tuple[str, Any]) -> dict[str, Tensor]:
        name, last = case
        folder = tmp_path / f"{name} {last}"
        found = None
        for kind in (last, True, last):  # a run goes on in the folder of one that kept it otherwise
            saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=1, save_last=kind)
            settings: dict[str, Any] = {"callbacks": [saver], "enable_checkpointing": True}
            found = run(name, seeded(Small), rows(4), **settings)
        assert found is not None
        return found.weights

    cases = [("zero2", True), ("zero3", "link"), ("fsdp2", "link"), ("1f1b", "link")]
    rank, _ = run_distributed(each, 2, cases, keep)
    for (name, last), weights in rank.items():
        path = tmp_path / f"{name} {last}" / "last.ckpt"
        assert path.is_symlink() is (last == "link") and path.is_dir()
        assert_same(weights_in(path), weights, atol=1e-7)


# --- saving in the background ---


def slow(seconds: float) -> None:
    """Let saves in the background take long, on this rank."""
    write = saving.write_checkpoint

    def slowly(*args: Any, **kwargs: Any) -> None:
        time.sleep(seconds)
        write(*args, **kwargs)

    background.write_checkpoint = slowly  # type: ignore[attr-defined]


class Saves(pl.Callback):
    """Saves after the second batch, and says how long training waited and what was on its way."""

    def __init__(self, path: Path, at: int = 1) -> None:
        self._path, self._at = path, at

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._at:
            trainer.save_checkpoint(self._path)
            self.there = self._path.exists()
            self.threads = [thread.name for thread in threading.enumerate()]


def test_a_save_in_the_background_is_that_of_its_step(tmp_path: Path) -> None:
    def both(name: str) -> tuple[Ran, Ran, Saves]:
        found = []
        for way in (False, True):
            callback = Saves(tmp_path / f"{name} {way}")
            settings: dict[str, Any] = {"callbacks": [callback], "settings": {"async_save": way}}
            ran = run(name, seeded(Small), rows(5), **settings)
            # nobody has waited but fit
            assert (tmp_path / f"{name} {way}" / "manifest.json").exists()
            found.append((ran.weights, ran.optimizer))
        assert not callback.there and "lightning-shard-save" in callback.threads
        resumed = [
            run(name, seeded(Small, seed=9), rows(5), ckpt_path=tmp_path / f"{name} {way}") for way in (False, True)
        ]
        return found, [(ran.weights, ran.optimizer) for ran in resumed]  # type: ignore[return-value]

    def slowly(names: list[str]) -> Any:
        slow(0.4)
        return each(names, both)

    for rank in run_distributed(slowly, 2, FEW):
        for name, (found, resumed) in rank.items():
            assert_same(found[1][0], found[0][0], atol=0.0)
            for part in (0, 1):
                assert_same(found[1][part], found[0][part], atol=0.0)
                assert_same(resumed[1][part], resumed[0][part], atol=0.0)
            sync, inflight = (weights_in(tmp_path / f"{name} {way}") for way in (False, True))
            assert_same(inflight, sync, atol=0.0)
            assert not torch.equal(sync["first.weight"], found[0][0]["first.weight"]), name


def test_saves_in_the_background_wait_for_each_other_and_removals_for_them(tmp_path: Path) -> None:
    def keep(name: str) -> Any:
        folder = tmp_path / name
        running, most = [0], [0]
        write = saving.write_checkpoint

        def counted(*args: Any, **kwargs: Any) -> None:
            running[0] += 1
            most[0] = max(most[0], running[0])
            before = {path.name for path in folder.glob("*.ckpt")}
            time.sleep(0.1)
            # the one before is there as long as this one is not
            assert {path.name for path in folder.glob("*.ckpt")} == before
            write(*args, **kwargs)
            running[0] -= 1

        background.write_checkpoint = counted  # type: ignore[attr-defined]
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=1, save_last=True)
        settings: dict[str, Any] = {"callbacks": [saver], "settings": {"async_save": True}}
        ran = run(name, seeded(Small), rows(4), enable_checkpointing=True, **settings)
        return ran.weights, most[0]

    for rank in run_distributed(each, 2, ["zero3", "fsdp2"], keep):
        for name, (weights, most) in rank.items():
            assert names_in(tmp_path / name) == ["last.ckpt", "step=4.ckpt"] and most == 1
            for path in names_in(tmp_path / name):
                assert_same(weights_in(tmp_path / name / path), weights, atol=1e-7)


def test_a_failed_save_in_the_background_is_told_at_the_next_step_or_at_the_end(tmp_path: Path) -> None:
    class Waits(Saves):
        """Lets all ranks fail before the next step."""

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            self.steps = trainer.global_step
            for thread in threading.enumerate():
                if thread.name == "lightning-shard-save":
                    thread.join()

    def fails(case: tuple[str, int]) -> tuple[str, int, list[str]]:
        name, at = case
        folder = tmp_path / f"{name} {at}"
        run(name, seeded(Small), rows(1), save=folder / "c")
        original = saving.write_tensors

        def full(*args: Any) -> None:
            if world()[0] == 1:
                args[2].clear()  # torch sees that tensors are not whole
            original(*args)

        saving.write_tensors = full  # type: ignore[attr-defined]
        callback = Waits(folder / "c", at)
        settings: dict[str, Any] = {"callbacks": [callback], "settings": {"async_save": True}}
        message = message_of(lambda: run(name, seeded(Small), rows(4), **settings))
        saving.write_tensors = original  # type: ignore[attr-defined]
        torch.distributed.barrier()
        return message, callback.steps, names_in(folder)

    for rank in run_distributed(each, 2, [("fsdp2", 1), ("fsdp2", 3)], fails):
        for (name, at), (message, steps, names) in rank.items():
            assert message.startswith("RuntimeError: The checkpoint") and "was not written" in message, message
            assert steps == at + 1 and names == ["c"], (name, at)


# --- other file systems ---


class NoRename(LocalFileSystem):
    """Like an object store: what is there has its name."""

    protocol = ("norename",)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("norename://"))

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("no rename here")

    rename = mv_file = move = mv


def on_file_system(protocol: str, name: str, folder: Path) -> Any:
    register_implementation("norename", NoRename, clobber=True)
    path = f"{protocol}://{folder}/{name} {protocol} c"
    ran = run(name, seeded(Small), rows(1), save=path)
    first = ran.weights
    assert_same(weights_in(path), first, atol=0.0)
    torch.distributed.barrier()
    original = saving.write_tensors

    def full(*args: Any) -> None:
        original(*args)
        raise RuntimeError("rank 1 failed with OSError: no space")

    second = run(name, seeded(Small), rows(1), ckpt_path=path, max_epochs=2)
    saving.write_tensors = full  # type: ignore[attr-defined]
    message = message_of(lambda: second.trainer.save_checkpoint(path))
    saving.write_tensors = original  # type: ignore[attr-defined]
    assert "was not written" in message and "no space" in message, message
    torch.distributed.barrier()
    assert_same(weights_in(path), first, atol=0.0)
    torch.distributed.barrier()
    second.trainer.save_checkpoint(path)
    assert_same(weights_in(path), second.weights, atol=0.0)
    # Lightning takes a file:// URL in dirpath for a relative path
    kept = f"{'' if protocol == 'file' else f'{protocol}://'}{folder}/{name} {protocol} kept"
    saver = ModelCheckpoint(kept, "{step}", every_n_train_steps=1)
    run(name, seeded(Small), rows(3), callbacks=[saver], enable_checkpointing=True)
    assert [path.name for path in (folder / f"{name} {protocol} kept").iterdir()] == ["step=3.ckpt"]
    last = run(name, seeded(Small, seed=9), rows(3), ckpt_path=saver.best_model_path, max_epochs=2)
    assert {int(states["step"]) for states in last.optimizer.values()} == {6}
    return message_of(lambda: run(name, seeded(Small), rows(1), ckpt_path=f"{path}/none", max_epochs=2))


@pytest.mark.parametrize("protocol", ["file", "norename"])
def test_urls(protocol: str, tmp_path: Path) -> None:
    for rank in run_distributed(each, 2, ["zero3", "fsdp2"], lambda name: on_file_system(protocol, name, tmp_path)):
        for name, missing in rank.items():
            assert "There is no checkpoint at" in missing, (name, missing)
    for name in ("zero3", "fsdp2"):
        names = names_in(tmp_path / f"{name} {protocol} c")
        assert "manifest.json" in names
        if protocol == "norename":
            assert len(names) == 2 and names[0].startswith("data-")
            (tmp_path / f"{name} {protocol} c" / "manifest.json").unlink()
            with pytest.raises(FileNotFoundError, match="was not written to its end"):
                weights_in(tmp_path / f"{name} {protocol} c")
        else:
            assert not [path for path in names_in(tmp_path) if path.startswith(".")]
