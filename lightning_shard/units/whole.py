"""Parameters that every rank keeps whole: too small to cut, or used where no unit could gather them.

FSDP2 leaves them alone altogether, so their gradients are averaged here.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class WholeParameters:
    """Averages the gradients of parameters that are not sharded.

    Args:
        parameters: The parameters by name; the same on every rank.

    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)

    def average_gradients(self) -> None:
        """Replace each gradient by its mean over the ranks, in one message a dtype. Collective.

        A parameter that this rank's backward has not reached counts as a gradient of zero; one that no rank has reached
        is for :class:`~lightning_shard.units.agreement.ReachedParameters` to notice.
        """
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        for dtype in sorted({parameter.dtype for parameter in trained}, key=str):
            same = [parameter for parameter in trained if parameter.dtype == dtype]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            torch.distributed.all_reduce(flat)
            flat /= torch.distributed.get_world_size()
            for parameter, mean in zip(same, torch.split(flat, [p.numel() for p in same]), strict=True):
                parameter.grad = mean.view_as(parameter).clone()


def split_kinds(parameters: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Sharded and whole ones: an operator over a list of tensors takes no mixture."""
    sharded: list[Tensor] = []
    whole: list[Tensor] = []
    for parameter in parameters:
        (sharded if isinstance(parameter, DTensor) else whole).append(parameter)
    return sharded, whole


def clip_by_norm(parameters: Iterable[Tensor], limit: float) -> None:
    """Scale all gradients by ``limit / norm`` if their common 2-norm exceeds ``limit``.

    Like ``torch.nn.utils.clip_grad_norm_``, for a mixture of sharded and whole parameters.

    Args:
        parameters: Parameters with gradients.
        limit: The largest allowed norm.

    """
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    kinds = split_kinds(parameter for parameter in parameters if parameter.grad is not None)
    norms = [get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds if kind]
    if not norms:
        return
    device = norms[0].device
    whole_norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in whole_norms]))
    for kind in kinds:
        clip_grads_with_norm_(kind, limit, total)


def clip_by_value(parameters: Iterable[Tensor], limit: float) -> None:
    """Clamp every gradient's elements to [-limit, limit]."""
    for kind in split_kinds(parameter for parameter in parameters if parameter.grad is not None):
        torch.nn.utils.clip_grad_value_(kind, limit)
