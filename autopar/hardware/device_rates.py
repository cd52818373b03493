"""The rates of a device for matrix products in each dtype and for elementwise functions; a part of the schema of ``device.py``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from autopar.util.toml import MAY_BE_ZERO, T, Table

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
