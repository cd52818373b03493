"""Refinement of a cut: ranks with several stages choose their recompute anew, and blocks move from one stage to another.

The stage cut gives each stage an equal share of the memory of its rank and counts the most micro-batches that the stage ever holds. But the
stages of a rank are full at different moments, so that the same block frees more on one stage than on another. Here the blocks of a rank
are weighed together against its fullest moments. Of all changes to a leaner mode (:func:`autopar.planner.stages.recompute.lower_hull`) the
one that frees most of the excess for its seconds is made, until no moment is in excess; changes that turn out not to be needed are taken
back. This is the greedy algorithm for covering programs (Dobson 1982).

A block moves to another stage as long as the simulated step gets shorter. Which stage has one block more decides how the pipeline fills and
drains, and what ranks with different devices wait for. The step is as long as its longest chain of actions
(:mod:`autopar.cost.step.simulation`). With other stages the same actions still follow each other, so that a chain that was the longest of
one cut gives a lower bound for other cuts without recompute. Moves are simulated in the order of these bounds, until none is below the best
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.cost.step.memory import kept_bytes
from autopar.cost.step.simulation import Chain
from autopar.cost.step.step import StageCost
from autopar.plan.prediction import Memory
from autopar.planner.stages.cut_problem import CutProblem, Fitting, Modes, Stops, allows, fitted
from autopar.planner.stages.recompute import OFFLOADED, Array, Mode, lower_hull
from autopar.planner.stages.stage_cut import exactly

MAX_CHOICES = 4
"""How often ranks choose again because the memory model finds more bytes than they counted."""

TINY_S = 1e-12
"""Least seconds counted for a change to a leaner mode, so that the bytes freed for a second are finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """A change to a leaner mode, which each of the equal blocks of a stage may make.

    Attributes:
        turn: the index of the stage among the stages of its rank.
        blocks: the indices of the blocks.
        previous: the index of the change that brings the blocks to the mode before it; -1 if that is their quickest mode.
        mode: the mode after the change.
        time_s: seconds that the change adds for one block.
        freed_bytes: bytes that the change frees for one block and each micro-batch.
    """

    turn: int
    blocks: tuple[int, ...]
    previous: int
    mode: Mode
    time_s: float
    freed_bytes: float


def refined(problem: CutProblem, fitting: Fitting) -> Fitting:
    """Return the cut with another choice of recompute if that is quicker and fits; else the same cut.

    Cuts with one stage a rank, without recompute, or whose blocks may keep on the host what they need, are returned unchanged.
    """
    if not problem.may_exchange(fitting):
        return fitting
    covering = _covering_modes(problem, fitting.stops, range(problem.pp))
    if covering is None or covering[0] == fitting.modes:
        return fitting
    other = problem.fitting(fitting.stops, covering[0])
    return other if problem.fits(other) and problem.time_s(other) < problem.time_s(fitting) else fitting


def _covering_modes(problem: CutProblem, stops: Stops, ranks: Sequence[int]) -> tuple[Modes, Sequence[Memory]] | None:
    """Choose modes in which some ranks fit and take as little time as the greedy algorithm finds.

    The transient bytes of a rank depend on what it recomputes. Each round counts those of the choice before it; the first round counts
    those without recompute.

    Args:
        problem: the problem.
        stops: the stop of each stage.
        ranks: the ranks to choose for; the blocks of other ranks are in their quickest modes.

    Returns:
        The modes of all blocks and the memory of these ranks, which is within their limits; None if no such modes are found.
    """
    cover = _Cover(problem, stops, ranks)
    limits = [problem.memory_limits[rank] for rank in ranks]
    modes = problem.quickest_modes(stops)
    stages = problem.stages_of(stops, modes)
    memory = problem.model.memory(stages, problem.step, ranks)
    kept = _kept_bytes(stages)
    excess = _excess_bytes(problem, memory, kept)
    for _ in range(MAX_CHOICES):
        if _all_fit(memory, limits):
            break
        counts = cover.counts(excess)
        if counts is None:
            return None
        modes = cover.modes(counts)
        memory = problem.model.memory(problem.stages_of(stops, modes), problem.step, ranks)
        excess = [  # without recompute, but with the transient bytes of this choice; more where that did not free enough
            old if now.total <= limit else np.maximum(np.maximum(old, new), old + now.total - limit)
            for old, new, now, limit in zip(excess, _excess_bytes(problem, memory, kept), memory, limits, strict=True)
        ]
    return (modes, memory) if _all_fit(memory, limits) else None


