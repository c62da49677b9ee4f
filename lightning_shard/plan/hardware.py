"""Devices: what the planner has to know of each, a table of common ones, and files with others."""

import math
import re
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the planner has to know of a device; every number is a peak from its maker."""

    name: str
    """As in ``--device``."""

    memory_bytes: float
    """Bytes of its own memory."""

    bf16_flops: float
    """Dense floating-point operations a second in bf16 (fp16 where it has no bf16), with fp32 accumulation."""

    fp32_flops: float
    """The same in fp32, without TF32."""

    memory_bandwidth: float
    """Bytes a second to and from its memory."""

    link_bandwidth: float
    """Bytes a second that it can send to devices of its own node (one direction)."""

    network_bandwidth: float
    """Bytes a second that it can send to other nodes (one direction)."""

    host_bandwidth: float
    """Bytes a second between it and host memory (one direction)."""

    per_node: int = 8
    """Usual number of devices in a node."""

    source: str = ""
    """Where the numbers come from."""


_GB, _TFLOPS = 1e9, 1e12
_NDR, _HDR = 400e9 / 8, 200e9 / 8
"""A port of InfiniBand for each device, as in the makers' own nodes of eight: bytes a second in one direction."""

_PCIE3, _PCIE4, _PCIE5 = 16e9, 32e9, 64e9
"""Sixteen lanes: bytes a second in one direction."""

