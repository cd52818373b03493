"""Devices that have a shipped profile: as a table, by the name that a GPU's driver reports, and the modes that they compute in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from autopar.hardware.device import Device
from autopar.hardware.read import known_devices, load_profile
from autopar.util.formatting import num_bytes, plain_table

_REPORTED = (
    (r"H100 80GB HBM3", "h100-sxm5-80gb"),
    (r"H100", "h100-hbm2e-96gb"),
    (r"H200", "h200-sxm-141gb"),
    (r"B200", "b200-sxm-180gb"),
    (r"GB200", "gb200"),
    (r"A100-SXM4?-80GB", "a100-sxm4-80gb"),
    (r"A100-SXM4?-40GB", "a100-sxm4-40gb"),
    (r"A10G", "a10g-24gb"),
    (r"L4", "l4-24gb"),
    (r"V100-SXM2-16GB(-N)?", "v100-sxm2-16gb"),
    (r"V100-SXM2-32GB(-LS)?", "v100-sxm2-32gb"),
    (r"MI300X( OAM| VF)?", "mi300x-192gb"),
)
"""What stands behind the maker in the whole of a reported name. Boards that are not here have other clocks, links or memory than any
profile: PCIe, NVL and SXM3 boards, A10, L40S, H800, GH200, workstations; and so have parts of a GPU, whose names go on (``MIG 1g.10gb``)."""

_NEEDS_MEMORY = frozenset({"h100-hbm2e-96gb"})
"""Profiles of devices whose reported name does not tell them from others."""

_MAKER = re.compile(r"(?:NVIDIA |AMD )?(?:Tesla |Instinct )?")
_MEMORY_SPREAD = 0.08
"""By what part the memory that drivers report of equal devices may differ: error correction and versions of the driver take some."""


def shipped_profile_name(device_name: str, memory_bytes: int | None = None) -> str | None:
    """The shipped profile of a GPU; None where no shipped profile is certain to be that of this device.

    Args:
        device_name: as its driver reports it.
        memory_bytes: of the device; where it is not known, names that several devices share are of none.

    >>> shipped_profile_name("NVIDIA H100 80GB HBM3"), shipped_profile_name("A100-SXM4-40GB", 42_300_000_000)
    ('h100-sxm5-80gb', 'a100-sxm4-40gb')
    >>> shipped_profile_name("NVIDIA H100 PCIe") is None
    True
    """
    model = _MAKER.sub("", " ".join(device_name.split()), count=1)
    for pattern, name in _REPORTED:
        if re.fullmatch(pattern, model) and name in known_devices() and _fits(name, memory_bytes):
            return name
    return None


def _fits(name: str, memory_bytes: int | None) -> bool:
    """Whether a device with so much memory can be that of the profile."""
    if memory_bytes is None:
        return name not in _NEEDS_MEMORY
    return has_memory(memory_bytes, _profile_bytes(name))


def has_memory(memory_bytes: int, of_bytes: int) -> bool:
    """Whether devices that report so much memory can be equal."""
    return abs(memory_bytes / of_bytes - 1.0) <= _MEMORY_SPREAD


@cache
def _profile_bytes(name: str) -> int:
    return load_profile(name).device.memory_bytes


def multiplies_in_tf32() -> bool:
    """Whether GPUs make products of float32 in TF32, however that was said: torch has an old and a new way since 2.9."""
    import torch

    matmul: Any = torch.backends.cuda.matmul
    mode = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if mode is None else mode == "tf32"


def convolves_in_tf32() -> bool:
    """Whether cuDNN makes convolutions of float32 in TF32: a mode of its own, and on unless somebody says otherwise."""
    import torch  # to list devices needs none

    cudnn: Any = torch.backends.cudnn
    mode = getattr(getattr(cudnn, "conv", None), "fp32_precision", None)
    return bool(cudnn.allow_tf32) if mode is None else mode == "tf32"


DTYPES = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}
"""Columns, and the dtypes of products that they show."""


def shipped_devices() -> tuple[Device, ...]:
    """In the order of their names."""
    return tuple(load_profile(name).device for name in known_devices())


def peaks(device: Device) -> dict[str, float]:
    """Published dense peaks of products by precision, in FLOP/s; of a CPU what one core was measured to reach."""
    rates = {rate.dtype: rate.datasheet_flops_per_s for rate in device.matmul}
    return {name: rates[dtype] for name, dtype in DTYPES.items() if dtype in rates}


def render_devices(devices: Sequence[Device]) -> str:
    """A row for each device."""
    head = ("device", "memory", *(f"{name} TFLOP/s" for name in DTYPES))
    rows = [
        (device.name, num_bytes(device.memory_bytes), *(_tera(peaks(device).get(name)) for name in DTYPES))
        for device in devices
    ]
    return plain_table(head, rows, left=("device",), width=120, indent=0)


def devices_summary(devices: Sequence[Device]) -> dict[str, Any]:
    """The same as JSON values."""
    return {device.name: {"memory_bytes": device.memory_bytes, "peak_flops_per_s": peaks(device)} for device in devices}


def _tera(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e12:,.4g}"
