"""Builds the trace of a step while it runs."""

import contextlib
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_shard.pipeline.functions import READING
from lightning_shard.pipeline.structure import (
    ParameterSlot,
    Slot,
    has_plain_leaf,
    hidden_tensors,
    map_leaves,
    plain_content,
    tensors_in,
)
from lightning_shard.pipeline.trace import Call, Operation, Trace, Value, storage_key


class Recorder:
    """Builds a `Trace` while a step runs."""

    def __init__(self, step: str, parameters: dict[int, str]) -> None:
        self.trace = Trace(step)
        self._parameters = parameters
        self._by_tensor: dict[int, Value] = {}
        self._by_storage: dict[int, list[Value]] = {}
        self._stack: list[Call] = []
        self._counts: dict[str, int] = {}
        self._regions: list[FrameType] = []
        self._memory: dict[int, str] = {}
        self.in_hooks = False
        self._places: dict[tuple[str, int] | None, int] = {}

    def begins_with(self, batch: Any, module: nn.Module) -> None:
        """Tensors that are there before the step: of the batch, and what modules hold besides parameters."""
        self._memory = {storage_key(parameter): name for name, parameter in module.named_parameters()}
        held = [tensor for submodule in module.modules() for tensor in tensors_in(_held(submodule))]
        for tensor in [*tensors_in(batch), *held]:
            if id(tensor) not in self._parameters and id(tensor) not in self._by_tensor:
                self._add(tensor, depends=False, operation=None)
        self.trace.batch = [self.value_of(tensor) for tensor in tensors_in(batch)]
        self.trace.buffers = {name: self.value_of(buffer) for name, buffer in module.named_buffers()}

    # --- modules ---

    def enter(self, name: str, arguments: Any = (), hooked: bool = False) -> Call:
        """A module's forward begins, with these arguments; ``hooked``: it has backward hooks."""
        self.trace.now += 1
        ordinal = self._counts.get(name, 0)
        self._counts[name] = ordinal + 1
        parent = self._stack[-1] if self._stack else None
        values = [self.value_of(each) for each in tensors_in(arguments) if id(each) not in self._parameters]
        call = Call(
            name=name,
            ordinal=ordinal,
            parent=parent,
            start=self.trace.now,
            region=self._place()[0],
            arguments=values,
            hooked=hooked,
        )
        if content := plain_content(arguments):
            call.given = (arguments, content)
        self._stack.append(call)
        self.trace.calls.append(call)
        return call

    def leave(self, call: Call, result: Any) -> None:
        """A module's forward ended with ``result``."""

        def note(tensor: Tensor) -> Slot | ParameterSlot:
            parameter = self._parameters.get(id(tensor))
            if parameter is not None:
                return ParameterSlot(parameter)
            value = self.value_of(tensor)
            call.outputs.append(value)
            return Slot(value.index)

        self.trace.now += 1
        call.gradients = torch.is_grad_enabled()
        call.template = map_leaves(result, Tensor, note)
        if call.reads and (call.settings or has_plain_leaf(result)):
            call.opaque = (
                "gives a number or a decision that may follow from values; let it return a tensor (no .item())"
            )
        elif kind := hidden_tensors(result):
            call.opaque = f"returns a {kind}, in which tensors cannot be replaced; return a dict or a dataclass"
        elif call.given is not None and plain_content(call.given[0]) != call.given[1]:
            call.opaque = "changes a list or dict that it is given; return what it has to say"
        call.given = None
        call.end = self.trace.now

    def unwind(self, call: Call) -> None:
        """A module's forward is over, by a result or an error."""
        while self._stack and self._stack.pop() is not call:
            pass

    # --- operations ---

    def begin(self, name: str, arguments: Any, shape_only: bool) -> Operation:
        """An operation is called."""
        self.trace.now += 1
        inputs: list[Value] = []
        parameters: list[str] = []
        for tensor in tensors_in(arguments):
            parameter = self._parameters.get(id(tensor))
            if parameter is not None:
                parameters.append(parameter)
            else:
                inputs.append(self.value_of(tensor))
        if not shape_only:
            for value in inputs:
                value.last_use = self.trace.now
        region, source = self._place()
        if name in READING and not self.in_hooks:
            for call in self._stack:
                call.reads = True
        operation = Operation(
            time=self.trace.now,
            name=name,
            call=self._stack[-1] if self._stack else None,
            inputs=[] if shape_only else inputs,
            parameters=[] if shape_only else parameters,
            writes=False,
            source=source,
            region=region,
            hook=self.in_hooks,
        )
        if name:
            caller = operation.call.key if operation.call is not None else None
            operation.place = self._places.get(caller, 0)
            self._places[caller] = operation.place + 1
        self.trace.operations.append(operation)
        return operation

    def finish(self, operation: Operation, given_arguments: Any, result: Any, written: list[Tensor]) -> None:
        """An operation gave ``result`` and changed the tensors ``written`` in place."""
        depends = bool(operation.parameters) or any(value.depends for value in operation.inputs)
        given = {id(value.tensor) for value in operation.inputs}
        for tensor in written:
            operation.writes = True
            parameter = self._parameters.get(id(tensor), self._memory.get(storage_key(tensor)))
            if parameter is not None:
                self.trace.changed.setdefault(parameter, operation.source)
                continue
            before = self.value_of(tensor)
            for alias in list(self._by_storage.get(storage_key(tensor), [before])):
                if self._by_tensor.get(id(alias.tensor)) is alias:
                    alias.mutated = alias.mutated or operation.time
                    self._add(alias.tensor, depends or alias.depends, operation)
        variable = _follows_values(operation, given_arguments) or any(value.variable for value in operation.inputs)
        changed = {id(tensor) for tensor in written}
        for tensor in tensors_in(result):
            known = id(tensor) in given or id(tensor) in self._parameters or id(tensor) in changed
            if not known:
                self._add(tensor, depends, operation).variable = variable and tensor.dim() > 0
        operation.results = tuple(self.value_of(t) for t in tensors_in(result) if id(t) not in self._parameters)

    def hooked(self, tensor: Tensor) -> None:
        """A gradient hook is put on a tensor."""
        self.trace.now += 1
        if id(tensor) not in self._parameters:
            call = self._stack[-1] if self._stack else None
            self.value_of(tensor).hooks.append((self.trace.now, call, self._place()[1]))

    def drew(self) -> None:
        """Random numbers were drawn."""
        if self.trace.operations:
            self.trace.operations[-1].random = True

    def add_flops(self, flops: int) -> None:
        """The running operation computes."""
        if self.trace.operations:
            self.trace.operations[-1].flops += flops

    def saved(self, tensor: Tensor, seen: set[int]) -> None:
        """Autograd keeps a tensor; memory that several tensors share counts once."""
        key = storage_key(tensor)
        if id(tensor) not in self._parameters and key not in seen and self.trace.operations:
            seen.add(key)
            self.trace.operations[-1].saved += tensor.numel() * tensor.element_size()

    def use(self, arguments: Any, name: str = "") -> list[Value]:
        """Something other than an operation takes these values: a metric, or the caller of the step."""
        operation = self.begin("", arguments, shape_only=False)
        operation.name = name
        return operation.inputs

    def value_of(self, tensor: Tensor) -> Value:
        """The value that ``tensor`` is now; one that was never seen came out of a function that cannot be watched."""
        value = self._by_tensor.get(id(tensor))
        if value is None:
            value = self._add(tensor, tensor.requires_grad, None)
        return value

    def _add(self, tensor: Tensor, depends: bool, operation: Operation | None) -> Value:
        value = Value(
            index=len(self.trace.values),
            born=self.trace.now,
            depends=depends,
            tensor=tensor,
            operation=operation,
            call=self._stack[-1] if self._stack else None,
        )
        self.trace.values.append(value)
        self._by_tensor[id(tensor)] = value
        self._by_storage.setdefault(storage_key(tensor), []).append(value)
        return value

    # --- places ---

    def locate(self, module: nn.Module) -> None:
        """Note which values lie in attributes of modules, at the end of the step."""
        for name, submodule in module.named_modules():
            for attribute, content in vars(submodule).items():
                if isinstance(content, Tensor) and id(content) in self._by_tensor:
                    self._by_tensor[id(content)].location = (name, attribute)

    def _place(self) -> tuple[int, str]:
        """Which activation checkpoint is running (its function's frame is on the stack), and the user's line."""
        frame: FrameType | None = sys._getframe(2)
        checkpoint: FrameType | None = None
        source = ""
        while frame is not None:
            file = frame.f_code.co_filename
            if file.endswith(_CHECKPOINT):
                checkpoint = frame
            if not source and not file.startswith(_LIBRARIES):
                source = f"{file}:{frame.f_lineno}"
            frame = frame.f_back
        if checkpoint is None:
            return 0, source
        if not self._regions or self._regions[-1] is not checkpoint:
            self._regions.append(checkpoint)
        return len(self._regions), source


_CHECKPOINT = "torch/utils/checkpoint.py"
_LIBRARIES = tuple(str(Path(file).parent) for file in (torch.__file__, pl.__file__, contextlib.__file__, __file__))


_BY_VALUES = frozenset("nonzero argwhere masked_select unique unique_consecutive bincount repeat_interleave".split())


def _follows_values(operation: Operation, arguments: Any) -> bool:
    """Whether the shape of an operation's result follows from values."""
    args: tuple[Any, ...] = arguments[0] if arguments else ()
    if operation.name == "where":
        return len(args) == 1
    if operation.name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in index)
    return operation.name in _BY_VALUES


def _held(module: nn.Module) -> list[Any]:
    """Tensors in attributes of a module, and in lists and dicts there; other objects are not looked into."""
    inside = {"_parameters", "_modules"}
    contents = [content for name, content in vars(module).items() if name not in inside and not name.endswith("_hooks")]
    held: list[Any] = []
    for content in contents:
        items = content.values() if isinstance(content, dict) else content
        held += [content] if isinstance(content, Tensor) else []
        if isinstance(content, dict | list | tuple):
            held += [item for item in items if isinstance(item, Tensor)]
    return held
