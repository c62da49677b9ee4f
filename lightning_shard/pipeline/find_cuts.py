"""Where a step can be cut in two: at the end of a module call, if everything that crosses can be handed on.

What crosses a cut is handed on: outputs of module calls that are over by then, and results of operations between
modules. The code between modules runs on every stage, so such a result is computed again behind the cut, if what it is
computed from costs no more to hand on than itself; else it takes the place of what its operation gives there.
"""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightning_shard.pipeline.cuts import Cut, Refused, Relay
from lightning_shard.pipeline.functions import READING
from lightning_shard.pipeline.trace import Call, Operation, Trace, Value


class _Impossible(Exception):
    """A value that crosses can neither be handed on nor be computed again."""


@dataclass(frozen=True, kw_only=True)
class _Need:
    """What must be on the stage behind a cut."""

    relays: dict[int, Relay] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()

    @classmethod
    def of(cls, relay: Relay) -> "_Need":
        return cls(relays={relay.value.index: relay})

    def __or__(self, other: "_Need") -> "_Need":
        if not other.relays and not other.parameters:
            return self
        return _Need(relays=self.relays | other.relays, parameters=self.parameters | other.parameters)

    @property
    def size(self) -> int:
        return sum(relay.size for relay in self.relays.values())


def _is_fixed(value: Value) -> bool:
    """Whether an operation's result may take the place of what the operation gives elsewhere."""
    operation = value.operation
    return operation is not None and not operation.writes and value in operation.results and value.mutated is None


