"""The time of a step by the roofline: each part at the device's full speed, so that no run is faster.

Source: Williams et al. 2009, *Roofline: An Insightful Visual Performance Model*: a computation takes as long as its
arithmetic at full rate, or its memory traffic at full bandwidth, whichever is longer.
"""

from collections.abc import Sequence

from lightning_shard.plan.costs import Cost, Phase, Transfer
from lightning_shard.plan.hardware import Device
from lightning_shard.plan.profile import ModuleProfile
from lightning_shard.plan.results import StepTime

_HOST_BANDWIDTH = 100e9
"""Bytes a second at which a host's processors read and write memory, all of a node's ranks together: two sockets of
DDR4 or one of DDR5. An optimizer on the host is bound by it."""


def step_time(cost: Cost, profile: ModuleProfile, device: Device, nodes_of: int, precision: str) -> StepTime | None:
    """Seconds of one optimizer step.

    Computation hides communication of the same phase: the gathers of forward, the gathers and reductions of backward.
    What takes longer than the computation, and what happens while nothing computes, is exposed.

    Args:
        cost: Of the strategy.
        profile: Of the module.
        device: What a rank runs on.
        nodes_of: Ranks in a node.
        precision: As in ``Trainer(precision=...)``.

    Returns:
        ``None`` where the module's FLOPs are not known.

    """
    if not profile.flops:
        return None
    rate = device.fp32_flops if precision in ("32-true", "64-true") else device.bf16_flops
    forward = _at_roof(profile.flops, profile.saved_bytes, rate, device) * cost.flops_fraction * cost.batches
    backward = (2 + cost.recomputed) * forward
    update = _update(cost, profile, device, nodes_of)
    exposed = 0.0
    for phase, hidden in (("forward", forward), ("backward", backward), ("step", 0.0)):
        exposed += max(0.0, _seconds(cost.transfers, phase, device, nodes_of) - hidden)  # type: ignore[arg-type]
    exposed += max(0.0, cost.host_traffic / device.host_bandwidth - (0.0 if cost.bubble else backward))
    compute = forward + backward
    return StepTime(
        compute=compute + update,
        exposed_communication=exposed,
        bubble=compute * cost.bubble / (1 - cost.bubble),
    )


def _at_roof(flops: float, saved: float, rate: float, device: Device) -> float:
    # What is kept for backward was written once and is read about once before: the least that memory must move.
    return max(flops / rate, 2 * saved / device.memory_bandwidth)


def _update(cost: Cost, profile: ModuleProfile, device: Device, nodes_of: int) -> float:
    """An optimizer reads and writes all that it touches once: bound by memory."""
    states = cost.model_states
    touched = 2 * (states.optimizer + states.master + states.parameters) + states.gradients
    if cost.host_update:
        return touched * nodes_of / _HOST_BANDWIDTH
    return touched / device.memory_bandwidth


def _seconds(transfers: Sequence[Transfer], phase: Phase, device: Device, nodes_of: int) -> float:
    """Time on the wire: through the network where a group spans nodes, by the links inside one."""
    total = 0.0
    for each in transfers:
        if each.phase == phase:
            spans = each.ranks * each.across > nodes_of
            total += each.sent * each.size / (device.network_bandwidth if spans else device.link_bandwidth)
    return total
