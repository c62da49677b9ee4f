"""The names that ``Trainer(strategy=...)`` understands once ``lightning_shard`` is imported.

One table, a row a name. A name is listed only when its strategy is built.
"""

from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_shard.config import Offload


@dataclass(frozen=True, kw_only=True)
class Name:
    """One registered name."""

    strategy: str
    """The strategy's class, as ``module:class``: it is imported when a Trainer asks for the name."""

    settings: dict[str, Any] = field(default_factory=dict)
    """The constructor arguments that the name stands for."""

    description: str
    """One line for tables and ``--help``."""

    def strategy_class(self) -> type[Strategy]:
        """The strategy's class itself."""
        module, _, name = self.strategy.partition(":")
        found: type[Strategy] = getattr(import_module(module), name)
        return found

    def make(self, **settings: Any) -> Strategy:
        """A strategy of the class; what Lightning calls with the settings of the name."""
        return self.strategy_class()(**settings)


PIPELINE = "lightning_shard.strategies.pipeline:PipelineStrategy"
FSDP2 = "lightning_shard.strategies.fsdp:FSDP2Strategy"
ZERO = "lightning_shard.strategies.zero:ZeROStrategy"
AUTO = "lightning_shard.strategies.auto:AutoShardStrategy"

NVME_PATH = "nvme_swap"
"""Swap folder of ``zero3_nvme``, relative to the working directory; choose a local drive through ``Offload``."""

NAMES: dict[str, Name] = {
    "zero1": Name(
        strategy=ZERO, settings={"stage": 1}, description="ZeRO-1: optimizer states partitioned over the ranks"
    ),
    "zero2": Name(strategy=ZERO, settings={"stage": 2}, description="ZeRO-2: optimizer states and gradients"),
    "zero3": Name(
        strategy=ZERO,
        settings={"stage": 3},
        description="ZeRO-3: optimizer states, gradients and parameters",
    ),
    "zero1_offload": Name(
        strategy=ZERO,
        settings={"stage": 1, "offload": Offload(optimizer="cpu")},
        description="ZeRO-1 with optimizer states on CPU",
    ),
    "zero2_offload": Name(
        strategy=ZERO,
        settings={"stage": 2, "offload": Offload(optimizer="cpu")},
        description="ZeRO-2 with optimizer states on CPU",
    ),
    "zero3_offload": Name(
        strategy=ZERO,
        settings={"stage": 3, "offload": Offload(optimizer="cpu")},
        description="ZeRO-3 with optimizer states on CPU",
    ),
    "zero3_offload_params": Name(
        strategy=ZERO,
        settings={"stage": 3, "offload": Offload(optimizer="cpu", parameters="cpu")},
        description="ZeRO-3 with optimizer states and parameters on CPU",
    ),
    "zero3_nvme": Name(
        strategy=ZERO,
        settings={"stage": 3, "offload": Offload(optimizer="nvme", parameters="nvme", nvme_path=NVME_PATH)},
        description="ZeRO-Infinity: ZeRO-3 with optimizer states and parameters on NVMe",
    ),
    "fsdp2": Name(strategy=FSDP2, description="FSDP2: parameters, gradients and optimizer states sharded by unit"),
    "fsdp2_grad": Name(
        strategy=FSDP2,
        settings={"reshard_after_forward": False},
        description="FSDP2 that keeps parameters from forward to backward: less traffic, more memory",
    ),
    "fsdp2_offload": Name(
        strategy=FSDP2,
        settings={"cpu_offload": True},
        description="FSDP2 with parameters, gradients and optimizer states on CPU",
    ),
    "fsdp2_hybrid": Name(
        strategy=FSDP2,
        settings={"replicas": 2},
        description="FSDP2 sharded within each half of the ranks, replicated between the halves (HSDP)",
    ),
    "pipeline_gpipe": Name(
        strategy=PIPELINE,
        settings={"schedule": "gpipe"},
        description="Pipeline of stages, all forwards before all backwards (GPipe)",
    ),
    "pipeline_1f1b": Name(
        strategy=PIPELINE,
        settings={"schedule": "1f1b"},
        description="Pipeline that alternates forwards and backwards: fewer activations at once (1F1B)",
    ),
    "pipeline_interleaved": Name(
        strategy=PIPELINE,
        settings={"schedule": "interleaved"},
        description="1F1B with several stages on each rank: a smaller bubble, more messages",
    ),
    "pipeline_looped_bfs": Name(
        strategy=PIPELINE,
        settings={"schedule": "looped_bfs"},
        description="GPipe's order with several stages on each rank (breadth first)",
    ),
    "pipeline_zero_bubble": Name(
        strategy=PIPELINE,
        settings={"schedule": "zero_bubble"},
        description="Interleaved pipeline that fills its bubble with the gradients of weights (ZB1P)",
    ),
    "pipeline_zbv": Name(
        strategy=PIPELINE,
        settings={"schedule": "zbv"},
        description="Zero-bubble pipeline whose first rank also has the last stage (ZBV)",
    ),
    "pipeline_dualpipev": Name(
        strategy=PIPELINE,
        settings={"schedule": "dualpipev"},
        description="V-shaped pipeline that pairs forwards with backwards (DualPipeV)",
    ),
    "auto_shard": Name(
        strategy=AUTO, description="The planner chooses: of the strategies that fit the memory the least invasive"
    ),
}


def register_strategies() -> None:
    """Register every name with Lightning's Trainer. Safe to call again: a name that is there already is left alone."""
    for name, entry in NAMES.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, entry.make, description=entry.description, **entry.settings)


def strategy_classes() -> list[type[Strategy]]:
    """The classes behind the names, each once, in the order of the table; imports them all."""
    return list(dict.fromkeys(entry.strategy_class() for entry in NAMES.values()))


def available_names() -> list[str]:
    """All strategy names that the Trainer understands: ours and Lightning's own."""
    return sorted(StrategyRegistry.available_strategies())


def nearest_name(name: str) -> str | None:
    """The registered name that is closest to ``name`` by spelling, or ``None`` when nothing is close."""
    matches = get_close_matches(name.lower(), available_names(), n=1, cutoff=0.6)
    return matches[0] if matches else None