class CutFinder:
    """Finds the cuts of one trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._deep = _dependent_calls(trace)
        self._after: dict[int, list[Operation]] = {}
        self._writes = [
            operation
            for operation in trace.operations
            if operation.writes
            and operation.inputs
            and not operation.inputs[0].depends
            and (operation.parameters or any(value.depends for value in operation.inputs[1:]))
        ]
        self._grads = [operation for operation in trace.operations if operation.name == "grad"]
        self._reads = [
            operation
            for operation in trace.operations
            # Hooks that read values do nothing on stages that do not have them.
            if operation.name in READING and not operation.hook and any(value.depends for value in operation.inputs)
        ]
        self._by_values = [
            operation
            for operation in trace.operations
            if any(value.depends for value in operation.inputs)
            and any(value.variable and value.operation is operation for value in operation.results)
            and not any(value.variable for value in operation.inputs)
        ]
        self._opaque = [call for call in trace.calls if call.opaque]
        self._returned: dict[int, list[Call]] = {}
        for call in trace.calls:
            for value in call.outputs:
                made_inside = value.call is not None and any(each is call for each in value.call.around())
                if not made_inside and not value.depends and value not in call.arguments:
                    self._returned.setdefault(value.index, []).append(call)
        self._regions: dict[int, int] = {}
        for operation in trace.operations:
            if operation.region:
                self._regions[operation.region] = operation.time

    def depends(self, call: Call) -> bool:
        """Whether a call computes with parameters, or with what was computed from them."""
        return id(call) in self._deep

    def cover(self, call: Call | None, time: int) -> Call | None:
        """The outermost call around an event that is over at ``time`` and is not run again behind it."""
        found = None
        for each in call.around() if call is not None else ():
            if each.end <= time and self.depends(each):
                found = each
        return found

    def find(self) -> tuple[list[Cut], list[Refused]]:
        """All cuts, in order, and the places that are none."""
        cuts: list[Cut] = []
        refused: list[Refused] = []
        candidates = sorted((call for call in self._trace.calls if call.end < self._trace.end), key=lambda c: c.end)
        active: list[Value] = []
        pending = sorted(self._trace.values, key=lambda value: value.born)
        place = 0
        for call in candidates:
            while place < len(pending) and pending[place].born <= call.end:
                active.append(pending[place])
                place += 1
            active = [value for value in active if value.last_use > call.end]
            try:
                cut = self._cut(call, active)
            except _Impossible as reason:
                refused.append(Refused(name=call.name, reason=str(reason)))
                continue
            if cut is None:
                continue
            if cuts and self._nothing_between(cuts[-1], cut):
                cut = Cut(
                    time=cut.time,
                    call=call,
                    keys=(*cuts.pop().keys, *cut.keys),
                    relays=cut.relays,
                    parameters=cut.parameters,
                )
            cuts.append(cut)
        return cuts, refused

    def _cut(self, call: Call, active: Sequence[Value]) -> Cut | None:
        time = call.end
        known: dict[int, _Need | _Impossible] = {}
        need = _Need()
        for value in active:
            need = need | self._need(value, time, known)
        for operation in self._writes:
            if operation.time <= time and self.cover(operation.call, time) is None:
                need = need | self._again(operation, time, known)
        if not need.relays:
            return None
        self._check_place(call, need.relays.values())
        self.stale_versions(need.relays.values(), time)
        ordered = tuple(sorted(need.relays.values(), key=lambda relay: relay.value.index))
        return Cut(time=time, call=call, keys=(call.key,), relays=ordered, parameters=need.parameters)

    def _need(self, value: Value, time: int, known: "dict[int, _Need | _Impossible]") -> "_Need":
        """What must be handed on so that ``value`` is there behind a cut at ``time``."""
        if value.index not in known:
            try:
                known[value.index] = self._find_need(value, time, known)
            except _Impossible as error:
                known[value.index] = error
        found = known[value.index]
        if isinstance(found, _Impossible):
            raise found
        return found

    def _find_need(self, value: Value, time: int, known: "dict[int, _Need | _Impossible]") -> "_Need":
        for when, call, source in value.hooks:
            if when <= time and self.cover(call, time) is None:
                raise _Impossible(
                    f"the gradient hook that is put on a tensor at {source} would run on both sides, each with a part"
                    " of"
                    " the gradient; put it on inside a module"
                )
        covering = self.cover(value.call, time)
        if covering is not None and value.born > covering.start:
            return _Need.of(_relay(value, covering))
        if not value.depends:
            # A call that is left out cannot return what it was not given, such as a buffer.
            for call in self._returned.get(value.index, ()):
                if self.cover(call, time) is call:
                    return _Need.of(Relay(value=value, call=call))
            return _Need()
        operation = value.operation
        if operation is None:
            # What a function of its own made is known by the first call that returns it.
            for call in self._trace.calls:
                if value in call.outputs and self.cover(call, time) is call:
                    return _Need.of(Relay(value=value, call=call))
            raise _Impossible(f"a tensor of shape {tuple(value.tensor.shape)} crosses that no watched function made")
        direct = _Need.of(Relay(value=value, call=operation.call, operation=operation)) if _is_fixed(value) else None
        try:
            again = self._again(operation, time, known)
        except _Impossible:
            if direct is None:
                raise
            return direct
        if direct is not None and (again.parameters or again.size > direct.size):
            return direct
        return again

    def _again(self, operation: Operation, time: int, known: "dict[int, _Need | _Impossible]") -> "_Need":
        """What an operation needs to run again behind a cut."""
        if operation.random:
            raise _Impossible(
                f"the result of {operation.name} at {operation.source} crosses, which draws random numbers and changes"
                " a tensor in place; make it a module (nn.Dropout instead of functional dropout)"
            )
        need = _Need(parameters=frozenset(operation.parameters))
        for value in operation.inputs:
            need = need | self._need(value, time, known)
        return need

    def stale_versions(self, relays: Iterable[Relay], time: int) -> dict[int, int]:
        """Values that a call which is left out has changed in place: for each older version the one that is handed on.

        Both are one tensor, which the step may use by either name.

        Raises:
            _Impossible: If both versions are needed, or the tensor was made where it is made again.

        """
        handed = {relay.value.index: relay for relay in relays}
        stale: dict[int, int] = {}
        for index, relay in handed.items():
            operation = relay.value.operation
            if operation is None or not operation.writes or relay.operation is not None:
                continue
            for older in self._trace.values[:index]:
                if older.tensor is not relay.value.tensor:
                    continue
                if older.index in handed:
                    raise _Impossible(
                        f"{relay.source} changes what {handed[older.index].source} returned in place, and both are"
                        " needed"
                    )
                if self.cover(older.call, time) is None:
                    raise _Impossible(f"{relay.source} changes a tensor in place that was made outside of it")
                stale[older.index] = index
        return stale

    def _check_place(self, call: Call, relays: Iterable[Relay]) -> None:
        time = call.end
        for operation in self._grads:
            if operation.time > time:
                raise _Impossible("torch.autograd.grad is called later in the step and needs the graph in one piece")
            if self.cover(operation.call, time) is None:
                raise _Impossible(
                    "torch.autograd.grad is called earlier in the step, between modules, and would run again behind the"
                    " cut; call it inside a module"
                )
        for operation in self._reads:
            if operation.time <= time and self.cover(operation.call, time) is None:
                raise _Impossible(
                    f"{operation.name} at {operation.source} reads a value of the stage before, between modules; read"
                    " it after the last module call, or inside a module"
                )
        for operation in self._by_values:
            if operation.time <= time and self.cover(operation.call, time) is None:
                raise _Impossible(
                    f"{operation.name} at {operation.source} needs values of the stage before, between modules; do it"
                    " inside a module"
                )
        for opaque in self._opaque:
            if self.cover(opaque, time) is opaque:
                raise _Impossible(f"{opaque.name!r} {opaque.opaque}")
        for each in call.around():
            if each.hooked and (each.end > time or each is call):
                raise _Impossible(
                    f"{each.name!r} has backward hooks, which need its forward and what it returned on one stage"
                )
        trains = self._trace.step == "training_step"
        if trains and call.region and not call.gradients:
            raise _Impossible(f"{call.name!r} runs under a re-entrant activation checkpoint; use use_reentrant=False")
        if call.region and self._regions.get(call.region, 0) > time:
            raise _Impossible("it ends inside an activation checkpoint, which is run again as a whole")
        for relay in relays:
            if relay.value.variable:
                raise _Impossible(f"what {relay.source} gives has a shape that follows from values")
            source = relay.call if relay.operation is None else relay.operation
            if source is None:
                continue
            if isinstance(source, Call) and source.hooked:
                raise _Impossible(
                    f"{source.name!r} has backward hooks, which need its forward and what it returned on one stage"
                )
            if trains and isinstance(source, Call) and not source.gradients and relay.value.expects_gradient:
                raise _Impossible(
                    f"{source.name!r} runs under a re-entrant activation checkpoint; use use_reentrant=False"
                )
            end = source.end if isinstance(source, Call) else source.time
            if source.region and self._regions.get(source.region, 0) > end:
                raise _Impossible(f"the activation checkpoint around {source.name!r} goes on after it")

    def _nothing_between(self, before: Cut, cut: Cut) -> bool:
        """Whether only returns lie between two cuts: the later one then says the same, with the outer module's name."""
        if not any(call is cut.call for call in before.call.around()):
            return False
        same = [relay.value for relay in before.relays] == [relay.value for relay in cut.relays]
        return same and before.parameters == cut.parameters and not self._operation_in(before.time, cut.time)

    def _operation_in(self, start: int, end: int) -> bool:
        place = bisect.bisect_right(self._trace.operations, start, key=lambda operation: operation.time)
        return place < len(self._trace.operations) and self._trace.operations[place].time <= end


def _dependent_calls(trace: Trace) -> set[int]:
    deep: set[int] = set()
    for operation in trace.operations:
        if operation.parameters or any(value.depends for value in operation.inputs):
            for call in operation.call.around() if operation.call is not None else ():
                deep.add(id(call))
    for call in trace.calls:
        if any(value.depends for value in call.outputs):
            deep.update(id(each) for each in call.around())
    return deep


def _relay(value: Value, covering: Call) -> Relay:
    if value in covering.outputs:
        return Relay(value=value, call=covering, attribute=None)
    if value.location is not None:
        module = value.location[0]
        if module == covering.name or module.startswith(f"{covering.name}."):
            return Relay(value=value, call=covering, attribute=value.location)
    made = f"{value.operation.name} at {value.operation.source}" if value.operation is not None else "a module"
    raise _Impossible(
        f"a tensor of shape {tuple(value.tensor.shape)} from {made} crosses, which {covering.name!r} neither returns"
        " nor keeps as an attribute"
    )
