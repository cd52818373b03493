"""The dynamic program over prefixes of the blocks: the least that stages take, and where they stop then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.planner.stages.choices import Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """Which consecutive blocks may be stages, by how many they are and where they stop.

    Attributes:
        least: the fewest blocks of a stage.
        allowed: for each stage at [k, j] whether blocks j - least - k : j may be it.
        place: at [k, j] the number of their kind among those that may be any.
        kinds: these, as they are counted in ``CutShape.distinct``.
    """

    least: int
    allowed: tuple[NDArray[np.bool_], ...]
    place: NDArray[np.int64]
    kinds: NDArray[np.int64]


def forward(tables: Sequence[Array], spans: Spans, combine: np.ufunc) -> tuple[float, list[Array]]:
    """The dynamic program: least ``combine`` of the stages' times for blocks 0:j, and that of each prefix before each stage."""
    width, size = tables[0].shape
    most = spans.least + width - 1
    padded = np.full(size + most, np.inf)  # that of blocks 0:j stands at j + most
    best = padded[most:]
    best[0] = 0.0
    shifted = np.lib.stride_tricks.as_strided(
        padded[width - 1 :], shape=(width, size), strides=(-padded.itemsize, padded.itemsize), writeable=False
    )  # [k, j]: that of blocks 0:j - least - k
    before, through = [], np.empty((width, size))
    for table in tables:
        before.append(best.copy())
        combine(shifted, table, out=through)
        np.minimum.reduce(through, axis=0, out=best)
    return float(best[-1]), before


def stops_of(tables: Sequence[Array], spans: Spans, before: Sequence[Array]) -> list[int]:
    """Where the stages of the least sum stop; of equal ones the stages at the end are the longest."""
    width, size = tables[0].shape
    stops = [size - 1]
    for table, best in zip(reversed(tables[1:]), reversed(before[1:]), strict=True):
        last = stops[-1]
        lengths = np.arange(min(spans.least + width - 1, last), spans.least - 1, -1)
        found = best[last - lengths] + table[lengths - spans.least, last]
        stops.append(last - int(lengths[np.argmin(found)]))
    return stops[::-1]
