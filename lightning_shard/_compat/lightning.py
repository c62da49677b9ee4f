"""Private API of Lightning: what its Trainer and its own DeepSpeedStrategy do, without a public name."""

from typing import Any

import lightning.pytorch as pl
import torch

# Lightning's checks that its DeepSpeedStrategy runs; the CPU path replaces the methods that call them.
from lightning.fabric.strategies.deepspeed import _format_precision_config, _validate_device_index_selection
from lightning.fabric.strategies.registry import _StrategyRegistry

# The Trainer's own reading of `configure_optimizers`, with all its forms and warnings: there is no public name for it.
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers, _MockOptimizer

# The launcher has no public name, nor has the Trainer's way to call hooks.
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.trainer import call
from torch.distributed.device_mesh import DeviceMesh

StrategyRegistryType = _StrategyRegistry
format_precision_config = _format_precision_config
init_optimizers_and_lr_schedulers = _init_optimizers_and_lr_schedulers
validate_device_index_selection = _validate_device_index_selection


def is_mock_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether Lightning stands in for a ``configure_optimizers`` that returned nothing."""
    return isinstance(optimizer, _MockOptimizer)


def train_batch_size_per_rank(trainer: Any) -> int | None:
    """Rows per rank and batch of the train loader, or ``None`` when the loader does not say.

    The loop's data source is private, but it is the only way to the loader before the loop starts.
    """
    source = trainer.fit_loop._data_source
    if not source.is_defined():
        return None
    batch_size = getattr(getattr(source.dataloader(), "batch_sampler", None), "batch_size", None)
    return batch_size if isinstance(batch_size, int) else None


def attached_trainer(module: "pl.LightningModule | None") -> "pl.Trainer | None":
    """The module's Trainer, if it has one: the public property raises where there is none."""
    return None if module is None else module._trainer


def give_mesh(module: "pl.LightningModule", mesh: DeviceMesh) -> None:
    """Let ``configure_model`` find the mesh as ``self.device_mesh``, which has no public setter."""
    module._device_mesh = mesh


def leave_backward_to_strategy(trainer: "pl.Trainer") -> None:
    """Let automatic optimization call neither ``zero_grad`` nor ``backward``; a switch without a public name."""
    trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward = True


def zero_gradients(trainer: "pl.Trainer", batch_idx: int) -> None:
    """What that loop does before a backward, with the hooks around it, if ``batch_idx`` begins to accumulate."""
    if batch_idx % trainer.accumulate_grad_batches == 0:
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        optimizer = trainer.optimizers[0]
        loop._on_before_zero_grad(optimizer)
        loop._optimizer_zero_grad(batch_idx, optimizer)


def call_hooks(trainer: "pl.Trainer", name: str, *args: Any) -> None:
    """Call a hook of the callbacks and of the module, as the Trainer does."""
    call._call_callback_hooks(trainer, name, *args)
    call._call_lightning_module_hook(trainer, name, *args)


class WholeModuleLauncher(_MultiProcessingLauncher):
    """Starts ranks by spawn or fork, and gives the parent the weights of all ranks, not rank 0's own."""

    def _collect_rank_zero_results(self, trainer: "pl.Trainer", results: Any) -> Any:
        module = trainer.lightning_module
        whole = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
        vars(module)["state_dict"] = lambda: whole
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del vars(module)["state_dict"]
