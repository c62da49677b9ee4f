"""What a ZeRO strategy offers its users beside Lightning's hooks: whole tensors by parameter name."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_shard.zero import state
from lightning_shard.zero.changes import whole_parameters
from lightning_shard.zero.leftover import EmptyWeights

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DeepSpeedStrategy as Host
else:
    Host = object


class WholeTensors(Host):
    """The part of :class:`~lightning_shard.ZeROStrategy` that gathers partitions."""

    empty_weights: EmptyWeights

    def accept_weights(self) -> None:
        """Take the module's present weights for the engine's own."""
        raise AssertionError("The strategy knows how.")

    def full_state_dict(self) -> dict[str, Tensor]:
        """All parameters and persistent buffers, whole, in fp32 where the engine trains them. Collective.

        Returns:
            Plain name to CPU tensor, on every rank. Needs host memory for the whole model on each.

        """
        module, optimizer = self.module_and_optimizer()
        with self.empty_weights.paused():
            return state.full_state_dict(module, optimizer)

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state by parameter name, whole. Collective.

        Returns:
            Parameter name to state name to CPU tensor in the parameter's shape (scalars as they are), on every rank.

        """
        module, optimizer = self.module_and_optimizer()
        if optimizer is None:
            raise RuntimeError("There is no optimizer state outside `fit`.")
        return state.full_optimizer_state(module, optimizer)

    @contextmanager
    def whole_parameters(self, parameters: Iterable[nn.Parameter]) -> Generator[None, None, None]:
        """Parameters whole inside, also at stage 3, and what rank 0 writes to them there kept. Collective.

        For a teacher that follows the trained weights, clamping, or a new initialisation, on every rank alike.

        Args:
            parameters: Parameters of the module.

        """
        _, optimizer = self.module_and_optimizer()
        with whole_parameters(parameters, optimizer):
            yield
        self.accept_weights()

    def module_and_optimizer(self) -> tuple["pl.LightningModule", Any]:
        """The module inside the engine, and the engine's optimizer (``None`` outside ``fit``)."""
        module = self.lightning_module
        if module is None or self.model is None or self.model is module:
            raise RuntimeError("The engine is not set up: call this while the Trainer runs, for example in a callback.")
        trained = module.trainer.state.fn == TrainerFn.FITTING
        return module, self.deepspeed_engine.optimizer if trained else None
