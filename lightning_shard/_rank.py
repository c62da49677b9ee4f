"""The life of one rank, in its own process: take a job, run it, report, wait to be ended."""

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any

from lightning_shard import _shipping

_PR_SET_PDEATHSIG = 1
"""Linux: the signal that this process gets when its parent dies."""


def live(connection: "Connection[Any, Any]", rank: int, log: str) -> None:
    """Run the job that comes through ``connection`` and send back ``(succeeded, moment, data)``.

    Args:
        connection: To the caller.
        rank: This process's rank.
        log: File for everything that this process prints.

    """
    os.setsid()
    _die_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The caller decides what an interrupt means.
    # A collection would walk all that the server has imported and so copy the pages that it shares with this rank, and
    # the engine's ZeRO 3 collects in each setup (0.7 s). What is frozen is not walked.
    gc.freeze()
    try:
        connection.send((True, 0.0, _work(connection, rank)))
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        connection.send((False, time.monotonic(), "".join(traceback.format_exception(error))))
    # Leaving now would close this rank's sockets, and its peers' errors would hide the cause.
    while True:
        signal.pause()


def _work(connection: "Connection[Any, Any]", rank: int) -> bytes:
    environment, folder, path = connection.recv()
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(folder)
    sys.path[:] = path
    import torch

    torch.set_num_threads(1)
    function, args, kwargs = _shipping.loads(connection.recv_bytes())
    try:
        return _shipping.dumps(function(*args, **kwargs))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _die_with_parent() -> None:
    """End this rank, and what it started, as soon as the caller is gone, even by SIGKILL."""
    caller = multiprocessing.parent_process()
    assert caller is not None, "a rank is always a child process"
    sentinel = caller.sentinel

    def watch() -> None:
        wait([sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="watch the caller", daemon=True).start()
    if sys.platform == "linux":
        # The thread needs the interpreter, the kernel does not: the server dies with the caller, and the rank with it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
