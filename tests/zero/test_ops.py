"""C++ ops, with a stand-in for the compiler: clear errors on every rank, and no hang on a lock."""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard import _compat
from lightning_shard.testing import run_distributed
from lightning_shard.zero import ops


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of compiled ops, in a folder with a space in its name."""
    folder = tmp_path / "torch extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    return folder


def folder(part: str) -> Path:
    return Path(_compat.op_build_directory(part))


class Compiler:
    """Stands in for the build: leaves the files that a build would."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.loaded: set[str] = set()

    def load(self, op: Any) -> None:
        assert not any((folder(part) / "lock").exists() for part in ("pin_memory", op))
        self.built.append(op)
        self.loaded.add(op)
        for part in ("pin_memory", op):
            (folder(part) / f"{part}.so").touch()

    def is_loaded(self, op: Any) -> bool:
        return op in self.loaded


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    stand_in = Compiler()
    monkeypatch.setattr(_compat, "load_op", stand_in.load)
    monkeypatch.setattr(_compat, "op_is_loaded", stand_in.is_loaded)
    monkeypatch.setattr(ops, "_missing_tool", lambda: None)
    return stand_in


def test_a_build_is_announced_and_a_cached_op_is_not(compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    ops.ensure_op("async_io", local_rank=0)
    said = capsys.readouterr().out
    assert "Compiling DeepSpeed's async_io op" in said and "minutes" in said
    assert "Compiled DeepSpeed's async_io op in" in said and str(folder("async_io")) in said
    # In this process it is there; in the next one it comes from the cache.
    ops.ensure_op("async_io", local_rank=0)
    assert compiler.built == ["async_io"]
    compiler.loaded.clear()
    ops.ensure_op("async_io", local_rank=0)
    assert compiler.built == ["async_io"] * 2
    assert capsys.readouterr().out == ""


def test_only_the_first_rank_of_a_machine_announces(compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    ops.ensure_op("cpu_adam", local_rank=1)
    assert compiler.built == ["cpu_adam"]
    assert "Compil" not in capsys.readouterr().out


@pytest.mark.parametrize("part", ["async_io", "pin_memory"])
def test_the_lock_of_a_killed_build_is_removed(
    part: str, compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = folder(part) / "lock"
    lock.touch()
    ops.ensure_op("async_io", local_rank=0)  # the stand-in would refuse to build under a lock
    assert not lock.exists()
    assert f"Removing the lock that a killed build left behind: {lock}" in capsys.readouterr().out


WAIT = "import sys, time\nprint('ready', flush=True)\ntime.sleep(60)"


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(code: str, **settings: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, **settings)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_the_lock_of_a_build_that_is_alive_stays(compiler: Compiler, child: Any) -> None:
    # Somebody else's build: no flock of ours, but a compiler that works in the folder.
    lock = folder("async_io") / "lock"
    lock.touch()
    builder = child(WAIT, cwd=folder("async_io"))
    with ops._build_lock("async_io"):
        assert lock.exists()
    builder.kill()
    builder.wait()
    with ops._build_lock("async_io"):
        assert not lock.exists()


def test_a_build_of_another_process_is_waited_for(compiler: Compiler, child: Any) -> None:
    path = folder("async_io") / "lightning_shard.flock"
    lock = folder("async_io") / "lock"
    code = (
        "import fcntl, os, time\n"
        f"handle = open({str(path)!r}, 'w')\n"
        "fcntl.flock(handle, fcntl.LOCK_EX)\n"
        f"open({str(lock)!r}, 'w').close()\n"
        "print('ready', flush=True)\n"
        "time.sleep(0.7)\n"
        f"os.unlink({str(lock)!r})\n"
    )
    start = time.monotonic()
    child(code)
    ops.ensure_op("async_io", local_rank=0)
    assert time.monotonic() - start >= 0.6
    assert compiler.built == ["async_io"]


def test_a_killed_builder_holds_nobody_up(compiler: Compiler, child: Any) -> None:
    path = folder("async_io") / "lightning_shard.flock"
    lock = folder("async_io") / "lock"
    holder = child(
        f"import fcntl\nhandle = open({str(path)!r}, 'w')\nfcntl.flock(handle, fcntl.LOCK_EX)\n"
        f"open({str(lock)!r}, 'w').close()\n{WAIT}"
    )
    with open(path, "w") as handle, pytest.raises(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    holder.kill()
    ops.ensure_op("async_io", local_rank=0)
    assert not lock.exists()


def test_a_failed_build_gives_the_reason_and_the_remedy(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(op: str) -> None:
        raise RuntimeError("\n  Error building extension 'async_io': libaio.h not found\nninja: stopped")

    monkeypatch.setattr(_compat, "load_op", fail)
    with pytest.raises(MisconfigurationException) as caught:
        ops.ensure_op("async_io", local_rank=0)
    message = str(caught.value)
    assert "async_io op could not be built or loaded on rank 0" in message and "libaio.h not found" in message
    assert "apt-get install libaio-dev" in message and "ninja: stopped" not in message
    with pytest.raises(MisconfigurationException, match=r"Offload\(cpu_adam=False\)"):
        ops.ensure_op("cpu_adam", local_rank=0)


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MisconfigurationException, match=r"no C\+\+ compiler \('c\+\+' is not on the PATH\)"):
        ops.ensure_op("cpu_adam", local_rank=0)
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(MisconfigurationException, match="'no-such-compiler' is not on the PATH"):
        ops.ensure_op("cpu_adam", local_rank=0)


def test_a_compiler_behind_a_cache_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ccache", "ninja"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "ccache g++")
    assert ops._missing_tool() is None


def test_ninja_of_this_environment_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "c++").touch(mode=0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ops._missing_tool() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ninja", None)
    assert "pip install ninja" in str(ops._missing_tool())


@pytest.mark.ranks
@pytest.mark.parametrize("rank_without", [0, 1])
def test_every_rank_hears_that_one_has_no_compiler(rank_without: int, tmp_path: Path) -> None:
    empty = str(tmp_path)

    def ensure() -> str:
        torch.distributed.init_process_group("gloo")
        rank = int(os.environ["RANK"])
        stand_in = Compiler()
        _compat.load_op, _compat.op_is_loaded = stand_in.load, stand_in.is_loaded
        if rank == rank_without:
            os.environ["PATH"] = empty
            os.environ.pop("CXX", None)
        else:
            ops._missing_tool = lambda: None
        try:
            ops.ensure_op("async_io", local_rank=rank)
        except MisconfigurationException as error:
            return str(error)
        return "built"

    for message in run_distributed(ensure, 2, timeout=30):
        assert f"on rank {rank_without}: there is no C++ compiler" in message and "libaio-dev" in message


@pytest.mark.ranks
def test_one_rank_of_a_machine_builds_for_all() -> None:
    def ensure() -> tuple[list[str], list[str]]:
        torch.distributed.init_process_group("gloo")
        stand_in = Compiler()
        _compat.load_op, _compat.op_is_loaded = stand_in.load, stand_in.is_loaded
        ops._missing_tool = lambda: None
        cached: list[str] = []
        load = stand_in.load

        def note(op: Any) -> None:
            cached.extend(str(path.name) for path in folder(op).glob("*.so"))
            load(op)

        _compat.load_op = note
        ops.ensure_op("async_io", local_rank=int(os.environ["RANK"]))
        return stand_in.built, cached

    assert run_distributed(ensure, 2, timeout=30) == [(["async_io"], []), (["async_io"], ["async_io.so"])]


def test_a_cached_op_that_is_compiled_again_is_announced_too(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ops.ensure_op("async_io", local_rank=0)
    capsys.readouterr()
    compiler.loaded.clear()
    monkeypatch.setattr(ops, "_LOADING_SECONDS", 0.05)
    monkeypatch.setattr(_compat, "load_op", lambda op: time.sleep(0.5))
    ops.ensure_op("async_io", local_rank=0)
    said = capsys.readouterr().out
    assert said.count("Compiling DeepSpeed's async_io op") == 1 and "Compiled DeepSpeed's async_io op in" in said
