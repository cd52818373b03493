"""The host beside a device as plain data: what offloading can use of it (units and provenance as in ``device.py``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.util.toml import Table

_RATES = ("to_host_bytes_per_s", "to_device_bytes_per_s", "memory_bandwidth_bytes_per_s", "launch_s", "latency_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """One device's share of its node's host while all devices of the node use it.

    Attributes:
        to_host_bytes_per_s, to_device_bytes_per_s: of large copies out of the device and into it, page-locked on the host.
        latency_s: of one copy, besides its bytes.
        memory_bandwidth_bytes_per_s: of the host's memory, read plus write.
        launch_s: of one operator on the host.
        memory_bytes: of the host's memory; None where the profile does not know it: then it limits nothing, and plans say so.
    """

    to_host_bytes_per_s: float
    to_device_bytes_per_s: float
    latency_s: float
    memory_bandwidth_bytes_per_s: float
    launch_s: float
    memory_bytes: int | None = None
    provenance: str

    def to_dict(self) -> dict[str, Any]:
        """The table ``[device.host]``."""
        known = {} if self.memory_bytes is None else {"num_bytes": self.memory_bytes}
        return {**{name: getattr(self, name) for name in _RATES}, **known, "provenance": self.provenance}

    @classmethod
    def from_table(cls, table: Table) -> HostLink:
        """Read what :meth:`to_dict` gives."""
        found = cls(
            to_host_bytes_per_s=table.number("to_host_bytes_per_s"),
            to_device_bytes_per_s=table.number("to_device_bytes_per_s"),
            memory_bandwidth_bytes_per_s=table.number("memory_bandwidth_bytes_per_s"),
            launch_s=table.number("launch_s", positive=False),
            latency_s=table.number("latency_s", positive=False),
            memory_bytes=table.integer("num_bytes") if table.has("num_bytes") else None,
            provenance=table.text("provenance"),
        )
        table.finish()
        return found
