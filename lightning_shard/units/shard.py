"""Turn chosen modules into FSDP2 units, one after the other, so that at most one of them is whole at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_shard._compat import sharding
from lightning_shard.materialize import has_meta_tensors, materialize
from lightning_shard.sending import sendable
from lightning_shard.units.policy import stays_fp32


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """How units are sharded."""

    mesh: DeviceMesh
    """The ranks: one axis ``dp_shard``, or two, ``dp_replicate`` and ``dp_shard``."""

    device: torch.device
    """The training device of this rank."""

    reshard_after_forward: bool | int
    """Whether a unit is sharded again after forward, or to how many ranks."""

    cpu_offload: bool
    """Whether shards live on the CPU."""

    policy: MixedPrecisionPolicy
    """Dtypes; the output dtype is for root units."""


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """Which modules become units."""

    units: tuple[str, ...]
    """Names of the units, inner ones before outer ones. ``""`` is the module itself."""

    roots: tuple[str, ...]
    """The units that no other unit contains."""

    checkpointed: tuple[str, ...]
    """Names of the modules whose activations are recomputed in backward."""

    whole: frozenset[str]
    """Names of parameters that no unit may take; scalars are among them without being named."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A module after sharding."""

    units: dict[str, FSDPModule]
    """The units by name, inner ones before outer ones."""

    roots: tuple[str, ...]
    """The units that no other unit contains."""

    whole: dict[str, nn.Parameter]
    """Parameters that every rank keeps whole, by name."""


def shard_module(module: nn.Module, plan: UnitPlan, options: ShardOptions) -> Layout:
    """Make the units of a plan, in place. Collective.

    The values of rank 0 are everyone's. A unit on the meta device is given its values just before it is sharded.

    Args:
        module: The module; none of it is sharded yet.
        plan: Which modules become units.
        options: How.

    Raises:
        MisconfigurationException: Naming parameters that a unit cannot hold together, or that have no values.

    """
    sharding.whole_numbers()
    modules = dict(module.named_modules(remove_duplicate=False))
    for name in plan.checkpointed:
        recompute_activations(modules[name])
    units: dict[str, FSDPModule] = {}
    for name in plan.units:
        unit = modules[name]
        _prepare_values(unit, options)
        mine = {f"{name}.{key}".lstrip("."): p for key, p in unit.named_parameters() if not isinstance(p, DTensor)}
        in_fp32 = stays_fp32(unit, options.policy)
        left_out = {p for key, p in mine.items() if not (p.dim() and p.numel()) or key in plan.whole or p in in_fp32}
        check_dtypes(name, {key: parameter for key, parameter in mine.items() if parameter not in left_out})
        is_root = name in plan.roots
        fully_shard(
            unit,
            mesh=options.mesh,
            # Explicitly, or torch would keep a root whole from forward to backward.
            reshard_after_forward=options.reshard_after_forward,
            mp_policy=options.policy if is_root else _without_output_dtype(options.policy),
            offload_policy=_offload_policy(options),
            ignored_params=left_out,
        )
        assert isinstance(unit, FSDPModule)
        units[name] = unit
    if "" not in units:
        _prepare_values(module, options)
    whole = {name: parameter for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)}
    move_rest(module, options.device)
    return Layout(units=units, roots=plan.roots, whole=whole)


def recompute_activations(module: nn.Module) -> None:
    """Let a module keep only its inputs for backward, and run its forward again there.

    Inside the module's call, so that the unit's own hooks are outside of it; and without a wrapper module, which would
    put its name into every parameter's name.
    """
    module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def _prepare_values(unit: nn.Module, options: ShardOptions) -> None:
    """Everything of a unit that is not sharded yet: with values, on the device, contiguous, and those of rank 0."""
    if has_meta_tensors(unit):
        materialize(unit, options.device)
    with torch.no_grad():
        for tensor in _unsharded_tensors(unit):
            if not tensor.is_contiguous():
                # FSDP2 cuts rows of memory; strides are no part of a parameter's meaning.
                tensor.data = tensor.data.contiguous()
            tensor.data = tensor.data.to(options.device)
            if torch.distributed.get_world_size() > 1:
                torch.distributed.broadcast(sendable(tensor.data), src=0)


def _unsharded_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from (parameter for parameter in module.parameters() if not isinstance(parameter, DTensor))
    yield from module.buffers()


def check_dtypes(unit: str, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse a unit whose trained parameters have several dtypes: they are gathered and reduced in one buffer.

    Args:
        unit: The unit's name.
        parameters: Its parameters by name.

    Raises:
        MisconfigurationException: Naming the unit and a parameter of each dtype.

    """
    examples: dict[torch.dtype, str] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            examples.setdefault(parameter.dtype, name)
    if len(examples) > 1:
        listed = ", ".join(f"{name!r} is {str(dtype).removeprefix('torch.')}" for dtype, name in examples.items())
        raise MisconfigurationException(
            f"The FSDP unit {unit or '(root)'!r} has trained parameters of different dtypes: {listed}. A unit gathers"
            " and reduces them in one buffer. Give them one dtype, freeze one kind, or put the modules that differ into"
            " units of their own: FSDP2Strategy(units=ClassUnits(classes=[...]))."
        )


def _without_output_dtype(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        cast_forward_inputs=policy.cast_forward_inputs,
    )


def _offload_policy(options: ShardOptions) -> OffloadPolicy:
    if not options.cpu_offload:
        return OffloadPolicy()
    # Pinned memory is what makes copies to a GPU asynchronous; without a GPU there is nothing to pin for.
    return CPUOffloadPolicy(pin_memory=options.device.type != "cpu")


def move_rest(module: nn.Module, device: torch.device) -> None:
    """Move everything that is not sharded to ``device``; shards stay where the units keep them."""
    for tensor in _unsharded_tensors(module):
        if tensor.device != device and not tensor.is_meta:
            tensor.data = tensor.data.to(device)
