"""Do the strategy's arguments, and the user's config, fit together, to the stage and to the device?"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard.config import ActivationCheckpointing, Offload, ZeroPlusPlus

if TYPE_CHECKING:
    from lightning_shard.zero.engine_config import ZeROOptions

_STAGE3_ONLY = ("zero_plus_plus", "prefetch_elements", "persistence_elements", "reshard_after_forward")
_KINDS: dict[str, type] = {
    "offload": Offload,
    "zero_plus_plus": ZeroPlusPlus,
    "activation_checkpointing": ActivationCheckpointing,
    "bucket_elements": int,
    "prefetch_elements": int,
    "persistence_elements": int,
    "overlap_comm": bool,
    "contiguous_gradients": bool,
    "reshard_after_forward": bool,
}
_EXAMPLES: dict[type, str] = {
    Offload: "Offload(optimizer='cpu')",
    ZeroPlusPlus: "ZeroPlusPlus(...)",
    ActivationCheckpointing: "ActivationCheckpointing(...)",
    int: "a whole number of elements",
    bool: "True, False",
}
_AT_LEAST = {"bucket_elements": 2, "prefetch_elements": 0, "persistence_elements": 0}


def check_arguments(options: "ZeROOptions") -> None:
    """Refuse arguments that contradict each other.

    Raises:
        MisconfigurationException: Naming the arguments and their values.

    """
    if type(options.stage) is not int or options.stage not in (1, 2, 3):
        raise MisconfigurationException(f"ZeROStrategy(stage={options.stage!r}): choose 1, 2 or 3.")
    for name, kind in _KINDS.items():
        value = getattr(options, name)
        if value is not None and type(value) is not kind:
            raise MisconfigurationException(
                f"ZeROStrategy({name}={value!r}): {_EXAMPLES.get(kind, kind.__name__)} or None is needed, got"
                f" {type(value).__name__}."
            )
    for name, least in _AT_LEAST.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise MisconfigurationException(f"ZeROStrategy({name}={value}): at least {least} elements.")
    if options.stage == 3:
        return
    for name in _STAGE3_ONLY:
        value = getattr(options, name)
        if value is not None:
            raise MisconfigurationException(
                f"ZeROStrategy({name}={value!r}) belongs to stage 3, where parameters are partitioned, but"
                f" stage={options.stage}. Leave it out, or set stage=3."
            )
    offload = options.offload
    if offload is not None and (offload.parameters is not None or offload.optimizer == "nvme" or offload.ratio < 1.0):
        raise MisconfigurationException(
            f"{offload} needs stage 3, but stage={options.stage}: stages 1 and 2 keep parameters whole on the device"
            " and can only move the whole optimizer to the CPU. Set stage=3, or Offload(optimizer='cpu')."
        )


def check_device(options: "ZeROOptions", device: torch.device) -> None:
    """Refuse what the device cannot do.

    Raises:
        MisconfigurationException: Naming the option and the device.

    """
    if device.type not in ("cpu", "cuda"):
        raise MisconfigurationException(f"ZeROStrategy runs on CPU and CUDA devices, not on {device.type!r}.")
    if options.zero_plus_plus is not None and device.type != "cuda":
        raise MisconfigurationException(
            f"{options.zero_plus_plus} needs CUDA (its quantisation kernels and secondary partitions live on GPUs), but"
            f" the device is {device.type!r}. Pass zero_plus_plus=None there."
        )
    if options.offload is not None and options.offload.ratio < 1.0 and device.type != "cuda":
        raise MisconfigurationException(
            f"Offload(ratio={options.offload.ratio}) splits the optimizer between CPU and GPU, but the device is"
            f" {device.type!r}. Set ratio=1.0 there."
        )


_ZERO_PLUS_PLUS_OFF = {
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
}


def check_effective(zero: Mapping[str, Any], stage: int, device_type: str) -> None:
    """Refuse a complete ``zero_optimization`` section that the engine would ignore in part, or fail on much later.

    What arguments can say is refused when the strategy is made; the same can come by the user's config.

    Args:
        zero: The section, arguments and config merged.
        stage: The ZeRO stage.
        device_type: ``"cpu"`` or ``"cuda"``.

    Raises:
        MisconfigurationException: Naming the key, its value and what it needs.

    """
    for section in ("offload_optimizer", "offload_param"):
        settings = zero.get(section) or {}
        if not isinstance(settings, Mapping):
            raise MisconfigurationException(
                f"The DeepSpeed config's zero_optimization.{section} must be a mapping such as {{'device': 'cpu'}}, got"
                f" {settings!r}."
            )
        device = settings.get("device")
        if device in (None, "none"):
            continue
        place = f"zero_optimization.{section}.device={device!r}"
        if stage < 3 and (section == "offload_param" or device == "nvme"):
            raise MisconfigurationException(
                f"The DeepSpeed config sets {place}, which needs stage 3, but stage={stage}: stages 1 and 2 can only"
                " move the whole optimizer to the CPU. Set stage=3, or take it out."
            )
        if device == "nvme" and not settings.get("nvme_path"):
            raise MisconfigurationException(
                f"The DeepSpeed config sets {place} without a folder for its swap files: set"
                f" zero_optimization.{section}.nvme_path."
            )
        ratio = settings.get("ratio", 1.0)
        if ratio < 1.0 and (stage < 3 or device_type != "cuda"):
            raise MisconfigurationException(
                f"The DeepSpeed config sets zero_optimization.{section}.ratio={ratio}, which splits the optimizer"
                f" between CPU and GPU at stage 3, but stage={stage} and the device is {device_type!r}. Take it out."
            )
    for key, off in _ZERO_PLUS_PLUS_OFF.items():
        if zero.get(key, off) != off and (stage < 3 or device_type != "cuda"):
            raise MisconfigurationException(
                f"The DeepSpeed config sets zero_optimization.{key}={zero[key]!r} (ZeRO++), which needs stage 3 and"
                f" CUDA, but stage={stage} and the device is {device_type!r}. Take it out."
            )
