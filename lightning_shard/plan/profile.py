"""What the planner knows of a module: sizes, units, FLOPs, places to cut it, and what a step of it keeps in memory.

Everything is found on tensors without data. Two kinds of runs tell it: one recorded step, for FLOPs and cuts, and a few
simulated steps on one or two ranks, whose parts closed forms then scale to any number of ranks.
"""

import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard._compat.dry_run import attached_trainer, fake_mode
from lightning_shard.pipeline.microbatch import count_rows
from lightning_shard.plan.repeats import Repeats, find_repeats
from lightning_shard.plan.simulate import SINGLE, Simulation, SimulationFailed, SimulationOptions, simulate
from lightning_shard.plan.stage_costs import Stages, record_stages
from lightning_shard.units.dry_copy import DryCopier
from lightning_shard.units.plan import settle_changes
from lightning_shard.units.usage import watch_step

TWO = 2
"""Ranks of the simulations from which those of more ranks follow."""


_CONVERTED = {"bf16-true": 2, "16-true": 2, "64-true": 8}
"""Bytes of an element where the precision converts the module."""


@dataclass(frozen=True, kw_only=True)
class ParameterFacts:
    """One parameter."""

    name: str
    """Its first name."""

    shape: tuple[int, ...]
    """Its shape."""

    size: int
    """Bytes of an element, as the module has it."""

    trained: bool
    """Whether it has a gradient."""

    optimizer: float
    """Elements that an optimizer keeps for each of its own."""

    @property
    def numel(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, kw_only=True)
class ModuleProfile:
    """Facts of one module and one batch."""

    module: "pl.LightningModule"
    """The module's copy without data, with all its layers."""

    batch: Any
    """What one rank gets for one call of ``training_step``; ``None`` if there is none."""

    rows: int | None
    """Rows of the batch; ``None`` if it has none that all its tensors share."""

    parameters: tuple[ParameterFacts, ...]
    """Each parameter once."""

    groups: tuple[tuple[str, ...], ...]
    """Names of the trained parameters in each optimizer group."""

    buffer_bytes: int
    """Of the module's buffers and the batch."""

    units: tuple[str, ...]
    """Names of the modules that FSDP2 gathers at once, besides the root."""

    unit_of: Mapping[str, str]
    """For each parameter the unit that it belongs to; ``""`` is the root."""

    repeats: Repeats | None
    """Equal blocks, if there are many."""

    stages: Stages | None
    """Where the step can be cut, and what lies between; ``None`` without a batch."""

    single: Simulation | None
    """A step in one process, in the run's precision."""

    tried: Simulation | None
    """Where the optimizer's states are from: that step, or none; ``None`` where it cannot be tried."""

    single_checkpointed: Simulation | None
    """The same with the units' activations recomputed; ``None`` if there are no units."""

    notes: tuple[str, ...]
    """What could not be found out, in words."""

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Classes of the optimizers; empty where they could not be tried."""
        return self.tried.optimizers if self.tried is not None else ()

    @property
    def psi(self) -> int:
        """Number of parameters, Ψ."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def trained(self) -> tuple[ParameterFacts, ...]:
        """Those with gradients."""
        return tuple(parameter for parameter in self.parameters if parameter.trained)

    @property
    def flops(self) -> float:
        """Floating-point operations of one forward of the batch."""
        return self.stages.flops if self.stages is not None else 0.0

    @property
    def saved_bytes(self) -> float:
        """What one forward of the batch keeps for backward in one process."""
        if self.single is None:
            return 0.0
        return max(memory.activations for memory in self.single.segments.values())


def prepare(module: "pl.LightningModule", batch: Any) -> tuple["pl.LightningModule", Any]:
    """A copy of the module and the batch without data; with the layers that ``configure_model`` makes.

    Raises:
        MisconfigurationException: If ``configure_model`` cannot run without data.

    """
    mode = fake_mode()
    trainer = attached_trainer(module)
    copier = DryCopier(mode, torch.device("cpu"), [] if trainer is None else [(trainer, None)])
    try:
        clone: pl.LightningModule = copier(module)
    except TypeError as error:
        raise MisconfigurationException(f"{type(module).__name__} cannot be planned: {error}.") from error
    fake_batch = copier(batch)
    try:
        with mode, redirect_stdout(StringIO()):
            clone.configure_model()
    except Exception as error:
        raise MisconfigurationException(
            f"{type(module).__name__}.configure_model could not be run without data"
            f" ({type(error).__name__}: {error}). Plan a module that has its layers already."
        ) from error
    vars(clone)["configure_model"] = lambda: None
    return clone, fake_batch