def _all_fit(memory: Sequence[Memory], limits: Sequence[int]) -> bool:
    return all(rank_memory.total <= limit for rank_memory, limit in zip(memory, limits, strict=True))


def excess_bytes(problem: CutProblem, fitting: Fitting) -> list[Array]:
    """Return the bytes by which each rank exceeds its limit at each of its fullest moments; negative where it has bytes to spare."""
    return _excess_bytes(problem, fitting.memory, _kept_bytes(fitting.stages))


def _kept_bytes(stages: Sequence[StageCost]) -> Array:
    """Return the bytes that each stage keeps of a micro-batch between forward and backward [stages]."""
    last = len(stages) - 1
    return np.array([kept_bytes(stage, receives=s > 0, sends=s < last) for s, stage in enumerate(stages)])


def _excess_bytes(problem: CutProblem, memory: Sequence[Memory], kept: Array) -> list[Array]:
    """Return for each rank the bytes in excess of its limit at each of its fullest moments, with what stages keep as given.

    Args:
        problem: the problem.
        memory: the memory of the ranks, from which all but the kept bytes of micro-batches is taken.
        kept: the bytes that each stage keeps of a micro-batch [stages].
    """
    excess = []
    for m in memory:
        other_bytes = m.parameters + m.gradients + m.optimizer + m.transient
        kept_by_stages = kept[m.pp_rank :: problem.pp]
        excess.append(problem.peaks(m.pp_rank) @ kept_by_stages + other_bytes - problem.tensor_limits[m.pp_rank])
    return excess


def _changes(problem: CutProblem, stops: Stops, rank: int) -> list[_Change]:
    """Return the changes to leaner modes of all blocks of a rank; the changes of the same blocks follow each other."""
    equal_blocks: dict[tuple[int, int], list[int]] = {}  # by stage and key
    rank_blocks = problem.block_options[rank].blocks
    for turn, (_, start, stop) in enumerate(problem.spans(stops)[rank :: problem.pp]):
        for i in range(start, stop):
            equal_blocks.setdefault((turn, rank_blocks[i].key), []).append(i)
    changes: list[_Change] = []
    for (turn, _), members in equal_blocks.items():
        options = [option for option in rank_blocks[members[0]].options if option.mode != OFFLOADED]
        hull = [options[i] for i in lower_hull(options)]
        for level, (before, after) in enumerate(pairwise(hull)):
            changes.append(
                _Change(
                    turn=turn,
                    blocks=tuple(members),
                    previous=len(changes) - 1 if level else -1,
                    mode=after.mode,
                    time_s=after.time_s - before.time_s,
                    freed_bytes=before.held_bytes - after.held_bytes,
                )
            )
    return changes


