"""Lightning's save and load, in the engine's own format; weights alone go to one plain Lightning file."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_shard import _compat
from lightning_shard.checkpoint.whole import may_save, save_whole_or_absent
from lightning_shard.zero import checkpoint as format
from lightning_shard.zero import state
from lightning_shard.zero.consolidate import read_checkpoint

if TYPE_CHECKING:
    from lightning_shard.strategies.zero import ZeROStrategy


class EngineCheckpoints:
    """Saves and loads for one strategy. Every method is collective."""

    def __init__(self, strategy: "ZeROStrategy") -> None:
        self._strategy = strategy
        module = strategy.lightning_module
        assert module is not None
        self._module = module

    def save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """Write ``checkpoint`` to ``filepath``.

        That is a folder in the engine's format, or one file of weights where no optimizer state is there to be saved:
        weights only was asked for, or the last run was no ``fit``.

        Raises:
            TypeError: If ``storage_options`` is given, which the engine's format does not know.

        """
        strategy = self._strategy
        if not may_save(strategy, self._module, storage_options):
            return
        path = Path(strategy.broadcast(filepath))
        _, optimizer = strategy.module_and_optimizer()
        if "optimizer_states" not in checkpoint or optimizer is None:
            self._save_weights(checkpoint, path)
            return
        self._warn_of_edits(checkpoint)
        client_state = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}

        def write(folder: Path) -> None:
            strategy.deepspeed_engine.save_checkpoint(
                str(folder),
                tag=format.TAG,
                client_state=client_state,
                exclude_frozen_parameters=strategy.exclude_frozen_parameters,
            )
            strategy.nvme_states().save(folder / format.TAG)

        facts = self._facts()
        save_whole_or_absent(path, strategy.is_global_zero, write, lambda folder: format.store_facts(folder, facts))

    def load(self, checkpoint_path: Any) -> dict[str, Any]:
        """Load the engine's folder.

        Returns:
            Lightning's part of the checkpoint.

        Raises:
            FileNotFoundError: If it is not whole.
            MisconfigurationException: If training goes on and another stage or world size wrote it.

        """
        strategy = self._strategy
        path = Path(strategy.broadcast(checkpoint_path))
        fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        if not fitting:
            # Weights alone fit every stage and world size; the engine's own way fails at stage 3 without an optimizer.
            return read_checkpoint(path, lazy=True)
        format.check_loadable(path, strategy.stage, strategy.world_size)
        with _compat.scalars_as_bytes():
            _, client_state = strategy.deepspeed_engine.load_checkpoint(
                str(path),
                tag=format.TAG,
                load_optimizer_states=True,
                load_lr_scheduler_states=False,
                load_module_strict=self._module.strict_loading,
            )
        if client_state is None:
            raise MisconfigurationException(f"The DeepSpeed engine could not load the checkpoint {path}.")
        strategy.nvme_states().load(path / format.TAG)
        strategy.accept_weights()
        loaded: dict[str, Any] = client_state
        return loaded

    def load_weights(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load weights that `load` read without the engine, which has loaded all others already."""
        if "state_dict" in checkpoint:
            module, optimizer = self._strategy.module_and_optimizer()
            state.load_full_state_dict(module, optimizer, checkpoint["state_dict"], strict)
            self._strategy.accept_weights()

    def _save_weights(self, checkpoint: dict[str, Any], path: Path) -> None:
        strategy = self._strategy
        module, optimizer = strategy.module_and_optimizer()
        full = state.full_state_dict(module, optimizer, keep=strategy.is_global_zero)
        if strategy.is_global_zero:
            edited = checkpoint["state_dict"]
            frozen = {n for n, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
            dropped = frozen if strategy.exclude_frozen_parameters else set()
            weights = {name: full.get(name, value) for name, value in edited.items() if name not in dropped}
            # What belongs to an optimizer would not fit weights alone.
            kept = {k: v for k, v in checkpoint.items() if k not in ("optimizer_states", "lr_schedulers")}
            strategy.checkpoint_io.save_checkpoint({**kept, "state_dict": weights}, str(path))
        strategy.barrier()

    def _warn_of_edits(self, checkpoint: dict[str, Any]) -> None:
        own, edited = self._module.state_dict().keys(), checkpoint.get("state_dict", {}).keys()
        changed = sorted(own ^ edited)
        if changed:
            rank_zero_warn(
                "on_save_checkpoint added or dropped entries of the state dict"
                f" ({', '.join(changed)}). The engine's format stores the module as it is, so these changes are not"
                " saved; save_weights_only=True and consolidated files honour them."
            )

    def _facts(self) -> format.WrittenBy:
        strategy = self._strategy
        return format.WrittenBy(
            stage=strategy.stage,
            world_size=strategy.world_size,
            precision=str(strategy.precision_plugin.precision),
            nvme_optimizer=strategy.nvme_states().active,
        )
