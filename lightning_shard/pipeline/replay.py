"""Run the user's whole step on one stage: calls before the stage return at once, and its last call ends the run.

Wrappers are put around the forwards of the modules that matter, once. While no stage runs, they do nothing.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_shard._compat.pipelining import compiled_call
from lightning_shard.pipeline.absent import AbsentError
from lightning_shard.pipeline.hooks import ReplayedCall
from lightning_shard.pipeline.stage_run import Leave, Operations, StageRun, StepMismatch, name_call
from lightning_shard.pipeline.stages import StagePlan


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
            with Operations(run) if plan.counts_operations else nullcontext():
                result = step()
        except Leave:
            return run.sent()
        except RuntimeError as error:
            if "data is not allocated" not in str(error):
                raise
            raise AbsentError(
                f"Stage {plan.stage} of {plan.stages} makes a tensor of values (torch.tensor) that other stages"
                " compute. Use torch.stack, which needs no values, or do it after the last module call."
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
            f"Stage {plan.stage} of {plan.stages} ran {plan.step} to its end without reaching {name_call(plan.exit)},"
            " where the stage ends. The step calls its modules otherwise than when it was traced: a branch depends on"
            " values or on chance. Make the calls the same for every microbatch, or choose other cuts with"
            " PipelineStrategy(split=[...])."
        )


class ReplayedForward:
    """Stands in for a module's forward. In a copy of the module it is the class's own forward again."""

    is_replay = True

    def __init__(self, replay: Replay, name: str, module: nn.Module) -> None:
        self._replay = replay
        self._name = name
        self._module = module
        # A module that compiled itself calls what it compiled, past its forward and its hooks.
        self._attribute = compiled_call(module)
        self._own = vars(module).get(self._attribute)
        self._forward: Callable[..., Any] = getattr(module, self._attribute)
        vars(module)[self._attribute] = self
        self._call = ReplayedCall(replay, name, module) if self._attribute == "forward" else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module as the stage that runs wants it; if none does, as ever."""
        run = self._replay.current
        if run is None:
            return self._forward(*args, **kwargs)
        return run.call(self._name, self._forward, args, kwargs)

    def remove(self) -> None:
        """Give the module its forward back."""
        if self._call is not None:
            self._call.remove()
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
