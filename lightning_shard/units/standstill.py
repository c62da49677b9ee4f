"""Ranks that wait for each other in different places, which no timeout of a collective tells from slow work.

If one rank uses a unit that another does not, it waits in a gather that the other never enters, while that one goes on
to wait somewhere else. Every rank keeps note of where it waits; a thread that wakes up every few seconds compares the
notes of all ranks when nothing has moved. On the CPU only: on CUDA the host does not wait in a gather, and the ranks
meet in :class:`~lightning_shard.units.agreement.ReachedParameters`.
"""

import faulthandler
import json
import os
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from lightning_shard._compat import sharding

_TICK = 3.0
"""Seconds between two looks."""

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
        last: tuple[int, Place | None] = (-1, None)
        try:
            while not self._stop.wait(_TICK):
                now = (self._entered, self._place)
                if now[1] is None or now != last:
                    last = now
                    board.clear()
                    continue
                board.write(json.dumps(now[1]))
                notes = [note for note in board.read() if note is not None]
                all_wait = len(notes) == torch.distributed.get_world_size()
                if all_wait and len(set(notes)) > 1 and self._unmoved(last):
                    self._end([(what, unit) for what, unit in map(json.loads, notes)])
                    return
        except (RuntimeError, OSError):
            return  # the other ranks, or this process, have ended

    def _unmoved(self, last: tuple[int, Place | None]) -> bool:
        """Whether this rank still waits a tick later: the notes were written one after the other."""
        return not self._stop.wait(_TICK) and (self._entered, self._place) == last

    def _end(self, places: Sequence[Place]) -> None:
        self.verdict = explain(places)
        # A rank that waits in our own message raises the verdict itself; its end wakes up those that wait for it.
        if not self._stop.wait(_GRACE):
            faulthandler.dump_traceback()
            print(f"lightning_shard: {self.verdict}", file=sys.stderr, flush=True)
            os._exit(1)


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
        " unwanted result by zero), or choose units that hold the alternatives together, such as"
        " units=SizeUnits(min_params=...)."
    )
