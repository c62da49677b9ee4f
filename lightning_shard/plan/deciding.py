"""From a plan to a decision in words: the strategy to take and why, or why there is none."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard.plan.report import label, table
from lightning_shard.plan.results import Plan, StrategyPlan
from lightning_shard.plan.words import size_in_words

_SHOWN = 3
"""Strategies that a refusal shows."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to take."""

    name: str
    """A registered name, or ``"ddp"``."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Constructor arguments on top of those that the name stands for."""

    text: str
    """Why, for people."""


def decide(plan: Plan, *, margin: float, excluded: Mapping[str, str], notes: tuple[str, ...]) -> Decision:
    """Take what the plan says.

    Args:
        plan: The plan for a device.
        margin: Share of the device's memory that was to be left free.
        excluded: Names that were no candidates, and why.
        notes: What else people should know.

    Raises:
        MisconfigurationException: If nothing fits: with the strategies that come nearest, their numbers, and remedies.

    """
    chosen = plan.chosen
    if chosen is None:
        raise MisconfigurationException(_refusal(plan, margin, excluded, notes))
    lines = [table(plan).rstrip(), *_excluded_lines(excluded), *notes, f"auto_shard is {label(chosen)} from now on."]
    return Decision(name=chosen.name, settings=dict(chosen.settings), text="\n".join(lines))


def _refusal(plan: Plan, margin: float, excluded: Mapping[str, str], notes: tuple[str, ...]) -> str:
    assert plan.device is not None
    usable = plan.device.memory_bytes * (1 - margin)
    by_name: dict[str, StrategyPlan] = {}
    for each in sorted(plan.strategies, key=lambda each: each.device_bytes):
        by_name.setdefault(each.name, each)
    nearest = {label(each): _missing(each, usable) for each in list(by_name.values())[:_SHOWN]}
    width = max(map(len, nearest), default=0)
    lines = [
        f"No strategy fits {plan.parameters:,} parameters on {plan.devices} x {plan.device.name}: each device has"
        f" {size_in_words(plan.device.memory_bytes)}, of which {size_in_words(usable)} may be used (margin={margin:g})."
        " Nearest are:",
        *(f"  {name:<{width}}  {missing}" for name, missing in nearest.items()),
        *_excluded_lines(excluded),
        *notes,
        "Use more devices, a smaller batch (with accumulate_grad_batches), activation checkpointing"
        " (FSDP2Strategy(activation_checkpointing=True)), a lower precision such as bf16-true, or keep model states on"
        " NVMe (strategy='zero3_nvme'). To try anyway, name a strategy, or lower the margin.",
    ]
    return "\n".join(lines)


def _missing(strategy: StrategyPlan, usable: float) -> str:
    needed = f"needs {size_in_words(strategy.device_bytes)}"
    if strategy.device_bytes <= usable:
        return f"{needed}, but: {strategy.reason}"
    elsewhere = f", besides {size_in_words(strategy.host_bytes)} in host memory" if strategy.host_bytes else ""
    return f"{needed}, {size_in_words(strategy.device_bytes - usable)} too much{elsewhere}"


def _excluded_lines(excluded: Mapping[str, str]) -> list[str]:
    """One line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in excluded.items():
        by_reason.setdefault(" ".join(reason.split()), []).append(name)
    return [f"Not considered: {', '.join(names)} ({reason.rstrip('.')})." for reason, names in by_reason.items()]
