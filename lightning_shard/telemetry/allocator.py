"""What torch's allocator really handed out, to the byte, between two points of a run.

On CPU that is the c10 allocator: every tensor's storage, and what operators allocate as tensors for themselves,
whichever thread does it. What libraries below torch take from the system themselves (scratch memory of oneDNN and
MKL, sockets) is not part of it. On CUDA it is the caching allocator's count of bytes that tensors hold.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lightning_shard._compat.allocator import Block, Recorder, begin_counting

__all__ = ["AllocatorTracker", "PhaseBytes", "track_allocator"]

_MARK = 1
"""Bytes of the block that shows the total at the ends of a phase."""


@dataclass(frozen=True, kw_only=True)
class PhaseBytes:
    """What the allocator did in one phase."""

    name: str
    """The phase's name."""

    start_bytes: int
    """Live bytes at its start, less those at the start of the tracker."""

    peak_bytes: int
    """The most live bytes at any moment, less those at the start of the phase."""

    left_bytes: int
    """Live bytes at its end, less those at its start; negative if more was freed than was made."""

    allocations: int
    """Blocks that came. 0 on CUDA, where it is not counted."""


class Phase:
    """A phase that is measured; :attr:`bytes` is there when it has ended."""

    def __init__(self) -> None:
        self._bytes: PhaseBytes | None = None

    @property
    def bytes(self) -> PhaseBytes:
        """What was measured.

        Raises:
            RuntimeError: If the phase has not ended.

        """
        if self._bytes is None:
            raise RuntimeError("The phase has not ended: its bytes are known after its `with` block.")
        return self._bytes


class AllocatorTracker:
    """Measures; made by :func:`track_allocator`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phases: list[PhaseBytes] = []
        self._running: str | None = None
        self._start = self._live()

    @property
    def phases(self) -> Sequence[PhaseBytes]:
        """The phases that have ended."""
        return tuple(self._phases)

    @property
    def live_bytes(self) -> int:
        """Live bytes now, less those at the start of the tracker; not within a phase."""
        return self._live() - self._start

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Measure what happens within the ``with`` block.

        On CPU every block is recorded, about 100 bytes each, which are not the allocator's: measure steps, not runs.

        Args:
            name: Any name.

        Raises:
            RuntimeError: If another phase or a profiler of torch is at work, or the block ends in another thread.

        """
        if self._running is not None:
            raise RuntimeError(f"The phase {name!r} cannot begin before {self._running!r} has ended.")
        self._running = name
        phase = Phase()
        try:
            measure = _measure_cuda if self._device.type == "cuda" else _measure_cpu
            with measure(name, self._start, self._device, phase):
                yield phase
            self._phases.append(phase.bytes)
        finally:
            self._running = None

    def _live(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        if self._running is not None:
            raise RuntimeError(f"live_bytes is not known within a phase, here {self._running!r}.")
        recorder = Recorder()
        _mark()
        return recorder.end()[0].total - _MARK


@contextmanager
def track_allocator(device: torch.device | str = "cpu") -> Iterator[AllocatorTracker]:
    """Measure the allocator of a device in this process, all threads together.

    Begin before the module is made: blocks from before the first tracker of the process are not known to the CPU's
    counter, and their end is not seen (torch then warns of a memory block of unknown size). That counter stays on and
    costs a lookup for each block. A phase takes a millisecond longer than without, and some microseconds for each
    block.

    Example::

        with track_allocator() as allocator:
            module = make_module()
            train(module, steps=2)
            with allocator.phase("step") as step:
                train(module, steps=1)
        print(step.bytes.start_bytes + step.bytes.peak_bytes)

    On CPU the phase's thread is recorded with the threads that work for it (gloo's, autograd's); what others hold
    shows in the totals at the next block of a recorded one. On CUDA the numbers are those of
    ``torch.cuda.memory_stats``: rounded up to the allocator's 512 bytes, without the context and the libraries. Was
    run on CPU; the CUDA part has not been run.

    Args:
        device: ``"cpu"``, or a CUDA device.

    Raises:
        RuntimeError: If torch was built without the counter, the counter does not count to the byte, or memory was
            profiled in this process before the first tracker.
        ValueError: If the device is of another type.

    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"track_allocator(device={str(device)!r}): the allocators of cpu and cuda are known.")
    if device.type == "cpu":
        _check_counter(counted_before=begin_counting())
    yield AllocatorTracker(device)


def _check_counter(counted_before: bool) -> None:
    """Refuse a counter that is not exact."""
    recorder = Recorder()
    block = torch.UntypedStorage(12345)  # type: ignore[no-untyped-call]
    del block
    changes = [(block.change, block.total) for block in recorder.end()]
    if len(changes) < 2 or (changes[0][0], changes[-1][0]) != (12345, -12345):
        raise RuntimeError(
            f"torch {torch.__version__} reports {changes} for a block of 12345 bytes that came and went: its CPU"
            " allocator cannot be measured to the byte."
        )
    before = changes[0][1] - 12345
    if not counted_before and before != 0:
        raise RuntimeError(
            f"Memory was profiled in this process before, which left {before} bytes in the CPU allocator's counter"
            " whose end it may not have seen. Enter track_allocator() once before the first memory profile."
        )


def _mark() -> None:
    # A storage, not a tensor: no mode and no default device sees it.
    block = torch.UntypedStorage(_MARK)  # type: ignore[no-untyped-call]
    del block


@contextmanager
def _measure_cpu(name: str, origin: int, _: torch.device, phase: Phase) -> Iterator[None]:
    recorder = Recorder()
    ended = False
    try:
        _mark()
        yield
        _mark()
        blocks = recorder.end()
        ended = True
    finally:
        if not ended:
            recorder.end()
    phase._bytes = _summary(name, origin, blocks)


def _summary(name: str, origin: int, blocks: Sequence[Block]) -> PhaseBytes:
    thread = next(block.thread for block in blocks if block.change == _MARK)
    own = [index for index, block in enumerate(blocks) if block.thread == thread]
    first, last = own[0], own[-2]  # each mark comes and goes
    assert blocks[first].change == blocks[last].change == _MARK
    start, end = blocks[first].total - _MARK, blocks[last].total - _MARK
    totals = [block.total for index, block in enumerate(blocks) if index not in (first, last)]
    return PhaseBytes(
        name=name,
        start_bytes=start - origin,
        peak_bytes=max(start, end, *totals) - start,
        left_bytes=end - start,
        allocations=sum(block.change > 0 for block in blocks) - 2,
    )


@contextmanager
def _measure_cuda(name: str, origin: int, device: torch.device, phase: Phase) -> Iterator[None]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    yield
    torch.cuda.synchronize(device)
    end = torch.cuda.memory_allocated(device)
    phase._bytes = PhaseBytes(
        name=name,
        start_bytes=start - origin,
        peak_bytes=torch.cuda.max_memory_allocated(device) - start,
        left_bytes=end - start,
        allocations=0,
    )
