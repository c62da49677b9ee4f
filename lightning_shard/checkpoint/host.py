"""The checkpoint part of every strategy: Lightning's hooks, each one call into this room."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.optim import Optimizer

from lightning_shard.checkpoint.background import BackgroundSave
from lightning_shard.checkpoint.format import OPTIMIZERS, hyper_parameters
from lightning_shard.checkpoint.kinds import check_can_be_replaced
from lightning_shard.checkpoint.load import Loading
from lightning_shard.checkpoint.places import place_of
from lightning_shard.checkpoint.save import gather_contents, write_checkpoint
from lightning_shard.checkpoint.sources import open_source
from lightning_shard.checkpoint.states import TrainingStates
from lightning_shard.checkpoint.together import together
from lightning_shard.checkpoint.whole import may_save

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as Host
else:
    Host = object


class PortableCheckpoints(Host):
    """Saves and loads the portable format, and loads all others. Mixed into a strategy before Lightning's class."""

    _async_save = False
    _trusted = False
    _leaves_out_frozen = False
    _loading: Loading | None = None
    _stand_ins: dict[str, Any]

    @abstractmethod
    def training_states(self) -> TrainingStates:
        """The states of the training, as this strategy cuts them."""

    @property
    def _background(self) -> BackgroundSave:
        if "_background_save" not in vars(self):
            self._background_save = BackgroundSave()
        return self._background_save

    @property
    def _shows_bars(self) -> bool:
        """Whether the user wants bars: those of the Trainer stand for all."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer.progress_bar_callback is not None

    # --- saving ---

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Names and stand-ins of the weights, for hooks to look at and to drop: every rank writes its own part."""
        self._stand_ins = self.training_states().state_dict()
        return dict(self._stand_ins)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The groups, for hooks to look at: every rank writes its own part of the states."""
        groups = [hyper_parameters(group) for group in optimizer.param_groups]
        return {"state": {}, "param_groups": groups}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, whole or not at all. Collective.

        Raises:
            RuntimeError: On every rank, if writing failed on any.
        MisconfigurationException: If something else than a checkpoint stands there.

        """
        assert self.lightning_module is not None
        if not may_save(self, self.lightning_module, storage_options):
            return
        place = place_of(self.broadcast(filepath))
        self._background.finish()
        together(f"Saving to {place}", lambda: check_can_be_replaced(place))
        with torch.no_grad():
            contents = gather_contents(checkpoint, self.training_states(), self._stand_ins, self._leaves_out_frozen)
            state = self.lightning_module.trainer.state
            if self._async_save and state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING:
                self._background.start(place, contents)
            else:
                write_checkpoint(place, contents, None, shown=self._shows_bars)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, when the one that is being written is whole."""
        remove = super().remove_checkpoint
        self._background.after(lambda: remove(filepath))

    # --- loading ---

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are read straight into the parts that ranks hold."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """The Trainer calls `load_optimizer_state_dict`."""
        return True

    @property
    def _fitting(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.state.fn == TrainerFn.FITTING

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a checkpoint of any kind, written under any strategy by any number of ranks. Collective.

        Returns:
            Lightning's part of it, with stand-ins for tensors.

        Raises:
            FileNotFoundError: If there is none, or files of it are missing.
            MisconfigurationException: If it does not fit this training.

        """
        return self._open(checkpoint_path, self._fitting, weights_only)

    def _open(self, checkpoint_path: Any, with_optimizers: bool, weights_only: bool | None) -> dict[str, Any]:
        place = place_of(self.broadcast(checkpoint_path))
        self._background.finish()
        trusted = self._trusted or weights_only is False
        source = together(f"Opening {place}", lambda: open_source(place, trusted))
        self._loading = Loading(
            source,
            self.training_states(),
            with_optimizers=with_optimizers,
            groups_later=bool(self._finetuning),
            shown=self.is_global_zero and self._shows_bars,
        )
        checkpoint = self._loading.checkpoint()
        if not self._loading.has_optimizers and self._fitting:
            checkpoint.update({OPTIMIZERS: [], "lr_schedulers": []})
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read weights, as hooks left them. Collective."""
        if self._loading is not None:
            self._loading.weights(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read optimizer states. Collective."""
        module = self.lightning_module
        if self._loading is not None and module is not None:
            for callback in self._finetuning:
                # Lightning calls this hook before it has loaded what the callback is to restore here.
                callback.on_fit_start(module.trainer, module)
            self._loading.optimizers()

    @property
    def _finetuning(self) -> list[BaseFinetuning]:
        """Callbacks that add parameter groups while training goes on, and before it goes on."""
        assert self.lightning_module is not None
        callbacks = self.lightning_module.trainer.callbacks  # type: ignore[attr-defined]
        return [callback for callback in callbacks if isinstance(callback, BaseFinetuning)]

    # --- the run ---

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Raise the error of a save in the background."""
        self._background.check()
        super().on_train_batch_start(batch, batch_idx)

    def on_train_start(self) -> None:
        """The checkpoint has been loaded."""
        self._loading = None
        super().on_train_start()

    def on_train_end(self) -> None:
        """Wait for the last save."""
        self._background.finish()
        super().on_train_end()

    def teardown(self) -> None:
        """Wait for the last save, also after an error."""
        self._loading = None
        try:
            self._background.finish()
        finally:
            self._background.free()
            super().teardown()


def check_async(async_save: bool, portable: bool) -> None:
    """Refuse to save something else than the portable format in the background.

    Raises:
        MisconfigurationException: If that is asked for.

    """
    if async_save and not portable:
        raise MisconfigurationException(
            "async_save=True goes with the default checkpoint format only: leave out save_distributed_checkpoint=False"
            ' or checkpoint_format="engine".'
        )
