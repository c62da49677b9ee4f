"""Give every rank the parameters of its own stages, and stand-ins for the others."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.materialize import has_meta_tensors, materialize
from lightning_shard.pipeline.absent import absent_parameter, is_absent
from lightning_shard.pipeline.layout import Layout
from lightning_shard.sending import sendable


def keep_own(module: "pl.LightningModule", layout: Layout, mine: Iterable[int], device: torch.device) -> None:
    """Free what belongs to other stages; what stays is on ``device``, with the values that rank 0 had. Collective.

    A module on the meta device is given values where it stays; those that several ranks keep are made equal by
    `make_equal`.

    Args:
        module: The whole module, on the CPU or the meta device.
        layout: Its stages.
        mine: The stages of this rank.
        device: Where this rank runs.

    """
    on_meta = has_meta_tensors(module)
    if not on_meta:
        _from_rank_zero(module)
    own = set(mine)
    kept = {name for name, stages in layout.owners.items() if own & set(stages)}
    places = {id(parameter): name for name, parameter in module.named_parameters()}
    shared: dict[int, nn.Parameter] = {}
    if on_meta:
        _replace(module, _whole_modules(module, places, kept), places, shared, device)
        for submodule in module.modules():
            if any(is_absent(parameter) for parameter in submodule.parameters(recurse=False)):
                _make_buffers(submodule, device)
        materialize(module, device)
        places = {id(parameter): name for name, parameter in module.named_parameters()}
        shared = {}
    _replace(module, kept, places, shared, device)
    move_own(module, device)


def take_over(
    module: "pl.LightningModule",
    layout: Layout,
    missing: dict[str, set[int]],
    mine: Iterable[int],
    rank_of: Callable[[int], int],
    group: Any,
    device: torch.device,
) -> None:
    """Give stages further parameters, which a step uses there that was not known when the module was laid out.

    Collective in each pipeline.

    Args:
        module: The module, laid out.
        layout: Its stages; the new owners are added.
        missing: Names of parameters and the stages that they are missing on.
        mine: The stages of this rank.
        rank_of: The place in the pipeline of a stage's rank.
        group: Process group of the pipeline.
        device: Where this rank runs.

    """
    parameters = dict(module.named_parameters())
    here = {rank_of(stage) for stage in mine}
    for name in sorted(missing):
        parameter = parameters[name]
        source = rank_of(layout.owners[name][0])
        absent = is_absent(parameter)
        data = torch.empty(tuple(parameter.shape), dtype=parameter.dtype, device=device) if absent else parameter.data
        dist.broadcast(sendable(data), src=dist.get_global_rank(group, source), group=group)
        layout.owners[name] = tuple(sorted({*layout.owners[name], *missing[name]}, key=_owner_first(layout, name)))
        if absent and here & {rank_of(stage) for stage in missing[name]}:
            real = nn.Parameter(data, requires_grad=parameter.requires_grad)
            for submodule in module.modules():
                for own, old in list(submodule.named_parameters(recurse=False, remove_duplicate=False)):
                    if old is parameter:
                        setattr(submodule, own, real)


def _owner_first(layout: Layout, name: str) -> Callable[[int], tuple[bool, int]]:
    owner = layout.owners[name][0]
    return lambda stage: (stage != owner, stage)


def move_own(module: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers that are here to ``device``."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if not is_absent(tensor) and tensor.device != device:
            tensor.data = tensor.data.to(device)


def make_equal(tensors: Sequence[Tensor], source: int, group: Any) -> None:
    """Give ``tensors`` the values that the rank ``source`` has. Collective in ``group``."""
    with torch.no_grad():
        for tensor in tensors:
            contiguous = tensor.data.contiguous()
            dist.broadcast(sendable(contiguous), src=source, group=group)
            tensor.data.copy_(contiguous)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are here, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if not is_absent(parameter)}


def _from_rank_zero(module: nn.Module) -> None:
    """Seeds may differ between ranks, and initial values may depend on each other across stages."""
    if dist.get_world_size() == 1:
        return
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            data = tensor.data.contiguous()
            dist.broadcast(sendable(data), src=0)
            if data.data_ptr() != tensor.data.data_ptr():
                tensor.data.copy_(data)


def _whole_modules(module: nn.Module, places: dict[int, str], kept: set[str]) -> set[str]:
    """The parameters to keep so that no module has some of its own: values are made module by module."""
    together = set(kept)
    for submodule in module.modules():
        names = {places[id(parameter)] for parameter in submodule.parameters(recurse=False)}
        if names & kept:
            together |= names
    return together


def _make_buffers(module: nn.Module, device: torch.device) -> None:
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            setattr(module, name, torch.zeros_like(buffer, device=device))


def _replace(
    module: nn.Module, kept: set[str], places: dict[int, str], shared: dict[int, nn.Parameter], device: torch.device
) -> None:
    for submodule in module.modules():
        for name, parameter in list(submodule.named_parameters(recurse=False, remove_duplicate=False)):
            full_name = places.get(id(parameter))
            if full_name is None or full_name in kept or is_absent(parameter):
                continue
            if id(parameter) not in shared:
                stand_in = absent_parameter(parameter, device, full_name)
                attributes = {key: value for key, value in vars(parameter).items() if key not in vars(stand_in)}
                vars(stand_in).update(attributes)
                shared[id(parameter)] = stand_in
            # By the module's own setter: recurrent layers keep a list of their weights.
            setattr(submodule, name, shared[id(parameter)])
