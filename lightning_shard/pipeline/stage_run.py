"""One run of a step on one stage: what each call of a module, and each operation between modules, does there."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_shard.pipeline.absent import AbsentError, AbsentTensor, absent_of
from lightning_shard.pipeline.boundary import Entrance
from lightning_shard.pipeline.functions import operation_name
from lightning_shard.pipeline.stages import Capture, Key, Place, StagePlan, Stub, Wire
from lightning_shard.pipeline.structure import ParameterSlot, Slot, map_leaves, tensors_in


class StepMismatch(RuntimeError):
    """A step did not run as it did when it was traced."""


class Leave(BaseException):
    """Ends a step at the last call of a stage. Not an `Exception`: the user's own handlers are not meant."""


class StageRun:
    """One run of a step on one stage."""

    def __init__(
        self,
        module: nn.Module,
        plan: StagePlan,
        received: Sequence[Tensor],
        device: torch.device,
        reseed: Callable[[int], None],
        recompute: Callable[..., Any] | None,
    ) -> None:
        self.plan = plan
        self.left = False
        self.over = False
        self.own_work = False
        self.stood_in: Any = None
        self._hooks = 0
        self._module = module
        self._device = device
        self._reseed = reseed
        self._recompute = recompute
        self._counts: dict[str, int] = {}
        self._got: dict[int, Tensor] = {}
        self._stack: list[Key] = []
        self._places: dict[Key | None, int] = {}
        self._through: dict[int, Tensor] = {}
        self._met: set[Place] = set()
        sent = {wire.value for wire in plan.sends}
        for wire, tensor in zip(plan.receives, received, strict=True):
            if wire.written and wire.value in sent:
                # The step changes its copy; what goes on is what came.
                self._through[wire.value] = Entrance.apply(tensor, False)  # type: ignore[no-untyped-call]
            self._got[wire.value] = Entrance.apply(tensor, wire.written)  # type: ignore[no-untyped-call]

    def call(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One call of the module ``name``."""
        if self.left:
            raise Leave
        ordinal = self._counts.get(name, 0)
        self._counts[name] = ordinal + 1
        key = (name, ordinal)
        stub = self.plan.stubs.get(key)
        if stub is not None:
            self.own_work = True
            result = self.stood_in = self._stand_in(name, stub, (args, kwargs))
            self.own_work = False
        else:
            self._stack.append(key)
            try:
                if self._recompute is not None and key in self.plan.outermost:
                    result = self._recompute(forward, *args, **kwargs)
                else:
                    result = forward(*args, **kwargs)
            finally:
                self._stack.pop()
            if key in self.plan.captures:
                self.own_work = True
                self._capture(key, result)
                self.own_work = False
            if key == self.plan.exit:
                self.over = True
                if not self._hooks:
                    self.leave_if_over()
        if key in self.plan.reseeds:
            self._reseed(sorted(self.plan.reseeds).index(key) + 1)
        return result

    # --- hooks around a call ---

    def calls_of(self, name: str) -> int:
        """How often a module has been called."""
        return self._counts.get(name, 0)

    def leaves_out(self, name: str, ordinal: int) -> bool:
        """Whether the stage leaves out a call."""
        return (name, ordinal) in self.plan.stubs

    def enter_hooks(self) -> None:
        """A call with its hooks begins."""
        self._hooks += 1

    def exit_hooks(self) -> None:
        """It has ended."""
        self._hooks -= 1

    def leave_if_over(self) -> None:
        """End the step, if the stage's last call has returned."""
        if self.over:
            self.left = self.own_work = True
            raise Leave

    # --- operations between modules ---

    def operate(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One operation; where its results are handed on to this stage, these."""
        around = self._stack[-1] if self._stack else None
        number = self._places.get(around, 0)
        self._places[around] = number + 1
        place = (around, number, operation_name(func) or "")
        self._met.add(place)
        handed = dict(self.plan.substitutes.get(place, ()))
        if not handed:
            result = func(*args, **kwargs)
            for output, value in self.plan.results.get(place, ()):
                tensors = list(tensors_in(result))
                if output >= len(tensors):
                    self._mismatch(f"{func.__name__} returned {len(tensors)} tensors, not more than {output}")
                self._got[value] = tensors[output]
            return result
        try:
            result = func(*args, **kwargs)
        except AbsentError:
            if len(handed) == 1 and 0 in handed:
                return self._got[handed[0]]
            raise
        outputs = itertools.count()

        def replace(tensor: Tensor) -> Tensor:
            value = handed.get(next(outputs))
            return tensor if value is None else self._got[value]

        return map_leaves(result, Tensor, replace)

    def sent(self) -> tuple[Tensor, ...]:
        """The values to send."""
        self.check_substitutes()
        return tuple(self._checked(wire) for wire in self.plan.sends)

    def check_substitutes(self) -> None:
        """Every value that is handed on as an operation's result must have taken its place."""
        for around, number, name in self.plan.substitutes.keys() - self._met:
            self._mismatch(f"operation {number} of {name_call(around)} was not {name}")

    def _checked(self, wire: Wire) -> Tensor:
        tensor = self._through.get(wire.value, self._got.get(wire.value))
        if tensor is None:
            self._mismatch(f"{wire.source!r} was not called before {name_call(self.plan.exit)}")
        if isinstance(tensor, AbsentTensor):
            raise AbsentError(
                f"Stage {self.plan.stage} of {self.plan.stages} should hand on an output of {wire.source!r}, but it was"
                f" computed from {tensor.origin!r}, which another stage computes. The step uses values otherwise than"
                " when it was traced; choose other cuts with PipelineStrategy(split=[...])."
            )
        if tuple(tensor.shape) != wire.shape or tensor.dtype != wire.dtype:
            self._mismatch(
                f"{wire.source!r} returned shape {tuple(tensor.shape)} and {tensor.dtype}, not {wire.shape} and"
                f" {wire.dtype}"
            )
        return tensor

    def _stand_in(self, name: str, stub: Stub, arguments: Any) -> Any:
        for inner, count in stub.inner.items():
            self._counts[inner] = self._counts.get(inner, 0) + count
        made: dict[int, Tensor] = {}
        given = _without_parameters(arguments) if stub.passed else []

        def fill(slot: Slot | ParameterSlot) -> Tensor:
            if isinstance(slot, ParameterSlot):
                return self._module.get_parameter(slot.name)
            key = stub.stale.get(slot.key, slot.key)
            if key in self._got:
                return self._got[key]
            if slot.key in stub.passed:
                return given[stub.passed[slot.key]]
            if key not in made:
                shape, dtype, requires_grad = stub.shapes[slot.key]
                made[key] = absent_of(shape, dtype, self._device, name, requires_grad)
            return made[key]

        for module, attribute, value in stub.attributes:
            setattr(self._module.get_submodule(module), attribute, self._got[value])
        for module, attribute, setting in stub.settings:
            vars(self._module.get_submodule(module))[attribute] = setting
        return map_leaves(stub.template, (Slot, ParameterSlot), fill)

    def _capture(self, key: Key, result: Any) -> None:
        tensors = _without_parameters(result)
        if len(tensors) != self.plan.outputs[key]:
            self._mismatch(f"{name_call(key)} returned {len(tensors)} tensors, not {self.plan.outputs[key]}")
        for capture in self.plan.captures[key]:
            tensor = self._find(capture, tensors)
            self._got[capture.value] = tensor.clone() if capture.copy else tensor

    def _find(self, capture: Capture, tensors: list[Tensor]) -> Tensor:
        if capture.output is not None:
            return tensors[capture.output]
        assert capture.attribute is not None
        module, attribute = capture.attribute
        found = getattr(self._module.get_submodule(module), attribute, None)
        if not isinstance(found, Tensor):
            self._mismatch(f"{module}.{attribute} is no tensor any more")
        return found

    def _mismatch(self, what: str) -> NoReturn:
        raise StepMismatch(
            f"Stage {self.plan.stage} of {self.plan.stages}: {what}, as it did when {self.plan.step} was traced. Make"
            " the step call its modules in the same way for every microbatch, or choose other cuts with"
            " PipelineStrategy(split=[...])."
        )


class Operations(TorchFunctionMode):
    """Shows a run the operations between modules."""

    def __init__(self, run: StageRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._run.own_work or operation_name(func) is None:
            return func(*args, **(kwargs or {}))
        return self._run.operate(func, args, kwargs or {})


def _without_parameters(value: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(value) if not isinstance(tensor, nn.Parameter)]


def name_call(key: Key | None) -> str:
    """A call, for people."""
    if key is None:
        return "the step"
    return repr(key[0]) if key[1] == 0 else f"{key[0]!r} (call number {key[1] + 1})"
