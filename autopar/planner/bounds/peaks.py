"""Which of a rank's fullest moments say anything about its memory that the others do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from autopar.schedule import peak_table


def corner_peaks(
    schedule: str, pp: int, virtual_stages: int, num_micro_batches: int
) -> Callable[[int], NDArray[np.int64]]:
    """For each pipeline rank the rows of :func:`autopar.schedule.peak_table` that are the corners of their convex hull.

    What a rank holds is linear in how many micro-batches its stages hold, so that of all moments it is the most at a corner. A moment
    half-way between two others is none. With virtual stages a rank passes from one to another in even steps: few are left.
    """

    @cache
    def of_rank(rank: int) -> NDArray[np.int64]:
        found = peak_table(schedule, pp, virtual_stages, num_micro_batches, rank)
        every = {tuple(live) for live in found.tolist()}
        inner = {
            live
            for live in every
            if any(other != live and tuple(2 * x - y for x, y in zip(live, other, strict=True)) in every for other in every)
        }  # fmt: skip
        corners: NDArray[np.int64] = np.array([live for live in found.tolist() if tuple(live) not in inner])
        return corners

    return of_rank
