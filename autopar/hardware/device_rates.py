"""How fast a device multiplies matrices, dtype by dtype, and computes functions; a part of ``device.py``'s schema."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.util.toml import T, Table

ALIGNED_ELEMENTS = 8
"""Matrix units load 16 bytes at once (NVIDIA, Matrix Multiplication Background User's Guide): 8 half elements."""


def times(value: T, factor: float, *names: str) -> T:
    """A dataclass with these of its numbers times ``factor``."""
    return replace(value, **{name: getattr(value, name) * factor for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One point of an efficiency curve: the smallest of a matmul's m, n, k, and the fraction of the ceiling it reaches.

    ``backward_efficiency``: of the two products of its backward together; 0: as ``efficiency``.
    """

    smallest_dim: int
    efficiency: float
    backward_efficiency: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRate:
    """How fast one dtype multiplies matrices.

    Attributes:
        dtype: torch's name without ``torch.``.
        ceiling_flops_per_s: the most that a large matmul was measured to reach.
        datasheet_flops_per_s: the published dense peak; what MFU divides by. Equal to the ceiling where none is published.
        calibrated: whether the curve was measured.
        attention_fraction: of the ceiling that fused attention reaches, masked scores not counted; 1 where not known.
        attention_backward_fraction: likewise backward; 0: as forward.
        attention_half_width: width of a head at which half of that is reached; 0: at any.
        triton_fraction: of the ceiling that the first fused attention in Triton reaches (FlashAttention 1 with a bias); 0:
            as ``attention_fraction``.
        triton_backward_fraction: likewise backward; 0: as forward.
        flash2_fraction: of the ceiling that FlashAttention-2 reaches where ``attention_fraction`` is of a faster kernel; 0: as
            that.
        flash2_backward_fraction: likewise backward; 0: as forward.
        ordered_fraction: of the rate of fused attention's backward, what is left where it adds up in one order
            (deterministic); 0: not known, and as without.
        num_units: that take tiles of a product side by side; 0: only the curve counts.
        tile_elements: of the output, of one tile.
        wave_loss, fill_depth, unaligned_fraction, unaligned_batched_fraction: see :meth:`product_flops_per_s`.
        curve: points by rising ``smallest_dim``; interpolated in log space, constant outside.
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
    unaligned_fraction: float = 1.0
    unaligned_batched_fraction: float = 1.0
    curve: tuple[CurvePoint, ...]
    provenance: str

    def product_flops_per_s(self, count: int, rows: int, columns: int, depth: int) -> float:
        """The rate of ``count`` products [rows, depth] x [depth, columns] in one kernel.

        The output is cut in tiles that the units take in waves: the last wave is ``wave_loss`` of one idle on average,
        and each tile loads and stores for as long as ``fill_depth`` more of its depth would take. Rows of a length
        that is no multiple of 8 elements cannot be loaded as the matrix units want them: one product of those reaches
        ``unaligned_fraction`` of the rate, several in one kernel ``unaligned_batched_fraction`` (other kernels, and measured
        apart).

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
        """A rate that no padding, cut or order of dims takes a product above: the floor of its time rests on it.

        Rows are aligned, and a smaller product is no faster than a larger one. Parts of a product then take together no less
        time than the whole: ``product_flops_per_s`` and ``flops_per_s`` fall with each dim.
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
        """The rate of fused attention forward or backward, masked scores not counted."""
        share = self.attention_fraction
        if backward and self.attention_backward_fraction:
            share = self.attention_backward_fraction
        return self.ceiling_flops_per_s * share * smallest_dim / (smallest_dim + self.attention_half_width)

    def efficiency(self, smallest_dim: int, *, backward: bool = False) -> float:
        """The fraction of the ceiling that a matmul with this smallest dim reaches.

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
        """The rate that a matmul with this smallest dim reaches, or the products of its backward."""
        return self.ceiling_flops_per_s * self.efficiency(smallest_dim, backward=backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionRate:
    """Seconds for each element of an elementwise function that computes longer than it moves bytes.

    Attributes:
        name: one of ``autopar.cost.operators.work.FUNCTIONS``.
        forward_s, backward_s: for one element of its first operand.
    """

    name: str
    forward_s: float
    backward_s: float


def rate_of(dtype: str, table: Table) -> MatmulRate:
    """Read a table ``[device.matmul.DTYPE]``.

    Raises:
        UsageError: a key is missing, unknown or has a wrong value; names file, line and key.
    """
    ceiling = table.number("ceiling_flops_per_s")
    curve = []
    for item in table.tables("curve"):
        curve.append(item.record(CurvePoint))
        if not 0 < curve[-1].efficiency <= 1 or curve[-1].backward_efficiency > 1:
            raise item.wrong("efficiency", "a number from 0 to 1", curve[-1].efficiency)
    sizes = [point.smallest_dim for point in curve]
    if not sizes or sizes != sorted(set(sizes)):
        raise table.wrong("curve", "at least one point, by rising smallest_dim", sizes or "none")
    datasheet = table.number("datasheet_flops_per_s", ceiling)
    rate = table.record(MatmulRate, dtype=dtype, curve=tuple(curve), datasheet_flops_per_s=datasheet)
    for key in ("unaligned_fraction", "unaligned_batched_fraction"):  # what is left of a rate
        if getattr(rate, key) > 1:
            raise table.wrong(key, "a number from 0 to 1", getattr(rate, key))
    return rate
