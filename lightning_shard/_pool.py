"""Ranks on this machine: processes forked from one warm server, a fresh set for every job.

The server (the standard library's fork server) imports torch, Lightning and the engine once. A rank forked from it
starts in a few hundredths of a second and ends with its job, so that no state of one job can reach another: neither
process groups and engine globals nor seeds, environment, warnings or hung threads.
"""

import importlib.util
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from lightning_shard import _rank, _shipping

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""Several ranks share the cores, and thread pools that started in the server would not survive its forks."""

SERVER_ENVIRONMENT = {
    **ONE_THREAD,
    # DeepSpeed picks its device at import; ranks here run on CPU, on a machine with GPUs too.
    "DS_ACCELERATOR": "cpu",
    # The torch compiler would start worker processes on import.
    "TORCH_WARM_POOL": "0",
}

GRACE_SECONDS = 0.3
"""How long other ranks may still report after the first failure: a refusal usually comes from all of them."""

_GUARD = (
    "A new process imports the script that starts it: keep what the script does under `if __name__ == '__main__':`."
)

_WATCHER = re.compile(r"_rank\.py\", line \d+ in watch$", re.MULTILINE)

LOG_LINES = 40
"""Lines of a failed rank's output that its error shows."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One function to be run by every rank."""

    function: Callable[..., Any]
    """Called once on each rank."""

    args: tuple[Any, ...]
    """Positional arguments, the same on each rank."""

    kwargs: dict[str, Any]
    """Keyword arguments, the same on each rank."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """How one rank ended."""

    rank: int
    """The rank."""

    result: Any = None
    """What the function returned."""

    failure: str | None = None
    """Traceback or exit code; ``None`` after success."""

    moment: float = 0.0
    """When it failed, on the clock that all processes of the machine share (seconds)."""


class TimedOut(Exception):
    """The job's time was up.

    Args:
        stacks: The stacks of the ranks that had not finished, by rank.

    """

    def __init__(self, stacks: dict[int, str]) -> None:
        super().__init__()
        self.stacks = stacks


class Failed(Exception):
    """At least one rank failed.

    Args:
        reports: Of the failed ranks, the first to fail first.
        logs: The last lines of each rank's output, by rank.

    """

    def __init__(self, reports: list[Report], logs: dict[int, str]) -> None:
        super().__init__()
        self.reports = reports
        self.logs = logs


_extra_modules: list[str] = []
_server_started = False


def preload(*modules: str) -> None:
    """Let the server import ``modules`` too.

    Raises:
        ModuleNotFoundError: If there is no such module.
        RuntimeError: If the server runs already.

    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"preload: there is no module {module!r} here.", name=module)
    if _server_started:
        raise RuntimeError(f"preload{modules}: ranks were started already; call it before the first job.")
    _extra_modules.extend(modules)


def start() -> None:
    """Let the server start now, in the background, rather than at the first job."""
    _context()


def run(job: Job, world_size: int, timeout: float) -> list[Any]:
    """Run ``job`` on ``world_size`` fresh ranks and return their results by rank.

    No rank outlives the call, however it ends.

    Raises:
        Failed: If a rank raised, exited or was killed.
        TimedOut: If ``timeout`` seconds passed first.

    """
    payload = _shipping.dumps((job.function, job.args, job.kwargs))
    with (
        tempfile.TemporaryDirectory(prefix="lightning-shard-ranks-", ignore_cleanup_errors=True) as folder,
        _ranks(world_size, payload, Path(folder)) as (processes, connections),
    ):
        return _collect(processes, connections, Path(folder), deadline=time.monotonic() + timeout)


@contextmanager
def _ranks(
    world_size: int, payload: bytes, logs: Path
) -> Iterator[tuple[list[ForkServerProcess], list["Connection[Any, Any]"]]]:
    context = _context()
    environment = _environment(world_size)
    processes: list[ForkServerProcess] = []
    connections: list[Connection[Any, Any]] = []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank.live, args=(theirs, rank, str(_log(logs, rank))), name=f"rank {rank}"
            )
            connections.append(ours)
            processes.append(process)
            process.start()
            theirs.close()
        for connection in connections:
            try:
                connection.send((environment, os.getcwd(), sys.path))
                connection.send_bytes(payload)
            except OSError:
                pass  # The rank is dead already; collecting says so, with its exit code.
        yield processes, connections
    finally:
        for process in processes:
            _kill(process)
        for connection in connections:
            connection.close()


