"""The two ends of a stage in the autograd graph."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


class Entrance(torch.autograd.Function):
    """A received tensor as the step may use it: not the buffer itself, into which the next microbatch is received."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, copy: bool) -> Tensor:
        """Return another tensor with the same contents, in the same memory unless it is to be changed in place."""
        return tensor.clone() if copy else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient as it can be sent."""
        return gradients[0].contiguous(), None


class Boundary(torch.autograd.Function):
    """What a stage returns: contiguous tensors of their own that the schedule may detach in place.

    They depend on everything received, also where the step does not use it, so that every parameter's gradient is found
    by way of the inputs when the schedule computes the gradients of inputs first.
    """

    @staticmethod
    def forward(ctx: Any, received: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return ``tensors`` without the first ``received``."""
        ctx.received = received
        results = []
        for tensor in tensors[received:]:
            alone = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            results.append(alone.set_(tensor.detach().resolve_conj().contiguous()))  # type: ignore[call-overload]
        constant = [made for made, tensor in zip(results, tensors[received:], strict=True) if not tensor.requires_grad]
        ctx.mark_non_differentiable(*constant)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Hand the gradients on as they are."""
        return (None, *[None] * ctx.received, *gradients)
