"""Checkpoints when something goes wrong: disks that are full, ranks that die, files that are damaged, other modules."""

import errno
import itertools
import json
import os
import pickle
import resource
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter

from lightning_shard.checkpoint.places import LocalPlace
from lightning_shard.testing import run_distributed
from tests.checkpoint.runs import (
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
from tests.strategies.test_zero_scripts import group_ended, start
from tests.strategies.zero_modules import Trained
from tests.strategies.zero_runs import trainer, world

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

STRATEGIES = ["zero2", "zero3", "fsdp2", "1f1b"]


def attempt(name: str, module: Any, path: Any, train: bool = True) -> tuple[str, bool]:
    """Resume from a checkpoint that is to be refused, or evaluate with its weights.

    Returns:
        The error, and whether all that this rank holds of the module is as it was when loading began.

    """
    resumed = trainer(strategy_of(name), max_epochs=9)
    strategy: Any = resumed.strategy
    load, before = strategy.load_checkpoint, []

    def held() -> list[Tensor]:
        return [box.tensor.clone() for each in strategy.training_states().weights().values() for box in each.boxes]

    def loading(*args: Any, **kwargs: Any) -> Any:
        before.extend(held())
        try:
            checkpoint = load(*args, **kwargs)
        finally:
            same.append(all(map(torch.equal, before, held())))
        return checkpoint

    def weights(*args: Any, **kwargs: Any) -> Any:
        try:
            return load_weights(*args, **kwargs)
        finally:
            same.append(all(map(torch.equal, before, held())))

    same: list[bool] = []
    load_weights = strategy.load_model_state_dict
    strategy.load_checkpoint, strategy.load_model_state_dict = loading, weights
    loop: Any = resumed.fit if train else resumed.validate
    message = message_of(lambda: loop(module, own_rows(name, rows(1)), ckpt_path=path))
    return message, bool(before) and all(same)


# --- writing fails ---


class FullDisk:
    """While it is entered, this rank's disk is full after its first bytes."""

    def __init__(self, on_rank: int, error: BaseException | None = None) -> None:
        self._here = world()[0] == on_rank
        self._error = error or OSError(errno.ENOSPC, "No space left on device")

    def __enter__(self) -> None:
        self._write = FileSystemWriter.write_data

        def write(writer: Any, *args: Any, **kwargs: Any) -> Any:
            Path(writer.path, f"__{world()[0]}_0.distcp").write_bytes(b"a part")
            raise self._error

        if self._here:
            FileSystemWriter.write_data = write  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        FileSystemWriter.write_data = self._write  # type: ignore[method-assign]


def weights_in(path: Path) -> dict[str, Tensor]:
    return dict(Small.load_from_checkpoint(path).state_dict())


@pytest.mark.parametrize("full", [1, 0])
def test_a_full_disk_fails_on_all_ranks_and_leaves_the_old_checkpoint(full: int, tmp_path: Path) -> None:
    def save(name: str) -> list[str]:
        folder = tmp_path / name
        ran = run(name, seeded(Small), rows(1), save=folder / "c")
        expected = ran.weights
        ran.trainer.fit_loop.max_epochs = 2
        ran.trainer.fit(ran.module, own_rows(name, rows(3)))
        with FullDisk(full):
            found = [message_of(lambda path=path: ran.trainer.save_checkpoint(folder / path)) for path in ("c", "new")]
        torch.distributed.barrier()  # rank 0 has removed what was written
        names = sorted(path.name for path in folder.iterdir())
        if names != ["c"]:
            raise AssertionError(names)
        assert_same(weights_in(folder / "c"), expected, atol=0.0)
        torch.distributed.barrier()
        ran.trainer.save_checkpoint(folder / "c")
        assert not torch.equal(weights_in(folder / "c")["first.weight"], expected["first.weight"])
        return found

    for rank in run_distributed(each, 2, STRATEGIES, save):
        for name, messages in rank.items():
            for message, path in zip(messages, ("c", "new"), strict=True):
                assert message.startswith(f"RuntimeError: The checkpoint {tmp_path / name / path} was not written"), (
                    name
                )
                assert f"rank {full} failed with OSError: [Errno 28] No space left on device" in message


def test_failures_before_and_after_the_tensors_are_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")

    def save() -> list[str]:
        ran = run("fsdp2", seeded(Small), rows(1), save=tmp_path / "c")
        before = ran.weights
        found = [message_of(lambda: ran.trainer.save_checkpoint(tmp_path / "file" / "c"))]
        for name in ("write", "commit"):
            original = getattr(LocalPlace, name)

            def fails(*args: Any) -> None:
                raise OSError(errno.EDQUOT, "Disk quota exceeded")

            setattr(LocalPlace, name, fails)
            found.append(message_of(lambda: ran.trainer.save_checkpoint(tmp_path / "c")))
            setattr(LocalPlace, name, original)
        assert_same(weights_in(tmp_path / "c"), before, atol=0.0)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "file"]
        return found

    for first, *others in run_distributed(save, 2):
        assert "rank 0 failed with" in first and str(tmp_path / "file" / "c") in first
        assert ["rank 0 failed with OSError" in message and "Disk quota exceeded" in message for message in others]


