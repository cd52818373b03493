"""The cut of virtual stages where ranks differ: how many blocks of the group each stage has.

:mod:`autopar.planner.stages.stage_cut` balances what each rank takes; which of a rank's stages has one block more decides how the pipeline
fills and drains. Here chains of actions (:mod:`autopar.planner.bounds.mixed_chains`) say which: of those known so far the longest is how
long a cut takes at least, which is worked out for all cuts one move away at once. A cut with a shorter one is looked for, simulated,
and its longest chain added, until no move of one block from a stage to another, nor of two, makes any chain the shorter one.

What is found depends on the row alone, never on what was looked at before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.planner.bounds.bound_rows import Array
from autopar.planner.bounds.mixed_chains import MOST_ACTIONS
from autopar.planner.bounds.mixed_rows import MixedRow
from autopar.planner.bounds.mixed_stages import Chain, Stages, busy, key_of, side_by_side

SIMULATIONS = 40
"""Of cuts of one row, at most."""

STALLED = 12
"""Of them one after the other that are no better, after which it ends."""

LEAST_GAIN = 1e-6
"""Of a step, below which a move is none."""

MOST_KNOWN = 4_096
"""Cuts of the blocks of one rank, up to which what it recomputes with each is worked out once."""

MORE_FULL = 2
"""Blocks of a rank that recompute in full beside those that have to, at most: these free what takes others longer."""

TINY = 1e-30

PAIRS = 4_000
"""Moves of two blocks that are weighed at once, at most."""


def sizes_of(row: MixedRow) -> tuple[int, ...] | None:
    """Blocks of the group on each stage, of the quickest cut that is found; None where none fits or the schedule is too long."""
    schedule, pp, v, m = key_of(row)
    if 2 * pp * v * m > MOST_ACTIONS or row.ranks[0].others:
        return None
    cut = _Cut(row)
    sizes = cut.first()
    if sizes is None:
        return None
    best, best_s, stalled = sizes, float("inf"), 0
    for _ in range(SIMULATIONS):
        again = cut.again(sizes[None])[0]
        time_s, chain = cut.stages.longest(schedule, sizes.astype(float), again)
        if time_s < best_s * (1 - LEAST_GAIN):
            best, best_s, stalled = sizes, time_s, 0
        stalled += 1
        if stalled > STALLED:
            break
        cut.add(chain)
        found = cut.moved(best, best_s)
        if found is None:
            break
        sizes = found
    return tuple(best.tolist())


def recomputed(stages: Stages, sizes: NDArray[np.int64]) -> Array:
    """As :meth:`_Cut.again`, of any cuts."""
    pp, v = stages.pp, len(stages.rank) // stages.pp
    blocks = sizes.reshape(len(sizes), v, pp).astype(float)
    held = (sizes * stages.num_bytes).reshape(len(sizes), v, pp).sum(axis=1) - stages.room_bytes
    freed, again_s = stages.freed_bytes.reshape(-1, v, pp), stages.again_s.reshape(-1, v, pp)
    if len(freed) == 1:
        found, left = _taken(blocks, held, freed[0])
        found[np.broadcast_to((left > 1e-6 * np.abs(stages.room_bytes))[:, None], found.shape)] = np.nan
        return found.reshape(sizes.shape)
    # as few in full as hold enough with all others in part, or some more, which spare others: the least time of these
    best, best_s = np.full((len(sizes), 2 * v, pp), np.nan), np.full(held.shape, np.inf)
    least, _ = _taken(blocks, held - (blocks * freed[0]).sum(axis=1), freed[1])
    for count in range(MORE_FULL + 1):
        full, wanted = np.zeros(blocks.shape), least.sum(axis=1) + count
        for turn in range(v):
            full[:, turn] = np.clip(wanted, 0.0, np.maximum(blocks[:, turn], 0))
            wanted = wanted - full[:, turn]
        some, left = _taken(blocks - full, held - (full * freed.sum(axis=0)).sum(axis=1), freed[0])
        some += full
        time_s = (some * again_s[0] + full * again_s[1]).sum(axis=1)
        time_s[(left > 1e-6 * np.abs(stages.room_bytes)) | (wanted > 0)] = np.inf
        own = np.concatenate([some, full], axis=1)
        best = np.where((time_s < best_s)[:, None], own, best)
        best_s = np.minimum(best_s, time_s)
    return best.reshape(len(sizes), -1)


def _taken(blocks: Array, held: Array, freed: Array) -> tuple[Array, Array]:
    """Of blocks [cuts, turns, ranks] so many, of the first turns first, as free what ranks hold too much; and what is left of that."""
    found = np.zeros(blocks.shape)
    for turn in range(len(freed)):
        count = np.ceil(np.maximum(held, 0.0) / np.maximum(freed[turn], TINY) - 1e-9)
        found[:, turn] = np.minimum(count, blocks[:, turn])
        held = held - found[:, turn] * freed[turn]
    return found, held


class _Cut:
    """Cuts of one row, and the chains that are known."""

    def __init__(self, row: MixedRow) -> None:
        self.stages = Stages(row)
        _, self.pp, self.v, m = key_of(row)
        self.least = np.ceil(self.stages.least).astype(np.int64)
        made = self.stages.each_s(side_by_side(busy(self.pp, self.v, m)))
        self.block, self.more, self.fixed = made
        self.places = self.pp * (self.stages.count + 2) ** np.arange(self.v)[::-1, None]
        self.known = self._every_again()
        size = len(self.stages.rank)
        pairs = np.array([(a, b) for a in range(size) for b in range(size) if a != b]).reshape(-1, 2)
        self.gives, self.takes = pairs.T
        self.moves = self._moves(pairs)
        own = self.stages.rank[self.gives] == self.stages.rank[self.takes]
        self.own = np.where(own, np.cumsum(own) - 1, -1)
        """Of moves from a stage of a rank to another of its own, which of these it is; -1 of others."""
        one = np.eye(size, dtype=np.int64)
        self.beside = np.concatenate([-one, one, self.moves[own]])

    def _moves(self, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
        """A block less on the first stage of each pair, one more on the second."""
        found = np.zeros((len(pairs), len(self.stages.rank)), dtype=np.int64)
        found[np.arange(len(pairs)), pairs[:, 0]] = -1
        found[np.arange(len(pairs)), pairs[:, 1]] = 1
        return found

    def add(self, chain: Chain) -> None:
        """One more that is known."""
        block, more, fixed = self.stages.each_s(side_by_side([chain]))
        self.block, self.more = np.concatenate([self.block, block]), np.concatenate([self.more, more])
        self.fixed = np.concatenate([self.fixed, fixed])

    def first(self) -> NDArray[np.int64] | None:
        """Each block on the rank that is done first, on the one of its stages that has the fewest."""
        sizes = self.least.copy()
        left = self.stages.count - int(sizes.sum())
        if left < 0:
            return None
        one = np.eye(len(sizes), dtype=np.int64)
        for _ in range(left):
            every = sizes + one
            times = self.times(every)
            own = times[np.arange(len(sizes)), self.stages.rank]
            fits = np.isfinite(times).all(axis=1)
            if not fits.any():
                return None
            place = np.lexsort((sizes, np.where(fits, own, np.inf)))[0]
            sizes[place] += 1
        return sizes

    def again(self, sizes: NDArray[np.int64]) -> Array:
        """Blocks that recompute each part on each stage of cuts [cuts, parts * stages]: on a rank's first stages, which hold the most; nan: too few."""
        if self.known is None:
            return recomputed(self.stages, sizes)
        own = np.maximum(sizes, 0).reshape(len(sizes), self.v, self.pp)
        found: Array = self.known.take((own * self.places).sum(axis=1) + np.arange(self.pp), axis=0)
        return found.transpose(0, 2, 1).reshape(len(sizes), -1)

    def _every_again(self) -> Array | None:
        """What each rank recomputes with any blocks on its stages [cuts of a rank * ranks, parts * turns]; None where there are too many."""
        most = self.stages.count + 2
        if most**self.v > MOST_KNOWN:
            return None
        cuts = np.indices((most,) * self.v).reshape(self.v, -1).T
        found = recomputed(self.stages, np.repeat(cuts, self.pp, axis=1)).reshape(len(cuts), -1, self.pp)
        return found.transpose(0, 2, 1).reshape(len(cuts) * self.pp, -1)

    def times(self, sizes: NDArray[np.int64]) -> Array:
        """Seconds of every known chain [cuts, chains]; infinite where a cut does not fit."""
        found = sizes @ self.block.T + self.again(sizes) @ self.more.T + self.fixed
        times: Array = np.where(np.isfinite(found), found, np.inf)
        return times

    def singles(self, sizes: NDArray[np.int64], times: Array) -> tuple[NDArray[np.int64], Array]:
        """The moves of one block that keep the least of each stage, and the seconds of every known chain with them.

        What a rank recomputes depends on its own blocks alone: a move between two ranks takes what one block less on the first
        and one more on the second take.

        Args:
            times: of every known chain, of the cut itself.
        """
        size = len(sizes)
        every = self.times(sizes + self.beside)
        may = (sizes > self.least)[self.gives].nonzero()[0]
        found = every.take(self.gives[may], axis=0)
        found += every.take(size + self.takes[may], axis=0)
        found -= times
        own = self.own[may]
        found[own >= 0] = every.take(2 * size + own[own >= 0], axis=0)
        return may, found

    def moved(self, sizes: NDArray[np.int64], time_s: float) -> NDArray[np.int64] | None:
        """A cut that may take less than ``time_s`` by the chains that are known; None where no such cut is found."""
        goal_s = time_s * (1 - LEAST_GAIN)
        may, every = self.singles(sizes, self.times(sizes[None])[0])
        if not len(may):
            return None
        values = every.max(axis=1)
        if values.min() < goal_s:
            place = self._least(every)
            return self._down(sizes + self.moves[may[place]], every[place])
        order = np.argsort(values, kind="stable")[: int(PAIRS / max(len(self.moves), 1))]
        pairs = ((sizes + self.moves[may[order]])[:, None] + self.moves).reshape(-1, len(sizes))
        pairs = pairs[(pairs >= self.least).all(axis=1)]
        every = self.times(pairs)
        if every.max(axis=1).min(initial=np.inf) < goal_s:
            place = self._least(every)
            return self._down(pairs[place], every[place])
        return None

    def _down(self, sizes: NDArray[np.int64], times: Array) -> NDArray[np.int64]:
        """Moves of one block as long as they make the longest of the known chains shorter; ``times``: of the chains of the cut."""
        value = float(times.max())
        while True:
            may, every = self.singles(sizes, times)
            place = self._least(every) if len(may) else 0
            found = float(every[place].max()) if len(may) else np.inf
            if not found < value * (1 - LEAST_GAIN):
                return sizes
            sizes, times, value = sizes + self.moves[may[place]], every[place], found

    @staticmethod
    def _least(every: Array) -> int:
        """The cut of the shortest longest chain, of several the one whose chains take the least together."""
        longest = every.max(axis=1)
        near = (longest <= longest.min() * (1 + LEAST_GAIN)).nonzero()[0]
        return int(near[every[near].sum(axis=1).argmin()]) if len(near) > 1 else int(near[0])
