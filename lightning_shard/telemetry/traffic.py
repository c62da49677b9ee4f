"""What a rank moves: collectives counted, between two points, in elements.

The unit is the ZeRO paper's: an all-reduce of n elements is 2n (a reduce-scatter and an all-gather), every other
collective n. That *payload* does not depend on the number of ranks. *Sent* is what a rank puts on the wire for it on a
ring, payload x (N - 1) / N. Backends are free to use other algorithms, so sent is a model and payload is a count.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch.distributed.tensor import DTensor

from lightning_shard._compat.collectives import Collective, Operation, TorchDispatchMode, read_collectives

__all__ = ["Collective", "Operation", "Traffic", "TrafficCounter", "count_traffic"]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one rank communicated."""

    calls: Mapping[Collective, int]
    """How often each collective was called: equal ones (operation, elements, dtype, ranks) are counted together."""

    @property
    def payload(self) -> int:
        """Payload in elements of whatever dtype: 2n for an all-reduce of n elements, n for everything else."""
        return sum(count * payload_elements(call) for call, count in self.calls.items())

    @property
    def sent(self) -> float:
        """Elements that this rank sends, if collectives run on a ring: payload x (N - 1) / N, with each group's N."""
        return sum(count * sent_elements(call) for call, count in self.calls.items())

    @property
    def payload_bytes(self) -> int:
        """Payload in bytes."""
        return sum(count * payload_elements(call) * call.dtype.itemsize for call, count in self.calls.items())

    @property
    def by_operation(self) -> dict[Operation, int]:
        """Payload elements of each operation that occurred."""
        payload: Counter[Operation] = Counter()
        for call, count in self.calls.items():
            payload[call.operation] += count * payload_elements(call)
        return dict(payload)

    def where(self, wanted: Callable[[Collective], bool]) -> "Traffic":
        """The part of the traffic that ``wanted`` says yes to, for example gradients without the norm's one element."""
        return _frozen({call: count for call, count in self.calls.items() if wanted(call)})

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        """What was communicated since ``earlier``, a snapshot of the same counter."""
        difference = {call: count - earlier.calls.get(call, 0) for call, count in self.calls.items()}
        return _frozen({call: count for call, count in difference.items() if count})


def payload_elements(call: Collective) -> int:
    """The paper's count of one call."""
    return (2 if call.operation == "all_reduce" else 1) * call.elements


def sent_elements(call: Collective) -> float:
    """Elements that a rank sends for one call on a ring; a send between two ranks goes as it is."""
    share = 1.0 if call.operation == "send" else (call.ranks - 1) / call.ranks
    return share * payload_elements(call)


class TrafficCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is active; made by :func:`count_traffic`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: Counter[Collective] = Counter()

    @property
    def traffic(self) -> Traffic:
        """What has been counted so far; later calls do not change it."""
        return _frozen(dict(self._calls))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count a call if it communicates, and let it run."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operators come by here, with the collectives among them
        for call in read_collectives(func, args):
            self._calls[call] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def count_traffic() -> Iterator[TrafficCounter]:
    """Count the collectives that this rank starts, in forward, in backward and in between.

    All of ``torch.distributed`` is seen, with its functional collectives, whoever calls it; a send is counted where it
    is sent. Not seen are libraries that talk to each other around ``torch.distributed``, and symmetric memory. While
    the counter is active every operator takes a detour through Python: count a step or two, and time other ones.

    Example::

        with count_traffic() as counter:
            loss = model(batch)
            before = counter.traffic
            loss.backward()
        print(counter.traffic - before)

    Was run on CPU with gloo, where a backward stays in the thread that called it. On CUDA autograd has threads of its
    own; it takes dispatch modes along to them, and the operators have the same names, but that was not run.

    Raises:
        NotImplementedError: From within, at a collective that is not known.

    """
    with TrafficCounter() as counter:
        yield counter


def _frozen(calls: dict[Collective, int]) -> Traffic:
    return Traffic(calls=MappingProxyType(calls))
