"""Links and collective libraries as plain data, and measured times of operators and collectives.

Units and provenance are as in ``device.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import UsageError
from autopar.util.toml import MAY_BE_ZERO, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """Seconds of one operator at one rank's shapes.

    ``call``: the JSON text ``[target, args, kwargs, outputs]``; a tensor is ``{"tensor": [dtype, shape, has gradient]}``,
    a dtype ``{"dtype": name}``.
    """

    call: str
    forward_s: float = field(metadata=MAY_BE_ZERO)
    backward_s: float = field(metadata=MAY_BE_ZERO)

    @classmethod
    def from_table(cls, table: Table) -> OperatorTime:
        """Return the time of an entry, which also has ``spread`` and ``repeats`` for readers: how well the median is known."""
        for key in ("spread", "repeats"):
            table.has(key)
        return table.record(cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionRate:
    """The rate of an elementwise function whose time is limited by computation, not by memory.

    Attributes:
        name: one of ``autopar.cost.operators.work.FUNCTIONS``.
        forward_s, backward_s: seconds for one element of its first operand.
    """

    name: str
    forward_s: float = field(metadata=MAY_BE_ZERO)
    backward_s: float = field(metadata=MAY_BE_ZERO)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTable:
    """Operators measured on a device; ``scale`` multiplies their times (for ranks that share a core)."""

    scale: float = 1.0
    provenance: str
    times: tuple[OperatorTime, ...]

    @classmethod
    def from_table(cls, table: Table) -> OperatorTable:
        """Return the operators of a table, or of the ``file`` next to the profile that the table names.

        Raises:
            UsageError: a key is missing or unknown; the file is missing or damaged.
        """
        if not table.has("file"):
            return table.record(cls)
        path = table.beside(table.text("file"))
        measured = Table(load_json(path), file=str(path))
        measured.raw("times")  # raises where it is missing
        return table.record(cls, times=tuple(map(OperatorTime.from_table, measured.tables("times"))))


def load_json(path: Path) -> dict[str, Any]:
    """Return an object from a JSON file.

    Raises:
        UsageError: the file cannot be read or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError.unreadable(path, error, fix="Check that the file is there and holds JSON") from error
    if not isinstance(data, dict):
        raise UsageError(
            "The file is not a JSON object",
            where=str(path),
            got=type(data).__name__,
            fix="Write the file again with the command that made it",
        )
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A linear piece of a collective's time: ``latency_s + num_bytes * s_per_byte`` up to ``up_to_bytes`` (0: no limit)."""

    up_to_bytes: float = 0.0
    latency_s: float = field(metadata=MAY_BE_ZERO)
    s_per_byte: float = field(metadata=MAY_BE_ZERO)

    def time_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes * self.s_per_byte


def pieces_time_s(pieces: Sequence[Piece], num_bytes: float) -> float:
    """Time by pieces of increasing size; never less than that of a smaller collective.

    >>> pieces_time_s((Piece(up_to_bytes=100, latency_s=1.0, s_per_byte=0.1), Piece(up_to_bytes=0, latency_s=0, s_per_byte=0.02)), 200)
    11.0
    """
    least = 0.0
    for piece in pieces:
        if not piece.up_to_bytes or num_bytes <= piece.up_to_bytes:
            return max(least, piece.time_s(num_bytes))
        least = max(least, piece.time_s(piece.up_to_bytes))
    return max(least, pieces[-1].time_s(num_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """A collective measured on groups of one shape, while all groups of that shape ran it.

    Attributes:
        kind: as ``autopar.cost.network.collectives.KINDS``.
        size: ranks of a group.
        num_nodes: nodes of a group.
        ranks_per_node: least number of ranks of the group on one of its nodes.
        devices_per_node: ranks of a node in the measured job, which share the node's links.
        residual: largest relative distance of a measured point from the fit.
        pieces: of the fit, by increasing size; bytes count the full tensor, of one rank's part for ``all_to_all``.
    """

    kind: str
    size: int
    num_nodes: int
    ranks_per_node: int
    devices_per_node: int
    residual: float = field(metadata=MAY_BE_ZERO)
    provenance: str
    pieces: tuple[Piece, ...]

    def time_s(self, num_bytes: float) -> float:
        return pieces_time_s(self.pieces, num_bytes)

    @classmethod
    def from_table(cls, table: Table) -> CollectiveTime:
        """Return the collective of a table; pieces must be there, by rising size."""
        time = table.record(cls)
        ends = [piece.up_to_bytes or math.inf for piece in time.pieces]
        if not ends or ends != sorted(set(ends)):
            raise table.wrong("pieces", "at least one piece, by rising up_to_bytes", ends or "none")
        return time


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A kind of connection in one direction: between the devices of a node, one network card, or a switch's uplink.

    Attributes:
        bandwidth_bytes_per_s: the measured bus bandwidth of large messages.
        latency_s: one-way delay of a small message, as the transport gives it to the collective library.
        half_bandwidth_bytes: message size at which half of the bandwidth is reached; 0 if not measured.
        step_fraction: fraction of the bandwidth that a training step reaches, as its buffers and ranks are less ready than those of a
            benchmark.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float = field(metadata=MAY_BE_ZERO)
    half_bandwidth_bytes: float = 0.0
    step_fraction: float = 1.0
    provenance: str

    @property
    def rate_bytes_per_s(self) -> float:
        """The bandwidth of collectives in a training step."""
        return self.bandwidth_bytes_per_s * self.step_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One algorithm of a library for collectives, and its latency.

    A step inside a node costs ``intra_step_s + delays_per_step * link.latency_s``, a step between nodes ``inter_step_s + delays_per_step *
    nic.latency_s``; the collective adds ``base_s + base_delays * latency_s``. The number of steps follows from ``name`` (``ring``,
    ``tree``, ``nvls``) and the collective.

    Attributes:
        protocol: the library's name for how it moves data (``LL``, ``LL128``, ``Simple``).
        bandwidth_fraction: fraction of the link's bandwidth that the protocol reaches.
        collectives: the collectives that it serves; empty for all.
    """

    name: str
    protocol: str = ""
    base_s: float = 0.0
    intra_step_s: float = 0.0
    inter_step_s: float = 0.0
    base_delays: float = 0.0
    delays_per_step: float = 0.0
    bandwidth_fraction: float = 1.0
    collectives: tuple[str, ...] = ()
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
        implemented_as: for some collectives the one that costs as much.
        measured: collectives on groups of given shapes, which take precedence over the algorithms; may be empty.
    """

    name: str
    algorithms: tuple[Algorithm, ...] = field(default=(), metadata={"key": "algorithm"})
    switch_bandwidths: tuple[SwitchBandwidth, ...] = field(default=(), metadata={"key": "switch_bandwidth"})
    implemented_as: dict[str, str] = field(default_factory=dict, hash=False)
    measured: tuple[CollectiveTime, ...] = ()
