"""What a run of a step consists of: module calls, the operations between them, and the values that they hand on."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_shard._compat.recording import storage_identity


@dataclass(eq=False)
class Value:
    """One tensor as the step makes it; changed in place, it becomes another value."""

    index: int
    """Its number."""

    born: int
    """When it was made."""

    depends: bool
    """Whether it was computed from parameters."""

    tensor: Tensor
    """The tensor itself, kept so that no other gets its identity."""

    operation: "Operation | None"
    """What made it; ``None`` if it came from nowhere that was seen: a batch, a buffer, a function of its own."""

    call: "Call | None"
    """The innermost module call in which it was made."""

    last_use: int = 0
    """When it was last an argument of an operation, or left the step."""

    mutated: int | None = None
    """When the tensor, or one that shares its memory, was next changed in place."""

    hooks: list[tuple[int, "Call | None", str]] = field(default_factory=list)
    """When, in which call and where gradient hooks were put on it."""

    variable: bool = False
    """Whether its shape follows from values of tensors, so that it may change with every microbatch."""

    location: tuple[str, str] | None = None
    """Module and attribute that hold it at the end of the step."""

    @property
    def expects_gradient(self) -> bool:
        """Whether a gradient may come back to it."""
        return self.depends and self.tensor.requires_grad


@dataclass(eq=False)
class Operation:
    """One function of tensors that the step called."""

    time: int
    """When."""

    name: str
    """The function's name."""

    call: "Call | None"
    """The innermost module call in which it ran."""

    inputs: list[Value]
    """Its arguments among the values."""

    parameters: list[str]
    """Names of the parameters among its arguments."""

    writes: bool
    """Whether it changed an argument in place."""

    source: str
    """Where the user's code called it, as ``file:line``."""

    region: int
    """Number of the activation checkpoint in which it ran; 0 outside."""

    hook: bool = False
    """Whether it ran in a forward hook of a module."""

    place: int = -1
    """Its number among the operations of its call, outside of calls in that; -1 for what is no function of tensors."""

    results: tuple[Value, ...] = ()
    """The tensors that it returned, in order; an argument that it returned, too."""

    random: bool = False
    """Whether it drew random numbers."""

    flops: int = 0
    """Floating-point operations of its forward."""

    saved: int = 0
    """Bytes that autograd keeps for its backward, parameters aside."""


@dataclass(eq=False)
class Call:
    """One call of a module's forward."""

    name: str
    """The module's name."""

    ordinal: int
    """How many calls of the same module came before it in the step."""

    parent: "Call | None"
    """The call around it."""

    start: int
    """When it began."""

    region: int
    """Number of the activation checkpoint in which it began; 0 outside."""

    arguments: list[Value] = field(default_factory=list)
    """The values among its arguments, in order, parameters aside."""

    hooked: bool = False
    """Whether the module has backward hooks."""

    reads: bool = False
    """Whether it reads values of tensors into Python."""

    opaque: str = ""
    """Why it cannot be left out, if it cannot."""

    given: tuple[Any, Any] | None = None
    """While it runs, its arguments and what their lists and dicts held when it began."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Numbers and texts that the call left in attributes of its module."""

    end: int = sys.maxsize
    """When it ended."""

    gradients: bool = True
    """Whether gradients were enabled at its end."""

    template: Any = None
    """What it returned, with a `Slot` for each tensor, or a `ParameterSlot`."""

    outputs: list[Value] = field(default_factory=list)
    """The values that it returned, parameters aside."""

    @property
    def key(self) -> tuple[str, int]:
        """The module's name and the ordinal: which call of a step this is, on any stage."""
        return self.name, self.ordinal

    def around(self) -> "Iterator[Call]":
        """This call and those around it, from the inside out."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent


@dataclass(eq=False)
class Trace:
    """One run of a step. Times are counts of events, so that any two events can be compared."""

    step: str
    """Name of the step's method."""

    calls: list[Call] = field(default_factory=list)
    """Calls of modules, in order of their start."""

    operations: list[Operation] = field(default_factory=list)
    """Operations in order."""

    values: list[Value] = field(default_factory=list)
    """All tensors seen."""

    batch: list[Value] = field(default_factory=list)
    """The tensors of the batch."""

    buffers: dict[str, Value] = field(default_factory=dict)
    """What the buffers hold when the step begins."""

    changed: dict[str, str] = field(default_factory=dict)
    """Parameters that the step changes in place, and where."""

    settings: list[str] = field(default_factory=list)
    """Numbers and texts in attributes of the LightningModule that the step changes."""

    loss: Value | None = None
    """The loss of a training step."""

    returns: bool = False
    """Whether the step returned something other than ``None``."""

    guessed: str = ""
    """Why the run went on with a made-up value, if it did."""

    fake: bool = True
    """Whether the run was on fake tensors."""

    now: int = 0
    """The time."""

    @property
    def end(self) -> int:
        """When the step ended."""
        return self.now

    def buffer_uses(self, name: str) -> tuple[list[int], list[int]]:
        """When a buffer is read, and when it is changed by what depends on parameters."""
        storage = storage_key(self.buffers[name].tensor)
        reads: list[int] = []
        writes: list[int] = []
        for operation in self.operations:
            if any(storage_key(value.tensor) == storage for value in operation.inputs):
                changes = operation.writes and any(value.depends for value in operation.results)
                (writes if changes else reads).append(operation.time)
        return reads, writes

    def uses(self) -> Iterator[tuple[str, int, Operation]]:
        """Every use of a parameter: its name, when, and by which operation."""
        for operation in self.operations:
            for name in operation.parameters:
                yield name, operation.time, operation


def storage_key(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    try:
        return storage_identity(tensor)
    except (RuntimeError, NotImplementedError):  # some kinds of tensors have no memory of their own
        return -1 - id(tensor)
