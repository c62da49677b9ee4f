"""Tensors of every dtype as messages: the back-ends know the common ones only."""

import torch
from torch import Tensor

_COMMON = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)
"""Dtypes that gloo and nccl send as they are."""


def sendable(tensor: Tensor) -> Tensor:
    """A view that every back-end can send or receive into: the tensor itself, or its bytes.

    Args:
        tensor: A contiguous tensor; what is received into the view is in the tensor.

    """
    if tensor.dtype in _COMMON:
        return tensor
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.reshape(-1).view(torch.uint8)
