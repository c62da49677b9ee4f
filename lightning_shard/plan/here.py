"""The device that this rank runs on, as the planner wants to know it."""

import os
import re
from dataclasses import replace
from pathlib import Path

import torch

from lightning_shard.plan import hardware
from lightning_shard.plan.hardware import DEVICES, Device

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where a container's limit stands, in the kernel's second and first interface."""


def device_here(name: str | None, memory: float | None, device: torch.device, ranks: int) -> Device:
    """What this rank runs on.

    Args:
        name: A name of the hardware table; ``None`` for what is found.
        memory: Bytes to go by in place of the device's own; ``None`` for those.
        device: The rank's device.
        ranks: Ranks of this machine, which share its memory on the CPU.

    Raises:
        ValueError: If the table has no such name.

    """
    if name is not None:
        found = hardware.device(name)
    elif device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found = gpu_named(properties.name, properties.total_memory)
    else:
        found = replace(DEVICES["cpu"], memory_bytes=host_memory() / ranks)
    return found if memory is None else replace(found, memory_bytes=memory)


def gpu_named(name: str, memory: float) -> Device:
    """A GPU of the table, with the memory that it has in truth.

    Args:
        name: What its driver calls it, such as ``"NVIDIA A100-SXM4-80GB"``.
        memory: Its bytes.

    Returns:
        The device; for one that the table does not know, the speeds of the one whose memory is nearest, under the
        driver's name.

    """
    words = set(re.split(r"[^a-z0-9]+", name.lower().replace("rtx ", "rtx")))
    gpus = [each for each in DEVICES.values() if each.name != "cpu"]
    known = [each for each in gpus if each.name.split("-")[0] in words]
    nearest = min(known or gpus, key=lambda each: abs(each.memory_bytes - memory))
    return replace(nearest, memory_bytes=memory) if known else replace(nearest, name=name, memory_bytes=memory)


def host_memory() -> float:
    """Bytes of this machine's memory, or of its part that this container may use."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [int(text) for text in map(_read, _CGROUP_LIMITS) if text.isdigit()]
    return float(min([physical, *limits]))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""