class _Cover:
    """The covering program of some ranks: their changes to leaner modes, and the bytes that these free at the fullest moments.

    Attributes:
        changes: the changes of each rank.
        freed: bytes that a change of one block frees [ranks, changes, moments].
        time_s: seconds that a change of one block adds [ranks, changes].
        sizes: how many blocks may make a change [ranks, changes]; 0 pads ranks with fewer changes.
        previous: the change that must come before [ranks, changes]; -1 if there is none.
    """

    def __init__(self, problem: CutProblem, stops: Stops, ranks: Sequence[int]) -> None:
        self.problem, self.stops = problem, stops
        self.changes = [_changes(problem, stops, rank) for rank in ranks]
        peaks = [problem.peaks(rank) for rank in ranks]
        shape = len(ranks), max(1, *map(len, self.changes))
        self.freed = np.zeros((*shape, max(map(len, peaks))))
        self.time_s, self.sizes, self.previous = np.ones(shape), np.zeros(shape), np.full(shape, -1)
        for row, (moments, changes) in enumerate(zip(peaks, self.changes, strict=True)):
            for i, change in enumerate(changes):
                self.freed[row, i, : len(moments)] = moments[:, change.turn] * change.freed_bytes
                self.time_s[row, i], self.sizes[row, i] = max(change.time_s, TINY_S), len(change.blocks)
                self.previous[row, i] = change.previous

    def counts(self, excess_by_rank: Sequence[Array]) -> Array | None:
        """Return how many blocks make each change [ranks, changes]; None if all changes together free too little.

        Args:
            excess_by_rank: the bytes in excess of each rank at its moments.
        """
        ranks, counts = np.arange(len(excess_by_rank)), np.zeros(self.sizes.shape)
        excess = np.full((len(excess_by_rank), self.freed.shape[2]), -np.inf)  # no excess where moments are padding
        for row, of_rank in enumerate(excess_by_rank):
            excess[row, : len(of_rank)] = of_rank
        while True:
            missing = np.maximum(excess, 0.0)
            covered = np.minimum(self.freed, missing[:, None]).sum(axis=2)
            available = self._limits(counts) - counts
            gains = np.where((available > 0) & (covered > 0), covered / self.time_s, 0.0)
            best = gains.argmax(axis=1)
            is_useful = gains[ranks, best] > 0
            if not is_useful.any():
                break
            freed = self.freed[ranks, best]
            repeats = np.where((missing > 0) & (freed > 0), missing / np.maximum(freed, 1.0), np.inf).min(axis=1)
            number = np.clip(np.floor(repeats), 1.0, available[ranks, best]) * is_useful
            counts[ranks, best] += number
            excess = excess - number[:, None] * freed
        for change in np.argsort(-self.time_s, axis=1, kind="stable").T:  # of each rank, the slowest changes first
            count = counts[ranks, change]
            if not count.any():
                continue
            freed = self.freed[ranks, change]
            needed = (counts * (self.previous == change[:, None])).sum(axis=1)
            removable = np.where(freed > 0, -excess / np.maximum(freed, 1.0), np.inf).min(axis=1)
            back = np.clip(np.floor(removable), 0.0, count - needed)
            counts[ranks, change] -= back
            excess = excess + back[:, None] * freed
        return None if (excess > 0).any() else counts

    def modes(self, counts: Array) -> Modes:
        """Return the modes of all blocks; of the equal blocks of a stage the first ones recompute most.

        Blocks of other ranks are in their quickest modes.

        Args:
            counts: how many blocks make each change [ranks, changes].
        """
        modes = list(self.problem.quickest_modes(self.stops))
        for changes, counts_of_rank in zip(self.changes, counts.astype(int).tolist(), strict=True):
            for change, count in zip(changes, counts_of_rank, strict=False):
                for i in change.blocks[:count]:
                    modes[i] = change.mode
        return tuple(modes)

    def _limits(self, counts: Array) -> Array:
        """Return how many blocks may make each change: at most as many as have made the change before it."""
        before = np.take_along_axis(counts, np.maximum(self.previous, 0), axis=1)
        limits: Array = np.where(self.previous >= 0, before, self.sizes)
        return limits


TRIED_CUTS, TRIED_ACTIONS = 60, 150_000
"""A local search makes and simulates up to so many cuts; more, if all their simulations together have no more actions than that.

Small pipelines are searched to the end so, which 60 cuts seldom reach (docs/adr/0023 compares other limits).
"""

QUICK_TRIES = 4
"""The cuts in succession without a gain after which a quick local search ends (docs/adr/0023: 4, 6 and 10 give the same plans)."""

LEAST_GAIN = 1e-6
"""The least reduction of the step, relative to it, for which a move is accepted."""


def improved(problem: CutProblem, fitting: Fitting, time_s: float, *, is_quick: bool = False) -> Fitting:
    """Return the cut that a local search ends with, over moves of one block from one stage to another; the same cut if none is quicker.

    Args:
        problem: the problem.
        fitting: a cut that fits.
        time_s: the simulated seconds of its step.
        is_quick: end after :data:`QUICK_TRIES` cuts without a gain; a pipeline of which not so many are tried is left as it is.
    """
    most = TRIED_ACTIONS // (2 * problem.num_stages * problem.candidate.num_micro_batches)
    if is_quick and most < QUICK_TRIES:
        return fitting
    moves, covers, masks = _Moves(problem, fitting), RankCovers(problem), problem.masks()
    seen, best, in_vain = {fitting.stops}, fitting, 0
    while len(seen) <= max(TRIED_CUTS, most) and not (is_quick and in_vain == QUICK_TRIES):
        in_vain += 1
        stops = moves.most_promising(seen, time_s * (1 - LEAST_GAIN), masks)
        if stops is None:
            break
        seen.add(stops)
        neighbour = covers.fitting(stops)
        if neighbour is None:
            continue
        neighbour_s = moves.add(neighbour)
        if neighbour_s < time_s * (1 - LEAST_GAIN):
            best, time_s, in_vain = neighbour, neighbour_s, 0
            moves.begin(best)
    return refined(problem, best) if best is not fitting else fitting


