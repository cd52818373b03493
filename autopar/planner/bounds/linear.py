"""A tighter bound of one candidate in one layout: a linear program over how many blocks of each kind a stage has in each mode.

In whatever order the ranks carry out their actions, a step takes no less than any chain of actions that follow each other
(:mod:`autopar.cost.step.critical_path`), and that is linear in how many blocks of which kind each stage has. What a rank holds at
each of its fullest moments is linear in them too, and has to fit. Chains are added one after the other, those that are
the longest for the best stages so far (Kelley 1960); the program's value is a bound after every one of them.

What is relaxed: blocks may be divided; the order of kinds of blocks is kept only as shares of each; what a stage's first
block adds, and what is alive in passing, are the least that they can be. Where stages hold few blocks of the group of equal
ones, all choices of whole blocks and their modes on a rank are weighed: what the modes take at least, by how many blocks the
rank has, and no less than the convex hull between.

The program is worth its time only where a bound is loose: it is solved for the candidates that hold the bound when a search
is done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from autopar.cost.step.critical_path import Chain, longest_chains
from autopar.cost.step.simulation import StageTimes
from autopar.planner.bounds.bound_rows import Row
from autopar.planner.bounds.mode_counts import lower_corners, useful_counts
from autopar.planner.bounds.peaks import corner_peaks
from autopar.planner.bounds.whole_blocks import PLAIN, in_whole_blocks

MAX_ACTIONS = 60_000
"""Of all ranks in a step, past which it is not simulated for a bound."""

MAX_COLUMNS = 1000

MAX_CHOICES = 40_000
"""Choices of modes on a rank's stages that are weighed."""

MAX_COUNTS = 600_000
"""Numbers of blocks of a stage in each mode that are looked through for those worth weighing."""

ROUNDS = 25
"""Times that chains are added."""

CHAINS = 8
"""Added at once."""

STALLED = 4
"""Rounds that raise the bound by less than ``STEP`` of it one after the other, after which it is taken as it is."""

STEP = 1e-3

SLACK = 1e-5
"""Of a bound, and a hundredth of it of a limit of memory: the solver's tolerances are below."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Equal blocks that follow each other; lists are by mode.

    Attributes:
        first, count: the first one's place among all blocks, and how many there are.
        in_group: whether they belong to the largest group of equal blocks.
        forward_s, backward_s: of one micro-batch.
        shared_forward_s: of the forwards that gather parameters anew.
        gather_s: what the first forward takes longer.
        once_s: after the rank's last backward.
        static_bytes, held_bytes, passing_bytes: parameters and states; of a micro-batch; at its peak inside.
        stage_bytes: of a micro-batch on a stage that has one of these, however many.
    """

    first: int
    count: int
    in_group: bool
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    shared_forward_s: float
    gather_s: float
    once_s: float
    static_bytes: float
    held_bytes: tuple[float, ...]
    passing_bytes: tuple[float, ...]
    stage_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """What stages have beside their blocks, in order of the model.

    Attributes:
        shares: of each stage's forwards those that gather parameters anew.
        forward_s, backward_s: of each stage and micro-batch.
        first_s: what the first forward of a stage takes longer.
        once_s: of each rank.
    """

    shares: tuple[float, ...]
    forward_s: tuple[float, ...]
    backward_s: float
    first_s: float
    once_s: float


