"""Links and collective libraries as plain data, read from profiles (units and provenance as in ``device.py``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.hardware.measured_times import CollectiveTime
from autopar.util.toml import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A kind of connection, one direction: between the devices of a node, one network card, or a switch's uplink.

    Attributes:
        bandwidth_bytes_per_s: the bus bandwidth that large messages were measured to reach.
        latency_s: one-way delay of a small message, as the transport gives it to the collective library.
        half_bandwidth_bytes: message size at which half of the bandwidth is reached; 0 where not measured.
        step_fraction: of the bandwidth, what a training step reaches: neither its buffers nor its ranks are as ready as
            those of a benchmark.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    half_bandwidth_bytes: float = 0.0
    step_fraction: float = 1.0
    provenance: str

    @property
    def rate_bytes_per_s(self) -> float:
        """What collectives reach inside of a training step."""
        return self.bandwidth_bytes_per_s * self.step_fraction

    def to_dict(self) -> dict[str, Any]:
        """The link as plain data."""
        return {
            "name": self.name,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "latency_s": self.latency_s,
            "half_bandwidth_bytes": self.half_bandwidth_bytes,
            "step_fraction": self.step_fraction,
            "provenance": self.provenance,
        }

    @classmethod
    def from_table(cls, table: Table) -> Link:
        """Read what :meth:`to_dict` gives."""
        link = cls(
            name=table.text("name"),
            bandwidth_bytes_per_s=table.number("bandwidth_bytes_per_s"),
            latency_s=table.number("latency_s", positive=False),
            half_bandwidth_bytes=table.number("half_bandwidth_bytes", 0.0, positive=False),
            step_fraction=table.number("step_fraction", 1.0),
            provenance=table.text("provenance"),
        )
        table.finish()
        return link


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way in which a library carries out collectives, and its latency.

    A step inside a node costs ``intra_step_s + delays_per_step * link.latency_s``, a step between nodes
    ``inter_step_s + delays_per_step * nic.latency_s``; the whole adds ``base_s + base_delays * latency_s``. How many
    steps there are follows from ``name`` (``ring``, ``tree``, ``nvls``) and the collective.

    Attributes:
        protocol: the library's name for how it moves data (``LL``, ``LL128``, ``Simple``).
        bandwidth_fraction: what the protocol leaves of the link's bandwidth.
        collectives: which ones it serves; empty for all.
    """

    name: str
    protocol: str
    base_s: float
    intra_step_s: float
    inter_step_s: float
    base_delays: float
    delays_per_step: float
    bandwidth_fraction: float
    collectives: tuple[str, ...]
    provenance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchBandwidth:
    """Bus bandwidth of in-switch reduction (NVLS) by the number of devices, for one kind of link."""

    link: str
    collective: str
    num_devices: int
    bandwidth_bytes_per_s: float
    provenance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveLibrary:
    """A collective library (``nccl``, ``gloo``): its algorithms, and which collectives it builds from others.

    Attributes:
        implemented_as: (collective, collective): the first costs what the second costs.
        measured: collectives on groups of given shapes, which go before the algorithms; any may be empty.
    """

    name: str
    algorithms: tuple[Algorithm, ...]
    switch_bandwidths: tuple[SwitchBandwidth, ...]
    implemented_as: tuple[tuple[str, str], ...]
    measured: tuple[CollectiveTime, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The library as plain data."""
        return {
            "name": self.name,
            "implemented_as": dict(self.implemented_as),
            "algorithm": [
                {key: _plain(getattr(item, key)) for key in item.__dataclass_fields__} for item in self.algorithms
            ],
            "switch_bandwidth": [
                {key: getattr(item, key) for key in item.__dataclass_fields__} for item in self.switch_bandwidths
            ],
            **({"measured": [item.to_dict() for item in self.measured]} if self.measured else {}),
        }

    @classmethod
    def from_table(cls, table: Table) -> CollectiveLibrary:
        """Read what :meth:`to_dict` gives; numbers left out of an algorithm are zero, its fraction is one."""
        implemented = table.table("implemented_as") if table.has("implemented_as") else None
        library = cls(
            name=table.text("name"),
            algorithms=tuple(_algorithm(item) for item in table.tables("algorithm")),
            switch_bandwidths=tuple(_switch_bandwidth(item) for item in table.tables("switch_bandwidth")),
            implemented_as=tuple((key, implemented.text(key)) for key in implemented.names()) if implemented else (),
            measured=tuple(CollectiveTime.from_table(item) for item in table.tables("measured")),
        )
        table.finish()
        return library


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _algorithm(table: Table) -> Algorithm:
    collectives = table.raw("collectives") if table.has("collectives") else []
    if not isinstance(collectives, list | tuple) or not all(isinstance(name, str) for name in collectives):
        raise table.wrong("collectives", "a list of names", repr(collectives))
    algorithm = Algorithm(
        name=table.text("name"),
        protocol=table.text("protocol", ""),
        base_s=table.number("base_s", 0.0, positive=False),
        intra_step_s=table.number("intra_step_s", 0.0, positive=False),
        inter_step_s=table.number("inter_step_s", 0.0, positive=False),
        base_delays=table.number("base_delays", 0.0, positive=False),
        delays_per_step=table.number("delays_per_step", 0.0, positive=False),
        bandwidth_fraction=table.number("bandwidth_fraction", 1.0),
        collectives=tuple(collectives),
        provenance=table.text("provenance"),
    )
    table.finish()
    return algorithm


def _switch_bandwidth(table: Table) -> SwitchBandwidth:
    bandwidth = SwitchBandwidth(
        link=table.text("link"),
        collective=table.text("collective"),
        num_devices=table.integer("num_devices"),
        bandwidth_bytes_per_s=table.number("bandwidth_bytes_per_s"),
        provenance=table.text("provenance"),
    )
    table.finish()
    return bandwidth
