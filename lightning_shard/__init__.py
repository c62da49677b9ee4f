"""Every LightningModule parallel by one word: ``Trainer(strategy="zero3_offload")``.

Importing the package registers its strategy names with Lightning. The import is light: no deepspeed, no process group,
and of the strategies only those that are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_shard._compat.reading import read_folders_with
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
    from lightning_shard.checkpoint.convert import convert as convert_checkpoint
    from lightning_shard.checkpoint.inference import load_from_checkpoint
    from lightning_shard.checkpoint.inspect import inspect as inspect_checkpoint
    from lightning_shard.plan.search import plan_module as plan
    from lightning_shard.strategies.auto import AutoShardStrategy
    from lightning_shard.strategies.fsdp import FSDP2Strategy
    from lightning_shard.strategies.pipeline import PipelineStrategy
    from lightning_shard.strategies.zero import ZeROStrategy
    from lightning_shard.zero.consolidate import consolidate_checkpoint

__version__ = "0.1.0"

__all__ = [
    "ActivationCheckpointing",
    "AutoShardStrategy",
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
    "convert_checkpoint",
    "inspect_checkpoint",
    "load_from_checkpoint",
    "plan",
]

_MODULES: dict[str, tuple[str, str | None]] = {
    "AutoShardStrategy": ("lightning_shard.strategies.auto", "AutoShardStrategy"),
    "FSDP2Strategy": ("lightning_shard.strategies.fsdp", "FSDP2Strategy"),
    "PipelineStrategy": ("lightning_shard.strategies.pipeline", "PipelineStrategy"),
    "ZeROStrategy": ("lightning_shard.strategies.zero", "ZeROStrategy"),
    "consolidate_checkpoint": ("lightning_shard.zero.consolidate", "consolidate_checkpoint"),
    "convert_checkpoint": ("lightning_shard.checkpoint.convert", "convert"),
    "inspect_checkpoint": ("lightning_shard.checkpoint.inspect", "inspect"),
    "load_from_checkpoint": ("lightning_shard.checkpoint.inference", "load_from_checkpoint"),
    "plan": ("lightning_shard.plan", None),
}
"""Where the public names live that are imported when first used: module, and name there; None for the module itself."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, own_name = _MODULES[name]
    found = import_module(module)
    value = found if own_name is None else getattr(found, own_name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _read_folder(path: Any, weights_only: bool | None) -> dict[str, Any]:
    from lightning_shard.checkpoint.assemble import load_whole

    return load_whole(path, weights_only)


register_strategies()
read_folders_with(_read_folder)
