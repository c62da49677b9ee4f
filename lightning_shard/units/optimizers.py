"""Which optimizers may run on shards.

A shard knows which whole tensor it is a part of, so an optimizer that looks at rows or norms can be right on it.
Whether one is depends on which operators torch can run on shards; those that are not known are tried.
"""

from collections.abc import Sequence

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Optimizer

from lightning_shard.trial import STEPS, differs, distinct_settings, train_copy, trial_problem
from lightning_shard.units.full import full_tensor

_KNOWN = frozenset("SGD ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop".split())
"""Classes of torch.optim that are right on shards."""

_REMEDY = (
    "Choose an elementwise optimizer (SGD, Adam, AdamW, Adagrad, RMSprop, ...), or strategy='ddp' for whole tensors."
)


def check_optimizers(optimizers: Sequence[Optimizer], module: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse optimizers that would train nothing, or something else than in one process. Collective.

    Args:
        optimizers: The module's optimizers. Not changed.
        module: The sharded module.
        mesh: The ranks.

    Raises:
        MisconfigurationException: Naming the optimizer and what is wrong.

    """
    known = {id(parameter) for parameter in module.parameters()}
    for index, optimizer in enumerate(optimizers):
        kind = type(optimizer)
        for group_index, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    raise MisconfigurationException(
                        f"Optimizer {index} ({kind.__name__}) holds a tensor of shape {list(parameter.shape)} (group"
                        f" {group_index}, place {place}) that is no parameter of the module: it was probably taken"
                        " before sharding replaced the parameters, and training it would change nothing. Collect the"
                        " parameters inside `configure_optimizers`, from `self.parameters()`."
                    )
        if not (kind.__name__ in _KNOWN and kind is getattr(torch.optim, kind.__name__, None)):
            _try_on_shards(optimizer, mesh)


def _try_on_shards(optimizer: Optimizer, mesh: DeviceMesh) -> None:
    """Let a copy train two small tensors, whole and sharded, and compare.

    Raises:
        MisconfigurationException: If the shards end up otherwise, or the optimizer fails.

    """
    name = type(optimizer).__name__
    shards = mesh[mesh.mesh_dim_names[-1]] if mesh.mesh_dim_names else mesh
    device = torch.device(mesh.device_type)

    def whole(tensor: Tensor) -> Tensor:
        return tensor.to(device, copy=True)

    def sharded(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor.to(device, copy=True), shards, [Shard(0)], src_data_rank=None)

    for settings in distinct_settings(optimizer):
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device.type == "cuda" else []):
            start, gradients = trial_problem(torch.float32)
            try:
                train_copy(optimizer, settings, start, gradients, whole)
            except Exception:
                # Some take matrices only, and the first of the tensors is one.
                start, gradients = start[:1], [step[:1] for step in gradients]
            try:
                expected = _flat(train_copy(optimizer, settings, start, gradients, whole))
                found = _flat(train_copy(optimizer, settings, start, gradients, sharded))
            except Exception as error:
                reason = (str(error).strip() or "no message").splitlines()[0]
                raise MisconfigurationException(
                    f"{name} cannot run on FSDP2's shards: trying it on two small sharded tensors failed with"
                    f" {type(error).__name__}: {reason} {_REMEDY}"
                ) from error
        if (wrong := differs(found, expected, _flat(start))) is not None:
            raise MisconfigurationException(
                f"{name} trains shards otherwise than whole tensors: {STEPS} steps move two small tensors by up to"
                f" {wrong[1]:.1e}, and shards of them by an amount that differs by {wrong[0]:.1e}. {_REMEDY}"
            )


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([full_tensor(tensor).reshape(-1) for tensor in tensors])