def profile_module(
    module: "pl.LightningModule", batch: Any, options: SimulationOptions, optimizer_elements: float
) -> ModuleProfile:
    """Find everything out. Takes seconds; memory does not depend on the module's size.

    Args:
        module: The module; it is not changed.
        batch: What one rank gets for one call of ``training_step``, on any device; ``None`` leaves model states only.
        options: Of the run: precision, clipping, accumulation. The strategy is ignored.
        optimizer_elements: Elements per parameter to go on with where the optimizer cannot be tried.

    Raises:
        MisconfigurationException: If the module has no parameters, or cannot be copied.

    """
    clone, fake_batch = prepare(module, batch)
    named = dict(clone.named_parameters())
    if not named:
        raise MisconfigurationException(
            f"{type(module).__name__} has no parameters: build its layers in __init__ or configure_model."
        )
    repeats = find_repeats(clone)
    notes: list[str] = []
    single = checkpointed = stages = None
    with warnings.catch_warnings(action="ignore"):
        usage = watch_step(clone, "training_step", fake_batch) if batch is not None else None
        units = settle_changes(clone, "blocks", usage, True)[0].names
        if batch is not None:
            single = _try(clone, fake_batch, options, repeats, notes)
        if single is not None and units:
            checkpointed = _try(clone, fake_batch, options, repeats, [], checkpointed=units)
        if batch is not None:
            try:
                stages = record_stages(clone, fake_batch, options.precision)
            except Exception as error:
                notes.append(f"FLOPs and pipeline stages are not known: {_first_line(error)}.")
    if batch is None:
        notes.append("There is no batch: activations and FLOPs are not counted, only model states.")
    if single is not None and not single.reached:
        notes.append("Backward of training_step reaches no parameter (does it return a loss?): optimizer states are 0.")
    tried = single if single is not None else _states_alone(clone, fake_batch, options)
    kept = tried.optimizer_bytes if tried is not None and tried.states_made else None
    if kept is None:
        notes.append("The optimizer could not be tried: two states per parameter are assumed, as Adam keeps them.")
    every = tuple(name for name, parameter in named.items() if parameter.requires_grad)
    groups = tried.optimizer_groups if tried is not None and kept is not None else (every,)
    held = [fake_batch, list(clone.buffers())]
    return ModuleProfile(
        module=clone,
        batch=fake_batch,
        rows=_rows(fake_batch),
        parameters=tuple(
            ParameterFacts(
                name=name,
                shape=tuple(p.shape),
                size=p.element_size(),
                trained=p.requires_grad,
                optimizer=optimizer_elements
                if kept is None
                else kept.get(name, 0) / max(1, p.numel() * (_CONVERTED.get(options.precision) or p.element_size())),
            )
            for name, p in named.items()
        ),
        groups=tuple(tuple(n for n in group if named[n].requires_grad) for group in groups),
        buffer_bytes=sum(tensor.numel() * tensor.element_size() for tensor in _tensors(held)),
        units=units,
        unit_of={name: _unit(name, units) for name in named},
        repeats=repeats,
        stages=stages,
        single=single,
        tried=tried,
        single_checkpointed=checkpointed,
        notes=tuple(notes),
    )


def _try(
    module: "pl.LightningModule",
    batch: Any,
    options: SimulationOptions,
    repeats: Repeats | None,
    notes: list[str],
    checkpointed: tuple[str, ...] = (),
) -> Simulation | None:
    """A step in one process: with few blocks where the rest follows from them, else with all."""
    options = replace(options, strategy=SINGLE, settings={}, checkpointed=checkpointed)
    for blocks in (repeats, None) if repeats is not None else (None,):
        try:
            return simulate(module, batch, replace(options, repeats=blocks))
        except SimulationFailed as error:
            reason = _first_line(error)
    notes.append(f"A step could not be simulated, so that activations are not counted: {reason}.")
    return None


def _states_alone(module: "pl.LightningModule", batch: Any, options: SimulationOptions) -> Simulation | None:
    """What the optimizers keep, without a step: for every parameter that is trained."""
    trained = frozenset(name for name, parameter in module.named_parameters() if parameter.requires_grad)
    try:
        return simulate(
            module, batch, replace(options, strategy=SINGLE, settings={}, reached=trained, states_only=True)
        )
    except SimulationFailed:
        return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _rows(batch: Any) -> int | None:
    try:
        return count_rows(batch)
    except MisconfigurationException:
        return None


def _unit(parameter: str, units: tuple[str, ...]) -> str:
    return max((unit for unit in units if parameter.startswith(f"{unit}.")), key=len, default="")


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
