"""Saving while training goes on: the loop waits for a copy to host memory, and a thread writes it."""

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_shard.checkpoint.places import Place
from lightning_shard.checkpoint.save import Contents, write_checkpoint


class BackgroundSave:
    """At most one save in flight, in a thread of its own, over a process group of its own.

    Messages of a thread among those of the training would be taken for them, so the group is a separate one; gloo's,
    because it must not wait for the device.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._busy = False
        self._group: Any = None
        self._error: BaseException | None = None
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._afterwards: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def in_flight(self) -> bool:
        """Whether a save is being written."""
        return self._busy

    def start(self, place: Place, contents: Contents) -> None:
        """Copy what is to be written, and write it in the background. Collective.

        Raises:
            RuntimeError: If the save before it failed.

        """
        self.finish()
        if dist.is_initialized() and self._group is None:
            self._group = dist.new_group(backend="gloo")
        copied = contents.on_host(self._buffers)
        self._busy = True
        # No daemon: a process that ends waits for its last checkpoint.
        self._thread = threading.Thread(target=self._write, args=(place, copied), name="lightning-shard-save")
        self._thread.start()

    def _write(self, place: Place, contents: Contents) -> None:
        try:
            write_checkpoint(place, contents, self._group, shown=False)
        except BaseException as error:  # it is raised where the user is
            self._error = error
        with self._lock:
            afterwards, self._afterwards = self._afterwards, []
            try:
                for do in afterwards if self._error is None else ():
                    do()
            except Exception as error:
                self._error = error
            self._busy = False

    def after(self, do: Callable[[], None]) -> None:
        """Do something when the save in flight is whole: at once if there is none, and never if it fails."""
        with self._lock:
            if self._busy:
                self._afterwards.append(do)
                return
        do()

    def check(self) -> None:
        """Raise the error of a save that has failed."""
        if self._error is not None and not self._busy:
            error, self._error = self._error, None
            raise error

    def finish(self) -> None:
        """Wait for the save in flight, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def free(self) -> None:
        """Give the host memory of copies back. The process group goes with the others when the process ends."""
        self._buffers.clear()