def test_an_interrupt_leaves_no_temporary_folder(tmp_path: Path) -> None:
    """In one process and on one of two ranks."""
    path = tmp_path / "a folder" / "c d.ckpt"

    def save(name: str) -> str:
        ran = run(name, seeded(Small), rows(1), save=path)
        with FullDisk(world()[1] - 1, KeyboardInterrupt()):
            message = message_of(lambda: ran.trainer.save_checkpoint(path))
        if world()[1] > 1:
            torch.distributed.barrier()
        names = [each.name for each in path.parent.iterdir()]
        if names != ["c d.ckpt"]:
            raise AssertionError(names)
        assert_same(weights_in(path), ran.weights, atol=0.0)
        return message

    for ranks in (1, 2):
        for rank in run_distributed(each, ranks, ["fsdp2"], save):
            assert "KeyboardInterrupt" in rank["fsdp2"]


KILLED = """
import os
import signal

from torch.distributed.checkpoint import FileSystemWriter

if __name__ == "__main__":
    run = trainer(sys.argv[1], enable_checkpointing=False)
    run.fit(Module(), batches)
    run.save_checkpoint("c.ckpt")
    write = FileSystemWriter.write_data

    def dies(writer, plan, planner):
        result = write(writer, plan, planner)
        if run.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    FileSystemWriter.write_data = dies
    open(f"saving on rank {run.global_rank}", "w").close()
    run.save_checkpoint(sys.argv[2])
"""


def test_a_rank_that_is_killed_ends_all_and_the_old_checkpoint_loads(tmp_path: Path) -> None:
    """One script overwrites its checkpoint when the rank dies, another writes a new one."""
    begun = time.time()
    scripts = {
        "c.ckpt": start(tmp_path / "same", KILLED, "fsdp2", "c.ckpt"),
        "new.ckpt": start(tmp_path / "new", KILLED, "zero2", "new.ckpt"),
    }
    ended: dict[str, float] = {}
    try:
        for path in itertools.cycle(scripts):
            if scripts[path].process.poll() is not None:
                ended.setdefault(path, time.time())
            if len(ended) == len(scripts) or time.time() > begun + 100:
                break
            time.sleep(0.05)
        for path, script in scripts.items():
            output = script.finish(limit=1.0)
            saving = [file.stat().st_mtime for file in script.folder.glob("saving on rank *")]
            assert len(saving) == 2, output
            assert ended[path] - max(saving) < 20, output
            assert script.process.returncode not in (0, -signal.SIGTERM), output
            assert group_ended(script.process, limit=15.0), output
            checkpoints = {each.name for each in script.folder.glob("*.ckpt")}
            assert checkpoints == {"c.ckpt"}, output
            for partial in script.folder.glob(".*.partial"):  # the other rank removes it, if it has the time
                assert partial.name == f".{path}.partial"
                assert "was not written to its end" in run_distributed(refusal, 1, partial)[0]
            weights = run_distributed(loads, 1, script.folder / "c.ckpt")[0]
            assert weights == {"net.weight": (3, 4), "net.bias": (3,)}
    finally:
        for script in scripts.values():
            script.kill()


