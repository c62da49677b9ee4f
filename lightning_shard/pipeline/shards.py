"""Stages whose parameters are shared by the ranks that run them: gathered for a step, reduced after it."""

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_shard._compat.held_units import HeldUnits
from lightning_shard._compat.sharding import whole_numbers
from lightning_shard.pipeline.absent import is_absent
from lightning_shard.pipeline.layout import Layout
from lightning_shard.pipeline.tied import reached_anywhere, reduce_gradients
from lightning_shard.units.find import find_units
from lightning_shard.units.shard import check_dtypes

_ATTRIBUTE = "_lightning_shard_stage_units"


class StageShards:
    """The shards of this rank's stages.

    Args:
        module: The LightningModule, with stand-ins for other stages' parameters.
        layout: Its stages.
        mesh: The ranks that run the same stages.

    """

    def __init__(self, module: "pl.LightningModule", layout: Layout, mesh: DeviceMesh) -> None:
        self._module = module
        self._group = mesh.get_group()
        self._pending = False
        held: HeldUnits | None = vars(module).get(_ATTRIBUTE)
        if held is None:
            held = _shard(module, layout, mesh)
            vars(module)[_ATTRIBUTE] = held
        self._held = held

    def gather(self) -> None:
        """Make this rank's stages whole, for a step. Collective."""
        self._held.gather()

    def after_training(self) -> None:
        """Gradients wait for more batches, or for :meth:`reduce`: until then parameters stay whole."""
        self._pending = True

    def after_evaluation(self) -> None:
        """Release what was gathered: the optimizer changes shards."""
        if not self._pending:
            self._held.release()

    def reduce(self) -> None:
        """Average gradients over the ranks that share the stages; parameters are shards again. Collective."""
        here = [each for each in self._module.parameters() if not is_absent(each) and each.requires_grad]
        for parameter, is_reached in zip(here, reached_anywhere(here, self._group), strict=True):
            # Gradients are reduced in one buffer a unit: ranks that did not reach a parameter send zeros.
            if is_reached and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        whole = [each for each in here if not self._is_in_unit(each)]
        self._held.reduce()
        reduce_gradients(whole, self._group, average=True)
        self._pending = False

    def _is_in_unit(self, parameter: nn.Parameter) -> bool:
        return bool(parameter.dim() and parameter.numel())


def _shard(module: "pl.LightningModule", layout: Layout, mesh: DeviceMesh) -> HeldUnits:
    whole_numbers()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    left_out = {each for each in module.parameters() if is_absent(each) or not (each.dim() and each.numel())}
    units: list[FSDPModule] = []
    for name in find_units(module, "blocks").names:
        unit = module.get_submodule(name)
        inside = [parameter for parameter in unit.parameters() if not isinstance(parameter, DTensor)]
        stages = {layout.owners[names[id(parameter)]] for parameter in inside if id(parameter) in names}
        # A unit lies in one stage; what several stages use belongs to the rest, as does what is partly elsewhere.
        if not inside or any(is_absent(parameter) for parameter in inside) or len(stages) != 1:
            continue
        if len(next(iter(stages))) > 1:
            continue
        units.append(_make_unit(name, unit, mesh, left_out))
    root = _make_unit("", module, mesh, left_out)
    rank_zero_info(f"Stages are sharded over {mesh.size()} ranks each: {len(units)} units here, and the rest.")
    return HeldUnits(root, [*units, root])


def _make_unit(name: str, unit: nn.Module, mesh: DeviceMesh, left_out: set[nn.Parameter]) -> FSDPModule:
    mine = {f"{name}.{key}".lstrip("."): each for key, each in unit.named_parameters() if not isinstance(each, DTensor)}
    check_dtypes(name, {key: each for key, each in mine.items() if each not in left_out})
    for parameter in mine.values():
        if parameter not in left_out and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    ignored = {parameter for parameter in mine.values() if parameter in left_out}
    fully_shard(unit, mesh=mesh, reshard_after_forward=False, ignored_params=ignored)
    assert isinstance(unit, FSDPModule)
    return unit
