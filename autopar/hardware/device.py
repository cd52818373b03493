"""Devices as plain data, read from profiles; ``link.py`` describes what connects them.

Every number is in SI units (bytes, seconds, FLOP/s), and every group of numbers has a provenance. The TOML files in ``profiles/``, the
dictionaries of :meth:`Device.to_table` and cluster files share one schema (``profiles/README.md``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autopar.errors import UsageError
from autopar.hardware.link import FunctionRate, OperatorTable
from autopar.util.toml import MAY_BE_ZERO, T, Table, as_table

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

ALIGNED_ELEMENTS = 8
"""Elements of half precision that matrix units load at once: 16 bytes (NVIDIA, Matrix Multiplication Background User's Guide)."""


def times(value: T, factor: float, *names: str) -> T:
    """Return a copy of a dataclass in which the named numbers are multiplied by ``factor``."""
    return replace(value, **{name: getattr(value, name) * factor for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One point of an efficiency curve.

    Attributes:
        smallest_dim: the smallest of a matmul's m, n and k.
        efficiency: the fraction of the ceiling that such a matmul reaches.
        backward_efficiency: the fraction that the two products of its backward reach together; 0 stands for ``efficiency``.
    """

    smallest_dim: int
    efficiency: float = field(metadata={"at_most": 1})
    backward_efficiency: float = field(default=0.0, metadata={"at_most": 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRate:
    """The rate of matrix products in one dtype. Fractions are fractions of the ceiling, unless something else is said.

    Attributes:
        dtype: the name of the dtype without ``torch.``.
        ceiling_flops_per_s: the highest rate that was measured for a large matmul, in FLOP per second.
        datasheet_flops_per_s: the published dense peak, from which MFU is computed; equal to the ceiling if none is published.
        calibrated: whether the curve was measured.
        attention_fraction: the fraction that fused attention reaches, masked scores not counted; 1 if it is not known.
        attention_backward_fraction: the same in backward; 0 stands for the forward fraction.
        attention_half_width: the width of a head at which half of the fraction is reached; 0 if it does not depend on the width.
        triton_fraction: the fraction of the first fused attention in Triton (FlashAttention 1 with a bias); 0 stands for
            ``attention_fraction``.
        triton_backward_fraction: the same in backward; 0 stands for the forward fraction.
        flash2_fraction: the fraction of FlashAttention-2 if ``attention_fraction`` is that of a faster kernel; 0 stands for
            ``attention_fraction``.
        flash2_backward_fraction: the same in backward; 0 stands for the forward fraction.
        ordered_fraction: the fraction of the rate of attention's backward that remains if it sums in a fixed order (deterministic);
            0 if it is not known, which is taken as no loss.
        num_units: the number of units that compute tiles of a product in parallel; 0 if only the curve counts.
        tile_elements: the number of output elements of a tile.
        wave_loss, fill_depth, unaligned_fraction, unaligned_batched_fraction: see :meth:`product_flops_per_s`.
        curve: the points by rising ``smallest_dim``. The efficiency is interpolated in log space between them and constant outside.
        provenance: the source of the numbers.
    """

    dtype: str
    ceiling_flops_per_s: float
    datasheet_flops_per_s: float
    calibrated: bool
    attention_fraction: float = 1.0
    attention_backward_fraction: float = 0.0
    attention_half_width: float = 0.0
    triton_fraction: float = 0.0
    triton_backward_fraction: float = 0.0
    flash2_fraction: float = 0.0
    flash2_backward_fraction: float = 0.0
    ordered_fraction: float = 0.0
    num_units: int = 0
    tile_elements: float = 128.0 * 128.0
    wave_loss: float = 0.0
    fill_depth: float = 0.0
    unaligned_fraction: float = field(default=1.0, metadata={"at_most": 1})
    unaligned_batched_fraction: float = field(default=1.0, metadata={"at_most": 1})
    curve: tuple[CurvePoint, ...]
    provenance: str

    def product_flops_per_s(self, count: int, rows: int, columns: int, depth: int) -> float:
        """Return the rate of ``count`` products [rows, depth] x [depth, columns] in one kernel, in FLOP per second.

        The output is divided into tiles, which the units compute in waves. On average ``wave_loss`` of the last wave is idle, and loading
        and storing a tile takes as long as ``fill_depth`` further elements of depth. Rows whose length is not a multiple of 8 elements are
        not aligned for the matrix units: a single such product reaches ``unaligned_fraction`` of the rate, and several in one kernel
        reach ``unaligned_batched_fraction`` (these are other kernels, which are measured separately).

        >>> rate = MatmulRate(dtype="float16", ceiling_flops_per_s=1e12, datasheet_flops_per_s=1e12, calibrated=True,
        ...                   curve=(CurvePoint(smallest_dim=1, efficiency=0.5),), provenance="example", num_units=1,
        ...                   tile_elements=64 * 64, wave_loss=1.0, fill_depth=64)
        >>> rate.product_flops_per_s(1, 64, 64, 64)
        125000000000.0
        """
        waves = count * rows * columns / (self.tile_elements * self.num_units)
        share = waves / (waves + self.wave_loss) * depth / (depth + self.fill_depth)
        if columns % ALIGNED_ELEMENTS or depth % ALIGNED_ELEMENTS:
            share *= self.unaligned_fraction if count == 1 else self.unaligned_batched_fraction
        return self.flops_per_s(min(rows, columns, depth)) * share

    def at_best(self) -> MatmulRate:
        """Return a rate that a product cannot exceed with any padding, split or order of dims; lower bounds of times use it.

        Rows count as aligned, and a smaller product is no faster than a larger one: ``product_flops_per_s`` and ``flops_per_s`` do not
        increase as a dim gets smaller. The parts of a product then take together no less time than the complete product.
        """
        best = tuple(
            replace(
                point,
                efficiency=max(p.efficiency for p in self.curve[: i + 1]),
                backward_efficiency=max(p.backward_efficiency or p.efficiency for p in self.curve[: i + 1]),
            )
            for i, point in enumerate(self.curve)
        )
        return replace(self, curve=best, unaligned_fraction=1.0, unaligned_batched_fraction=1.0)

    def attention_flops_per_s(self, smallest_dim: int, *, backward: bool = False) -> float:
        """Return the rate of fused attention in forward or backward, masked scores not counted, in FLOP per second."""
        share = self.attention_fraction
        if backward and self.attention_backward_fraction:
            share = self.attention_backward_fraction
        return self.ceiling_flops_per_s * share * smallest_dim / (smallest_dim + self.attention_half_width)

    def efficiency(self, smallest_dim: int, *, backward: bool = False) -> float:
        """Return the fraction of the ceiling that a matmul with this smallest dim reaches, or the products of its backward.

        >>> points = (CurvePoint(smallest_dim=1, efficiency=0.25), CurvePoint(smallest_dim=64, efficiency=1.0))
        >>> rate = MatmulRate(dtype="float32", ceiling_flops_per_s=1e11, datasheet_flops_per_s=1e11, curve=points,
        ...                   calibrated=True, provenance="example")
        >>> rate.efficiency(1), rate.efficiency(8), rate.efficiency(4096)
        (0.25, 0.5, 1.0)
        """

        def reached(point: CurvePoint) -> float:
            return (backward and point.backward_efficiency) or point.efficiency

        before = self.curve[0]
        for point in self.curve:
            if smallest_dim <= point.smallest_dim:
                if point.smallest_dim == before.smallest_dim:
                    return reached(point)
                span = math.log(point.smallest_dim / before.smallest_dim)
                share = math.log(max(smallest_dim, before.smallest_dim) / before.smallest_dim) / span
                return float(reached(before) ** (1 - share) * reached(point) ** share)
            before = point
        return reached(before)

    def flops_per_s(self, smallest_dim: int, *, backward: bool = False) -> float:
        """Return the rate of a matmul with this smallest dim, or of the products of its backward, in FLOP per second."""
        return self.ceiling_flops_per_s * self.efficiency(smallest_dim, backward=backward)


def rate_of(dtype: str, table: Table) -> MatmulRate:
    """Return the rate of a table ``[device.matmul.DTYPE]``.

    Raises:
        UsageError: a key is missing or unknown, or has a wrong value; the error names file, line and key.
    """
    datasheet = table.number("datasheet_flops_per_s", table.number("ceiling_flops_per_s"))
    rate = table.record(MatmulRate, dtype=dtype, datasheet_flops_per_s=datasheet)
    sizes = [point.smallest_dim for point in rate.curve]
    if not sizes or sizes != sorted(set(sizes)):
        raise table.wrong("curve", "at least one point, by rising smallest_dim", sizes or "none")
    return rate


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
    provenance: dict[str, str] = field(hash=False)
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
        return replace(self, memory_bytes=num_bytes, provenance={**self.provenance, "memory": provenance})

    def at_best(self) -> Device:
        """Return a device on which parts of a product together take no less time than the product; see :meth:`MatmulRate.at_best`.

        It is this device if that already holds.
        """
        best = tuple(rate.at_best() for rate in self.matmul)
        return self if best == self.matmul else replace(self, matmul=best)

    def to_table(self) -> dict[str, Any]:
        """Return the ``[device]`` table of the profile, as plain data."""
        topics = {
            topic: {key: getattr(self, name) for key, name in keys.items()} | {"provenance": self.provenance[topic]}
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
        numbers, notes = dict[str, Any](), dict[str, str]()
        for topic, keys in TOPICS.items():
            part = table.table(topic)
            numbers |= part.fields_of(cls, keys)
            notes[topic] = part.text("provenance")
            part.finish()
        matmul = table.table("matmul")
        rates = tuple(rate_of(dtype, matmul.table(dtype)) for dtype in matmul.names())
        return table.record(cls, **numbers, matmul=rates, provenance=notes)


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