_TABLE = (
    Device(
        name="a100-40gb",
        memory_bytes=40 * _GB,
        bf16_flops=312 * _TFLOPS,
        fp32_flops=19.5 * _TFLOPS,
        memory_bandwidth=1555 * _GB,
        link_bandwidth=300 * _GB,
        network_bandwidth=_HDR,
        host_bandwidth=_PCIE4,
        source="NVIDIA A100 data sheet, SXM 40 GB (NVLink 600 GB/s in both directions); network of the DGX A100 data"
        " sheet: a 200 Gb/s InfiniBand port for each GPU",
    ),
    Device(
        name="a100-80gb",
        memory_bytes=80 * _GB,
        bf16_flops=312 * _TFLOPS,
        fp32_flops=19.5 * _TFLOPS,
        memory_bandwidth=2039 * _GB,
        link_bandwidth=300 * _GB,
        network_bandwidth=_HDR,
        host_bandwidth=_PCIE4,
        source="NVIDIA A100 data sheet, SXM 80 GB (NVLink 600 GB/s in both directions); network of the DGX A100 data"
        " sheet: a 200 Gb/s InfiniBand port for each GPU",
    ),
    Device(
        name="h100",
        memory_bytes=80 * _GB,
        bf16_flops=989.5 * _TFLOPS,
        fp32_flops=67 * _TFLOPS,
        memory_bandwidth=3350 * _GB,
        link_bandwidth=450 * _GB,
        network_bandwidth=_NDR,
        host_bandwidth=_PCIE5,
        source="NVIDIA H100 data sheet, SXM (bf16 1979 TFLOPS with sparsity, so half of it; NVLink 900 GB/s in both"
        " directions); network of the DGX H100 data sheet: a 400 Gb/s InfiniBand port for each GPU",
    ),
    Device(
        name="h200",
        memory_bytes=141 * _GB,
        bf16_flops=989.5 * _TFLOPS,
        fp32_flops=67 * _TFLOPS,
        memory_bandwidth=4800 * _GB,
        link_bandwidth=450 * _GB,
        network_bandwidth=_NDR,
        host_bandwidth=_PCIE5,
        source="NVIDIA H200 data sheet, SXM (bf16 1979 TFLOPS with sparsity, so half of it; NVLink 900 GB/s in both"
        " directions); network of the DGX H200 data sheet: a 400 Gb/s InfiniBand port for each GPU",
    ),
    Device(
        name="b200",
        memory_bytes=180 * _GB,
        bf16_flops=2250 * _TFLOPS,
        fp32_flops=75 * _TFLOPS,
        memory_bandwidth=8000 * _GB,
        link_bandwidth=900 * _GB,
        network_bandwidth=_NDR,
        host_bandwidth=_PCIE5,
        source="an eighth of NVIDIA's DGX and HGX B200 data sheets (1440 GB, 64 TB/s, bf16 36 PFLOPS with sparsity, so"
        " half of it, fp32 600 TFLOPS; NVLink 1.8 TB/s in both directions; a 400 Gb/s port for each GPU)",
    ),
    Device(
        name="l4",
        memory_bytes=24 * _GB,
        bf16_flops=121 * _TFLOPS,
        fp32_flops=30.3 * _TFLOPS,
        memory_bandwidth=300 * _GB,
        link_bandwidth=_PCIE4,
        network_bandwidth=100e9 / 8 / 8,
        host_bandwidth=_PCIE4,
        source="NVIDIA L4 data sheet (bf16 242 TFLOPS with sparsity, so half of it; PCIe 4.0 x16); network: 100 Gb/s"
        " Ethernet that the eight of a node share, an assumption",
    ),
    Device(
        name="t4",
        memory_bytes=16 * _GB,
        bf16_flops=65 * _TFLOPS,
        fp32_flops=8.1 * _TFLOPS,
        memory_bandwidth=320 * _GB,
        link_bandwidth=_PCIE3,
        network_bandwidth=50e9 / 8 / 4,
        host_bandwidth=_PCIE3,
        per_node=4,
        source="NVIDIA T4 data sheet (fp16, as it has no bf16; PCIe 3.0 x16); network: 50 Gb/s Ethernet that the four"
        " of a node share, an assumption",
    ),
    Device(
        name="rtx4090",
        memory_bytes=24 * _GB,
        bf16_flops=165.2 * _TFLOPS,
        fp32_flops=82.6 * _TFLOPS,
        memory_bandwidth=1008 * _GB,
        link_bandwidth=_PCIE4,
        network_bandwidth=10e9 / 8 / 2,
        host_bandwidth=_PCIE4,
        per_node=2,
        source="NVIDIA Ada GPU architecture whitepaper, appendix A (bf16 with fp32 accumulation; PCIe 4.0 x16, through"
        " host memory, as it cannot reach its neighbours directly); network: 10 Gb/s Ethernet that the two of a"
        " workstation share, an assumption",
    ),
    Device(
        name="mi300x",
        memory_bytes=192 * _GB,
        bf16_flops=1307.4 * _TFLOPS,
        fp32_flops=163.4 * _TFLOPS,
        memory_bandwidth=5300 * _GB,
        link_bandwidth=448 * _GB,
        network_bandwidth=_NDR,
        host_bandwidth=_PCIE5,
        source="AMD Instinct MI300X data sheet (seven Infinity Fabric links of 128 GB/s in both directions; the link"
        " to one neighbour is a seventh); network: a 400 Gb/s port for each GPU, as in nodes of eight",
    ),
    Device(
        name="cpu",
        memory_bytes=32 * _GB,
        bf16_flops=0.75 * _TFLOPS,
        fp32_flops=0.75 * _TFLOPS,
        memory_bandwidth=76.8 * _GB,
        link_bandwidth=10 * _GB,
        network_bandwidth=10e9 / 8,
        host_bandwidth=76.8 * _GB,
        per_node=1,
        source="no maker: eight cores at 3 GHz with AVX2 (2 fused multiply-adds of 8 numbers a cycle), two channels of"
        " DDR5-4800, 32 GB, ranks of one machine at 10 GB/s, 10 Gb/s Ethernet; describe your own in a file",
    ),
)

DEVICES: dict[str, Device] = {each.name: each for each in _TABLE}
"""The devices of the table by name."""

ALIASES = {"a100": "a100-80gb"}
"""Other names of devices in the table."""


def device(name: str) -> Device:
    """A device of the table.

    Args:
        name: Its name; upper and lower case are equal.

    Raises:
        ValueError: If there is none of that name; with the names that are near, and all that there are.

    """
    return find_device(name, DEVICES)


