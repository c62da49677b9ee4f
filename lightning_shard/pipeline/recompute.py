"""Keep what a stage received, and run its forward again in backward (GPipe, Huang et al. 2019, section 2.3)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Modules that keep statistics of the rows that they see."""


class Recompute:
    """Runs functions so that backward runs them again instead of keeping their activations.

    Args:
        module: Whose batch normalisations count a row once only, however often it is run.

    """

    def __init__(self, module: nn.Module) -> None:
        self._norms = [each for each in module.modules() if isinstance(each, BATCH_NORMS) and each.track_running_stats]

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``function`` returns; random numbers are the same when it is run again."""
        again = False

        def run(*inner: Any, **keywords: Any) -> Any:
            nonlocal again
            if again:
                with self._statistics_kept():
                    return function(*inner, **keywords)
            again = True
            return function(*inner, **keywords)

        # A function that ends early would end in the middle of the user's code.
        with set_checkpoint_early_stop(False):
            return checkpoint(run, *args, use_reentrant=False, **kwargs)

    @contextmanager
    def _statistics_kept(self) -> Iterator[None]:
        """Let the running statistics move on copies that are thrown away."""
        kept = [
            (norm, name, buffer)
            for norm in self._norms
            if norm.training
            for name, buffer in norm.named_buffers(recurse=False)
        ]
        for norm, name, buffer in kept:
            setattr(norm, name, buffer.clone())
        try:
            yield
        finally:
            for norm, name, buffer in kept:
                setattr(norm, name, buffer)
