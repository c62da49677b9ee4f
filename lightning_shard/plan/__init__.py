"""What each strategy costs before the run: model states, activations, traffic, bubbles, time.

The package can be called: ``lightning_shard.plan(module, batch, devices=8, device="h100")``.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_shard.plan.results import Plan


class _Callable(ModuleType):
    """A module that is a function, too: ``lightning_shard.plan`` is the name of both."""

    def __call__(self, *args: Any, **kwargs: Any) -> "Plan":
        """Plan a module; see :func:`lightning_shard.plan.search.plan_module`."""
        from lightning_shard.plan.search import plan_module

        return plan_module(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
