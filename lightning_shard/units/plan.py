"""Which modules of a Trainer's module become units: found by structure, checked by a dry run of its steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_shard.config import ClassUnits, SizeUnits
from lightning_shard.units.find import Units, find_units, resolve_classes, why_not_a_unit
from lightning_shard.units.peek import NO_BATCH, peek_batch
from lightning_shard.units.shard import UnitPlan
from lightning_shard.units.usage import Usage, agree, merge, watch_step


@dataclass(frozen=True, kw_only=True)
class PlannedUnits:
    """A plan, and what people may want to know of it."""

    plan: UnitPlan
    """Which modules become units."""

    rejected: dict[str, str]
    """Modules that were asked for, or fit, but cannot be units, with the reason."""


def plan_units(
    trainer: "pl.Trainer",
    module: "pl.LightningModule",
    wanted: Literal["blocks"] | SizeUnits | ClassUnits,
    activation_checkpointing: bool | list[str],
    reshard_after_forward: bool | int,
) -> PlannedUnits:
    """Choose the units of a module.

    The module itself holds the rest: it is the root, and its parameters are whole during a step. In manual optimization
    a step goes on after its backwards and its optimizer steps, so there the module's parts are roots, each whole only
    in its own forward, and what lies in none of them stays whole.

    Args:
        trainer: The Trainer, with the loaders of the steps that it is going to run.
        module: The module, not sharded.
        wanted: The strategy's argument.
        activation_checkpointing: The strategy's argument.
        reshard_after_forward: The strategy's argument.

    Raises:
        MisconfigurationException: If classes are not found, or nothing can be checkpointed.

    """
    usage = watch_steps(trainer, module)
    found, whole = settle_changes(module, wanted, usage, reshard_after_forward is True)
    units = list(found.names)
    if module.automatic_optimization:
        units.append("")
        roots = [""]
    else:
        roots = list(manual_roots(module, usage))
        units.extend(name for name in roots if name not in units)
        roots.extend(name for name in units if not any(_inside(name, root) for root in roots))
    checkpointed = choose_checkpointed(module, [name for name in units if name], activation_checkpointing)
    plan = UnitPlan(
        units=_inner_first(module, units),
        roots=tuple(roots),
        checkpointed=tuple(checkpointed),
        whole=frozenset(whole),
    )
    return PlannedUnits(plan=plan, rejected=found.rejected)


def settle_changes(
    module: nn.Module, wanted: Literal["blocks"] | SizeUnits | ClassUnits, usage: Usage | None, sharded_at_rest: bool
) -> tuple[Units, set[str]]:
    """Find units that go together with what the steps change in place.

    A moving average of weights can be computed shard by shard if its parameters, and those that it follows, all are in
    units that do not run at that moment. Otherwise it must be whole, since a change to a gathered copy would be gone
    when that is released; and so must, at that moment, what it follows.

    Args:
        module: The module.
        wanted: The strategy's argument.
        usage: What dry runs saw.
        sharded_at_rest: Whether units are sharded whenever their forward does not run.

    Returns:
        The units, and the names of the parameters that must be whole.

    """
    whole: set[str] = set()
    while True:
        found = find_units(module, wanted, usage)
        if usage is None:
            return found, whole
        outside = dict(usage.outside)
        for target, sources in usage.changed.items():
            in_units = [_in_a_unit(name, found.names) for name in (target, *(sources or ()))]
            if sharded_at_rest and sources is not None and all(in_units):
                continue
            whole.add(target)
            for source in sources or ():
                if _in_a_unit(source, found.names) and source not in usage.changed:
                    outside.update(dict.fromkeys(_holders(source), source))
        if outside == usage.outside:
            return found, whole
        usage = replace(usage, outside=outside)


def _in_a_unit(parameter: str, units: Sequence[str]) -> bool:
    return any(_inside(parameter, unit) for unit in units)


def _holders(parameter: str) -> Iterator[str]:
    """The modules that a parameter lies in, besides the root."""
    parts = parameter.split(".")[:-1]
    yield from (".".join(parts[: length + 1]) for length in range(len(parts)))


def watch_steps(trainer: "pl.Trainer", module: "pl.LightningModule") -> Usage | None:
    """What dry runs of the steps show that the Trainer is about to run, on any rank. Collective.

    Returns:
        The same on every rank; ``None`` where no dry run could be made.

    """
    usages = []
    for step, loaders in steps_to_come(trainer):
        if (batch := peek_batch(loaders)) is not NO_BATCH:
            usages.append(watch_step(module, step, trainer.precision_plugin.convert_input(batch)))
    by_rank: list[Usage | None] = [None] * torch.distributed.get_world_size()
    # Batches differ, and so may what they use: the ranks need one plan.
    torch.distributed.all_gather_object(by_rank, merge(usages) if usages else None)
    seen = [usage for usage in by_rank if usage is not None]
    return agree(seen) if seen else None


def steps_to_come(trainer: "pl.Trainer") -> Iterator[tuple[str, Any]]:
    """The steps to come, each with its loaders. The Trainer asks for them here, a little earlier than otherwise."""
    match trainer.state.fn:
        case TrainerFn.FITTING:
            trainer.fit_loop.setup_data()
            yield "training_step", trainer.train_dataloader
            if trainer.enable_validation:
                trainer.fit_loop.epoch_loop.val_loop.setup_data()
                yield from (("validation_step", loader) for loader in _one_by_one(trainer.val_dataloaders))
        case TrainerFn.VALIDATING:
            trainer.validate_loop.setup_data()
            yield from (("validation_step", loader) for loader in _one_by_one(trainer.val_dataloaders))
        case TrainerFn.TESTING:
            trainer.test_loop.setup_data()
            yield from (("test_step", loader) for loader in _one_by_one(trainer.test_dataloaders))
        case TrainerFn.PREDICTING:
            trainer.predict_loop.setup_data()
            yield from (("predict_step", loader) for loader in _one_by_one(trainer.predict_dataloaders))


def _one_by_one(loaders: Any) -> list[Any]:
    """The loaders of an evaluation, which go one after the other; each step gets a batch of one."""
    if isinstance(loaders, dict):
        return [each for value in loaders.values() for each in _one_by_one(value)]
    if isinstance(loaders, (list, tuple)):
        return [each for value in loaders for each in _one_by_one(value)]
    return [loaders]


def manual_roots(module: nn.Module, usage: Usage | None) -> Iterator[str]:
    """The outermost modules inside ``module`` that can be units."""
    pending = [name for name, _ in module.named_children()]
    modules = dict(module.named_modules())
    while pending:
        name = pending.pop(0)
        if name not in modules or not any(True for _ in modules[name].parameters()):
            continue
        if why_not_a_unit(module, name, usage) is None:
            yield name
        else:
            pending.extend(f"{name}.{child}" for child, _ in modules[name].named_children())


def choose_checkpointed(module: nn.Module, units: list[str], activation_checkpointing: bool | list[str]) -> list[str]:
    """The modules whose activations are recomputed.

    Args:
        module: The module.
        units: Its units, without itself.
        activation_checkpointing: Every unit, or every module of classes; of nested ones the outermost.

    Raises:
        MisconfigurationException: If there is none.

    """
    if activation_checkpointing is False:
        return []
    if activation_checkpointing is True:
        chosen = units
        missing = (
            "FSDP2Strategy(activation_checkpointing=True) recomputes each unit, but besides the module itself there is"
            " none. Choose units=SizeUnits(min_params=...) small enough, or name classes:"
            " activation_checkpointing=['package.module.Class']."
        )
    else:
        classes = resolve_classes(activation_checkpointing, "activation_checkpointing")
        chosen = [name for name, each in module.named_modules() if name and isinstance(each, classes)]
        missing = (
            f"FSDP2Strategy(activation_checkpointing={activation_checkpointing!r}): no module is of these classes."
            f" Those there are: {', '.join(sorted({type(each).__name__ for each in module.modules()}))}."
        )
    if not chosen:
        raise MisconfigurationException(missing)
    return [name for name in chosen if not any(name != other and _inside(name, other) for other in chosen)]


def _inside(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def _inner_first(module: nn.Module, names: list[str]) -> tuple[str, ...]:
    """Children before their parents, else in the module's own order."""
    order = {name: place for place, (name, _) in enumerate(module.named_modules())}
    return tuple(sorted(names, key=lambda name: (-name.count(".") if name else 1, order[name])))
