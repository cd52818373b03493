"""Seconds that a rank recomputes at least if it has so many whole blocks, each in one mode.

The lines of a rank weigh memory against time as if a block could recompute in part. Of few blocks on a rank whole ones take longer: n
blocks hold more than there is room for, a of them free as much as the mode that frees less, b as much as the one that frees more, each
for the micro-batches that its stage holds, on the stages that hold the most first. The least of a t1 + b t2 that frees enough counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.planner.bounds.columns import Columns
from autopar.planner.bounds.instance import Array

MOST = 8
"""Blocks in the mode that frees more beside the fewest possible: beyond them all that is said is that they are more."""

SLACK = 1e-6
"""Of a block, up to which rounding is none."""


class WholeRecompute:
    """Of the ranks of some instances.

    Args:
        c: the instances.
        most: blocks that each virtual stage may have [i, v].
        inner: kinds of blocks that are counted, the first and the last block of the model aside.
    """

    def __init__(self, c: Columns, most: Array, inner: Sequence[int]) -> None:
        kept, seconds = c.kept_bytes[:, :, inner], c.backward_s[:, :, inner]
        first_s = seconds.min(axis=3, keepdims=True)
        full = kept.max(axis=3, keepdims=True)
        freed, again_s = full - kept, seconds - first_s
        far = np.where(freed > 0, again_s, np.inf)
        # the mode that frees the most, and the least seconds of any that frees some, with the most that such a one frees
        self.more = freed.max(axis=(2, 3))
        self.more_s = np.where(freed >= freed.max(axis=3, keepdims=True) * (1 - SLACK), far, np.inf).min(axis=(2, 3))
        is_less = freed < freed.max(axis=3, keepdims=True) * (1 - SLACK)
        self.less = np.where(is_less, freed, 0.0).max(axis=(2, 3))
        self.less_s = np.where(is_less, far, np.inf).min(axis=(2, 3))
        self.less_s = np.where(np.isfinite(self.less_s), self.less_s, 0.0)
        self.more_s = np.where(np.isfinite(self.more_s), self.more_s, 0.0)
        passing = c.passing_bytes.min(axis=3)
        some = passing[:, :, [k for k in range(len(c.counts)) if k != c.last or c.counts[k] > 1]].min(axis=2)
        least = c.kept_bytes.min(axis=3)
        end = (c.passing_bytes + c.kept_bytes).min(axis=3) - least
        room = c.room_bytes - np.where(c.is_last, end[:, :, c.last], some)
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
        """Micro-batches that so many blocks [n, r] hold together, on the stages that hold the fewest."""
        before = np.cumsum(self.sizes[rows][..., ::-1], axis=2)[..., ::-1]  # with each stage and those that hold fewer
        own = np.clip(count[..., None] - (before - self.sizes[rows]), 0.0, self.sizes[rows])
        found: Array = (own * self.held[rows]).sum(axis=2)
        return found

    def least_s(self, rows: NDArray[np.intp], count: Array) -> Array:
        """Seconds of one micro-batch that the ranks recompute at least with so many blocks [n, r] beside the first and the last one."""
        count = np.maximum(count, 0.0)
        need = count * self.static[rows] + self._held(count, rows) * self.full[rows] - self.room[rows]
        found = np.zeros(count.shape)
        places = np.nonzero(need > 0)
        if not len(places[0]):
            return found
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

        every = held_by(n[:, None])[:, 0]
        # as few in the mode that frees more as leave the rest to the other one
        over = np.maximum(short - less * every, 0.0) / np.maximum(more - less, 1e-30)
        fewest = np.ceil(blocks_of(over[:, None])[:, 0] - SLACK)
        is_never = ~np.isfinite(fewest)
        full = np.where(is_never, 0.0, fewest)[:, None] + np.arange(MOST)
        done = held_by(np.minimum(full, n[:, None]))
        rest = np.maximum(short[:, None] - more[:, None] * done, 0.0) / np.maximum(less, 1e-30)[:, None]
        other = np.where(rest > 0, np.ceil(blocks_of(done + rest) - np.minimum(full, n[:, None]) - SLACK), 0.0)
        # else no number of blocks in the other mode frees the rest
        is_enough = (full <= n[:, None]) & np.isfinite(other)
        seconds = full * more_s[:, None] + np.where(is_enough & (other > 0), other, 0.0) * less_s[:, None]
        seconds = np.where(is_enough, seconds, np.inf)
        beyond = (full[:, -1] + 1) * more_s
        least = np.minimum(seconds.min(axis=1), beyond)
        found[places] = np.where(is_never, np.inf, least)
        return found


def between(at: Array, xs: Array, ys: Array) -> Array:
    """Piecewise linear through points [..., points], at places [..., m]; beyond the last point as there."""
    place = np.clip((xs[..., None, :] <= at[..., None]).sum(axis=-1) - 1, 0, xs.shape[-1] - 2)
    x0, y0, x1, y1 = (np.take_along_axis(own, place + more, axis=-1) for more in (0, 1) for own in (xs, ys))
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where(x1 > x0, (y1 - y0) / (x1 - x0), 0.0)
    found: Array = y0 + (np.minimum(at, xs[..., -1:]) - x0) * slope
    return found
