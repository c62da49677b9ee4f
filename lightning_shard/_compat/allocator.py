"""The c10 CPU allocator's own count of its live bytes, and torch's record of each block as it comes and goes.

torch has no public door to either. Its public memory profile adds changes up that it saw, and it does not see a block
that a thread of its own frees, as gloo's threads do. The allocator's running total, which each record carries, knows
all threads. Written for torch 2.13.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import _disable_profiler, _prepare_profiler, _profiler_enabled
from torch._C._profiler import ProfilerConfig, ProfilerState, RecordScope, _EventType, _ExperimentalConfig

_COUNTS = "FLAGS_caffe2_report_cpu_memory_usage"
_LOG_LEVEL = "KINETO_LOG_LEVEL"


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block that came or went."""

    nanoseconds: int
    """When."""

    thread: int
    """Number of the thread, in the order in which they appeared."""

    address: int
    """Where it is."""

    change: int
    """Its bytes; negative if it went."""

    total: int
    """The allocator's live bytes after it: all blocks of all threads that came since counting began."""


def begin_counting() -> bool:
    """Let the allocator remember the size of every block, so that it knows what is freed; for good.

    It must not be ended: a block that is freed unseen would leave its size behind at an address that is used again.

    Returns:
        Whether the allocator counted already.

    Raises:
        RuntimeError: If torch's library has no such switch.

    """
    folder = Path(torch.__file__).parent / "lib"
    name = {"win32": "c10.dll", "darwin": "libc10.dylib"}.get(sys.platform, "libc10.so")
    try:
        switch = ctypes.c_bool.in_dll(ctypes.CDLL(str(folder / name)), _COUNTS)
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"torch {torch.__version__} has no {_COUNTS} in {folder / name}, so that its CPU allocator cannot be"
            " measured to the byte."
        ) from error
    before = switch.value
    switch.value = True
    return before


class Recorder:
    """Records blocks from its making to :meth:`end`, in the thread that made it and in those that work for it.

    Raises:
        RuntimeError: If a profiler of torch is at work in this thread.

    """

    def __init__(self) -> None:
        if _profiler_enabled():
            raise RuntimeError(
                "The CPU allocator cannot be measured while a profiler of torch is at work: end it first."
            )
        self._thread = threading.get_ident()
        # Arguments: shapes, memory, stack, FLOPs, modules. The events of operators are not wanted, only of memory.
        config: Any = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
        activities = {torch.profiler.ProfilerActivity.CPU}
        chosen = os.environ.get(_LOG_LEVEL)
        if chosen is None:
            os.environ[_LOG_LEVEL] = "6"  # it is read once; below it says on stderr when it starts and stops
        try:
            _prepare_profiler(config, activities)
        finally:
            if chosen is None:
                del os.environ[_LOG_LEVEL]
        # A scope that nothing has: an event that ends in another session than its own would write where it must not.
        enable: Any = torch._C._autograd._enable_profiler  # its stub lacks the scopes
        enable(config, activities, {RecordScope.KERNEL_FUNCTION_DTYPE})

    def end(self) -> list[Block]:
        """Stop recording.

        Returns:
            The blocks, in the order of time.

        Raises:
            RuntimeError: If another thread began it.

        """
        if self._thread != threading.get_ident():
            raise RuntimeError("A measurement of the CPU allocator must end in the thread that began it.")
        tree: Any = _disable_profiler()
        return sorted(_blocks(tree.experimental_event_tree()), key=lambda block: block.nanoseconds)


def _blocks(events: list[Any]) -> Iterator[Block]:
    pending = list(events)
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag != _EventType.Allocation or event.extra_fields.device.type != "cpu":
            continue
        yield Block(
            nanoseconds=event.start_time_ns,
            thread=event.start_tid,
            address=event.extra_fields.ptr,
            change=event.extra_fields.alloc_size,
            total=event.extra_fields.total_allocated,
        )
