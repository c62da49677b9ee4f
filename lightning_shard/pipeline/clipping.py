"""Gradient clipping over all stages: one norm, in which a parameter that several stages keep counts once."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard.pipeline.tied import local_part


class PipelineClipping:
    """Replaces how a precision plugin clips by norm.

    Args:
        precision: The plugin.
        group: The pipeline's ranks.
        shards: The ranks that share a stage's parameters, ``None`` where each has them whole.
        counts: Whether a parameter counts towards the norm on this rank.
        device: Of messages.

    """

    def __init__(
        self,
        precision: Precision,
        group: Any,
        shards: Any,
        counts: Callable[[nn.Parameter], bool],
        device: torch.device,
    ) -> None:
        self._precision = precision
        self._group = group
        self._shards = shards
        self._counts = counts
        self._device = device
        vars(precision)["clip_grad_by_norm"] = self._clip

    def remove(self) -> None:
        """Let the plugin clip by its own norm again."""
        vars(self._precision).pop("clip_grad_by_norm", None)

    def norm(self, parameters: Iterable[Any]) -> Tensor:
        """The 2-norm of all stages' gradients. Collective."""
        whole = torch.zeros((), dtype=torch.float32, device=self._device)
        cut = torch.zeros((), dtype=torch.float32, device=self._device)
        for parameter in parameters:
            if parameter.grad is None or not self._counts(parameter):
                continue
            square = torch.linalg.vector_norm(local_part(parameter.grad).float()).square().to(self._device)
            if isinstance(parameter.grad, DTensor):
                cut += square
            else:
                whole += square
        if self._shards is not None:
            dist.all_reduce(cut, group=self._shards)
        total = whole + cut
        dist.all_reduce(total, group=self._group)
        return total.sqrt()

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = [parameter for parameter in self._precision.main_params(optimizer) if parameter.grad is not None]
        norm = self.norm(parameters)
        # As torch.nn.utils.clip_grad_norm_ does.
        factor = torch.clamp(clip_val / (norm + 1e-6), max=1.0)
        for parameter in parameters:
            assert parameter.grad is not None
            gradient = local_part(parameter.grad)
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
