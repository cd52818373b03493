"""What a machine is, for pages that a person sends in."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from autopar.hardware.machine import device_name, host_memory_bytes
from autopar.util.formatting import num_bytes


def machine_facts() -> dict[str, Any]:
    """Devices, software and the host, as JSON values; nothing that names a person, a user or an address."""
    facts: dict[str, Any] = {
        "device": device_name(),
        "devices": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count() or 1,
        "host_bytes": host_memory_bytes(),
    }
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        first = torch.cuda.get_device_properties(0)
        facts |= {
            "devices": count,
            "device_names": [torch.cuda.get_device_name(i) for i in range(count)],
            "device_bytes": first.total_memory,
            "capability": f"{first.major}.{first.minor}",
            "multiprocessors": first.multi_processor_count,
            "cuda": torch.version.cuda or torch.version.hip,
            "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
            "peers": [[i != j and torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)],
        }
    return facts


def facts_text(facts: Mapping[str, Any]) -> str:
    """One paragraph of them."""
    parts = [f"{facts['devices']} x {facts['device']}"]
    if "device_bytes" in facts:
        parts.append(f"{num_bytes(facts['device_bytes'])} each, capability {facts['capability']}")
        parts.append(f"CUDA {facts['cuda']}, NCCL {facts['nccl']}")
        joined = sum(map(sum, facts["peers"]))
        parts.append(f"{joined} of {facts['devices'] * (facts['devices'] - 1)} pairs reach each other's memory")
    parts += [f"torch {facts['torch']}", f"Python {facts['python']}", str(facts["system"])]
    parts.append(f"{facts['cores']} cores, {num_bytes(facts['host_bytes'])} of host memory")
    return "; ".join(parts) + "."
