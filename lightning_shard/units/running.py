"""A sharded module at work: its steps, its gradients between backward and step, and the lists of mixed tensors."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import Precision
from torch import nn
from torch.optim import Optimizer

from lightning_shard._compat import sharding
from lightning_shard.units.agreement import ReachedParameters
from lightning_shard.units.shard import Layout
from lightning_shard.units.whole import WholeParameters, clip_by_norm, clip_by_value, split_kinds

_ATTRIBUTE = "_lightning_shard_units"


class RunningUnits:
    """Stays with its module for as long as that lives: several Trainers may use it one after the other.

    Args:
        module: The sharded module.
        layout: Its units.
        device: The training device.
        settings: What the module was sharded with, for later strategies to compare.

    """

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device, settings: dict[str, Any]) -> None:
        self.layout = layout
        self._settings = settings
        self._whole = WholeParameters(layout.whole)
        self._roots = [layout.units[name] for name in layout.roots]
        self._root = sharding.ReentrantRoot(layout.units[""]) if "" in layout.units else None
        self._reached = None
        if torch.distributed.get_world_size() > 1:
            self._reached = ReachedParameters(layout.units, layout.whole, device)
        for name, unit in layout.units.items():
            sharding.dtypes_of_all(unit)
            sharding.follow_freezing(unit)
            sharding.refuse_double_backward(unit, partial(_refuse_double_backward, name or "(root)"))
        # On the module, so that both go when the module goes.
        vars(module)[_ATTRIBUTE] = self

    @classmethod
    def of(cls, module: nn.Module, settings: dict[str, Any]) -> "RunningUnits | None":
        """The units that ``module`` has already, if it has.

        Raises:
            MisconfigurationException: If it was sharded with other settings.

        """
        running: RunningUnits | None = vars(module).get(_ATTRIBUTE)
        if running is None:
            return None
        for name, value in settings.items():
            if running._settings[name] != value:
                raise MisconfigurationException(
                    f"{type(module).__name__} was sharded by an earlier Trainer with"
                    f" {name}={running._settings[name]!r}, and this one asks for {name}={value!r}. Use the same"
                    " settings, or make a new module and load a checkpoint into it."
                )
        return running

    # --- steps ---

    def call(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step of the module; where the module is a unit itself, with that unit's parameters whole."""
        self.reshard()
        try:
            return step(*args, **kwargs) if self._root is None else self._root.call(step, args, kwargs)
        finally:
            if not torch.is_grad_enabled():
                self.reshard()

    def reshard(self) -> None:
        """Release what units have kept whole after a forward that no backward followed.

        The sharded weights may change in between: by an optimizer, a callback, a checkpoint.
        """
        for unit in self.layout.units.values():
            unit.reshard()

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Let backwards accumulate whole gradients on each rank, without communication."""
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(True)

    def _set_sync(self, sync: bool) -> None:
        if self._reached is not None:
            self._reached.sync = sync
        for root in self._roots:
            root.set_requires_gradient_sync(sync)

    # --- gradients ---

    def settle(self) -> None:
        """Bring the gradients of a backward into their final state. Collective.

        Raises:
            MisconfigurationException: On every rank, if they have used different units.

        """
        if self._reached is None or not self._reached.sync:
            return
        self._reached.note_whole()
        self._whole.average_gradients()
        self._reached.settle()

    def settle_pending(self) -> None:
        """The same, for a backward that went past the strategy: a plain ``loss.backward()`` in a step."""
        if self._reached is not None and self._reached.pending:
            self.settle()

    def finish_step(self) -> None:
        """After an optimizer's step: look at what the ranks told each other, and let the next forward gather anew.

        Raises:
            MisconfigurationException: As :meth:`settle` does, where it could go on without the answer.

        """
        if self._reached is not None:
            self._reached.finish()
        self.reshard()

    @property
    def standstill(self) -> str | None:
        """Why the ranks wait for each other in different places, if they do."""
        return None if self._reached is None else self._reached.standstill.verdict

    # --- whole parameters beside sharded ones ---

    def prepare_mixed_lists(self, optimizers: Sequence[Optimizer], precision: Precision) -> None:
        """Keep lists that mix whole and sharded tensors away from operators that take a list of one kind only."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if all(split_kinds(group["params"])):
                    for switch in ("foreach", "fused"):
                        if switch in group:
                            group[switch] = False
        if self.layout.whole:
            precision.clip_grad_by_norm = lambda optimizer, clip_val: clip_by_norm(  # type: ignore[method-assign]
                precision.main_params(optimizer), clip_val
            )
            precision.clip_grad_by_value = lambda optimizer, clip_val: clip_by_value(  # type: ignore[method-assign]
                precision.main_params(optimizer), clip_val
            )


def _refuse_double_backward(unit: str) -> None:
    raise MisconfigurationException(
        f"A gradient through the FSDP unit {unit!r} was asked for with create_graph=True, to take the gradient of a"
        " gradient. The unit's parameters are released before that, so it would be wrong. Compute the penalty without"
        " second derivatives, or use strategy='ddp'."
    )


@contextmanager
def explain_bypass(running: RunningUnits) -> Generator[None, None, None]:
    """Add the cause to torch's error at a parameter that is used while its unit is not gathered."""
    try:
        yield
    except RuntimeError as error:
        if (verdict := running.standstill) is not None:
            raise MisconfigurationException(verdict) from error
        if "mixed torch.Tensor and DTensor" in str(error):
            units = ", ".join(name or "(root)" for name in running.layout.units)
            error.add_note(
                "A parameter was used outside the forward of the FSDP unit that it belongs to, so it was not gathered."
                f" The units are: {units}. Call the module itself instead of one of its methods, register the method"
                " with torch.distributed.fsdp.register_fsdp_forward_method, or choose other units:"
                " FSDP2Strategy(units=...)."
            )
        raise
