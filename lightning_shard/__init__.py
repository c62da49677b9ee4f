"""Every LightningModule parallel by one word: ``Trainer(strategy="zero3_offload")``.

Importing the package registers its strategy names with Lightning. The import is light: no deepspeed, no process group.
"""

from lightning_shard.config import ActivationCheckpointing, Offload, ZeroPlusPlus
from lightning_shard.registry import register_strategies
from lightning_shard.strategies import ZeROStrategy
from lightning_shard.zero.consolidate import consolidate_checkpoint

__version__ = "0.1.0"

__all__ = [
    "ActivationCheckpointing",
    "Offload",
    "ZeROStrategy",
    "ZeroPlusPlus",
    "__version__",
    "consolidate_checkpoint",
]

register_strategies()
