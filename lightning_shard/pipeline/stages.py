"""What each stage does with each module call of a step: leave it out, keep what it returns, or end with it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_shard.pipeline.cuts import Cut, Relay, stage_of
from lightning_shard.pipeline.find_cuts import CutFinder
from lightning_shard.pipeline.trace import Call, Trace

Key = tuple[str, int]
"""A module's name, and the number of calls of it that came before in the step."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """One value that crosses a boundary, as both sides know it."""

    value: int
    """Its number in the trace."""

    shape: tuple[int, ...]
    """Shape for one microbatch."""

    dtype: torch.dtype
    """Element type."""

    gradient: bool
    """Whether its gradient travels back."""

    written: bool
    """Whether code of the step changes it in place, so that it must be a copy."""

    source: str
    """What it comes from, for people."""


@dataclass(frozen=True, kw_only=True)
class Stub:
    """A call that the stage leaves out."""

    template: Any
    """What it returns, with a slot for each tensor."""

    shapes: dict[int, tuple[tuple[int, ...], torch.dtype, bool]]
    """Shape and type of each value in the slots, and whether it requires gradients."""

    passed: dict[int, int]
    """Values that it returns as it was given them: their place among the tensors of its arguments."""

    stale: dict[int, int]
    """Values that were changed in place later: for each the one that is in its place."""

    settings: tuple[tuple[str, str, Any], ...]
    """Modules' plain attributes that it sets: module, attribute, value."""

    attributes: tuple[tuple[str, str, int], ...]
    """Modules' attributes that it sets to values that are handed on: module, attribute, value."""

    inner: dict[str, int]
    """How often it would call other modules."""


@dataclass(frozen=True, kw_only=True)
class Capture:
    """A value to keep for the next stage when a call returns."""

    value: int
    """Its number in the trace."""

    output: int | None
    """Its place among the tensors that the call returns, or ``None`` if it is an attribute."""

    attribute: tuple[str, str] | None
    """Module and attribute that hold it."""

    copy: bool
    """Whether it is changed in place before the stage ends."""


Place = tuple[Key | None, int, str]
"""The call around an operation, ``None`` for the step itself, the operation's number in it, and its name."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """How one stage replays a step."""

    stage: int
    """Which stage."""

    stages: int
    """Of how many."""

    step: str
    """Name of the step's method."""

    receives: tuple[Wire, ...]
    """What comes from the stage before, in order."""

    sends: tuple[Wire, ...]
    """What goes to the stage behind, in order; empty on the last stage."""

    stubs: dict[Key, Stub]
    """Calls that are left out."""

    captures: dict[Key, tuple[Capture, ...]]
    """Calls whose results are kept."""

    substitutes: dict[Place, tuple[tuple[int, int], ...]]
    """Operations before the stage whose results are handed on to it: pairs of a result's place and the value."""

    results: dict[Place, tuple[tuple[int, int], ...]]
    """Operations whose results are kept for the next stage, likewise."""

    called: frozenset[str]
    """All modules that the step calls, if operations are counted in them."""

    exit: Key | None
    """The call with which the stage ends; ``None`` on the last."""

    outputs: dict[Key, int]
    """How many tensors each captured call returned in the trace."""

    outermost: frozenset[Key]
    """On the last stage the calls that lie wholly in it and in no other such call, and use parameters."""

    writes_batch: bool
    """Whether the step changes tensors of its batch in place."""

    reseeds: frozenset[Key]
    """Calls after which random numbers start anew, so that all stages draw the same."""

    @property
    def is_last(self) -> bool:
        """Whether the stage runs to the end of the step."""
        return self.exit is None

    @property
    def modules(self) -> set[str]:
        """Names of the modules whose calls matter."""
        names = {key[0] for key in [*self.stubs, *self.captures, *self.reseeds, *self.outermost]}
        names.update(name for stub in self.stubs.values() for name in stub.inner)
        return names | self.called | ({self.exit[0]} if self.exit is not None else set())

    @property
    def counts_operations(self) -> bool:
        """Whether operations between modules are watched."""
        return bool(self.substitutes or self.results)


def plan_stages(trace: Trace, cuts: Sequence[Cut]) -> list[StagePlan]:
    """The plans of all stages that ``cuts`` make of a step.

    Raises:
        ValueError: If a random value is used on both sides of a cut and cannot be made equal there.

    """
    finder = CutFinder(trace)
    reseeds = _reseeds(trace, cuts, finder)
    counted = any(relay.operation is not None for cut in cuts for relay in cut.relays)
    called = frozenset(call.name for call in trace.calls) if counted else frozenset()
    plans = []
    for stage in range(len(cuts) + 1):
        before = cuts[stage - 1] if stage else None
        behind = cuts[stage] if stage < len(cuts) else None
        received = {relay.value.index for relay in before.relays} if before is not None else set()
        captures: dict[Key, list[Capture]] = {}
        outputs: dict[Key, int] = {}
        kept: list[Relay] = []
        for relay in behind.relays if behind is not None else ():
            if relay.value.index in received:
                continue
            if relay.operation is not None:
                kept.append(relay)
            elif relay.call is not None:
                captures.setdefault(relay.call.key, []).append(_capture(relay, behind.time if behind else 0))
                outputs[relay.call.key] = len(relay.call.outputs)
        plans.append(
            StagePlan(
                stage=stage,
                stages=len(cuts) + 1,
                step=trace.step,
                receives=_wires(before),
                sends=_wires(behind),
                stubs=_stubs(trace, before, finder) if before is not None else {},
                captures={key: tuple(entries) for key, entries in captures.items()},
                substitutes=_places(before.relays if before is not None else ()),
                results=_places(kept),
                called=called,
                exit=behind.call.key if behind is not None else None,
                outputs=outputs,
                outermost=_outermost(trace, before.time if before is not None else 0)
                if behind is None
                else frozenset(),
                writes_batch=any(value.mutated is not None for value in trace.batch),
                reseeds=reseeds,
            )
        )
    return plans


