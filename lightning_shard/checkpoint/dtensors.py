"""Tensors that are sharded over ranks by torch, as boxes."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_shard._compat.dcp import local_offsets
from lightning_shard.checkpoint.boxes import Box, Held
from lightning_shard.checkpoint.reading import Stored
from lightning_shard.checkpoint.states import empty_like, like


def hold_shards(tensor: Tensor, writes: bool = True) -> Held:
    """What this rank holds of a tensor, which may be sharded."""
    if not isinstance(tensor, DTensor):
        return Held.whole(tensor, writes)
    shape = tuple(tensor.shape)
    local = tensor.to_local().detach()
    if not tensor.numel():
        return Held.whole(torch.empty(shape, dtype=tensor.dtype), writes)
    boxes = (Box(offsets=local_offsets(tensor), tensor=local),) if local.numel() else ()
    return Held(shape=shape, dtype=tensor.dtype, boxes=boxes, writes=writes)


def new_like(stored: Stored, parameter: Tensor) -> Tensor:
    """An uninitialised state, sharded like its parameter where it has its shape."""
    if isinstance(parameter, DTensor) and stored.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=like(stored, parameter)).detach()
    return empty_like(stored, parameter)


def shard_like(value: Tensor, target: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds of one that is cut like ``target``; else the tensor itself.

    Every rank has the same value, so that none has to send.
    """
    if not isinstance(target, DTensor) or value.shape != target.shape:
        return value
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
