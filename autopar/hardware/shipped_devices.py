"""The devices that have a shipped profile, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.hardware.device import Device
from autopar.hardware.read import known_devices, load_profile
from autopar.util.formatting import num_bytes, plain_table

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
