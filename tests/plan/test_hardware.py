"""The table of devices, sizes as people write them, and files with devices of one's own."""

import itertools
from dataclasses import fields
from pathlib import Path

import pytest

from lightning_shard.plan.hardware import DEVICES, Device, device, find_device, parse_bytes, read_devices

MINE = """
mine:
  memory_bytes: 48GB
  bf16_flops: 150e12
  fp32_flops: 75.0e+12
  memory_bandwidth: 900GB/s
  link_bandwidth: 25 GB/s
  network_bandwidth: 1250000000
  host_bandwidth: 16GiB/s
  per_node: 2
"""


def test_every_device_that_is_promised_is_there():
    promised = "a100-40gb a100-80gb h100 h200 b200 l4 t4 rtx4090 mi300x cpu"
    assert list(DEVICES) == promised.split()
    assert device("a100") is DEVICES["a100-80gb"]
    assert device(" H100 ").memory_bytes == 80e9


@pytest.mark.parametrize("name", DEVICES)
def test_the_table_makes_sense(name: str):
    """What holds of every computer: caches aside, nothing is faster than what it is attached to."""
    each = DEVICES[name]
    assert each.name == name and each.source
    for field in fields(Device):
        if field.type is float:
            assert getattr(each, field.name) > 0, field.name
    assert each.network_bandwidth <= each.link_bandwidth <= each.memory_bandwidth
    assert each.host_bandwidth <= each.memory_bandwidth
    assert each.fp32_flops <= each.bf16_flops
    assert 1e9 < each.memory_bytes < 1e12 and each.per_node in (1, 2, 4, 8)


def test_newer_devices_are_not_smaller_and_not_slower():
    generations = [device(name) for name in ("t4", "a100-40gb", "a100-80gb", "h100", "h200", "b200")]
    for older, newer in itertools.pairwise(generations):
        for field in ("memory_bytes", "bf16_flops", "fp32_flops", "memory_bandwidth", "link_bandwidth"):
            assert getattr(older, field) <= getattr(newer, field), (older.name, newer.name, field)


@pytest.mark.parametrize(("name", "near"), [("h10", "'h100'"), ("a100-80", "'a100-80gb'"), ("RTX-4090", "'rtx4090'")])
def test_a_misspelt_name_is_refused_with_near_ones(name: str, near: str):
    with pytest.raises(ValueError, match=f"no device '{name}'.*Did you mean.*{near}.*Known are a100-40gb, "):
        device(name)


def test_a_name_like_no_other_is_refused_with_all():
    with pytest.raises(ValueError, match=r"no device 'xyz'\. Known are"):
        device("xyz")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80e9),
        ("80 GiB", 80 * 2**30),
        ("0.5TB", 0.5e12),
        ("512MiB", 2**29),
        ("3kB", 3000),
        ("80e9", 80e9),
        ("1e3 B", 1000),
        (80e9, 80e9),
        (12, 12),
    ],
)
def test_sizes(text: str | float, size: float):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "80G", "80Gb", "80 GB GB", "0", "0GB", "-1", "-3GB", "nan", "inf", "1e999", "8_0", "x", True]
)
def test_what_is_no_size_is_refused_by_name(text: str | bool):
    with pytest.raises(ValueError, match="is no size") as told:
        parse_bytes(text)
    assert repr(text) in str(told.value)


def test_a_users_own_device(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text(MINE)
    assert read_devices(file) == {
        "mine": Device(
            name="mine",
            memory_bytes=48e9,
            bf16_flops=150e12,
            fp32_flops=75e12,
            memory_bandwidth=900e9,
            link_bandwidth=25e9,
            network_bandwidth=1.25e9,
            host_bandwidth=16 * 2**30,
            per_node=2,
        )
    }
    both = DEVICES | read_devices(file)
    assert find_device("Mine", both).per_node == 2 and find_device("a100", both).name == "a100-80gb"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("48GB", "48Gb", "device 'mine': memory_bytes='48Gb' must be a number of bytes"),
        ("48GB", "-1", "memory_bytes=-1 must be"),
        ("150e12", "lots", "bf16_flops='lots' must be a number of operations a second"),
        ("150e12", "true", "bf16_flops=True"),
        ("150e12", ".nan", "bf16_flops=nan"),
        ("150e12", "[1]", r"bf16_flops=\[1\]"),
        ("per_node: 2", "per_node: 2.5", "per_node=2.5 must be a whole number"),
        ("per_node: 2", "pernode: 2", "no field 'pernode'. Did you mean 'per_node'"),
        ("fp32_flops", "zzz", "no field 'zzz'. The fields are"),
        ("  fp32_flops: 75.0e+12\n", "", "device 'mine': fp32_flops must be given"),
        ("mine:", "mine: 3\nother:", "device 'mine': it must have fields"),
        (MINE, "- 1", "must hold devices by name"),
        (MINE, "", "must hold devices by name"),
        ("mine:", "mine: [", "not valid YAML"),
    ],
)
def test_a_mistake_in_a_file_is_named(before: str, after: str, message: str, tmp_path: Path):
    file = tmp_path / "mine.yaml"
    assert before in MINE
    file.write_text(MINE.replace(before, after))
    with pytest.raises(ValueError, match=message) as told:
        read_devices(file)
    assert str(file) in str(told.value)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ValueError, match=r"nothing\.yaml: cannot be read"):
        read_devices(tmp_path / "nothing.yaml")
