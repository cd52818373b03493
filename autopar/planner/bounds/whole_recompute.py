"""The least seconds that a rank recomputes if each of its blocks is in exactly one mode.

The linear constraints of :mod:`autopar.planner.bounds.feasibility` weigh memory against time as if a block could be recomputed in part. A
rank with few blocks takes longer when blocks are recomputed whole. Suppose n blocks need more memory than there is. Then a of them are in
the mode that frees the most, and b in a mode that frees less; each frees its bytes once for every micro-batch that its stage holds, and
stages that hold the most are filled first. The bound is the least of a t1 + b t2 over all a and b that free enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.planner.bounds.columns import Columns
from autopar.planner.bounds.instance import Array

MOST = 8
"""The number of values that are enumerated for a; beyond the largest one the bound is a larger a alone."""

SLACK = 1e-6
"""The fraction of a block, or of freed bytes, that counts as rounding."""


class WholeRecompute:
    """Bounds of recompute in whole blocks for the ranks of some instances.

    Args:
        c: the instances.
        most: the blocks that each virtual stage may have [i, v].
        inner: the kinds of blocks that count; the first and the last block of the model are accounted for separately.
    """

    def __init__(self, c: Columns, most: Array, inner: Sequence[int]) -> None:
        kept, seconds = c.kept_bytes[:, :, inner], c.backward_s[:, :, inner]
        first_s = seconds.min(axis=3, keepdims=True)
        full = kept.max(axis=3, keepdims=True)
        freed, again_s = full - kept, seconds - first_s
        time_s = np.where(freed > 0, again_s, np.inf)
        # the mode that frees the most; and of the other modes that free some, the least seconds of any and the most bytes of any
        self.more = freed.max(axis=(2, 3))
        self.more_s = np.where(freed >= freed.max(axis=3, keepdims=True) * (1 - SLACK), time_s, np.inf).min(axis=(2, 3))
        is_less = freed < freed.max(axis=3, keepdims=True) * (1 - SLACK)
        self.less = np.where(is_less, freed, 0.0).max(axis=(2, 3))
        self.less_s = np.where(is_less, time_s, np.inf).min(axis=(2, 3))
        self.less_s = np.where(np.isfinite(self.less_s), self.less_s, 0.0)
        self.more_s = np.where(np.isfinite(self.more_s), self.more_s, 0.0)
        passing = c.passing_bytes.min(axis=3)
        ending = passing[:, :, [k for k in range(len(c.counts)) if k != c.last or c.counts[k] > 1]].min(axis=2)
        least = c.kept_bytes.min(axis=3)
        end = (c.passing_bytes + c.kept_bytes).min(axis=3) - least
        room = c.room_bytes - np.where(c.is_last, end[:, :, c.last], ending)
        for is_there, k, turn in ((c.is_first, c.first, 0), (c.is_last, c.last, -1)):
            room = room - is_there * (c.static_bytes[:, :, k] + c.held[:, :, turn] * least[:, :, k])
        self.room = room
        self.static = c.static_bytes[:, :, inner].min(axis=2)
        self.full = full.min(axis=(2, 3))
        order = np.argsort(-np.where(c.has_stage[:, None], c.held, -1.0), axis=2)
        held = np.take_along_axis(c.held, order, axis=2)
        sizes = np.take_along_axis(np.broadcast_to(most[:, None], held.shape), order, axis=2)
        self.held, self.sizes = held, sizes

    def _held(self, count: Array, rows: NDArray[np.intp]) -> Array:
        """Return how many micro-batches these numbers of blocks [n, r] hold together, on the stages that hold the fewest."""
        # Blocks of each stage and of those that hold fewer micro-batches.
        up_to = np.cumsum(self.sizes[rows][..., ::-1], axis=2)[..., ::-1]
        taken = np.clip(count[..., None] - (up_to - self.sizes[rows]), 0.0, self.sizes[rows])
        held: Array = (taken * self.held[rows]).sum(axis=2)
        return held

    def least_s(self, rows: NDArray[np.intp], count: Array) -> Array:
        """Return the least seconds that ranks recompute for one micro-batch with so many blocks [n, r] besides the first and the last one.

        Infinite where no choice of modes fits. ``rows`` [n] are positions of instances.
        """
        count = np.maximum(count, 0.0)
        need = count * self.static[rows] + self._held(count, rows) * self.full[rows] - self.room[rows]
        bounds_s = np.zeros(count.shape)
        places = np.nonzero(need > 0)
        if not len(places[0]):
            return bounds_s
        row, rank = rows[places[0]], places[1]
        n, short = count[places], need[places]
        more, less = self.more[row, rank], self.less[row, rank]
        more_s, less_s = self.more_s[row, rank], self.less_s[row, rank]
        held, sizes = self.held[row, rank], self.sizes[row, rank]
        ends = np.minimum(np.concatenate([np.zeros((len(n), 1)), np.cumsum(sizes, axis=1)], axis=1), n[:, None])
        sums = np.concatenate([np.zeros((len(n), 1)), np.cumsum(np.diff(ends, axis=1) * held, axis=1)], axis=1)

        def held_by(blocks: Array) -> Array:
            return between(blocks, ends, sums)

        def blocks_of(total: Array) -> Array:
            return np.where(total > sums[:, -1:] * (1 + 1e-12), np.inf, between(total, sums, ends))

        held_by_all = held_by(n[:, None])[:, 0]
        # The fewest blocks in the mode that frees more with which the other mode can free what is short.
        over = np.maximum(short - less * held_by_all, 0.0) / np.maximum(more - less, 1e-30)
        fewest = np.ceil(blocks_of(over[:, None])[:, 0] - SLACK)
        is_never = ~np.isfinite(fewest)
        full = np.where(is_never, 0.0, fewest)[:, None] + np.arange(MOST)
        done = held_by(np.minimum(full, n[:, None]))
        lack = np.maximum(short[:, None] - more[:, None] * done, 0.0) / np.maximum(less, 1e-30)[:, None]
        other = np.where(lack > 0, np.ceil(blocks_of(done + lack) - np.minimum(full, n[:, None]) - SLACK), 0.0)
        # elsewhere no number of blocks in the other mode frees what is short
        is_enough = (full <= n[:, None]) & np.isfinite(other)
        seconds = full * more_s[:, None] + np.where(is_enough & (other > 0), other, 0.0) * less_s[:, None]
        seconds = np.where(is_enough, seconds, np.inf)
        beyond = (full[:, -1] + 1) * more_s
        least = np.minimum(seconds.min(axis=1), beyond)
        bounds_s[places] = np.where(is_never, np.inf, least)
        return bounds_s


def between(at: Array, xs: Array, ys: Array) -> Array:
    """Interpolate linearly through points [..., points] at places [..., m]; beyond the last point the value stays constant."""
    place = np.clip((xs[..., None, :] <= at[..., None]).sum(axis=-1) - 1, 0, xs.shape[-1] - 2)
    x0, y0, x1, y1 = (np.take_along_axis(points, place + more, axis=-1) for more in (0, 1) for points in (xs, ys))
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where(x1 > x0, (y1 - y0) / (x1 - x0), 0.0)
    values: Array = y0 + (np.minimum(at, xs[..., -1:]) - x0) * slope
    return values
