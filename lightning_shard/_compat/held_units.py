"""Private API behind units of ``fully_shard`` that are gathered and reduced on request, not by their modules' hooks.

A pipeline runs many forwards before the first backward, ends forwards by an exception, and computes gradients apart.
torch has public calls to gather and to release units, but none to reduce their gradients, nor to take their hooks off.
"""

from collections.abc import Sequence
from typing import Any

from torch.distributed.fsdp import FSDPModule


class HeldUnits:
    """Units without hooks.

    Args:
        root: The outermost unit, before any forward.
        units: All units, the root among them.

    """

    def __init__(self, root: FSDPModule, units: Sequence[FSDPModule]) -> None:
        self._units = units
        self._state: Any = root._get_fsdp_state()
        for unit in units:
            state: Any = unit._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()

    def gather(self) -> None:
        """Make all parameters whole. Collective; nothing where they are."""
        # What tells the root that it is the root is otherwise done in its first forward.
        self._state._lazy_init()
        for unit in self._units:
            unit.unshard()

    def release(self) -> None:
        """Go back to shards, without the gradients."""
        for unit in self._units:
            unit.reshard()

    def reduce(self) -> None:
        """Average the whole parameters' gradients into the shards', and go back to shards. Collective."""
        self._state._root_post_backward_final_callback()