class Net(Trained):
    """The module of the scripts."""

    def __init__(self) -> None:
        super().__init__(lambda module: torch.optim.AdamW(module.parameters()))
        self.net = nn.Linear(4, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()


def refusal(path: Path) -> str:
    return message_of(lambda: Net.load_from_checkpoint(path))


def loads(path: Path) -> dict[str, Any]:
    """Go on with training from it; and the shapes of its weights."""
    ran = run("fsdp2", Net(), rows(1, width=4), ckpt_path=path, max_epochs=2)
    assert {int(states["step"]) for states in ran.optimizer.values()} == {5}
    return {name: tuple(value.shape) for name, value in Net.load_from_checkpoint(path).state_dict().items()}


# --- damaged files ---


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def garble(path: Path) -> None:
    path.write_bytes(b"\x80\x04garbled" * 9)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_in_the_middle(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    middle = len(contents) // 4
    contents[middle - 200 : middle] = bytes(200)
    path.write_bytes(contents)


def manifest_of(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        contents = json.loads(path.read_text())
        for key, value in changes.items():
            contents.pop(key, None) if value is None else contents.update({key: value})
        path.write_text(json.dumps(contents))

    return change


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "truncated shard": ("__1_0.distcp", half, "is not whole: __1_0.distcp has"),
    "missing shard": ("__0_0.distcp", Path.unlink, "is not whole: __0_0.distcp is missing, which holds a part of '"),
    "empty shard": ("__0_0.distcp", empty, "is not whole: __0_0.distcp has 0 bytes of"),
    "garbled shard": ("__0_0.distcp", garble, "is not whole: __0_0.distcp has 81 bytes of"),
    "truncated metadata": (".metadata", half, ".metadata is damaged"),
    "garbled metadata": (".metadata", garble, ".metadata is damaged"),
    "empty metadata": (".metadata", empty, ".metadata is damaged"),
    "missing metadata": (".metadata", Path.unlink, ".metadata"),
    "truncated manifest": ("manifest.json", half, "manifest.json is no manifest of a checkpoint, or is damaged"),
    "empty manifest": ("manifest.json", empty, "manifest.json is no manifest of a checkpoint, or is damaged"),
    "garbled manifest": ("manifest.json", garble, "manifest.json is no manifest of a checkpoint, or is damaged"),
    "missing manifest": ("manifest.json", Path.unlink, "but not the manifest.json"),
    "foreign manifest": ("manifest.json", manifest_of(format="other"), "its format is 'other'"),
    "later manifest": ("manifest.json", manifest_of(version=99), "has version 99 of the checkpoint format"),
    "manifest without version": ("manifest.json", manifest_of(version=None), "manifest.json is no manifest"),
    "manifest without writer": ("manifest.json", manifest_of(written_by=None), "manifest.json is no manifest"),
    "manifest with more": ("manifest.json", manifest_of(surprise=1), "manifest.json is no manifest"),
    "truncated lightning.pt": ("lightning.pt", half, "lightning.pt is damaged"),
    "garbled lightning.pt": ("lightning.pt", garble, "lightning.pt is damaged"),
    "empty lightning.pt": ("lightning.pt", empty, "lightning.pt is damaged"),
    "missing lightning.pt": ("lightning.pt", Path.unlink, "lightning.pt"),
}
"""Which file, what happens to it, and what the error says."""


def test_damaged_files_are_named_on_every_rank_and_nothing_is_loaded(tmp_path: Path) -> None:
    def save() -> None:
        run("zero3", seeded(Small), rows(1), save=tmp_path / "whole")

    run_distributed(save, 2)
    for key, (file, damage, _) in DAMAGES.items():
        shutil.copytree(tmp_path / "whole", tmp_path / key)
        damage(tmp_path / key / file)

    def load(case: tuple[str, str]) -> tuple[str, bool]:
        return attempt(case[0], seeded(Small, seed=99), tmp_path / case[1])

    thorough = ["truncated shard", "truncated metadata", "truncated lightning.pt", "missing manifest"]
    cases = [("fsdp2", key) for key in DAMAGES] + [*itertools.product(["zero2", "zero3", "1f1b"], thorough)]
    wrong = []
    for rank in run_distributed(each, 2, cases, load):
        for case, (message, unchanged) in rank.items():
            says, name = DAMAGES[case[1]][2], str(tmp_path / case[1])
            kind = message.partition(":")[0]
            fine = says in message and name in message and unchanged
            if not fine or kind not in ("ValueError", "FileNotFoundError", "MisconfigurationException", "RuntimeError"):
                wrong.append((case, unchanged, message[:300]))
    assert not wrong, "\n".join(map(str, wrong))


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    def save() -> None:
        run("auto", seeded(Small), rows(1), save=tmp_path / "whole.ckpt")

    def load(key: str) -> dict[str, tuple[str, bool]]:
        return {name: attempt(name, seeded(Small, seed=99), tmp_path / key) for name in ("zero3", "fsdp2", "1f1b")}

    run_distributed(save, 1)
    damages = {"half": half, "empty": empty, "garbled": garble}
    for key, damage in damages.items():
        shutil.copy(tmp_path / "whole.ckpt", tmp_path / key)
        damage(tmp_path / key)
    for rank in run_distributed(each, 2, damages, load):
        for key, found in rank.items():
            for name, (message, unchanged) in found.items():
                assert f"{tmp_path / key} is damaged, or no checkpoint" in message and unchanged, (name, key, message)


def test_values_that_were_changed_on_the_disk_name_their_tensor(tmp_path: Path) -> None:
    """The file has its length; what torch notices is told with the tensor's name, on the other rank too."""

    def save() -> None:
        run("fsdp2", seeded(Small), rows(1), save=tmp_path / "c")

    def load() -> str:
        return attempt("fsdp2", seeded(Small, seed=99), tmp_path / "c")[0]

    run_distributed(save, 2)
    shard = tmp_path / "c" / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    for message in run_distributed(load, 2):
        assert "in __0_0.distcp is damaged" in message and "the part of 'state_dict." in message


# --- other modules ---


class Changed(Small):
    """`Small`, but for one thing."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        if how == "more":
            self.more = nn.Linear(2, 2)
        elif how == "less":
            self.first.bias = None
        elif how == "shape":
            self.last = nn.Linear(5, 2)
        elif how == "dtype":
            del self.scale
            self.register_buffer("scale", torch.ones(3, dtype=torch.int64))
        elif how == "groups":
            self.make_optimizer = lambda module: torch.optim.AdamW(
                [{"params": module.first.parameters()}, {"params": module.last.parameters()}], lr=1e-2
            )
        elif how == "moved":
            self.make_optimizer = lambda module: torch.optim.AdamW([*module.first.parameters(), module.last.weight])


CHANGES = {
    "more": ["missing in it: 'more.bias', 'more.weight'", "strict_loading = False"],
    "less": ["unknown to this module: 'first.bias'", "strict_loading = False"],
    "shape": ["'last.bias' has shape (1,) in it and (2,) in the module", "'last.weight' has shape (1, 5)"],
    "dtype": ["'scale' is torch.float32 in it and torch.int64 in the module"],
    "groups": ["group"],
    "moved": ["'last.bias'"],
}
"""What the error says."""


def test_other_modules_are_refused_by_name_before_anything_is_loaded(tmp_path: Path) -> None:
    def save() -> None:
        run("fsdp2", seeded(Small), rows(1), save=tmp_path / "c")

    def load(case: tuple[str, str, bool]) -> tuple[str, bool]:
        name, how, train = case
        return attempt(name, seeded(Changed, how, seed=99), tmp_path / "c", train)

    run_distributed(save, 2)
    cases = [
        *itertools.product(["zero2", "zero3", "fsdp2"], CHANGES, [True]),
        *itertools.product(["zero2", "fsdp2"], ["more", "less", "shape", "dtype"], [False]),
        ("1f1b", "dtype", True),
    ]
    for rank in run_distributed(each, 2, cases, load):
        for case, (message, unchanged) in rank.items():
            where = (case, message)
            assert message.startswith("MisconfigurationException") and str(tmp_path / "c") in message, where
            says = CHANGES[case[1]] if not case[2] or case[1] not in ("more", "less") else []
            assert unchanged and all(part in message for part in says), where
            assert case[1] != "more" or "'more." in message, where
            assert case[1] != "less" or "'first.bias'" in message, where


def test_another_number_of_optimizers_is_refused(tmp_path: Path) -> None:
    class Two(Small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.make_optimizer = lambda module: [
                torch.optim.AdamW(module.first.parameters()),
                torch.optim.AdamW(module.last.parameters()),
            ]

        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            loss = super().training_step(batch, batch_idx)
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()

    def both() -> list[tuple[str, bool]]:
        run("fsdp2", seeded(Small), rows(1), save=tmp_path / "one")
        run("fsdp2", seeded(Two), rows(1), save=tmp_path / "two")
        return [
            attempt("fsdp2", seeded(Two), tmp_path / "one"),
            attempt("zero2", seeded(Small), tmp_path / "two"),
            attempt("1f1b", seeded(Small), tmp_path / "two"),
        ]

    for found in run_distributed(both, 2):
        for (message, unchanged), counts in zip(found, [(1, 2), (2, 1), (2, 1)], strict=True):
            assert f"holds the states of {counts[0]} optimizers" in message and f"returned {counts[1]}" in message
            assert unchanged


def test_a_plain_file_with_parameters_in_another_order_is_refused(tmp_path: Path) -> None:
    """A plain file counts parameters, so that only their shapes tell."""

    class Reordered(Small):
        def __init__(self) -> None:
            super().__init__(lambda module: torch.optim.AdamW([*module.last.parameters(), *module.first.parameters()]))

    def save() -> None:
        run("auto", seeded(Reordered), rows(1), save=tmp_path / "c.ckpt")

    def load(name: str) -> tuple[str, bool]:
        return attempt(name, seeded(Small, seed=99), tmp_path / "c.ckpt")

    run_distributed(save, 1)
    for rank in run_distributed(each, 2, STRATEGIES, load):
        for name, (message, unchanged) in rank.items():
            assert "the parameters are in another order" in message and "'first.weight'" in message and unchanged, name


def test_not_strict_loads_what_both_have(tmp_path: Path) -> None:
    class Other(Small):
        def __init__(self) -> None:
            super().__init__()
            self.strict_loading = False
            self.first.bias = None
            self.register_buffer("more", torch.full((2,), 4.0))

    def both(name: str) -> None:
        saved = run(name, seeded(Small), rows(1), save=tmp_path / name).weights
        module = seeded(Other, seed=99)
        evaluating = trainer(strategy_of(name))
        evaluating.validate(module, own_rows(name, rows(1)), ckpt_path=tmp_path / name, verbose=False)
        strategy: Any = evaluating.strategy
        for name_, held in strategy.training_states().weights().items():
            for box in held.boxes:
                wanted = saved.get(name_, torch.full((2,), 4.0))
                window = tuple(
                    slice(start, start + size) for start, size in zip(box.offsets, box.tensor.shape, strict=True)
                )
                assert torch.equal(box.tensor, wanted[window]), (name, name_)

    run_distributed(each, 2, ["zero2", "fsdp2"], both)


# --- files that would run code ---


class Runs:
    """Unpickled, makes a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._file),)


