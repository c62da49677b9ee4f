"""The one optimizer that the engine gets, and the schedulers that the Trainer steps."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from lightning_shard import _compat
from lightning_shard.config import Offload
from lightning_shard.zero import optimizers
from lightning_shard.zero.guards import check_optimizer_parameters
from lightning_shard.zero.ops import Op


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What the engine trains with."""

    optimizer: Optimizer
    """The optimizer for the flat partitions; shares its group dictionaries with the user's."""

    schedulers: list[LRSchedulerConfig]
    """The learning-rate schedulers, bound to ``optimizer``'s groups."""

    groups: list[dict[str, Any]]
    """The user's own groups, frozen ones too; the same dictionaries as ``optimizer``'s."""

    kind: str
    """The class of the user's optimizer."""


def promise_optimizer(module: "pl.LightningModule", config: Mapping[str, Any]) -> None:
    """Let a module without ``configure_optimizers`` pass the Trainer's own check where the config has an optimizer.

    Args:
        module: The user's module, as the Trainer connects it. Reading the optimizer takes the promise back.
        config: The user's DeepSpeed settings.

    """
    if "optimizer" in config and not is_overridden("configure_optimizers", module, pl.LightningModule):
        module.configure_optimizers = _promised  # type: ignore[method-assign]


def _promised() -> NoReturn:
    raise MisconfigurationException(
        "This module has no `configure_optimizers`: in its last run the DeepSpeed config's `optimizer` section took its"
        " place. Add the method, or train again with such a config."
    )


def configure_optimizer(
    module: "pl.LightningModule",
    config: Mapping[str, Any],
    offload: Offload | None,
    device: torch.device,
    ensure_op: Callable[[Op], None],
) -> Chosen:
    """Read the module's (or the config's) optimizer, refuse what cannot be partitioned, and choose for offload.

    Args:
        module: The user's module.
        config: The engine's configuration, with ``optimizer`` and ``scheduler`` sections where the user gave them.
        offload: The strategy's offload argument.
        device: The training device.
        ensure_op: Compiles an op where it is needed. Collective.

    Raises:
        MisconfigurationException: If there is no optimizer, more than one, or one that flat partitions would break.

    """
    optimizer, schedulers = _read(module, config)
    check_optimizer_parameters(module, optimizer)
    optimizers.check_no_early_state(optimizer)
    optimizers.check_elementwise(optimizer, device)
    chosen = _without_frozen_groups(_for_offload(optimizer, config, offload, device, ensure_op))
    if chosen is not optimizer:
        _compat.pretend_stepped(optimizer)
    groups = list(optimizer.param_groups)
    return Chosen(optimizer=chosen, schedulers=schedulers, groups=groups, kind=type(optimizer).__name__)


def _without_frozen_groups(optimizer: Optimizer) -> Optimizer:
    """``optimizer``, or a copy that shares its groups and state but lacks the groups that are frozen as a whole.

    Stages 1 and 2 cannot flatten an empty group. The user's own object keeps all groups in their order, because
    schedulers count by them.
    """
    active = [group for group in optimizer.param_groups if any(p.requires_grad for p in group["params"])]
    if len(active) == len(optimizer.param_groups):
        return optimizer
    trimmed = copy.copy(optimizer)
    _compat.without_step_wrapper(trimmed)
    trimmed.param_groups = active
    return trimmed


def _read(module: "pl.LightningModule", config: Mapping[str, Any]) -> tuple[Optimizer, list[LRSchedulerConfig]]:
    if vars(module).get("configure_optimizers") is _promised:
        del module.configure_optimizers
    name = type(module).__name__
    sections = [section for section in ("optimizer", "scheduler") if section in config]
    if not is_overridden("configure_optimizers", module, pl.LightningModule):
        if "optimizer" not in config:
            raise MisconfigurationException(
                f"{name} has no `configure_optimizers` and the DeepSpeed config has no `optimizer` section: ZeRO has"
                " nothing to train with. Add one of them."
            )
        optimizer = optimizers.from_config_section(config["optimizer"], module)
        return optimizer, _scheduler_from_section(config.get("scheduler"), optimizer)
    if sections:
        raise MisconfigurationException(
            f"The DeepSpeed config has the section(s) {', '.join(sections)}, but {name} overrides"
            " `configure_optimizers`. Take one of them out."
        )
    found, schedulers = _compat.init_optimizers_and_lr_schedulers(module)
    if len(found) > 1:
        raise MisconfigurationException(
            f"{name}.configure_optimizers returns {len(found)} optimizers"
            f" ({', '.join(type(entry).__name__ for entry in found)}), but ZeRO's engine partitions for one optimizer."
            " Use a strategy that keeps parameters apart (strategy='fsdp2', or Lightning's 'ddp'), or merge them into"
            " one optimizer with parameter groups."
        )
    if _compat.is_mock_optimizer(found[0]):
        raise MisconfigurationException(
            f"{name}.configure_optimizers returns no optimizer: ZeRO has nothing to partition. Return one, or use"
            " another strategy."
        )
    return found[0], schedulers


def _scheduler_from_section(section: Mapping[str, Any] | None, optimizer: Optimizer) -> list[LRSchedulerConfig]:
    """DeepSpeed's or torch's scheduler of that name, stepped by the Trainer after every optimizer step."""
    if not section:
        return []
    from deepspeed.runtime import lr_schedules

    name, params = str(section.get("type")), dict(section.get("params") or {})
    known = dict.fromkeys(lr_schedules.VALID_LR_SCHEDULES, lr_schedules)
    kind: Any = getattr(known.get(name, torch.optim.lr_scheduler), name, None)
    if name not in known and not (isinstance(kind, type) and issubclass(kind, torch.optim.lr_scheduler.LRScheduler)):
        raise MisconfigurationException(
            f"The DeepSpeed config's scheduler.type={name!r} is neither one of DeepSpeed's schedulers"
            f" ({', '.join(known)}) nor one of torch.optim.lr_scheduler. Choose one of them, or return a scheduler from"
            " `configure_optimizers`."
        )
    if kind is torch.optim.lr_scheduler.ReduceLROnPlateau:
        raise MisconfigurationException(
            f"The DeepSpeed config's scheduler.type={name!r} waits for a metric, which a config cannot name. Return it"
            " from `configure_optimizers` with its 'monitor'."
        )
    try:
        scheduler = kind(optimizer, **params)
    except (TypeError, ValueError) as error:
        raise MisconfigurationException(
            f"The DeepSpeed config's scheduler section does not fit {name}: {error}"
        ) from error
    return [LRSchedulerConfig(scheduler, interval="step")]


def _for_offload(
    optimizer: Optimizer,
    config: Mapping[str, Any],
    offload: Offload | None,
    device: torch.device,
    ensure_op: Callable[[Op], None],
) -> Optimizer:
    target = config["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
    if target in (None, "none"):
        return optimizer
    wanted = offload.cpu_adam if offload is not None else None
    cpu_adam = device.type == "cuda" if wanted is None else wanted
    if cpu_adam and optimizers.cpu_adam_fits(optimizer):
        ensure_op("cpu_adam")
    return optimizers.choose_for_offload(optimizer, cpu_adam)
