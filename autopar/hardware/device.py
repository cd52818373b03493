"""Devices as plain data, read from profiles; ``link.py`` describes what connects them.

Every number is in SI units (bytes, seconds, FLOP/s), and every group of numbers has a provenance. The TOML files in ``profiles/``, the
dictionaries of :meth:`Device.to_table` and cluster files share one schema (``profiles/README.md``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autopar.errors import UsageError
from autopar.hardware.device_rates import FunctionRate, MatmulRate, rate_of
from autopar.hardware.link import OperatorTable
from autopar.util.toml import MAY_BE_ZERO, Table, as_table

Kind = Literal["cpu", "cuda"]

KernelKind = Literal["cpu", "cuda", "cuda without flash"]
"""Which fused kernels torch has for a device."""

TOPICS: dict[str, dict[str, str]] = {
    "memory": {"num_bytes": "memory_bytes"},
    "bandwidth": {"bytes_per_s": "memory_bandwidth_bytes_per_s", "kernel_fraction": "kernel_fraction"},
    "launch": {"time_s": "launch_s", "blocking_time_s": "blocking_launch_s"},
    "fragmentation": {"fraction": "fragmentation", "fixed_segments_fraction": "fixed_segments"},
    "interference": {"fraction": "interference"},
    "uncertainty": {"fraction": "uncertainty", "memory_fraction": "memory_uncertainty"},
}
"""The topics of a device's scalar numbers: each is a table of its profile with its own provenance, and maps keys to fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Host time of work around operators, in seconds; 0 if it was not measured or is hidden by the device.

    Attributes:
        gradient_s: of one operator's backward, for each gradient that it computes; 0 means ``Device.launch_s``.
        view_s: of a view, forward, and again backward.
        product_s, product_gradient_s: of one matrix product, forward and in backward, in addition to its launch and the time by the curve:
            the overhead of a library for small products.
        sharded_launch_s: of one operator of an optimizer on a parameter that is a DTensor; 0 means ``Device.launch_s``.
        unit_s, unit_parameter_s: of FSDP's hooks around one unit, for a forward or backward, and in addition for each parameter.
        gather_s, gather_parameter_s: of one gather of a unit without collective and copies, and in addition for each parameter.
        reduce_s, reduce_parameter_s: of one reduction of a unit's gradients without collective and copies, and in addition for each
            parameter.
        collective_s: of calling a collective from emitted code, without the collective.
        action_s: of one action of a pipeline schedule with one stage on each rank, including posting its messages.
        message_s: of other threads of the process for each tensor that such a rank sends or receives; gloo wakes them several times for
            each, and they spin while the calling thread holds their lock.
        interleaved_action_s, interleaved_message_s: the same if ranks have several stages, which torch runs by another engine; 0 means
            ``action_s``.
        layers_s: of one pass of ``autopar.measure.timers.Layers``: the speed of the machine when it was measured.
    """

    gradient_s: float = 0.0
    view_s: float = 0.0
    product_s: float = 0.0
    product_gradient_s: float = 0.0
    sharded_launch_s: float = 0.0
    unit_s: float = 0.0
    unit_parameter_s: float = 0.0
    gather_s: float = 0.0
    gather_parameter_s: float = 0.0
    reduce_s: float = 0.0
    reduce_parameter_s: float = 0.0
    collective_s: float = 0.0
    action_s: float = 0.0
    message_s: float = 0.0
    interleaved_action_s: float = 0.0
    interleaved_message_s: float = 0.0
    layers_s: float = 0.0
    provenance: str

    def of_actions(self, virtual_stages: int) -> tuple[float, float]:
        """Seconds of one action, and of each tensor that it sends or receives, if a rank has so many stages."""
        if virtual_stages > 1 and self.interleaved_action_s:
            return self.interleaved_action_s, self.interleaved_message_s
        return self.action_s, self.message_s

    def scaled(self, factor: float, note: str) -> Overheads:
        """Return the overheads times ``factor``."""
        times = {name: getattr(self, name) * factor for name in self.__slots__ if name != "provenance"}
        return Overheads(**times, provenance=self.provenance + note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Device memory that tensors of the program cannot use: a context, buffers of a library."""

    name: str
    num_bytes: int = field(metadata=MAY_BE_ZERO)
    provenance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One rank's device.

    Attributes:
        memory_bytes: bytes that the framework can address, including reserves.
        memory_bandwidth_bytes_per_s: read plus write, of a large copy.
        launch_s: host and device overhead of one operator.
        fragmentation: memory that the allocator adds, as a fraction of the tensors' bytes.
        interference: compute lost to each second of concurrent communication; 0 is none, 1 is no overlap.
        uncertainty: half width of the interval of a predicted step time, relative to it.
        provenance: by topic (:data:`TOPICS`).
        kernel_fraction: fraction of the memory bandwidth that operators other than copies reach.
        blocking_launch_s: of one operator if the host waits for each (``CUDA_LAUNCH_BLOCKING``), and of one value that it reads
            (``autopar.cost.operators.operator_times``); 0 means ``launch_s``.
        fixed_segments: the fragmentation if the allocator cannot join its segments; 0 means ``fragmentation``.
        memory_uncertainty: half width of the interval of a predicted peak memory, relative to it.
        operators: operators that were measured at given shapes; None: all are priced by the roofline.
        functions: elementwise functions that were measured; others are priced by their bytes.
        overheads: host time around operators.
        host: the link to the host for offloading; None: nothing can be offloaded.
    """

    name: str
    kind: Kind
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    matmul: tuple[MatmulRate, ...]
    launch_s: float = field(metadata=MAY_BE_ZERO)
    reserves: tuple[Reserve, ...] = field(default=(), metadata={"key": "reserve"})
    fragmentation: float = field(metadata=MAY_BE_ZERO)
    interference: float = field(metadata=MAY_BE_ZERO)
    uncertainty: float = field(metadata=MAY_BE_ZERO)
    provenance: tuple[tuple[str, str], ...]
    kernel_fraction: float = 1.0
    blocking_launch_s: float = 0.0
    fixed_segments: float = 0.0
    memory_uncertainty: float = 0.0
    operators: OperatorTable | None = field(default=None, hash=False)
    functions: tuple[FunctionRate, ...] = field(default=(), metadata={"key": "function"})
    overheads: Overheads = Overheads(provenance="not measured")
    host: HostLink | None = None

    def function(self, name: str) -> FunctionRate | None:
        """Return the measured rate of an elementwise function, or None."""
        return next((rate for rate in self.functions if rate.name == name), None)

    @property
    def kernel_kind(self) -> KernelKind:
        """GPUs that multiply bfloat16 have torch's flash kernels, which need compute capability 8.0."""
        if self.kind == "cpu" or any(rate.dtype == "bfloat16" for rate in self.matmul):
            return self.kind
        return "cuda without flash"

    @property
    def gradient_s(self) -> float:
        """Host time of one gradient."""
        return self.overheads.gradient_s or self.launch_s

    @property
    def reserved_bytes(self) -> int:
        """The sum of the reserves."""
        return sum(reserve.num_bytes for reserve in self.reserves)

    def rate(self, dtype: str) -> MatmulRate:
        """Return the matmul rate of ``dtype`` (``"bfloat16"``).

        Raises:
            UsageError: the profile has no number for this dtype.
        """
        for rate in self.matmul:
            if rate.dtype == dtype:
                return rate
        known = [rate.dtype for rate in self.matmul]
        raise UsageError(
            f"No matmul rate for {dtype}",
            where=f"device '{self.name}'",
            fix=f"Choose another precision (the profile has {', '.join(known)}), or add [device.matmul.{dtype}] to it",
        )

    def multiplying(self, dtype: str, products: str) -> Device:
        """Return the same device, whose products of ``dtype`` have the rate of ``products`` in the profile.

        Raises:
            UsageError: the profile has no such rate.
        """
        if dtype == products:
            return self
        others = tuple(rate for rate in self.matmul if rate.dtype != dtype)
        return replace(self, matmul=(*others, replace(self.rate(products), dtype=dtype)))

    def with_memory(self, num_bytes: int, provenance: str) -> Device:
        """Return the same device with this much memory."""
        notes = {**dict(self.provenance), "memory": provenance}
        return replace(self, memory_bytes=num_bytes, provenance=tuple(notes.items()))

    def at_best(self) -> Device:
        """Return a device on which parts of a product together take no less time than the product; see :meth:`MatmulRate.at_best`.

        It is this device if that already holds.
        """
        best = tuple(rate.at_best() for rate in self.matmul)
        return self if best == self.matmul else replace(self, matmul=best)

    def to_table(self) -> dict[str, Any]:
        """Return the ``[device]`` table of the profile, as plain data."""
        topics = {
            topic: {key: getattr(self, name) for key, name in keys.items()}
            | {"provenance": dict(self.provenance)[topic]}
            for topic, keys in TOPICS.items()
        }
        matmul = {rate.pop("dtype"): rate for rate in as_table(self.matmul)}
        others = {"reserve": self.reserves, "function": self.functions, "overheads": self.overheads, "host": self.host}
        others |= {"name": self.name, "kind": self.kind, "operators": self.operators}
        known = {key: as_table(value) for key, value in others.items() if value is not None}
        return {**known, **topics, "matmul": matmul}

    @classmethod
    def from_table(cls, table: Table) -> Device:
        """Read the result of :meth:`to_table`.

        Raises:
            UsageError: a key is missing, unknown or has a wrong value; names file, line and key.
        """
        numbers, notes = dict[str, Any](), []
        for topic, keys in TOPICS.items():
            part = table.table(topic)
            numbers |= part.fields_of(cls, keys)
            notes.append((topic, part.text("provenance")))
            part.finish()
        matmul = table.table("matmul")
        rates = tuple(rate_of(dtype, matmul.table(dtype)) for dtype in matmul.names())
        return table.record(cls, **numbers, matmul=rates, provenance=tuple(notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """One device's share of its node's host while all devices of the node use it.

    Attributes:
        to_host_bytes_per_s, to_device_bytes_per_s: of large copies in each direction, page-locked on the host.
        latency_s: of one copy, in addition to the time of its bytes.
        memory_bandwidth_bytes_per_s: of the host's memory, read plus write.
        launch_s: of one operator on the host.
        memory_bytes: of the host's memory; None if it is unknown: then it limits nothing, and plans say so.
    """

    to_host_bytes_per_s: float
    to_device_bytes_per_s: float
    latency_s: float = field(metadata=MAY_BE_ZERO)
    memory_bandwidth_bytes_per_s: float
    launch_s: float = field(metadata=MAY_BE_ZERO)
    memory_bytes: int | None = field(default=None, metadata={"key": "num_bytes"})
    provenance: str
