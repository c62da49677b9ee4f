"""The names that ``Trainer(strategy=...)`` understands once ``lightning_shard`` is imported.

One table, a row a name. A name is listed only when its strategy is built.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_shard.config import Offload
from lightning_shard.strategies.zero import ZeROStrategy


@dataclass(frozen=True, kw_only=True)
class Name:
    """One registered name."""

    strategy: Callable[..., Strategy]
    """The strategy's class."""

    settings: dict[str, Any] = field(default_factory=dict)
    """The constructor arguments that the name stands for."""

    description: str
    """One line for tables and ``--help``."""


NVME_PATH = "nvme_swap"
"""Swap folder of ``zero3_nvme``, relative to the working directory; choose a local drive through ``Offload``."""

NAMES: dict[str, Name] = {
    "zero1": Name(
        strategy=ZeROStrategy, settings={"stage": 1}, description="ZeRO-1: optimizer states partitioned over the ranks"
    ),
    "zero2": Name(strategy=ZeROStrategy, settings={"stage": 2}, description="ZeRO-2: optimizer states and gradients"),
    "zero3": Name(
        strategy=ZeROStrategy,
        settings={"stage": 3},
        description="ZeRO-3: optimizer states, gradients and parameters",
    ),
    "zero1_offload": Name(
        strategy=ZeROStrategy,
        settings={"stage": 1, "offload": Offload(optimizer="cpu")},
        description="ZeRO-1 with optimizer states on CPU",
    ),
    "zero2_offload": Name(
        strategy=ZeROStrategy,
        settings={"stage": 2, "offload": Offload(optimizer="cpu")},
        description="ZeRO-2 with optimizer states on CPU",
    ),
    "zero3_offload": Name(
        strategy=ZeROStrategy,
        settings={"stage": 3, "offload": Offload(optimizer="cpu")},
        description="ZeRO-3 with optimizer states on CPU",
    ),
    "zero3_offload_params": Name(
        strategy=ZeROStrategy,
        settings={"stage": 3, "offload": Offload(optimizer="cpu", parameters="cpu")},
        description="ZeRO-3 with optimizer states and parameters on CPU",
    ),
    "zero3_nvme": Name(
        strategy=ZeROStrategy,
        settings={"stage": 3, "offload": Offload(optimizer="nvme", parameters="nvme", nvme_path=NVME_PATH)},
        description="ZeRO-Infinity: ZeRO-3 with optimizer states and parameters on NVMe",
    ),
}


def register_strategies() -> None:
    """Register every name with Lightning's Trainer. Safe to call again: a name that is there already is left alone."""
    for name, entry in NAMES.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, entry.strategy, description=entry.description, **entry.settings)


def available_names() -> list[str]:
    """All strategy names that the Trainer understands: ours and Lightning's own."""
    return sorted(StrategyRegistry.available_strategies())


def nearest_name(name: str) -> str | None:
    """The registered name that is closest to ``name`` by spelling, or ``None`` when nothing is close."""
    matches = get_close_matches(name.lower(), available_names(), n=1, cutoff=0.6)
    return matches[0] if matches else None
