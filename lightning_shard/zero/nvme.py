"""Optimizer states on NVMe across a checkpoint.

The engine copies its swap files into a checkpoint and back, but forgets which of them belong to the optimizer's state,
and leaves out whatever was too small to be swapped: a resumed run goes on with Adam's moments and step count lost,
silently. Here every rank writes its own partitions to plain files and puts them back.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard import _compat
from lightning_shard.zero.state import full_shape

_FILE = "lightning_shard_nvme_rank_{rank}_group_{group}.pt"
_WHOLE_FILE = "lightning_shard_nvme_whole.pt"


def uses_nvme(config: Mapping[str, Any], section: str | None = None) -> bool:
    """Whether an engine configuration offloads to NVMe.

    Args:
        config: The engine's configuration.
        section: ``"offload_optimizer"`` or ``"offload_param"``; ``None`` for any of them.

    """
    zero = config.get("zero_optimization", {})
    sections = ("offload_optimizer", "offload_param") if section is None else (section,)
    return any((zero.get(key) or {}).get("device") == "nvme" for key in sections)


class NVMeStates:
    """Saves and loads one rank's optimizer partitions where the engine keeps them on NVMe; else does nothing."""

    def __init__(self, module: nn.Module, zero_optimizer: Any, rank: int) -> None:
        self._module = module
        self._zero = zero_optimizer
        self._rank = rank
        self.active = bool(getattr(zero_optimizer, "swap_optimizer", False))

    def save(self, folder: Path) -> None:
        """Write a file for each partition group into ``folder``, and rank 0 one with what is not partitioned.

        Needs host memory for one group's partition and states beyond what the engine holds.
        """
        if not self.active:
            return
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        for group, parameters in enumerate(_compat.partition_groups(self._zero)):
            layout = []
            offset = 0
            for parameter in parameters:
                elements = _compat.own_elements(parameter)
                layout.append((names[id(parameter)], full_shape(parameter), offset, elements))
                offset += elements
            with _compat.swapped_in(self._zero, group, write_back=False) as (flat, state):
                contents = {"layout": layout, "master": flat.detach().clone(), "state": _cloned(state)}
            torch.save(contents, folder / _FILE.format(rank=self._rank, group=group))
        whole = _not_optimized(self._module, self._zero)
        if self._rank == 0:
            torch.save(whole, folder / _WHOLE_FILE)

    def load(self, folder: Path) -> None:
        """Put back what :meth:`save` wrote, into master weights, optimizer states and parameters.

        Raises:
            FileNotFoundError: If ``folder`` lacks this rank's files, as a checkpoint of the engine alone does.

        """
        if not self.active:
            return
        for group, _ in enumerate(_compat.partition_groups(self._zero)):
            path = folder / _FILE.format(rank=self._rank, group=group)
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} is missing. Without it the optimizer's states, which lived on NVMe, would be lost"
                    " silently."
                )
            contents = torch.load(path, map_location="cpu", weights_only=True)
            with _compat.swapped_in(self._zero, group, write_back=True) as (flat, state):
                flat.data.copy_(contents["master"])
                state.clear()
                state.update(contents["state"])
        _compat.gather_persistent(self._zero)


def read_nvme_weights(folder: Path, world_size: int) -> dict[str, Tensor]:
    """Whole fp32 weights by name from the files of all ranks, tied names left out.

    Args:
        folder: Where :meth:`NVMeStates.save` wrote.
        world_size: The number of ranks that wrote.

    """
    weights: dict[str, Tensor] = dict(torch.load(folder / _WHOLE_FILE, map_location="cpu", weights_only=True))
    group = 0
    while (folder / _FILE.format(rank=0, group=group)).is_file():
        ranks = [
            torch.load(folder / _FILE.format(rank=rank, group=group), map_location="cpu", mmap=True, weights_only=True)
            for rank in range(world_size)
        ]
        for name, shape, offset, elements in ranks[0]["layout"]:
            parts = [contents["master"][offset : offset + elements] for contents in ranks]
            numel = torch.Size(shape).numel()
            weights[name] = torch.cat(parts)[:numel].view(shape).clone()
        group += 1
    return weights


def _not_optimized(module: nn.Module, zero_optimizer: Any) -> dict[str, Tensor]:
    """Parameters that are in no partition group (frozen ones), whole."""
    import deepspeed

    optimized = {id(parameter) for group in _compat.partition_groups(zero_optimizer) for parameter in group}
    whole = {}
    for name, parameter in module.named_parameters():
        if id(parameter) not in optimized:
            with deepspeed.zero.GatheredParameters([parameter]):
                whole[name] = parameter.detach().cpu().clone()
    return whole


def _cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.detach().cpu().clone() if isinstance(value, Tensor) else value for key, value in state.items()}
