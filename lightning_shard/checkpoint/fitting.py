"""Whether a checkpoint fits the module that it is to be loaded into: said before anything is changed."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_shard.checkpoint.boxes import Held
from lightning_shard.checkpoint.reading import Stored
from lightning_shard.checkpoint.sources import RawOptimizer, Source, dtype_kind
from lightning_shard.checkpoint.states import SavedOptimizer

_FRESH = (
    "start a new run from its weights: load them into the module before `fit` (lightning_shard.load_from_checkpoint)"
)
_REMEDY = f"Resume with the same `configure_optimizers`, or {_FRESH}."


def check_weights(
    path: str, stored: Mapping[str, Stored], held: Mapping[str, Held], strict: bool, left_out: Sequence[str] = ()
) -> list[str]:
    """Refuse weights of another module.

    Args:
        path: The checkpoint, for messages.
        stored: What it holds, by name.
        held: What the module needs.
        strict: Whether names must be the same.
        left_out: Names that were left out of the checkpoint on purpose.

    Returns:
        Names that are missing because they were left out on purpose.

    Raises:
        MisconfigurationException: Naming what is missing, unknown, of another shape or of another kind of number.

    """
    problems = []
    missing = sorted(held.keys() - stored.keys())
    on_purpose = [name for name in missing if name in set(left_out)]
    missing = [name for name in missing if name not in set(left_out)]
    unknown = sorted(stored.keys() - held.keys())
    if strict and missing:
        problems.append(f"missing in it: {_few(missing)}")
    if strict and unknown:
        problems.append(f"unknown to this module: {_few(unknown)}")
    for name in sorted(held.keys() & stored.keys()):
        here, there = held[name], stored[name]
        if here.shape != there.shape:
            problems.append(f"{name!r} has shape {there.shape} in it and {here.shape} in the module")
        elif dtype_kind(here.dtype) != dtype_kind(there.dtype):
            problems.append(f"{name!r} is {there.dtype} in it and {here.dtype} in the module")
    if problems:
        shown = "; ".join(problems[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
        remedy = "Load the module that it was saved from"
        if strict and (missing or unknown):
            remedy += ", or set `strict_loading = False` on the module to load what both have"
        raise MisconfigurationException(f"{path} was saved from another module: {shown}. {remedy}.")
    return on_purpose if strict else []


def check_number(source: Source, wanted: int) -> None:
    """Refuse to train on from a checkpoint without the optimizers' states.

    Raises:
        MisconfigurationException: If it holds weights only, or the states of another number of optimizers.

    """
    if source.optimizers is None:
        raise MisconfigurationException(
            f"{source.path} holds weights only (saved with save_weights_only=True, or outside of `fit`), so training"
            f" cannot go on from it with the optimizer as it was. Give a full checkpoint, or {_FRESH}."
        )
    if len(source.optimizers) != wanted:
        raise MisconfigurationException(
            f"{source.path} holds the states of {len(source.optimizers)} optimizers, but `configure_optimizers`"
            f" returned {wanted}."
        )


def check_kind(source: Source, number: int, kind: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse the states of another kind of optimizer.

    Classes may have other names for the same (a fused one), and versions of torch add hyper-parameters, so that an
    optimizer is another one if each has hyper-parameters that the other has not.

    Args:
        source: The checkpoint.
        number: The optimizer's.
        kind: The class of this run's optimizer.
        groups: Its parameter groups.

    Raises:
        MisconfigurationException: Naming both, and the hyper-parameters.

    """
    assert source.optimizers is not None
    manifest = source.manifest.optimizers if source.manifest is not None else None
    saved_kind = manifest[number].get("class", "") if manifest else ""
    here = {key for group in groups for key in group} - _ANYONES
    there = {key for group in source.optimizers[number].groups for key in group} - _ANYONES
    if here - there and there - here:
        raise MisconfigurationException(
            f"{source.path}: optimizer {number} is {kind} here, with {', '.join(sorted(here - there))}; in the"
            f" checkpoint it is {saved_kind or 'another one'}, with {', '.join(sorted(there - here))}. {_REMEDY}"
        )
    if saved_kind and kind != saved_kind:
        rank_zero_warn(
            f"{source.path} was saved with {saved_kind}, and optimizer {number} is {kind} here: it goes on with the"
            " saved hyper-parameters and states."
        )


