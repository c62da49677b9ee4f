"""What a plan says: for every strategy its memory, its traffic and its time, and which of them to take."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lightning_shard.plan.arithmetic import ModelStates
from lightning_shard.plan.hardware import Device


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one rank's device at the moment when they are most, on the rank that needs most."""

    parameters: float = 0
    """Parameters, or this rank's part of them, with a master copy if there is one."""

    gradients: float = 0
    """Gradients, or this rank's part of them."""

    optimizer: float = 0
    """States of the optimizer."""

    activations: float = 0
    """What forward keeps for backward."""

    gathered: float = 0
    """Parameters of other ranks that are whole here for the moment."""

    buffers: float = 0
    """Buffers of the module, the batch, and buckets of the engine."""

    temporaries: float = 0
    """Everything else that operators make and soon release."""

    @property
    def total(self) -> float:
        """Sum of all."""
        return float(sum(getattr(self, each.name) for each in fields(self)))


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step by the roofline: each part at the device's full speed."""

    compute: float
    """Arithmetic and memory traffic of forward, backward (recomputation included) and the optimizer."""

    exposed_communication: float
    """Communication that nothing else hides."""

    bubble: float = 0
    """Waiting for other stages of a pipeline."""

    @property
    def total(self) -> float:
        """Sum of the three."""
        return self.compute + self.exposed_communication + self.bubble


@dataclass(frozen=True, kw_only=True)
class SchedulePlan:
    """What one pipeline schedule does with so many stages and microbatches."""

    schedule: str
    """Its name, as in ``PipelineStrategy(schedule=...)``."""

    bubble_fraction: float | None
    """Idle over total time with forward 1, backward-input 1 and backward-weight 1, mean over ranks, in [0, 1).
    ``None`` where the schedule cannot have these numbers."""

    in_flight_microbatches: tuple[int, ...] = ()
    """For each stage the most microbatches whose activations are kept at once."""

    timeline: tuple[str, ...] = ()
    """For each rank a line of characters, a column a unit of time."""

    reason: str = ""
    """Why the schedule cannot have these numbers, if it cannot."""


@dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """What one strategy costs."""

    name: str
    """A registered name, or Lightning's ``ddp``."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Constructor arguments beyond those that the name stands for; empty where the bare name will do."""

    model_states: ModelStates
    """Bytes of the model states of the rank that holds most, wherever they are."""

    host_bytes: float = 0
    """How many of them are in host memory or on NVMe."""

    payload_elements: float
    """Elements that a rank communicates in a step, in the ZeRO paper's count: an all-reduce of n is 2n."""

    sent_elements: float
    """Elements that a rank sends for it on a ring."""

    flops_fraction: float
    """Share of the model's layers that a rank computes: 1 where only storage is divided, 1/p on a pipeline's stage."""

    memory: Memory | None = None
    """Peak on the device; ``None`` where only the model states are known."""

    time: StepTime | None = None
    """Time of a step; ``None`` where the module's FLOPs are not known."""

    rows: int | None = None
    """Rows that all ranks together work off in a step; ``None`` where the batch has none to count. A pipeline works off
    one batch, where as many ranks beside each other work off one each."""

    fits: bool | None = None
    """Whether it fits the device with the margin; ``None`` where no device was given."""

    reason: str = ""
    """Why it fits or not, in words."""

    simulated: bool = False
    """Whether the peak comes from a simulation of the strategy's own code; else from closed forms."""

    @property
    def rows_per_second(self) -> float | None:
        """Rows of all ranks together; ``None`` where they or the time are not known."""
        return self.rows / self.time.total if self.rows is not None and self.time is not None else None

    @property
    def device_bytes(self) -> float:
        """Peak on the device, or where that is not known the model states there."""
        return self.memory.total if self.memory is not None else self.model_states.total - self.host_bytes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer to: what does each strategy cost, which ones fit, and which to take."""

    parameters: int
    """Number of parameters, Ψ; a shared one counts once."""

    devices: int
    """Ranks."""

    nodes: int = 1
    """Machines that the devices are in."""

    device: Device | None = None
    """What a rank runs on."""

    memory_bytes: float | None = None
    """Bytes of a device that the strategies were held against; ``None`` where they were not."""

    precision: str = "bf16-mixed"
    """As in ``Trainer(precision=...)``."""

    optimizer: str = "adam"
    """The optimizer's name."""

    strategies: tuple[StrategyPlan, ...]
    """Best first: those that fit by time, then those that do not."""

    chosen: StrategyPlan | None = None
    """The one to take: the least invasive that fits; ``None`` if none does, or no device was given."""

    schedules: tuple[SchedulePlan, ...] = ()
    """Pipeline schedules, where a number of stages was asked for."""

    notes: tuple[str, ...] = ()
    """What the plan does not know, in words."""

    def named(self, name: str) -> StrategyPlan:
        """The first strategy of that name.

        Raises:
            KeyError: If there is none.

        """
        for strategy in self.strategies:
            if strategy.name == name:
                return strategy
        raise KeyError(f"{name!r} is not in this plan; there are {', '.join(s.name for s in self.strategies)}")