class ByDottedName(pickle._Pickler):  # type: ignore[name-defined]
    """Names a function through a module that every checkpoint needs."""

    def save(self, value: Any, *args: Any) -> None:
        if value is os.mkdir:
            super().save("torch.distributed.checkpoint.metadata")
            super().save("os.mkdir")
            self.write(pickle.STACK_GLOBAL)
        else:
            super().save(value, *args)


def test_files_that_would_run_code_do_not(tmp_path: Path) -> None:
    def save() -> None:
        run("fsdp2", seeded(Small), rows(1), save=tmp_path / "c")

    def load(key: str) -> dict[str, tuple[str, bool]]:
        return {name: attempt(name, seeded(Small, seed=99), tmp_path / key) for name in ("fsdp2", "zero3")}

    def pickled(path: Path, pickler: Any = pickle.Pickler) -> None:
        with path.open("wb") as file:
            pickler(file, 4).dump(Runs(tmp_path / "ran"))

    def saved(path: Path) -> None:
        torch.save({"lightning": Runs(tmp_path / "ran")}, path)

    def shard(path: Path) -> None:
        size = path.stat().st_size
        saved(path)
        path.write_bytes(path.read_bytes().ljust(size, b"\0"))

    run_distributed(save, 2)
    kinds: dict[str, tuple[str, Callable[[Path], None]]] = {
        "metadata": (".metadata", pickled),
        "metadata by a dotted name": (".metadata", lambda path: pickled(path, ByDottedName)),
        "lightning.pt": ("lightning.pt", saved),
        "old lightning.pt": ("lightning.pt", pickled),
        "shard": ("__0_0.distcp", shard),
    }
    for key, (file, damage) in kinds.items():
        shutil.copytree(tmp_path / "c", tmp_path / key)
        damage(tmp_path / key / file)
    for rank in run_distributed(each, 2, kinds, load):
        for key, found in rank.items():
            for name, (message, _) in found.items():
                assert message.partition(":")[0] in ("ValueError", "MisconfigurationException", "RuntimeError"), message
                assert str(tmp_path / key) in message, (key, name, message)
    assert not (tmp_path / "ran").exists()
    for key in ("metadata", "metadata by a dotted name"):  # they would, were they read as pickles are
        with (tmp_path / key / ".metadata").open("rb") as file:
            pickle.load(file)
        (tmp_path / "ran").rmdir()


