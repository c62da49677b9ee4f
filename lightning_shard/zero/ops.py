"""DeepSpeed's C++ ops: compiled once per machine, with a word to the user, and never a hang on a stale lock.

Only two are ever needed for training: ``cpu_adam`` (CPU Adam on an offloaded partition) and ``async_io`` (NVMe).
"""

import fcntl
import os
import shlex
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard import _compat

Op = Literal["async_io", "cpu_adam"]

_REMEDIES: dict[Op, str] = {
    "async_io": (
        "NVMe offload needs it. Install libaio's headers (Debian and Ubuntu: `apt-get install libaio-dev`; Fedora:"
        " `dnf install libaio-devel`), or offload to the CPU: Offload(optimizer='cpu', parameters='cpu')."
    ),
    "cpu_adam": "Keep torch's Adam on the offloaded partition: Offload(cpu_adam=False), which needs no compiler.",
}
_LOADING_SECONDS = 5.0
"""A cached op loads within this; what takes longer is being compiled anew."""

_PARTS: dict[Op, tuple[str, ...]] = {"async_io": ("pin_memory", "async_io"), "cpu_adam": ("pin_memory", "cpu_adam")}


def ensure_op(op: Op, local_rank: int) -> None:
    """Have ``op`` loaded on this rank, compiled by one process of each machine. Collective.

    Args:
        op: The op's name.
        local_rank: This rank's number on its machine; 0 compiles, the others load what it made.

    Raises:
        MisconfigurationException: On every rank, if it cannot be built anywhere, with the remedy.

    """
    failure = _attempt(op, announce=True) if local_rank == 0 else None
    _raise_together(op, failure)
    failure = _attempt(op, announce=False) if local_rank != 0 else None
    _raise_together(op, failure)


def _attempt(op: Op, announce: bool) -> str | None:
    """Build or load ``op``; the reason where that fails."""
    if _compat.op_is_loaded(op):
        return None
    missing = _missing_tool()
    if missing is not None:
        return missing
    try:
        with _build_lock(op), _announced(op) if announce else nullcontext():
            _compat.load_op(op)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return None


@contextmanager
def _announced(op: Op) -> Iterator[None]:
    """Say that a compile goes on: at once where nothing is cached, else when loading takes too long to be only that."""
    started = time.monotonic()
    cached = _is_cached(op)

    def say() -> None:
        print(f"Compiling DeepSpeed's {op} op. This takes some minutes, once for this machine.", flush=True)

    patience = threading.Timer(_LOADING_SECONDS, say)
    patience.daemon = True
    if cached:
        patience.start()
    else:
        say()
    try:
        yield
    finally:
        patience.cancel()
    seconds = time.monotonic() - started
    if not cached or seconds > _LOADING_SECONDS:
        folder = _compat.op_build_directory(op)
        print(f"Compiled DeepSpeed's {op} op in {seconds:.0f} s; cached in {folder}.", flush=True)


def _raise_together(op: Op, failure: str | None) -> None:
    """Tell every rank what went wrong on any of them, so that none waits for a rank that has given up."""
    failures: list[str | None] = [failure]
    if torch.distributed.is_initialized():
        failures = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(failures, failure)
    for rank, reason in enumerate(failures):
        if reason is not None:
            raise MisconfigurationException(
                f"DeepSpeed's {op} op could not be built or loaded on rank {rank}: {reason}. {_REMEDIES[op]}"
            )


def _missing_tool() -> str | None:
    # CXX may hold more than the compiler: "ccache g++".
    compiler = (shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ({compiler!r} is not on the PATH)"
    _prefer_own_ninja()
    return None if shutil.which("ninja") is not None else "there is no ninja (`pip install ninja`)"


def _prefer_own_ninja() -> None:
    """Put the ``ninja`` of this Python environment first on the PATH, where a script started by its full path lacks it.

    Another version would also take the cached objects for outdated and compile everything again.
    """
    try:
        import ninja
    except ImportError:
        return
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if folders[0] != ninja.BIN_DIR:
        os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, *folders])


def _is_cached(op: Op) -> bool:
    return all(any(Path(_compat.op_build_directory(part)).glob("*.so")) for part in _PARTS[op])


@contextmanager
def _build_lock(op: Op) -> Iterator[None]:
    """Hold the machine's right to build ``op``, and clear the lock file that a killed build has left.

    torch marks a running build by an empty file, which a killed process never removes: every later run would wait for
    it without a word. A lock of the kernel (flock) ends with its process, so whoever holds it knows that none of ours
    builds; a build of somebody else's shows itself by a process that works in the folder.
    """
    directories = [Path(_compat.op_build_directory(part)) for part in _PARTS[op]]
    with open(directories[-1] / "lightning_shard.flock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        for directory in directories:
            lock = directory / "lock"
            if lock.exists() and not _somebody_builds_in(directory):
                print(f"Removing the lock that a killed build left behind: {lock}", flush=True)
                lock.unlink(missing_ok=True)
        yield


def _somebody_builds_in(directory: Path) -> bool:
    """Whether a process works in ``directory`` (ninja and the compiler do, while they build)."""
    import psutil

    directory = directory.resolve()
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and Path(process.cwd()) == directory:
                return True
        except (psutil.Error, OSError):
            continue
    return False
