"""A cut through a step: where it lies, what crosses it, and which stage an event or a parameter belongs to."""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_shard.pipeline.trace import Call, Operation, Trace, Value


@dataclass(frozen=True, kw_only=True)
class Relay:
    """One value that a stage hands to the next."""

    value: Value
    """The value."""

    call: Call | None
    """The module call that it comes out of; for an operation's result the one around it, ``None`` for the step."""

    attribute: tuple[str, str] | None = None
    """Module and attribute that it is left in, if the call does not return it."""

    operation: Operation | None = None
    """The operation that it is the result of, if it is computed between modules."""

    @property
    def source(self) -> str:
        """What it comes from, for people."""
        if self.operation is not None:
            return f"{self.operation.name} at {self.operation.source}"
        return self.call.name if self.call is not None else "the step"

    @property
    def size(self) -> int:
        """Its bytes, for one microbatch."""
        return self.value.tensor.numel() * self.value.tensor.element_size()


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A place at which a stage may end."""

    time: int
    """The end of ``call``."""

    call: Call
    """The module call at whose end it lies."""

    keys: tuple[tuple[str, int], ...]
    """The calls that end here, the innermost first."""

    relays: tuple[Relay, ...]
    """What crosses."""

    parameters: frozenset[str]
    """Parameters that the stage behind needs to compute values between modules again."""

    @property
    def crossing_bytes(self) -> int:
        """Bytes of all values that cross, for one microbatch."""
        return sum(relay.size for relay in self.relays)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A place at which no stage can end."""

    name: str
    """The module that ends there."""

    reason: str
    """Why, in one line."""


def stage_of(time: int, cuts: Sequence[Cut]) -> int:
    """The stage in whose part of the step ``time`` lies."""
    return bisect.bisect_left([cut.time for cut in cuts], time)


def parameter_stages(trace: Trace, cuts: Sequence[Cut]) -> dict[str, set[int]]:
    """The stages that use each parameter in the step."""
    stages: dict[str, set[int]] = {}
    for name, time, _ in trace.uses():
        stages.setdefault(name, set()).add(stage_of(time, cuts))
    for number, cut in enumerate(cuts):
        for name in cut.parameters:
            stages.setdefault(name, set()).add(number + 1)
    return stages


def spans(trace: Trace, cuts: Sequence[Cut]) -> Iterator[tuple[int, int]]:
    """The first and the last moment of each stage."""
    times = [0, *(cut.time for cut in cuts), trace.end]
    yield from ((start, end) for start, end in itertools.pairwise(times))
