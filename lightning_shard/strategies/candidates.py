"""Which strategies a run could use at all, whatever their memory: what each would refuse is asked of it beforehand."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn

from lightning_shard._compat.auto import is_compiled, precision_for, sync_batchnorm
from lightning_shard._compat.dry_run import fake_mode, quiet_module, quiet_trainer
from lightning_shard.registry import AUTO, FSDP2, NAMES, PIPELINE, ZERO
from lightning_shard.units.dry_copy import DryCopier

DDP = "ddp"

CHOICES = (DDP, *(name for name, entry in NAMES.items() if entry.strategy != AUTO))
"""Everything that can be chosen."""

ON_REQUEST = ("zero3_nvme",)
"""Chosen only if named: it writes to a drive, and needs one that is fast."""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """What a run could use, and what not."""

    names: tuple[str, ...]
    """The names that are left."""

    excluded: Mapping[str, str]
    """The others that were asked for, and why each of them will not do."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What is the same for every strategy."""

    devices: int
    """Ranks in all."""

    device: torch.device
    """What a rank trains on."""

    host_is_apart: bool
    """Whether memory of the host is other memory than the device's."""


def make_strategy(
    name: str, settings: Mapping[str, Any], process_group_backend: str | None, timeout: timedelta | None
) -> Strategy:
    """A new strategy.

    Args:
        name: One of :data:`CHOICES`.
        settings: Arguments on top of those that the name stands for.
        process_group_backend: The strategy's argument.
        timeout: The strategy's argument.

    """
    common = {"process_group_backend": process_group_backend, "timeout": timeout}
    if name == DDP:
        return DDPStrategy(**{**settings, **common})
    entry = NAMES[name]
    return entry.make(**{**entry.settings, **settings, **common})


def find_candidates(
    trainer: "pl.Trainer", module: "pl.LightningModule", wanted: Iterable[str] | None, around: Surroundings
) -> Candidates:
    """The names that nothing speaks against, in the order of the table.

    Args:
        trainer: The Trainer.
        module: The module, with its layers; it is not changed.
        wanted: Names to choose among; ``None`` for all that make sense.
        around: Ranks and devices.

    """
    names = tuple(wanted) if wanted is not None else tuple(name for name in CHOICES if name not in ON_REQUEST)
    optimizers = _count_optimizers(module)
    excluded: dict[str, str] = {}
    for name in names:
        reason = _senseless(name, around) if wanted is None else None
        reason = reason or _refusal(trainer, module, name, optimizers, around)
        if reason is not None:
            excluded[name] = reason
    return Candidates(names=tuple(name for name in names if name not in excluded), excluded=excluded)


def _senseless(name: str, around: Surroundings) -> str | None:
    """Why nobody would want it here."""
    offloads = "offload" in name
    if around.devices == 1 and name != DDP and not offloads:
        return "there is one rank, with whom nothing can be divided"
    if offloads and not around.host_is_apart:
        return "the device is the CPU: what is moved to its memory is there already"
    return None


def _refusal(
    trainer: "pl.Trainer", module: "pl.LightningModule", name: str, optimizers: int | None, around: Surroundings
) -> str | None:
    """Why the strategy would refuse this run, in its own words; ``None`` if it would not, as far as can be seen."""
    family = DDP if name == DDP else NAMES[name].strategy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the chosen strategy warns by itself
        try:
            strategy = make_strategy(name, {}, None, None)
            strategy.precision_plugin = precision_for(trainer, strategy)
            # Judged as for training, which the same Trainer may be asked for later.
            quiet = quiet_trainer(trainer, "training_step")
            quiet.state.fn = TrainerFn.FITTING
            if family != DDP and is_compiled(module):
                return "the module comes from torch.compile; compile submodules in `configure_model` instead"
            if family in (ZERO, PIPELINE) and optimizers is not None and optimizers > 1:
                return f"`configure_optimizers` returns {optimizers} optimizers, and it trains with one"
            if family == ZERO:
                _check_zero(quiet, module, strategy)
            elif family == FSDP2:
                _check_fsdp(module, around.device, sync_batchnorm(trainer))
            elif family == PIPELINE:
                _check_pipeline(quiet, module)
        except Exception as error:  # whatever it is, the strategy would not get further than here
            return str(error) or type(error).__name__
    return None


def _check_zero(trainer: "pl.Trainer", module: "pl.LightningModule", strategy: Any) -> None:
    from lightning_shard.zero.guards import check_run

    check_run(trainer, module, str(strategy.precision_plugin.precision), strategy.stage)
    # These ask in their `setup`, where the strategy is not there yet, or as late as in training, for its class.
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging | BaseFinetuning | GradientAccumulationScheduler):
            raise MisconfigurationException(f"the callback {type(callback).__name__} does not work with DeepSpeed")


def _check_fsdp(module: "pl.LightningModule", device: torch.device, synchronised: bool) -> None:
    from lightning_shard.units.guards import check_module

    check_module(module, device, synchronised)


def _check_pipeline(trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
    from lightning_shard.pipeline.guards import check_module

    check_module(trainer, module)


def _count_optimizers(module: "pl.LightningModule") -> int | None:
    """How many optimizers a copy of the module configures; ``None`` if it cannot be told without data."""
    mode = fake_mode()
    try:
        with warnings.catch_warnings(), mode:
            warnings.simplefilter("ignore")
            clone = DryCopier(mode, torch.device("cpu"), [])(module)
            quiet_module(clone, torch.device("cpu"))
            optimizers = clone.optimizers(use_pl_optimizer=False)
    except Exception:
        return None
    return len(optimizers) if isinstance(optimizers, list) else 1
