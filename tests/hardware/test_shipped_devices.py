"""Shipped devices: by the names that drivers report, and in the table of them."""

from __future__ import annotations

import json

import pytest

from autopar.hardware.describe import peaks, shipped_devices, shipped_profile_name
from autopar.hardware.read import known_devices, load_profile
from tests.support.cli_runner import Run

GIB = 2**30

SHIPPED = [
    ("NVIDIA H100 80GB HBM3", 79.11, "h100-sxm5-80gb"),
    ("NVIDIA H100", 95.04, "h100-hbm2e-96gb"),
    ("NVIDIA H200", 139.81, "h200-sxm-141gb"),
    ("NVIDIA B200", 178.35, "b200-sxm-180gb"),
    ("NVIDIA GB200", 184.0, "gb200"),
    ("NVIDIA A100-SXM4-80GB", 79.15, "a100-sxm4-80gb"),
    ("A100-SXM-80GB", 79.35, "a100-sxm4-80gb"),
    ("NVIDIA A100-SXM4-40GB", 39.38, "a100-sxm4-40gb"),
    ("A100-SXM4-40GB", 39.59, "a100-sxm4-40gb"),
    ("NVIDIA A10G", 22.06, "a10g-24gb"),
    ("NVIDIA L4", 22.03, "l4-24gb"),
    ("Tesla V100-SXM2-16GB", 15.78, "v100-sxm2-16gb"),
    ("NVIDIA Tesla V100-SXM2-16GB", 15.78, "v100-sxm2-16gb"),
    ("Tesla V100-SXM2-32GB", 31.74, "v100-sxm2-32gb"),
    ("Tesla V100-SXM2-32GB-LS", 31.74, "v100-sxm2-32gb"),
    ("AMD Instinct MI300X", 191.69, "mi300x-192gb"),
    ("AMD Instinct MI300X VF", 191.5, "mi300x-192gb"),
]

OTHERS = [
    ("NVIDIA H100 PCIe", 79.1),
    ("NVIDIA H100 NVL", 93.1),
    ("NVIDIA H100", 79.1),  # nothing says that it is SXM
    ("NVIDIA H100 SXM5 96GB", 95.0),
    ("NVIDIA H200 NVL", 139.8),
    ("NVIDIA H800", 79.1),
    ("NVIDIA GH200 480GB", 94.5),
    ("NVIDIA A100 80GB PCIe", 79.2),
    ("NVIDIA A100-SXM-64GB", 63.4),
    ("NVIDIA A10", 22.1),
    ("NVIDIA L40S", 44.4),
    ("Tesla V100-PCIE-16GB", 15.8),
    ("Tesla V100-SXM3-32GB", 31.7),
    ("AMD Instinct MI325X", 255.0),
]


@pytest.mark.parametrize(("reported", "gib"), OTHERS)
def test_a_device_without_a_profile_is_not_taken_for_another(reported: str, gib: float) -> None:
    assert shipped_profile_name(reported, round(gib * GIB)) is None
    assert shipped_profile_name(reported) is None


@pytest.mark.parametrize(("reported", "gib", "name"), SHIPPED)
def test_a_shipped_profile_is_of_the_whole_device_by_its_reported_name(reported: str, gib: float, name: str) -> None:
    assert shipped_profile_name(reported, round(gib * GIB)) == name
    assert shipped_profile_name(f"{reported} MIG 1g.10gb", round(gib * GIB)) is None
    assert shipped_profile_name(reported, round(gib * GIB / 2)) is None
    assert shipped_profile_name(reported, round(gib * GIB * 1.2)) is None


def test_every_shipped_gpu_is_found_by_some_name() -> None:
    of_gpus = {name for name in known_devices() if load_profile(name).device.kind == "cuda"}
    assert {name for _, _, name in SHIPPED} == of_gpus


def test_every_profile_is_listed_with_its_memory_and_a_peak() -> None:
    found = shipped_devices()
    assert [device.name for device in found] == list(known_devices())
    assert all(device.memory_bytes > 2**30 and peaks(device) for device in found)


def test_the_table_in_the_shell(run: Run) -> None:
    text = run("devices").out
    assert [line.split()[0] for line in text.splitlines()[1:]] == list(known_devices())
    row = next(line for line in text.splitlines() if line.startswith("a100-sxm4-80gb"))
    assert row.split()[1:] == ["79.1", "GiB", "19.5", "156", "312", "312", "-"]
    found = json.loads(run("devices", "--json").out)
    assert found["h100-sxm5-80gb"]["peak_flops_per_s"]["bf16"] == 989e12