class RankCovers:
    """Makes cuts with given stops that fit, with as much recompute as each rank needs, on whichever of its stages.

    The recompute of a rank depends only on the blocks of its stages, by which it is cached.
    """

    def __init__(self, problem: CutProblem) -> None:
        self.problem = problem
        self._keys = [[block.key for block in rank_blocks.blocks] for rank_blocks in problem.block_options]
        self._cover_of: dict[tuple[object, ...], tuple[list[Modes], Memory]] = {}
        """The modes of each stage of a rank and its memory, by the rank and the keys of the blocks of each stage."""

    def fitting(self, stops: Stops) -> Fitting | None:
        """Return the cut into stages of these stops; None if no choice of modes is found with which it fits."""
        problem, pp = self.problem, self.problem.pp
        if problem.candidate.offloads_activations:
            fitting = fitted(problem, exactly(stops, problem.num_blocks))
            return fitting if isinstance(fitting, Fitting) else None
        spans = problem.spans(stops)
        spans_of = [spans[rank::pp] for rank in range(pp)]
        keys = [
            (r, *(tuple(self._keys[r][start:stop]) for _, start, stop in parts)) for r, parts in enumerate(spans_of)
        ]
        missing = [rank for rank, key in enumerate(keys) if key not in self._cover_of]
        if missing:
            covering = _covering_modes(problem, stops, missing)
            if covering is None:
                return None
            for rank, memory in zip(missing, covering[1], strict=True):
                self._cover_of[keys[rank]] = [covering[0][start:stop] for _, start, stop in spans_of[rank]], memory
        covers = [self._cover_of[key] for key in keys]
        modes = tuple(mode for s, (rank, _, _) in enumerate(spans) for mode in covers[rank][0][s // pp])
        stages = problem.stages_of(stops, modes)
        return Fitting(stops=stops, modes=modes, stages=stages, memory=tuple(memory for _, memory in covers))


class _Moves:
    """The neighbours of a cut, one move of a block away, with lower bounds on their steps.

    A bound is the longest that any known chain is in the neighbour if no block recomputes.

    Args:
        problem: the problem.
        fitting: the cut.

    Attributes:
        chains: the known chains: those that were the longest in cuts so far.
        stops: the stops of each neighbouring cut [moves, stages].
        times_s: the bound on the step of each of them [moves].
    """

    def __init__(self, problem: CutProblem, fitting: Fitting) -> None:
        self.problem = problem
        self.chains: list[Chain] = []
        distinct = list(dict.fromkeys(problem.block_options))
        block_options = problem.block_options * problem.candidate.virtual_stages  # of each stage
        self.device_of_stage = np.array([distinct.index(options) for options in block_options])
        self.prefixes_s = np.stack([options.quickest_prefixes_s for options in distinct], axis=1)
        self.begin(fitting)
        self.add(fitting)

    def begin(self, fitting: Fitting) -> None:
        """Take another cut as the one whose neighbours are tried."""
        sizes = np.diff((0, *fitting.stops))
        source, target = ((sizes[:, None] > 1) & ~np.eye(len(sizes), dtype=bool)).nonzero()
        unit = np.eye(len(sizes), dtype=np.int64)
        self.stops = np.cumsum(sizes - unit[source] + unit[target], axis=1)  # [moves, stages]
        starts = np.pad(self.stops[:, :-1], ((0, 0), (1, 0)))
        device, prefixes_s = self.device_of_stage, self.prefixes_s
        self.forward_s, both_s = prefixes_s[:, device, self.stops] - prefixes_s[:, device, starts]  # [moves, stages]
        self.backward_s = both_s - self.forward_s
        self.times_s = self._longest_s(self.chains) if self.chains else np.zeros(len(source))

    def add(self, fitting: Fitting) -> float:
        """Return the seconds of the step of a cut, and add its longest chains to the known ones: one chain to the end of each rank."""
        time_s, new_chains = self.problem.model.longest_chains(fitting.stages, self.problem.step)
        self.chains += new_chains
        self.times_s = np.maximum(self.times_s, self._longest_s(new_chains))
        return time_s

    def most_promising(self, seen: set[Stops], goal_s: float, masks: list[list[NDArray[np.bool_]]]) -> Stops | None:
        """Return the stops of the neighbour of least bound that is new and allowed; None if no such bound is below ``goal_s``."""
        for move in np.argsort(self.times_s, kind="stable").tolist():
            if self.times_s[move] >= goal_s:
                return None
            stops = tuple(self.stops[move].tolist())
            if stops not in seen and any(allows(way, stops) for way in masks):
                return stops
        return None

    def _longest_s(self, chains: Sequence[Chain]) -> Array:
        """Return the seconds of the longest of some chains in each neighbour, without recompute [moves]."""
        forwards, backwards = (np.array([getattr(c, name) for c in chains]) for name in ("forwards", "backwards"))
        sends_s = np.array([c.sends_s for c in chains])
        longest_s: Array = (self.forward_s @ forwards.T + self.backward_s @ backwards.T + sends_s).max(axis=1)
        return longest_s
