"""All ranks must reach the same parameters in a backward: the engine adds gradients up by their place in a bucket.

Where one rank's batch uses head A and another's head B, the engine would add the gradient of A to that of B without an
error, or wait for a peer that has nothing to send. A collective of two integers before each reduction notices it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_shard import _compat


class GradientAgreement:
    """Compares, between the ranks, which parameters got a gradient since the last reduction, and in which order.

    Args:
        engine: The engine, set up for training on more than one rank.
        module: The user's module, for names.
        device: The training device.

    """

    def __init__(self, engine: Any, module: nn.Module, device: torch.device) -> None:
        # The processes talk, not the devices: a message over nccl would make every backward wait for its GPU.
        self._group = None if device.type == "cpu" else torch.distributed.new_group(backend="gloo")
        self._names: list[str] = []
        self._reached: list[int] = []
        self._handles: list[RemovableHandle] = []
        # Stage 1 reduces after backward in a fixed order, so there the order of arrival does not matter.
        self._in_order = engine.zero_optimization_stage() > 1
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                note = partial(self._note, len(self._names))
                self._handles.append(parameter.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]
                self._names.append(name)
        # Once a backward: every comparison waits for the other ranks.
        _compat.before_reduction(engine.optimizer, self.check)

    def _note(self, index: int, parameter: Tensor) -> None:
        self._reached.append(index)

    def check(self) -> None:
        """Compare with the other ranks. Collective.

        Raises:
            MisconfigurationException: On every rank, naming a parameter that only some of them have reached.

        """
        reached = tuple(self._reached if self._in_order else sorted(set(self._reached)))
        self._reached.clear()
        # A tuple of integers hashes alike in every process; 62 bits leave room for the sign.
        digest = hash(reached) % (1 << 62)
        largest = torch.tensor([digest, -digest])
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=self._group)
        low_and_high = largest.tolist()
        if low_and_high[0] == -low_and_high[1]:
            return
        by_rank: list[tuple[int, ...]] = [()] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(by_rank, reached, group=self._group)
        raise MisconfigurationException(self._explain(by_rank))

    def _explain(self, by_rank: Sequence[tuple[int, ...]]) -> str:
        remedy = (
            " The engine adds gradients up by their place in a bucket, so it would mix them. Let every rank use the"
            " same parameters in a step (add `0.0 * parameter.sum()` of an unused one to the loss), or use"
            " strategy='ddp_find_unused_parameters_true'."
        )
        for index, name in enumerate(self._names):
            with_it = [rank for rank, reached in enumerate(by_rank) if index in reached]
            if 0 < len(with_it) < len(by_rank):
                without = [rank for rank in range(len(by_rank)) if rank not in with_it]
                return f"Parameter {name!r} got a gradient on ranks {with_it} but not on ranks {without}.{remedy}"
        return f"The ranks' backwards reached the same parameters in different orders.{remedy}"

    def remove(self) -> None:
        """Take the hooks off the parameters, and end the group."""
        for handle in self._handles:
            handle.remove()
        if self._group is not None:
            torch.distributed.destroy_process_group(self._group)