def _context() -> ForkServerContext:
    global _server_started
    if "forkserver" not in multiprocessing.get_all_start_methods():
        raise RuntimeError("Ranks for tests are forked from a server process, which this operating system lacks.")
    # Set by the standard library while a new process imports the caller's script; going on would start a second server.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(f"A rank may not start ranks while it imports the script that started it. {_GUARD}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning_shard._warm", *_extra_modules])
    if not _server_started:
        from multiprocessing.forkserver import ensure_running

        saved = dict(os.environ)
        # The server knows no import path but this one: it may not start in the folder where the package lies.
        os.environ.update(SERVER_ENVIRONMENT, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
        try:
            ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(saved)
        _server_started = True
    return context


def _environment(world_size: int) -> dict[str, str]:
    """The caller's environment, with what tells Lightning and torch that a launcher of their own started the ranks."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {
        "DS_ACCELERATOR": "cpu",
        **({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {}),
        **os.environ,
        **ONE_THREAD,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "TORCHELASTIC_RUN_ID": "lightning_shard.testing",
    }


def _free_port() -> int:
    """A port that is free now, outside the range that the system hands out, so that nobody gets it meanwhile."""
    choice = random.SystemRandom()
    for _ in range(100):
        port = choice.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("No free port between 20000 and 32000 for the ranks to meet at.")


def _collect(
    processes: list[ForkServerProcess], connections: list["Connection[Any, Any]"], logs: Path, deadline: float
) -> list[Any]:
    reports: dict[int, Report] = {}
    while len(reports) < len(processes):
        failed = any(report.failure is not None for report in reports.values())
        pending = [rank for rank in range(len(processes)) if rank not in reports]
        sources: dict[Any, int] = {connections[rank]: rank for rank in pending}
        sources.update({processes[rank].sentinel: rank for rank in pending})
        ready = wait(list(sources), timeout=GRACE_SECONDS if failed else max(0.0, deadline - time.monotonic()))
        if not ready and failed:
            break
        if not ready:
            raise TimedOut({rank: _stack(processes[rank], logs, rank) for rank in pending})
        for rank in {sources[source] for source in ready}:
            reports[rank] = _receive(processes[rank], connections[rank], rank, begun=_log(logs, rank).exists())
    failures = sorted((r for r in reports.values() if r.failure is not None), key=lambda report: report.moment)
    if failures:
        raise Failed(failures, {rank: _tail(logs, rank) for rank in range(len(processes))})
    return [reports[rank].result for rank in range(len(processes))]


def _receive(process: ForkServerProcess, connection: "Connection[Any, Any]", rank: int, *, begun: bool) -> Report:
    try:
        succeeded, moment, data = connection.recv()
    except (EOFError, OSError):  # The process ended without a word.
        process.join(timeout=5)
        return Report(rank=rank, failure=_ending(process.exitcode, begun), moment=time.monotonic())
    if succeeded:
        return Report(rank=rank, result=_shipping.loads(data))
    return Report(rank=rank, failure=data, moment=moment)


def _ending(code: int | None, begun: bool) -> str:
    if code is not None and code < 0:
        return f"The process was killed by {signal.Signals(-code).name}."
    if begun:
        return f"The process exited with code {code} before the function returned."
    return f"The process exited with code {code} before it began. {_GUARD}"


def _stack(process: ForkServerProcess, logs: Path, rank: int) -> str:
    """Ask a rank for the stacks of its threads; its handler is in C, so that it answers while hung in a collective."""
    log = _log(logs, rank)
    if process.pid is None or not log.exists():
        return "(not started yet)"
    before = log.stat().st_size
    os.kill(process.pid, signal.SIGUSR1)
    text = ""
    for _ in range(50):
        time.sleep(0.02)
        earlier, text = text, log.read_bytes()[before:].decode(errors="replace")
        if text and text == earlier:
            return _own_frames(text)
    return "(gave no stack)"


def _own_frames(stacks: str) -> str:
    """The threads of the job, down to where the job was called."""
    threads = [thread for thread in stacks.strip().split("\n\n") if not _WATCHER.search(thread)]
    return "\n".join(thread.split(f'  File "{_rank.__file__}"')[0].rstrip() for thread in threads)


def _log(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"


def _tail(logs: Path, rank: int) -> str:
    log = _log(logs, rank)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-LOG_LINES:])


def _kill(process: ForkServerProcess) -> None:
    """End a rank and whatever it started, which may outlive it; a rank leads a process group of its own."""
    if process.pid is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # It has not made its group yet, or nothing of it is left.
        process.kill()
    process.join()