def find_device(name: str, devices: dict[str, Device]) -> Device:
    """A device among others.

    Args:
        name: Its name; upper and lower case are equal.
        devices: Devices by name.

    Raises:
        ValueError: If there is none of that name; with the names that are near, and all that there are.

    """
    by_lower = {key.lower(): key for key in devices}
    by_lower |= {alias: key for alias, key in ALIASES.items() if key in devices and alias not in by_lower}
    if (key := by_lower.get(name.strip().lower())) is not None:
        return devices[key]
    near = get_close_matches(name.strip().lower(), by_lower, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise ValueError(f"There is no device {name!r}.{hint} Known are {', '.join(by_lower)}.")


# --- sizes as people write them --------------------------------------------------------------------------------------

_UNITS = {
    **{"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12},
    **{"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
}
_SIZE = re.compile(r"(?P<number>[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?)\s*(?P<unit>[a-z]*)", re.IGNORECASE)


def parse_bytes(text: str | float) -> float:
    """Bytes of a size as people write it.

    Args:
        text: A number of bytes, or one with a unit: ``"80GB"`` is 80·10⁹, ``"80GiB"`` 80·2³⁰.

    Raises:
        ValueError: If it is no size, or not more than nothing.

    """
    match = _SIZE.fullmatch(str(text).strip())
    unit = match["unit"] if match else ""
    # `Gb` means bits elsewhere: only the letter before it may be of either case.
    if match is None or isinstance(text, bool) or unit.lower() not in _UNITS or unit.endswith("b"):
        raise ValueError(f"{text!r} is no size: write a number of bytes, or one with a unit, like 80GB or 80GiB.")
    size = float(match["number"]) * _UNITS[unit.lower()]
    if not 0 < size < math.inf:
        raise ValueError(f"{text!r} is no size: it must be more than 0 bytes, and finite.")
    return size


# --- a user's own devices --------------------------------------------------------------------------------------------


def read_devices(path: str | Path) -> dict[str, Device]:
    """Devices that a YAML file describes: names, and under each the fields of :class:`Device`.

    Sizes and bandwidths may have units (``80GB``, ``900GB/s``); ``per_node`` and ``source`` may be left out.

    Args:
        path: The file.

    Returns:
        The devices by name.

    Raises:
        ValueError: If the file cannot be read or says what makes no sense; naming file, device and field.

    """
    try:
        contents = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(contents, dict) or not contents:
        raise ValueError(f"{path}: it must hold devices by name, each with its fields, like 'mine: {{memory_bytes:'.")
    return {str(name): _device(f"{path}: device {str(name)!r}", str(name), given) for name, given in contents.items()}


def _device(place: str, name: str, given: Any) -> Device:
    known = {each.name: each for each in fields(Device) if each.name != "name"}
    if not isinstance(given, dict):
        raise ValueError(f"{place}: it must have fields ({', '.join(known)}), not {given!r}.")
    for field in given:
        if field not in known:
            near = get_close_matches(str(field), known, n=1)
            raise ValueError(
                f"{place}: there is no field {field!r}."
                + (f" Did you mean {near[0]!r}?" if near else f" The fields are {', '.join(known)}.")
            )
    missing = [field for field, each in known.items() if field not in given and each.default is MISSING]
    if missing:
        raise ValueError(f"{place}: {', '.join(missing)} must be given.")
    try:
        return Device(name=name, **{field: _value(field, value) for field, value in given.items()})
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _value(field: str, value: Any) -> Any:
    if field == "source":
        return str(value)
    if field == "per_node":
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{field}={value!r} must be a whole number of at least 1.")
        return value
    try:
        if field.endswith("_flops"):
            if isinstance(value, bool) or not 0 < (number := float(value)) < math.inf:
                raise ValueError
            return number
        return parse_bytes(value.removesuffix("/s") if isinstance(value, str) else value)
    except (TypeError, ValueError) as error:
        kind = "operations a second, like 989e12" if field.endswith("_flops") else "bytes, like 80GB or 80GiB"
        raise ValueError(f"{field}={value!r} must be a number of {kind}, more than 0 and finite.") from error
