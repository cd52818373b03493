"""Which shipped profile a GPU has, by the name that its driver reports and by its memory."""

from __future__ import annotations

import re
from functools import cache

from autopar.hardware.read import known_devices, load_profile

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
