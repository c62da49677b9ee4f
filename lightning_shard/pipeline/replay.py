"""Run the user's whole step on one stage: calls before the stage return at once, and its last call ends the run.

Wrappers are put around the forwards of the modules that matter, once. While no stage runs, they do nothing.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_shard._compat.pipelining import compiled_call
from lightning_shard.pipeline.absent import AbsentError, AbsentTensor, absent_of
from lightning_shard.pipeline.boundary import Entrance
from lightning_shard.pipeline.functions import operation_name
from lightning_shard.pipeline.stages import Capture, Key, Place, StagePlan, Stub, Wire
from lightning_shard.pipeline.structure import ParameterSlot, Slot, map_leaves, tensors_in


class StepMismatch(RuntimeError):
    """A step did not run as it did when it was traced."""


class _Leave(BaseException):
    """Ends a step at the last call of a stage. Not an `Exception`: the user's own handlers are not meant."""


class Replay:
    """The wrappers of one module, and the stage that runs at the moment."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.current: StageRun | None = None
        self._wrapped: dict[str, ReplayedForward] = {}

    def wrap(self, names: set[str]) -> None:
        """Put wrappers around the modules ``names`` that have none yet."""
        modules = dict(self.module.named_modules())
        for name in names - self._wrapped.keys():
            self._wrapped[name] = ReplayedForward(self, name, modules[name])

    def unwrap(self) -> None:
        """Take all wrappers off."""
        for wrapper in self._wrapped.values():
            wrapper.remove()
        self._wrapped.clear()

    def run(
        self,
        plan: StagePlan,
        step: Callable[[], Any],
        received: Sequence[Tensor],
        device: torch.device,
        reseed: Callable[[int], None] = lambda point: None,
        recompute: Callable[..., Any] | None = None,
    ) -> Any:
        """Run ``step`` as the stage of ``plan`` does.

        Args:
            plan: The stage's plan.
            step: Runs the user's step on a microbatch.
            received: What the stage before sent, in the order of ``plan.receives``.
            device: Where absent tensors say that they are.
            reseed: Called with the number of a call after which random numbers start anew.
            recompute: Calls the outermost modules of the stage so that backward runs them again.

        Returns:
            On the last stage what the step returned; else the values to send, in the order of ``plan.sends``.

        Raises:
            StepMismatch: If the step does not call its modules as it did when it was traced.
            AbsentError: If what is to be sent depends on a value of another stage.

        """
        assert self.current is None, "a stage runs already"
        run = StageRun(self.module, plan, received, device, reseed, recompute)
        self.current = run
        # A transformer layer's fast path would call no submodule, so that no stage could begin or end inside.
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with _Operations(run) if plan.counts_operations else nullcontext():
                result = step()
        except _Leave:
            return run.sent()
        except RuntimeError as error:
            if "data is not allocated" not in str(error):
                raise
            raise AbsentError(
                f"Stage {plan.stage} of {plan.stages} makes a tensor of values (torch.tensor) that other stages"
                " compute."
                " Use torch.stack, which needs no values, or do it after the last module call."
            ) from error
        finally:
            self.current = None
            torch.backends.mha.set_fastpath_enabled(fast)
        if plan.is_last:
            run.check_substitutes()
            return result
        if run.left:  # a bare `except:` in the step caught the end
            return run.sent()
        raise StepMismatch(
            f"Stage {plan.stage} of {plan.stages} ran {plan.step} to its end without reaching {_call(plan.exit)}, where"
            " the stage ends. The step calls its modules otherwise than when it was traced: a branch depends on values"
            " or on chance. Make the calls the same for every microbatch, or choose other cuts with"
            " PipelineStrategy(split=[...])."
        )


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
        self.own_work = False
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
            raise _Leave
        ordinal = self._counts.get(name, 0)
        self._counts[name] = ordinal + 1
        key = (name, ordinal)
        stub = self.plan.stubs.get(key)
        if stub is not None:
            self.own_work = True
            result = self._stand_in(name, stub, (args, kwargs))
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
                self.left = self.own_work = True
                raise _Leave
        if key in self.plan.reseeds:
            self._reseed(sorted(self.plan.reseeds).index(key) + 1)
        return result

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
            where = "the step" if around is None else _call(around)
            self._mismatch(f"operation {number} of {where} was not {name}")

    def _checked(self, wire: Wire) -> Tensor:
        tensor = self._through.get(wire.value, self._got.get(wire.value))
        if tensor is None:
            self._mismatch(f"{wire.source!r} was not called before {_call(self.plan.exit)}")
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
            self._mismatch(f"{_call(key)} returned {len(tensors)} tensors, not {self.plan.outputs[key]}")
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
            " the"
            " step call its modules in the same way for every microbatch, or choose other cuts with"
            " PipelineStrategy(split=[...])."
        )


class _Operations(TorchFunctionMode):
    """Shows a run the operations between modules."""

    def __init__(self, run: StageRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._run.own_work or operation_name(func) is None:
            return func(*args, **(kwargs or {}))
        return self._run.operate(func, args, kwargs or {})


class ReplayedForward:
    """Stands in for a module's forward. In a copy of the module it is the class's own forward again."""

    is_replay = True

    def __init__(self, replay: Replay, name: str, module: nn.Module) -> None:
        self._replay = replay
        self._name = name
        self._module = module
        # A module that compiled itself calls what it compiled, past its forward.
        self._attribute = compiled_call(module)
        self._own = vars(module).get(self._attribute)
        self._forward: Callable[..., Any] = getattr(module, self._attribute)
        vars(module)[self._attribute] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module as the stage that runs wants it; if none does, as ever."""
        run = self._replay.current
        if run is None:
            return self._forward(*args, **kwargs)
        return run.call(self._name, self._forward, args, kwargs)

    def remove(self) -> None:
        """Give the module its forward back."""
        if self._own is None:
            del vars(self._module)[self._attribute]
        else:
            vars(self._module)[self._attribute] = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The forward of the module's copy."""
        copied = memo.get(id(self._module), self._module)
        return type(copied).forward.__get__(copied)

    def __reduce__(self) -> NoReturn:
        """Raise: a pickled module would have lost what it stands in for."""
        raise AbsentError(
            f"Module {self._name!r} is part of a running pipeline and cannot be pickled; `trainer.save_checkpoint`"
            " saves the weights of all stages."
        )


def _without_parameters(value: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(value) if not isinstance(tensor, nn.Parameter)]


def _call(key: Key | None) -> str:
    assert key is not None
    return repr(key[0]) if key[1] == 0 else f"{key[0]!r} (call number {key[1] + 1})"
