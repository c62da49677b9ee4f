"""Ranks that wait for each other in different places, which no timeout of a collective tells from slow work.

If one rank uses a unit that another does not, it waits in a gather that the other never enters, while that one goes on
to wait somewhere else; so does a rank that calls the module alone, in a callback. Every rank keeps note of where it
waits; a thread that wakes up every few seconds compares the notes of all ranks when nothing has moved. On the CPU
only: on CUDA the host does not wait in a gather, and the ranks meet in
:class:`~lightning_shard.units.agreement.ReachedParameters`.
"""

import faulthandler
import json
import os
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from lightning_shard._compat import sharding

_TICK = 3.0
"""Seconds between two looks."""

_PATIENCE = 10
"""Ticks without any movement before collectives of others than the units' are believed to wait for ever."""

_GRACE = 12.0
"""Seconds for a rank that can still raise an error to do so, before the process is ended."""

Place = tuple[str, str]
"""What a rank waits in, and of which unit."""


class Standstill:
    """Watches this rank, and the others, from a thread of its own; started by the first wait."""

    def __init__(self) -> None:
        self.verdict: str | None = None
        self._place: Place | None = None
        self._entered = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting(self, what: str, unit: str = "") -> Generator[None, None, None]:
        """Inside, this rank is in a collective of ``unit``."""
        outer, self._place = self._place, (what, unit)
        self._entered += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="lightning_shard standstill", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            self._place = outer

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()

    def _watch(self) -> None:
        board = sharding.Board(torch.distributed.get_rank(), torch.distributed.get_world_size())
        last: tuple[Any, Place | None] = (None, None)
        ticks = 0
        try:
            while not self._stop.wait(_TICK):
                now = self._where()
                if now[1] is None or now != last:
                    last, ticks = now, 0
                    board.clear()
                    continue
                ticks += 1
                board.write(json.dumps(now[1]))
                notes = [note for note in board.read() if note is not None]
                places: list[Place] = [(what, unit) for what, unit in map(json.loads, notes)]
                if len(places) < torch.distributed.get_world_size() or len(set(places)) == 1:
                    continue
                others = sum(what.startswith(_OTHER) for what, _ in places)
                if others < len(places) and ticks >= (_PATIENCE if others else 1) and self._unmoved(last):
                    self._end(places)
                    return
        except (RuntimeError, OSError):
            return  # the other ranks, or this process, have ended

    def _where(self) -> tuple[Any, Place | None]:
        """What this rank waits in, and something that changes when it moves on."""
        return (self._entered, self._place) if self._place is not None else _place_of_main_thread()

    def _unmoved(self, last: tuple[Any, Place | None]) -> bool:
        """Whether this rank still waits a tick later: the notes were written one after the other."""
        return not self._stop.wait(_TICK) and self._where() == last

    def _end(self, places: Sequence[Place]) -> None:
        self.verdict = explain(places)
        # A rank that waits in our own message raises the verdict itself; its end wakes up those that wait for it.
        if not self._stop.wait(_GRACE):
            faulthandler.dump_traceback()
            print(f"lightning_shard: {self.verdict}", file=sys.stderr, flush=True)
            os._exit(1)


_OTHER = "torch.distributed."
"""How the notes of collectives begin that are not the units'."""


def _place_of_main_thread() -> tuple[Any, Place | None]:
    """The collective of ``torch.distributed`` that the main thread is in, read off its stack."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or not _is_of(frame, "torch", "distributed"):
        return None, None
    token = (id(frame), frame.f_lasti)
    name = frame.f_code.co_name
    while frame is not None and _is_of(frame, "torch"):
        frame = frame.f_back
    while frame is not None and (_is_of(frame, "lightning") or _is_of(frame, "lightning_shard")):
        frame = frame.f_back
    by = "" if frame is None else f" (from {frame.f_code.co_filename}, line {frame.f_lineno})"
    return token, (f"{_OTHER}{name}{by}", "")


def _is_of(frame: FrameType, *folders: str) -> bool:
    return f"{os.sep}{os.sep.join(folders)}{os.sep}" in frame.f_code.co_filename


def explain(places: Sequence[Place]) -> str:
    """Say who waits where, and what to do.

    Args:
        places: For each rank what it waits in.

    """
    waits = "; ".join(
        f"rank {rank} in {what}{f' of unit {unit!r}' if unit else ''}" for rank, (what, unit) in enumerate(places)
    )
    return (
        f"The ranks wait for each other in different places: {waits}. All ranks take part in every gather, so a step"
        " must use the same units on each of them, in the same order. Let every rank run the same modules (multiply an"
        " unwanted result by zero), call the module on every rank (not under rank_zero_only), or choose units that hold"
        " the alternatives together, such as units=SizeUnits(min_params=...)."
    )