class LinearProgram:
    """The program of one candidate with several pipeline ranks.

    Args:
        row: of the candidate in its layout.
        kinds: of blocks, in order of the model.
        every: see :class:`Every`.
    """

    def __init__(self, row: Row, kinds: Sequence[Kind], every: Every) -> None:
        self.row, self.kinds, self.every = row, kinds, every
        self.pp, self.stages = row.pp, row.pp * row.virtual_stages
        self.peaks = corner_peaks(row.schedule, row.pp, row.virtual_stages, row.num_micro_batches)
        blocks = sum(kind.count for kind in kinds)
        # every stage before and after has a block
        columns = [
            (i, s, j)
            for i, kind in enumerate(kinds)
            for s in range(max(0, self.stages - blocks + kind.first), min(self.stages, kind.first + kind.count))
            for j in range(len(kind.forward_s))
        ]
        self.kind, self.stage, self.mode = (np.array(part) for part in zip(*columns, strict=True))
        self.rank, self.turn = self.stage % self.pp, self.stage // self.pp
        share = np.array(every.shares)[self.stage]

        def each(name: str) -> Array:
            values = [getattr(kinds[i], name) for i, _, _ in columns]
            return np.array(
                [v[j] if isinstance(v, tuple) else v for v, j in zip(values, self.mode, strict=True)], dtype=float
            )

        self.forward_s = each("forward_s") + share * each("shared_forward_s")
        self.backward_s, self.gather_s, self.once_s = each("backward_s"), each("gather_s"), each("once_s")
        self.static, self.held = each("static_bytes"), each("held_bytes")
        self.more_s = each("forward_s") + each("backward_s")
        for i, kind in enumerate(kinds):  # over the quickest mode
            self.more_s[self.kind == i] -= _least_s(kind)
        self.grouped = np.array([kinds[i].in_group for i in self.kind])
        # of a micro-batch: what leaves a stage, and what one of its blocks at least needs there
        self.beside = np.array(
            [
                row.stage_bytes * (s < self.stages - 1)
                + min(kinds[int(i)].stage_bytes for i in self.kind[self.stage == s])
                for s in range(self.stages)
            ]
        )
        self.rows: list[Array] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self._blocks()
        self._memory()

    def _add(self, row: Array, low: float, high: float, *, passing: int = -1, step: float = 0.0) -> None:
        """A row over the columns, the bytes in passing of each rank and the step time."""
        more = np.zeros(self.pp + 1)
        if passing >= 0:
            more[passing] = 1.0
        more[-1] = step
        self.rows.append(np.concatenate([row, more]))
        self.low.append(low)
        self.high.append(high)

    def _blocks(self) -> None:
        for i, kind in enumerate(self.kinds):
            self._add((self.kind == i).astype(float), kind.count, kind.count)
        for i in range(len(self.kinds) - 1):
            before, after = ((self.kind == k) / self.kinds[k].count for k in (i, i + 1))
            later = self.stage[self.kind == i].max()  # from there on all of the kind before have been
            for s in np.unique(self.stage[(self.kind == i + 1) & (self.stage < later)]):
                self._add((after - before) * (self.stage <= s), -np.inf, 0.0)
        for s in range(self.stages):
            here = (self.stage == s).astype(float)
            self._add(here, 1.0, np.inf)
            if math.isfinite(self.row.most):
                self._add(here * self.grouped, -np.inf, self.row.most)

    def _memory(self) -> None:
        row = self.row
        limit = row.limit_bytes * (1 + SLACK / 100)
        for rank in range(self.pp):
            own = self.rank == rank
            for live in self.peaks(rank):
                used = own * (self.static + live[self.turn] * self.held) / limit
                self._add(used, -np.inf, 1.0 - float(live @ self.beside[rank :: self.pp]) / limit, passing=rank)
            for s in range(rank, self.stages, self.pp):
                kinds = {int(i) for i in self.kind[self.stage == s]}
                least = min(min(self.kinds[i].passing_bytes) for i in kinds) / limit
                self._add(np.zeros(len(self.kind)), least, np.inf, passing=rank)
                if len(kinds) == 1:  # the stage's last block is in the mode that passes most, or another one is there
                    sizes = np.array(self.kinds[kinds.pop()].passing_bytes) / limit
                    less = (self.stage == s) * (sizes.max() - sizes[np.minimum(self.mode, len(sizes) - 1)])
                    self._add(less, sizes.max(), np.inf, passing=rank)

    def _whole(self, goal_s: float) -> bool:
        """Rows of whole blocks of the group, for steps that take less than ``goal_s``; False where there is none.

        How many a rank has time for, and what their modes take on each rank at least, by how many they are.
        """
        row, group = self.row, [kind for kind in self.kinds if kind.in_group]
        if not group:
            return True
        m, block_s, once_s = row.num_micro_batches, min(map(_least_s, group)), min(kind.once_s for kind in group)
        room_s, most = [], []
        for rank in range(self.pp):
            own = range(rank, self.stages, self.pp)
            beside_s = sum(self.every.forward_s[s] + self.every.backward_s for s in own)
            for kind, s in ((self.kinds[0], 0), (self.kinds[-1], self.stages - 1)):
                beside_s += _least_s(kind) * (s in own and not kind.in_group)
            room_s.append(goal_s - m * beside_s - self.every.once_s)
            longest = math.floor(room_s[-1] / (m * block_s + once_s) + SLACK) if block_s > 0 else math.inf
            most.append(min(longest, row.most * row.virtual_stages, sum(kind.count for kind in group)))
        each = sum(kind.count for kind in group) - sum(most)
        if each > 0 or min(most) < 0:
            return False
        for rank in range(self.pp):
            own_columns = (self.rank == rank) * self.grouped
            self._add(own_columns.astype(float), -np.inf, most[rank])
            of_stage = row.most if row.virtual_stages > 1 else most[rank]
            if not math.isfinite(of_stage) or any(len(kind.forward_s) < 2 for kind in group):
                continue
            found = self._least_again_s(group, rank, int(max(each + most[rank], 0)), int(of_stage))
            points = [
                (n, s) for n, s in found
                if n <= most[rank] and m * (n * block_s + s) + n * once_s <= room_s[rank] * (1 + SLACK)
            ]  # fmt: skip
            if found and not points:
                return False
            if points:
                self._add(own_columns.astype(float), -np.inf, points[-1][0])
            for (n, least_s), (more, most_s) in pairwise(lower_corners(points)):
                slope_s = (most_s - least_s) / (more - n)
                self._add(own_columns * (self.more_s - slope_s), least_s - slope_s * n - SLACK * most_s, np.inf)
            if len(points) == 1:
                self._add(own_columns * self.more_s, points[0][1] * (1 - SLACK), np.inf)
        return True

    def _least_again_s(self, group: Sequence[Kind], rank: int, each: int, most: int) -> list[tuple[int, float]]:
        """For ``each`` blocks of the group on a rank's stages, and more, what their modes take over the quickest at least.

        Infinite where they do not fit; nothing where there are too many choices. ``most``: of a stage.
        """
        row, modes = self.row, range(min(len(kind.forward_s) for kind in group))
        if any(len(kind.forward_s) != len(modes) for kind in group):
            return []
        least = [_least_s(kind) for kind in group]
        more_s = np.array([
            min(kind.forward_s[j] + kind.backward_s[j] - own for kind, own in zip(group, least, strict=True)) for j in modes
        ])  # fmt: skip
        held = np.array([min(kind.held_bytes[j] for kind in group) for j in modes])
        static = min(kind.static_bytes for kind in group)
        if (most + 1) ** len(modes) > MAX_COUNTS:
            return []
        sizes = np.min([kind.passing_bytes for kind in group], axis=0)
        stage = useful_counts(most, more_s, held, sizes)
        if len(stage) ** row.virtual_stages > MAX_CHOICES:
            return []
        choices = stage[np.array(list(product(range(len(stage)), repeat=row.virtual_stages)))]
        choices = choices[choices.sum(axis=(1, 2)) >= each]
        live = self.peaks(rank)
        turns = range(rank, self.stages, self.pp)
        beside = self.beside[rank :: self.pp].copy()
        fixed = 0.0
        for kind, s in ((self.kinds[0], 0), (self.kinds[-1], self.stages - 1)):
            if s in turns and not kind.in_group:
                beside[turns.index(s)] += min(kind.held_bytes)
                fixed += kind.static_bytes
        used = (live @ ((choices * held).sum(axis=2) + beside).T).max(axis=0)
        used += fixed + static * choices.sum(axis=(1, 2)) + self._passing(group, turns, choices)
        fits = used <= row.limit_bytes * (1 + SLACK / 100)
        least_s = np.full(most * row.virtual_stages + 1, np.inf)
        np.minimum.at(least_s, choices.sum(axis=(1, 2))[fits], (choices * more_s).sum(axis=(1, 2))[fits])
        return [(n, float(least_s[n])) for n in range(each, len(least_s))]

    def _passing(self, group: Sequence[Kind], turns: range, choices: NDArray[np.int64]) -> Array:
        """Bytes in passing at least: a stage's last block is in one of the modes that the stage has."""
        sizes = np.min([kind.passing_bytes for kind in group], axis=0)
        is_alone = [bool(self.grouped[self.stage == s].all()) for s in turns]  # no other kind may be the last one
        last = np.where(choices > 0, sizes, np.inf).min(axis=2)
        last = np.where(np.isfinite(last) & is_alone, last, 0.0).max(axis=1)
        found: Array = np.maximum(last, min(min(kind.passing_bytes) for kind in self.kinds))
        return found

    # --- solving

    def bound_s(self, known_s: float, goal_s: float) -> float:
        """A bound, in seconds, from ``known_s`` to ``goal_s``: once only.

        Args:
            known_s: a bound.
            goal_s: what is not possible in less is not looked at more closely.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp  # as large to import as a search is long

        row, count = self.row, len(self.kind)
        if 2 * self.stages * row.num_micro_batches > MAX_ACTIONS or count > MAX_COLUMNS:
            return known_s
        if not self._whole(goal_s):
            return goal_s
        size = count + self.pp + 1
        aim = np.zeros(size)
        aim[-1] = 1.0
        upper = np.concatenate([[float(self.kinds[i].count) for i in self.kind], np.ones(self.pp), [np.inf]])
        found, solved = known_s / goal_s, 0.0
        box = Bounds(np.zeros(size), upper)
        inside, inside_s, stalled = np.zeros(0), math.inf, 0
        for _ in range(ROUNDS):
            laws = LinearConstraint(np.array(self.rows), self.low, self.high)
            result = milp(aim, bounds=box, constraints=laws, options=PLAIN)
            if result.status == 2:
                return goal_s
            if result.x is None:
                break
            # close to the goal a small rise may be all that is missing
            step = min(STEP, (1.0 - found) / STALLED)
            stalled = stalled + 1 if result.fun < solved * (1 + step) else 0
            solved = max(solved, result.fun)
            found = max(found, solved * (1 - SLACK))
            # chains are those of stages between the program's and the best so far: fewer are needed
            point = result.x[:count] if not len(inside) else (inside + result.x[:count]) / 2
            chains = self._chains(point)
            time_s = chains[0].time_s + self.every.once_s
            if time_s < inside_s or not len(inside):
                inside, inside_s = point, time_s
            if found >= 1.0 or stalled >= STALLED or inside_s <= max(solved * (1 + step), found) * goal_s:
                break
            for chain in chains:
                self._cut(chain, goal_s)
        found = in_whole_blocks(self, found, goal_s, aim, upper, SLACK)
        return min(found, 1.0) * goal_s

    def cut_at(self, taken: Array, goal_s: float, count: int) -> float:
        """Adds the ``count`` longest chains of stages with so many blocks of each column; the seconds of their step."""
        chains = self._chains(taken, count)
        for chain in chains:
            self._cut(chain, goal_s)
        return chains[0].time_s + self.every.once_s

    def _chains(self, taken: Array, count: int = CHAINS) -> list[Chain]:
        row, every = self.row, self.every

        def of_stages(values: Array) -> Array:
            found: Array = np.bincount(self.stage, values * taken, self.stages).astype(np.float64)
            return found

        forward, backward = of_stages(self.forward_s) + every.forward_s, of_stages(self.backward_s) + every.backward_s
        first = of_stages(self.gather_s) + every.first_s
        stages = [
            StageTimes(
                forward_s=forward[s],
                backward_s=backward[s],
                send_forward_s=row.send_s if s < self.stages - 1 else 0.0,
                send_backward_s=row.send_back_s if s else 0.0,
                first_forward_s=first[s],
            )
            for s in range(self.stages)
        ]
        after = np.bincount(self.rank, self.once_s * taken, self.pp)
        return longest_chains(row.schedule, self.pp, row.num_micro_batches, stages, after.tolist(), count)

    def _cut(self, chain: Chain, unit_s: float) -> None:
        """The step takes no less than a chain."""
        every = self.every
        seconds = (
            chain.forwards[self.stage] * self.forward_s
            + chain.backwards[self.stage] * self.backward_s
            + chain.firsts[self.stage] * self.gather_s
            + (self.rank == chain.rank) * self.once_s
        )
        fixed = float(chain.forwards @ np.array(every.forward_s)) + float(chain.backwards.sum()) * every.backward_s
        fixed += float(chain.firsts.sum()) * every.first_s + chain.sends_s + every.once_s
        self._add(-seconds / unit_s, fixed / unit_s, np.inf, step=1.0)


def _least_s(kind: Kind) -> float:
    """Forward and backward of one of these in the quickest mode."""
    return min(forward_s + backward_s for forward_s, backward_s in zip(kind.forward_s, kind.backward_s, strict=True))