def test_only_checkpoints_are_overwritten(tmp_path: Path) -> None:
    def save(name: str) -> list[str]:
        folder = tmp_path / name
        if world()[0] == 0:
            (folder / "mine").mkdir(parents=True)
            (folder / "mine" / "thesis.txt").write_text("years")
            (folder / "note.txt").write_text("a note")
            (folder / "empty").mkdir()
        ran = run(name, seeded(Small), rows(1), save=folder / "runs" / "a.ckpt")
        found = [
            message_of(lambda path=path: ran.trainer.save_checkpoint(folder / path))
            for path in ("mine", "runs", "note.txt")
        ]
        ran.trainer.save_checkpoint(folder / "empty")
        if world()[0] == 0:
            torch.save({"state_dict": {}}, folder / "plain.ckpt")
        torch.distributed.barrier()
        ran.trainer.save_checkpoint(folder / "plain.ckpt")
        return found

    for rank in run_distributed(each, 2, STRATEGIES, save):
        for name, messages in rank.items():
            for message, path in zip(messages, ("mine", "runs", "note.txt"), strict=True):
                assert f"{tmp_path / name / path} is a" in message and "is not overwritten" in message, (name, message)
            assert (tmp_path / name / "mine" / "thesis.txt").read_text() == "years"
            assert (tmp_path / name / "note.txt").read_text() == "a note"
            assert (tmp_path / name / "runs" / "a.ckpt" / "manifest.json").is_file()
            assert (tmp_path / name / "empty" / "manifest.json").is_file()
            assert (tmp_path / name / "plain.ckpt" / "manifest.json").is_file()


