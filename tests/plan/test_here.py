"""The device that a rank finds itself on."""

import os
from pathlib import Path

import pytest
import torch

from lightning_shard.plan import here
from lightning_shard.plan.hardware import DEVICES
from lightning_shard.plan.here import device_here, gpu_named, host_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("driver", "memory", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 85.1e9, "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", 42.4e9, "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", 85e9, "h100"),
        ("NVIDIA H200", 150e9, "h200"),
        ("Tesla T4", 15.8e9, "t4"),
        ("NVIDIA L4", 24e9, "l4"),
        ("NVIDIA GeForce RTX 4090", 25e9, "rtx4090"),
        ("AMD Instinct MI300X", 206e9, "mi300x"),
    ],
)
def test_gpus_are_known_by_what_their_drivers_call_them(driver: str, memory: float, name: str) -> None:
    found = gpu_named(driver, memory)
    assert (found.name, found.memory_bytes) == (name, memory)
    assert found.bf16_flops == DEVICES[name].bf16_flops


@pytest.mark.parametrize("driver", ["NVIDIA L40S", "NVIDIA GH200 480GB", "Something new"])
def test_an_unknown_gpu_keeps_its_name_and_its_memory(driver: str) -> None:
    found = gpu_named(driver, 46e9)
    assert (found.name, found.memory_bytes) == (driver, 46e9)
    assert found.bf16_flops == DEVICES["a100-40gb"].bf16_flops  # the nearest in memory


def test_ranks_of_a_cpu_share_its_memory() -> None:
    whole, half = device_here(None, None, CPU, 1), device_here(None, None, CPU, 2)
    assert whole.name == half.name == "cpu"
    assert half.memory_bytes == whole.memory_bytes / 2 == host_memory() / 2


def test_a_container_has_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, none = tmp_path / "limit", tmp_path / "none"
    limit.write_text("123456\n")
    none.write_text("max\n")
    monkeypatch.setattr(here, "_CGROUP_LIMITS", (str(none), str(tmp_path / "missing")))
    assert host_memory() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(here, "_CGROUP_LIMITS", (str(none), str(limit)))
    assert host_memory() == 123456


def test_a_named_device_and_a_limit_are_believed() -> None:
    assert device_here("h100", None, CPU, 2) == DEVICES["h100"]
    limited = device_here("H100", 5e9, CPU, 2)
    assert (limited.name, limited.memory_bytes, limited.bf16_flops) == ("h100", 5e9, DEVICES["h100"].bf16_flops)
    assert device_here(None, 5e9, CPU, 2).memory_bytes == 5e9
    with pytest.raises(ValueError, match="There is no device 'h1000'"):
        device_here("h1000", None, CPU, 2)