def _wires(cut: Cut | None) -> tuple[Wire, ...]:
    return tuple(
        Wire(
            value=relay.value.index,
            shape=tuple(relay.value.tensor.shape),
            dtype=relay.value.tensor.dtype,
            gradient=relay.value.expects_gradient and _is_continuous(relay.value.tensor.dtype),
            written=relay.value.mutated is not None,
            source=relay.source,
        )
        for relay in (cut.relays if cut is not None else ())
    )


def _is_continuous(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _places(relays: Iterable[Relay]) -> dict[Place, tuple[tuple[int, int], ...]]:
    places: dict[Place, tuple[tuple[int, int], ...]] = {}
    for relay in relays:
        operation = relay.operation
        if operation is not None:
            around = operation.call.key if operation.call is not None else None
            place = (around, operation.place, operation.name)
            places[place] = (*places.get(place, ()), (operation.results.index(relay.value), relay.value.index))
    return places


def _capture(relay: Relay, end: int) -> Capture:
    value = relay.value
    assert relay.call is not None
    return Capture(
        value=value.index,
        output=relay.call.outputs.index(value) if relay.attribute is None else None,
        attribute=relay.attribute,
        copy=value.mutated is not None and value.mutated <= end,
    )


def _stubs(trace: Trace, cut: Cut, finder: CutFinder) -> dict[Key, Stub]:
    outer: dict[int, Call] = {}
    inner: dict[int, dict[str, int]] = {}
    settings: dict[int, list[tuple[str, str, Any]]] = {}
    for call in trace.calls:
        covering = finder.cover(call, cut.time)
        if covering is None:
            continue
        outer[id(covering)] = covering
        if covering is not call:
            counts = inner.setdefault(id(covering), {})
            counts[call.name] = counts.get(call.name, 0) + 1
        for attribute, value in call.settings.items():
            settings.setdefault(id(covering), []).append((call.name, attribute, value))
    stale = finder.stale_versions(cut.relays, cut.time)
    attributes: dict[int, list[tuple[str, str, int]]] = {}
    for relay in cut.relays:
        if relay.attribute is not None and relay.call is not None:
            attributes.setdefault(id(relay.call), []).append((*relay.attribute, relay.value.index))
    return {
        call.key: Stub(
            template=call.template,
            shapes={v.index: (tuple(v.tensor.shape), v.tensor.dtype, v.tensor.requires_grad) for v in call.outputs},
            passed={v.index: call.arguments.index(v) for v in call.outputs if v in call.arguments},
            stale=stale,
            settings=tuple(settings.get(mark, ())),
            attributes=tuple(attributes.get(mark, ())),
            inner=inner.get(mark, {}),
        )
        for mark, call in outer.items()
    }


def _outermost(trace: Trace, start: int) -> frozenset[Key]:
    using = {id(call) for _, _, use in trace.uses() for call in (use.call.around() if use.call is not None else ())}
    return frozenset(
        call.key
        for call in trace.calls
        if call.start > start
        and id(call) in using
        and (call.parent is None or call.parent.start <= start)
        # What it was given must be the same when it runs again.
        and all(value.mutated is None or value.mutated < call.start for value in call.arguments)
    )


def _reseeds(trace: Trace, cuts: Sequence[Cut], finder: CutFinder) -> frozenset[Key]:
    """The calls after which to start random numbers anew: before draws whose result several stages use."""
    points: set[Key] = set()
    for operation in trace.operations:
        drawn = [v for v in trace.values if v.operation is operation and not v.depends] if operation.random else []
        last_use = max((_spread(trace, value) for value in drawn), default=operation.time)
        if stage_of(operation.time, cuts) == stage_of(last_use, cuts):
            continue
        before = [call for call in trace.calls if call.end < operation.time and finder.depends(call)]
        if not before:
            continue  # every microbatch begins with the same numbers on all stages
        latest = max(before, key=lambda call: call.end)
        for other in trace.operations:
            between = latest.end < other.time < operation.time
            if between and other.random and any(value.depends for value in other.inputs):
                raise ValueError(
                    f"{operation.name} at {operation.source} draws random numbers that several pipeline stages"
                    f" use, after {other.name} at {other.source}, which draws on one stage only. Draw before the"
                    " first module call, or make the latter a module (nn.Dropout instead of functional dropout)."
                )
        points.add(latest.key)
    return frozenset(points)


def _spread(trace: Trace, value: Any) -> int:
    """The last time at which ``value``, or what was computed from it without parameters, is used."""
    latest = value.last_use
    pending = [value]
    seen = {value.index}
    while pending:
        current = pending.pop()
        for other in trace.values:
            if other.index in seen or other.operation is None or other.depends:
                continue
            if current in other.operation.inputs:
                seen.add(other.index)
                pending.append(other)
                latest = max(latest, other.last_use)
    return int(latest)
