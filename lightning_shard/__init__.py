"""Every LightningModule parallel by one word: ``Trainer(strategy="zero3_offload")``.

Importing the package registers its strategy names with Lightning. The import is light: no deepspeed, no process group,
and of the strategies only those that are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_shard.config import (
    ActivationCheckpointing,
    ClassUnits,
    MixedPrecision,
    Offload,
    SizeUnits,
    ZeroPlusPlus,
)
from lightning_shard.registry import register_strategies

if TYPE_CHECKING:
    from lightning_shard.strategies.fsdp import FSDP2Strategy
    from lightning_shard.strategies.pipeline import PipelineStrategy
    from lightning_shard.strategies.zero import ZeROStrategy
    from lightning_shard.zero.consolidate import consolidate_checkpoint

__version__ = "0.1.0"

__all__ = [
    "ActivationCheckpointing",
    "ClassUnits",
    "FSDP2Strategy",
    "MixedPrecision",
    "Offload",
    "PipelineStrategy",
    "SizeUnits",
    "ZeROStrategy",
    "ZeroPlusPlus",
    "__version__",
    "consolidate_checkpoint",
]

_MODULES = {
    "FSDP2Strategy": "lightning_shard.strategies.fsdp",
    "PipelineStrategy": "lightning_shard.strategies.pipeline",
    "ZeROStrategy": "lightning_shard.strategies.zero",
    "consolidate_checkpoint": "lightning_shard.zero.consolidate",
}
"""Where the public names live that are imported when first used."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_strategies()