@contextmanager
def small_files(on_rank: int) -> Any:
    """Inside, files of one rank can grow to 20,000 bytes, as on a disk that is full then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if world()[0] == on_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


class Larger(Small):
    """Has a parameter that is larger than the buffer of a file."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(3, 8000)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.more(batch).square().mean()


def test_a_disk_that_fills_up_is_told_as_such(tmp_path: Path) -> None:
    """torch's zip writer hides the system's error behind one of its own."""

    def save() -> str:
        ran = run("fsdp2", seeded(Larger), rows(1), save=tmp_path / "c")
        with small_files(on_rank=1):
            found = message_of(lambda: ran.trainer.save_checkpoint(tmp_path / "c"))
        torch.distributed.barrier()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]
        assert_same(dict(Larger.load_from_checkpoint(tmp_path / "c").state_dict()), ran.weights, atol=0.0)
        return found

    for message in run_distributed(save, 2):
        assert message.startswith("RuntimeError: The checkpoint"), message
        assert "rank 1 failed with OSError: [Errno 27] File too large" in message, message


def test_an_interrupt_stays_one_on_every_rank(tmp_path: Path) -> None:
    def save() -> str:
        ran = run("fsdp2", seeded(Small), rows(1), save=tmp_path / "c")
        with FullDisk(1, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            ran.trainer.save_checkpoint(tmp_path / "c")
        torch.distributed.barrier()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]
        return "interrupted"

    assert run_distributed(save, 2) == ["interrupted"] * 2
