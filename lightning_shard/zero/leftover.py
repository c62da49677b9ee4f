"""A module after a stage-3 run: its parameters are empty, and its state dict must not pass for weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_shard import _compat

_ATTRIBUTE = "_lightning_shard_empty_weights"
"""Of a module: what guards it."""


class EmptyWeights:
    """Makes ``module.state_dict()`` of a partitioned module an error instead of a dictionary of empty tensors."""

    def __init__(self) -> None:
        self._paused = False
        self._handles: list[RemovableHandle] = []

    def guard(self, module: nn.Module) -> None:
        """Begin: the run is over, and ``module`` is left partitioned."""
        vars(module)[_ATTRIBUTE] = self
        # torch marks the hook with an attribute, which a bound method cannot carry.
        refuse = partial(self._refuse)
        for submodule in module.modules():
            handle = submodule.register_state_dict_post_hook(refuse)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    @staticmethod
    def release(module: nn.Module) -> None:
        """End: the next run, also that of another Trainer, fills the parameters again."""
        guard: EmptyWeights | None = vars(module).pop(_ATTRIBUTE, None)
        while guard is not None and guard._handles:
            guard._handles.pop().remove()

    def _refuse(self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        if self._paused:
            return
        for name, parameter in module.named_parameters(recurse=False):
            if _compat.is_empty_partitioned(parameter):
                raise RuntimeError(
                    f"state_dict() of a module that ZeRO stage 3 has partitioned: {prefix + name!r} is empty on every"
                    " rank, so its weights would be lost. Save by trainer.save_checkpoint(path, weights_only=True),"
                    " take them by trainer.strategy.full_state_dict() on every rank, or turn a saved folder into one"
                    " file by lightning_shard.consolidate_checkpoint(folder, file)."
                )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the strategy itself ask for names and placeholders."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
