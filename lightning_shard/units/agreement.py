"""What a backward has reached, compared between the ranks before the optimizer steps.

A unit reduces the gradients of all its parameters at once. Where a rank has none for one of them, zeros take part, so
that every rank reduces the same tensors. One small message between the processes then tells two things: parameters
that no rank has reached, whose gradient is nothing and not zero (momentum and weight decay would move them); and ranks
that have gathered different units, whose weights were mixed up.
"""

import threading
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_shard._compat import sharding
from lightning_shard._compat.simulating import is_simulated
from lightning_shard.units.standstill import Standstill


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """A message to the other ranks that may be under way."""

    work: Any
    """The collective."""

    message: torch.Tensor
    """What was sent, and afterwards the answer."""

    gathers: tuple[int, ...]
    """The units that this rank had gathered, in order."""


class ReachedParameters:
    """Watches every unit's gathers and reductions, and settles them after a backward.

    Args:
        units: The units by name, sharded, the root among them.
        whole: Parameters that are in no unit, by name.
        device: The training device.

    """

    def __init__(
        self, units: Mapping[str, FSDPModule], whole: Mapping[str, nn.Parameter], device: torch.device
    ) -> None:
        # The processes talk, not the devices: a message over nccl would make every backward wait for its GPU. And in a
        # group of their own: where ranks are out of step, it must not be taken for a part of another collective.
        self._alone = is_simulated()  # nobody to talk to
        self._group = None if self._alone else torch.distributed.new_group(backend="gloo")
        self.standstill = Standstill()
        weakref.finalize(self, self.standstill.stop)  # its thread would outlive the module
        watch = device.type == "cpu"
        self._names = list(units)
        self._whole = dict(whole)
        self._parameters: list[nn.Parameter] = []
        self._gathers: list[int] = []
        self._reached: set[int] = set()
        self._first: set[int] = set()
        self.pending = False
        self.sync = True
        self._sent: _Sent | None = None
        for index, (name, unit) in enumerate(units.items()):
            self._parameters.extend(sharding.sharded_parameters(unit))
            unit.set_reduce_scatter_unused_params(True, recurse=False)
            wait = partial(self.standstill.waiting, unit=name or "(root)") if watch else _no_wait
            sharding.observe_reduction(unit, self._note_reduction, partial(wait, "the reduction"))
            sharding.observe_unshard(unit, partial(self._gathers.append, index), partial(wait, "a gather"))
        for parameter in self._whole.values():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note_whole)  # type: ignore[no-untyped-call]
        self._parameters.extend(self._whole.values())

    def _note_whole(self, parameter: torch.Tensor) -> None:
        self.pending = self.pending or self.sync

    def _note_reduction(self, reached: list[nn.Parameter], first: list[nn.Parameter]) -> None:
        self.pending = True
        self._reached.update(map(id, reached))
        self._first.update(map(id, first))

    def note_whole(self) -> None:
        """Note which whole parameters this rank's backward has reached; before their gradients are averaged."""
        for parameter in self._whole.values():
            self._first.add(id(parameter))
            if parameter.grad is not None:
                self._reached.add(id(parameter))

    def settle(self) -> None:
        """Compare with the other ranks, and take the gradients away that no rank has. Collective.

        A rank that has reached everything needs no answer before the optimizer steps: it goes on, and :meth:`finish`
        looks at the answer when it has come.

        Raises:
            MisconfigurationException: On every rank, if they have gathered different units or in another order.

        """
        self.finish()
        self.pending = False
        gathers = tuple(self._gathers)
        reached = [id(parameter) in self._reached for parameter in self._parameters]
        missed = [p for p, is_reached in zip(self._parameters, reached, strict=True) if not is_reached]
        if self._alone:
            self._take_away(missed, frozenset(self._first))
        else:
            self._tell(gathers, reached, missed)
        self._gathers.clear()
        self._reached.clear()
        self._first.clear()

    def _tell(self, gathers: tuple[int, ...], reached: list[bool], missed: list[nn.Parameter]) -> None:
        # A tuple of integers hashes alike in every process; 62 bits leave room for the sign.
        digest = hash(gathers) % (1 << 62)
        message = torch.tensor([digest, -digest, *reached])
        work = torch.distributed.all_reduce(message, torch.distributed.ReduceOp.MAX, group=self._group, async_op=True)
        self._sent = _Sent(work=work, message=message, gathers=gathers)
        if any(parameter.grad is not None for parameter in missed):
            self.finish(frozenset(self._first))

    def finish(self, first: frozenset[int] = frozenset()) -> None:
        """Look at the answer to the last message, if it has not been looked at.

        Args:
            first: Parameters, by id, that had no gradient before this backward.

        Raises:
            MisconfigurationException: As in :meth:`settle`.

        """
        sent, self._sent = self._sent, None
        if sent is None:
            return
        with self.standstill.waiting("the comparison after backward"):
            self._wait(sent.work)
        high, low, *reached = sent.message.tolist()
        if high != -low:
            raise MisconfigurationException(self._explain(sent.gathers))
        missed = [p for p, is_reached in zip(self._parameters, reached, strict=True) if not is_reached]
        self._take_away(missed, first)

    @staticmethod
    def _take_away(missed: list[nn.Parameter], first: frozenset[int]) -> None:
        for parameter in missed:
            if id(parameter) in first:
                parameter.grad = None

    def _wait(self, work: Any) -> None:
        """Wait for the answer, unless the ranks have come to a standstill."""
        done = threading.Event()
        work.get_future().add_done_callback(lambda _: done.set())
        while not done.wait(1.0):
            if self.standstill.verdict is not None:
                raise MisconfigurationException(self.standstill.verdict)
        work.wait()

    def _explain(self, gathers: tuple[int, ...]) -> str:
        by_rank: list[tuple[int, ...]] = [()] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(by_rank, gathers, group=self._group)
        counts = {index: [gathered.count(index) for gathered in by_rank] for index in range(len(self._names))}
        where = next((index for index, times in counts.items() if len(set(times)) > 1), None)
        what = (
            "The ranks used the same units in a different order."
            if where is None
            else f"Unit {self._names[where] or '(root)'!r} was gathered {counts[where]} times on ranks 0 to"
            f" {len(by_rank) - 1}."
        )
        return (
            f"{what} All ranks take part in every gather, so a step must use the same units on each of them, in the"
            " same order. Let every rank run the same modules (multiply an unwanted result by zero), or choose units"
            " that hold the alternatives together, such as units=SizeUnits(min_params=...)."
        )


def _no_wait(what: str) -> AbstractContextManager[None]:
    return nullcontext()
