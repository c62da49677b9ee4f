"""Users' forward hooks around calls that a stage leaves out, or ends with."""

from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_shard._compat.pipelining import call_with_hooks, replace_call
from lightning_shard.pipeline.absent import AbsentError

if TYPE_CHECKING:
    from lightning_shard.pipeline.replay import Replay


class ReplayedCall:
    """Stands around a module's call: its forward, and the hooks before and after that.

    Hooks run where a call is left out, too, since the step may need what they do; there they see what the call would
    have given, which may be absent. One that needs values then does nothing: it has run on the stage that has them. The
    hooks of the call with which a stage ends run before the stage ends.

    Args:
        replay: Knows the stage that runs.
        name: The module's name.
        module: The module.

    """

    is_replay = True

    def __init__(self, replay: "Replay", name: str, module: nn.Module) -> None:
        self._replay = replay
        self._name = name
        self._module = module
        self._warned = False
        replace_call(module, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as ever; a stage that runs decides about its forward."""
        run = self._replay.current
        if run is None:
            return call_with_hooks(self._module, args, kwargs)
        before = run.calls_of(self._name)
        run.enter_hooks()
        try:
            result = call_with_hooks(self._module, args, kwargs)
        except AbsentError as error:
            made_before = run.calls_of(self._name) > before
            if not run.leaves_out(self._name, before):
                raise
            self._warn(error)
            result = run.stood_in if made_before else run.call(self._name, self._module.forward, args, kwargs)
        finally:
            run.exit_hooks()
        run.leave_if_over()
        return result

    def remove(self) -> None:
        """Give the module its own call back."""
        replace_call(self._module, None)

    def _warn(self, error: AbsentError) -> None:
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"A forward hook of {self._name!r} needs values that another pipeline stage computes, and is left out"
                f" on this one: {error}"
            )
