"""Optimizer states on NVMe across a checkpoint."""
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def uses_nvme(config: Mapping[str, Any]) -> bool:
    """Whether an engine configuration offloads anything to NVMe."""
    zero = config.get("zero_optimization", {})
    return any(zero.get(key, {}).get("device") == "nvme" for key in ("offload_optimizer", "offload_param"))


class NVMeStates:
    def __init__(self, zero_optimizer: Any, rank: int) -> None:
        self.active = False

    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...