_ANYONES = frozenset({"params", "initial_lr", "bias_correction", "foreach", "fused", "capturable", "differentiable"})
"""Entries of parameter groups that say nothing about the optimizer."""


def fit_optimizers(
    source: Source, names: Sequence[Sequence[Sequence[str]]], held: Mapping[str, Held], frozen: Collection[str] = ()
) -> list[SavedOptimizer]:
    """The checkpoint's optimizer states, keyed by the names of this run's parameters.

    Args:
        source: The checkpoint, with as many optimizers as the run has.
        names: For each of this run's optimizers, and each of its groups, the names of its parameters.
        held: The module's weights.
        frozen: Names of frozen parameters: DeepSpeed leaves them out of its groups.

    Raises:
        MisconfigurationException: If groups have other parameters, naming the first that differs.

    """
    assert source.optimizers is not None
    return [
        _fit(source, raw, number, own, held, frozen)
        for number, (raw, own) in enumerate(zip(source.optimizers, names, strict=True))
    ]


def _fit(
    source: Source,
    raw: RawOptimizer,
    number: int,
    names: Sequence[Sequence[str]],
    held: Mapping[str, Held],
    frozen: Collection[str],
) -> SavedOptimizer:
    here, there = [len(group) for group in names], [len(group["params"]) for group in raw.groups]
    by_name = all(isinstance(each, str) for group in raw.groups for each in group["params"])
    if len(here) != len(there) or (not by_name and here != there):
        raise MisconfigurationException(
            f"{source.path}: optimizer {number} has groups of {there} parameters, but the module's has groups of"
            f" {here}. {_REMEDY}"
        )
    name_of: dict[Any, str] = {}
    for place, (own, group) in enumerate(zip(names, raw.groups, strict=True)):
        if by_name:
            grouped = {name for each in raw.groups for name in each["params"]}
            needed = [name for name in own if name in grouped or name not in frozen]
            _check_group(source.path, number, place, needed, group["params"], raw)
            name_of.update({name: name for name in own})
        else:
            name_of.update(zip(group["params"], own, strict=True))
    stored = source.reader.stored
    tensors: dict[tuple[str, str], tuple[str, Stored]] = {}
    for (parameter, state), key in raw.tensors.items():
        if parameter in name_of:
            name = name_of[parameter]
            tensors[name, state] = (key, stored[key])
            shape, own_shape = stored[key].shape, held[name].shape if name in held else None
            if own_shape is not None and not by_name and _looks_elementwise(shape, own_shape) and shape != own_shape:
                raise MisconfigurationException(
                    f"{source.path}: the state {state!r} at the place of {name!r} in optimizer {number} has shape"
                    f" {shape}, but the parameter has {own_shape}: the parameters are in another order. {_REMEDY}"
                )
    values = {name_of[each]: dict(found) for each, found in raw.values.items() if each in name_of}
    groups = [{**group, "params": list(own)} for group, own in zip(raw.groups, names, strict=True)]
    return SavedOptimizer(groups=groups, tensors=tensors, values=values)


def _looks_elementwise(shape: Sequence[int], own: Sequence[int]) -> bool:
    return len(shape) == len(own)


def _check_group(
    path: str, number: int, place: int, own: Sequence[str], saved: Sequence[str], raw: RawOptimizer
) -> None:
    here, there = set(own), set(saved)
    for name in own:
        if name not in there:
            where = next((f"group {i}" for i, group in enumerate(raw.groups) if name in group["params"]), "no group")
            raise MisconfigurationException(
                f"{path}: parameter {name!r} is in group {place} of optimizer {number} here, but in {where} in"
                f" the checkpoint. {_REMEDY}"
            )
    if extra := [name for name in saved if name not in here]:
        raise MisconfigurationException(
            f"{path}: group {place} of optimizer {number} had {len(saved)} parameters when it was saved, {len(own)}"
            f" here: {_few(extra)} are missing. {_REMEDY}"
        )


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
