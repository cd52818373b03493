"""Fits latency and bandwidth to times of a collective by size, in as few straight pieces as the points need."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from autopar.hardware.measured_times import Piece, pieces_time_s

MAX_PIECES = 3
LEAST_POINTS = 3
"""Of a piece where there are several."""
GOOD_ENOUGH = 0.03
"""Root of the mean square of relative distances below which no further piece is tried."""

Point = tuple[float, float]
"""Bytes and seconds."""


def fit_pieces(points: Sequence[Point]) -> tuple[Piece, ...]:
    """Pieces ``latency_s + num_bytes * s_per_byte`` by least squares of relative distances, neither part below zero.

    A further piece has to halve the distance that is left; which points belong to which piece is found by trying all
    cuts. Neighbouring pieces meet where their lines cross if that lies between their points, else half way between
    (in log space).

    Args:
        points: bytes and seconds, both above zero, of at least two sizes.

    >>> [piece] = fit_pieces([(1e3, 21e-6), (1e6, 1020e-6), (1e8, 100020e-6)])
    >>> round(1e6 * piece.latency_s, 6), round(1 / piece.s_per_byte)
    (20.0, 1000000000)
    """
    merged = _merged(points)
    best = _cuts(merged, 1)
    for count in range(2, min(MAX_PIECES, len(merged) // LEAST_POINTS) + 1):
        if math.sqrt(best[0] / len(merged)) <= GOOD_ENOUGH:
            break
        more = _cuts(merged, count)
        if more[0] > 0.25 * best[0]:  # squares: half of the distance
            break
        best = more
    lines = [_line(merged[start:stop])[1] for start, stop in best[1]]
    pieces = []
    for i, (latency, slope) in enumerate(lines):
        end = 0.0
        if i + 1 < len(lines):
            stop = best[1][i][1]
            end = _meeting((latency, slope), lines[i + 1], merged[stop - 1][0], merged[stop][0])
        pieces.append(Piece(up_to_bytes=end, latency_s=latency, s_per_byte=slope))
    return tuple(pieces)


def residual(pieces: Sequence[Piece], points: Sequence[Point]) -> float:
    """The largest relative distance of a point from the pieces."""
    return max(abs(pieces_time_s(pieces, size) / time_s - 1.0) for size, time_s in points)


def _merged(points: Sequence[Point]) -> list[Point]:
    """One point for each size: the geometric mean."""
    by_size: dict[float, list[float]] = {}
    for size, time_s in points:
        by_size.setdefault(size, []).append(math.log(time_s))
    return [(size, math.exp(sum(logs) / len(logs))) for size, logs in sorted(by_size.items())]


def _line(points: Sequence[Point]) -> tuple[float, tuple[float, float]]:
    """Sum of squares of relative distances, latency and slope."""
    sizes, times = (np.array(column) for column in zip(*points, strict=True))
    scale = float(sizes.max())
    found, distance = nnls(np.stack([1.0 / times, sizes / scale / times], axis=1), np.ones(len(points)))
    return float(distance) ** 2, (float(found[0]), float(found[1]) / scale)


def _cuts(points: Sequence[Point], count: int) -> tuple[float, list[tuple[int, int]]]:
    """The best way to cut the points into ``count`` pieces: sum of squares, and (start, stop) of each."""
    least = LEAST_POINTS if count > 1 else 1
    best: tuple[float, list[tuple[int, int]]] = (math.inf, [])
    starts = range(least, len(points) - least + 1)
    for cuts in (
        [()] if count == 1 else [(i,) for i in starts] if count == 2 else [(i, j) for i in starts for j in starts]
    ):
        spans = list(zip((0, *cuts), (*cuts, len(points)), strict=True))
        if all(stop - start >= least for start, stop in spans):
            cost = sum(_line(points[start:stop])[0] for start, stop in spans)
            best = min(best, (cost, spans))
    return best


def _meeting(one: tuple[float, float], other: tuple[float, float], low: float, high: float) -> float:
    if one[1] != other[1]:
        crossing = (other[0] - one[0]) / (one[1] - other[1])
        if low <= crossing <= high:
            return crossing
    return math.sqrt(low * high)
