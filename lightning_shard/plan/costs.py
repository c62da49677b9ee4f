"""What one strategy costs on one device: the common form in which closed forms and simulations tell it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lightning_shard.plan.arithmetic import ModelStates, sent_elements
from lightning_shard.plan.profile import ModuleProfile
from lightning_shard.plan.results import Memory

Phase = Literal["forward", "backward", "step"]
"""While what a transfer runs: computation of the phase can hide it, except at a step, where there is none."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Communication of a rank in one optimizer step."""

    payload: float
    """Elements in the ZeRO paper's count: an all-reduce of n elements is 2n, everything else n."""

    size: float
    """Bytes of an element."""

    ranks: int
    """Size of the group."""

    across: int = 1
    """How far apart its ranks are numbered: 1 for neighbours."""

    phase: Phase
    """While what."""

    ring: bool = True
    """Whether it is a collective, which sends payload x (N - 1) / N; else a message, sent as it is."""

    @property
    def sent(self) -> float:
        """Elements that the rank sends."""
        return sent_elements(self.payload, self.ranks) if self.ring else self.payload


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a strategy costs on the rank that needs most."""

    name: str
    """A registered name, or ``ddp``."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Constructor arguments beyond those that the name stands for."""

    model_states: ModelStates
    """Bytes, wherever they are."""

    host_bytes: float = 0
    """How many of them are not on the device."""

    memory: Memory | None
    """Peak on the device; ``None`` where activations are not known."""

    together: float | None = None
    """Peak of device and host, where both are one memory; ``None`` where that is the sum of the two."""

    transfers: tuple[Transfer, ...] = ()
    """Communication of a step."""

    host_traffic: float = 0
    """Bytes between device and host in a step, both directions together."""

    host_update: bool = False
    """Whether the optimizer runs on the host."""

    flops_fraction: float = 1
    """Share of the model's layers that a rank computes."""

    recomputed: float = 0
    """Forwards that are run a second time, in forwards."""

    batches: int = 1
    """Batches that come by a rank in a step: more than one where gradients accumulate."""

    replicas: int = 1
    """Groups of ranks that work off other rows."""

    bubble: float = 0
    """Idle over total of a pipeline."""

    worst: int = 0
    """The rank within a pipeline that needs most."""


def by_segments(profile: ModuleProfile) -> dict[str, Memory]:
    """Peaks of the parts of a step in one process; a single empty one where no step could be simulated."""
    return dict(profile.single.segments) if profile.single is not None else {"before": Memory()}


def largest(segments: Mapping[str, Memory]) -> Memory:
    """The peak of a step from those of its parts."""
    return max(segments.values(), key=lambda memory: memory.total)


def map_segments(segments: Mapping[str, Memory], change: Callable[[str, Memory], Memory]) -> dict[str, Memory]:
    """Each part's peak, changed."""
    return {name: change(name, memory) for name, memory in segments.items()}


def scaled(memory: Memory, states: ModelStates, was: ModelStates) -> Memory:
    """A part's peak with other model states; of each kind it holds the share that it held before.

    Args:
        memory: The peak with the states ``was``.
        states: Bytes of the model states now.
        was: Bytes that they had there.

    """
    return replace(
        memory,
        parameters=memory.parameters * _ratio(states.parameters + states.master, was.parameters + was.master),
        gradients=memory.gradients * _ratio(states.gradients, was.gradients),
        optimizer=memory.optimizer * _ratio(states.optimizer, was.optimizer),
    )


def _ratio(now: float, before: float) -> float:
    return now / before if before else 0.0


def divisors(number: int) -> list[int]:
    """Of a number, from 1 on."""
    return [each for each in range(1, number + 1) if number % each == 0]


def total_payload(transfers: Sequence[Transfer]) -> float:
    """Payload elements of a step."""
    return sum(each.payload for each in transfers)


def total_sent(transfers: Sequence[Transfer]) -> float:
    """Sent elements of a step."""
    return sum(each.sent for each in transfers)
