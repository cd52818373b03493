"""A cut made better: blocks of ranks with several stages recompute where it frees most, and move from one stage to another.

The cut gives each stage an equal share of its rank's memory and counts the most micro-batches that it ever holds. But a rank's stages are
full at different moments, so the same block frees more on one stage than on another, and some stages never hold much. Here a rank's blocks
are weighed together against its fullest moments: of all steps to a leaner mode (of :func:`autopar.planner.stages.recompute.lower_hull`) the
one is taken that frees most of what the rank has too much for its seconds, until no moment has too much, and steps that turn out not to be
needed are taken back: the greedy algorithm of covering programs (Dobson 1982).

A block moves as long as the simulated step gets shorter. The cut balances what each rank takes. Which of several stages has one block more
decides how the pipeline fills and drains, and what ranks that differ wait for; the simulation works that out action by action. A step is as
long as its longest chain of actions (:mod:`autopar.cost.step.simulation`), and with other stages the same actions still follow each other:
so each chain that was the longest of some cut says how long other cuts take at least, if no block recomputes. Moves are simulated in the
order of the longest of all chains that are known, until none is left that may be shorter than the best cut.
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
from autopar.planner.stages.cut_problem import CutProblem, Fitting, Modes, Stops, allows, exactly, fitted
from autopar.planner.stages.recompute import MOVED, Array, Mode, lower_hull

MAX_CHOICES = 4
"""Times that ranks choose again because the memory model finds more than they counted."""

TINY_S = 1e-12
"""Seconds that a step takes at least, so that what is freed for each second is finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """To a leaner mode, for the equal blocks of a stage.

    Attributes:
        turn: of the stage on its rank.
        blocks: their positions.
        previous: the step of the same rank that brings them to the mode before; -1: they have it from the beginning.
        mode: that they have then.
        time_s, freed_bytes: of one block.
    """

    turn: int
    blocks: tuple[int, ...]
    previous: int
    mode: Mode
    time_s: float
    freed_bytes: float


def refined(problem: CutProblem, found: Fitting) -> Fitting:
    """The cut with other blocks recomputed where that is quicker and fits; never slower, nor too large where it was not.

    Cuts whose ranks hold one stage, or whose blocks may keep on the host what they need, are left as they are.
    """
    if problem.candidate.virtual_stages == 1 or problem.candidate.moves or not {"selective", "full"} & {*found.modes}:
        return found
    covered = _covered(problem, found.stops, range(problem.pp))
    if covered is None or covered[0] == found.modes:
        return found
    other = problem.fitting(found.stops, covered[0])
    return other if problem.fits(other) and problem.time_s(other) < problem.time_s(found) else found


def _covered(problem: CutProblem, stops: Stops, ranks: Sequence[int]) -> tuple[Modes, Sequence[Memory]] | None:
    """The modes in which some ranks take the least time, and their memory, which is as much as they have; None where there are none.

    What a rank needs in passing depends on what it recomputes: it is taken from one choice for the next one, from none at all on.
    Blocks of other ranks are in their quickest modes.
    """
    cover = _Cover(problem, stops, ranks)
    limits = [problem.memory_limits[rank] for rank in ranks]
    modes = problem.quickest_modes(stops)
    made = problem.stages_of(stops, modes)
    memory = problem.model.memory(made, problem.step, ranks)
    held = _held(made)
    needs = _needs(problem, memory, held)
    for _ in range(MAX_CHOICES):
        if _fit(memory, limits):
            break
        taken = cover.taken(needs)
        if taken is None:
            return None
        modes = cover.modes(taken)
        memory = problem.model.memory(problem.stages_of(stops, modes), problem.step, ranks)
        needs = [
            own if now.total <= limit else np.maximum(np.maximum(own, more), own + now.total - limit)
            for own, more, now, limit in zip(needs, _needs(problem, memory, held), memory, limits, strict=True)
        ]
    return (modes, memory) if _fit(memory, limits) else None


def _fit(memory: Sequence[Memory], limits: Sequence[int]) -> bool:
    return all(own.total <= limit for own, limit in zip(memory, limits, strict=True))


def needs_of(problem: CutProblem, found: Fitting) -> list[Array]:
    """For each rank the bytes that it has too much at each of its fullest moments; below zero: what it has left."""
    return _needs(problem, found.memory, _held(found.made))


def _held(made: Sequence[StageCost]) -> Array:
    """What stages keep of a micro-batch [stages]."""
    last = len(made) - 1
    return np.array([kept_bytes(stage, receives=s > 0, sends=s < last) for s, stage in enumerate(made)])


def _needs(problem: CutProblem, memory: Sequence[Memory], held: Array) -> list[Array]:
    """For each of some ranks the bytes that it has too much at each of its fullest moments if all blocks take their quickest modes.

    Args:
        memory: of the ranks; what they have beside what micro-batches keep is taken from it.
        held: what stages then keep of a micro-batch [stages].
    """
    needs = []
    for own in memory:
        others = own.parameters + own.gradients + own.optimizer + own.transient
        kept = held[own.pp_rank :: problem.pp]
        needs.append(problem.peaks(own.pp_rank) @ kept + others - problem.tensor_limits[own.pp_rank])
    return needs


def _rank_steps(problem: CutProblem, stops: Stops, rank: int) -> list[_Step]:
    """Of all blocks of a rank; steps of the same blocks one after the other."""
    blocks: dict[tuple[int, int], list[int]] = {}
    own = problem.block_options[rank].blocks
    for turn, (_, start, stop) in enumerate(problem.spans(stops)[rank :: problem.pp]):
        for i in range(start, stop):
            blocks.setdefault((turn, own[i].key), []).append(i)
    steps: list[_Step] = []
    for (turn, _), places in blocks.items():
        options = [option for option in own[places[0]].options if option.mode != MOVED]
        hull = [options[i] for i in lower_hull(options)]
        for level, (one, other) in enumerate(pairwise(hull)):
            steps.append(
                _Step(
                    turn=turn,
                    blocks=tuple(places),
                    previous=len(steps) - 1 if level else -1,
                    mode=other.mode,
                    time_s=other.time_s - one.time_s,
                    freed_bytes=one.held_bytes - other.held_bytes,
                )
            )
    return steps


class _Cover:
    """The steps of some ranks, and what they free at the ranks' fullest moments.

    Attributes:
        steps: of each rank.
        freed: by one block [ranks, steps, moments].
        time_s, sizes, previous: [ranks, steps]; of fewer steps the rest is of no blocks.
    """

    def __init__(self, problem: CutProblem, stops: Stops, ranks: Sequence[int]) -> None:
        self.problem, self.stops = problem, stops
        self.steps = [_rank_steps(problem, stops, rank) for rank in ranks]
        peaks = [problem.peaks(rank) for rank in ranks]
        shape = len(ranks), max(1, *map(len, self.steps))
        self.freed = np.zeros((*shape, max(map(len, peaks))))
        self.time_s, self.sizes, self.previous = np.ones(shape), np.zeros(shape), np.full(shape, -1)
        for place, (moments, own) in enumerate(zip(peaks, self.steps, strict=True)):
            for i, step in enumerate(own):
                self.freed[place, i, : len(moments)] = moments[:, step.turn] * step.freed_bytes
                self.time_s[place, i], self.sizes[place, i] = max(step.time_s, TINY_S), len(step.blocks)
                self.previous[place, i] = step.previous

    def taken(self, needs: Sequence[Array]) -> Array | None:
        """How often steps are taken [ranks, steps]; None where too little is freed.

        Args:
            needs: bytes that each rank has too much at its moments.
        """
        every, taken = np.arange(len(needs)), np.zeros(self.sizes.shape)
        left = np.full((len(needs), self.freed.shape[2]), -np.inf)  # of fewer moments the rest has nothing too much
        for place, own in enumerate(needs):
            left[place, : len(own)] = own
        while True:
            missing = np.maximum(left, 0.0)
            useful = np.minimum(self.freed, missing[:, None]).sum(axis=2)
            room = self._limits(taken) - taken
            gains = np.where((room > 0) & (useful > 0), useful / self.time_s, 0.0)
            best = gains.argmax(axis=1)
            may = gains[every, best] > 0
            if not may.any():
                break
            freed = self.freed[every, best]
            whole = np.where((missing > 0) & (freed > 0), missing / np.maximum(freed, 1.0), np.inf).min(axis=1)
            number = np.clip(np.floor(whole), 1.0, room[every, best]) * may
            taken[every, best] += number
            left = left - number[:, None] * freed
        for place in np.argsort(-self.time_s, axis=1, kind="stable").T:
            own = taken[every, place]
            if not own.any():
                continue
            freed = self.freed[every, place]
            onward = (taken * (self.previous == place[:, None])).sum(axis=1)
            spare = np.where(freed > 0, -left / np.maximum(freed, 1.0), np.inf).min(axis=1)
            back = np.clip(np.floor(spare), 0.0, own - onward)
            taken[every, place] -= back
            left = left + back[:, None] * freed
        return None if (left > 0).any() else taken

    def modes(self, taken: Array) -> Modes:
        """Of all blocks, by how often each rank takes its steps [ranks, steps]; of equal ones of a stage the first recompute the most.

        Those of ranks that are not looked at are in their quickest modes.
        """
        modes = list(self.problem.quickest_modes(self.stops))
        for own, counts in zip(self.steps, taken.astype(int).tolist(), strict=True):
            for step, count in zip(own, counts, strict=False):
                for i in step.blocks[:count]:
                    modes[i] = step.mode
        return tuple(modes)

    def _limits(self, taken: Array) -> Array:
        """How often each step may be taken: by the blocks that took the one before it."""
        before = np.take_along_axis(taken, np.maximum(self.previous, 0), axis=1)
        found: Array = np.where(self.previous >= 0, before, self.sizes)
        return found


TRIES = 60
"""Cuts that are made and simulated, at most."""

LEAST_GAIN = 1e-6
"""Of a step, below which a move is none."""


def improved(problem: CutProblem, found: Fitting, time_s: float) -> Fitting:
    """A cut from which no move that was tried shortens the step; that which is given where none does.

    Args:
        found: a cut that fits.
        time_s: of its step.
    """
    moves, covers, masks = _Moves(problem, found), RankCovers(problem), problem.masks()
    seen, best = {found.stops}, found
    while len(seen) <= TRIES:
        stops = moves.shortest(seen, time_s * (1 - LEAST_GAIN), masks)
        if stops is None:
            break
        seen.add(stops)
        other = covers.fitting(stops)
        if other is None:
            continue
        other_s = moves.add(other)
        if other_s < time_s * (1 - LEAST_GAIN):
            best, time_s = other, other_s
            moves.begin(best)
    return refined(problem, best) if best is not found else found


class RankCovers:
    """Cuts with as much recompute as each rank needs, whichever turn it is on.

    That depends on the blocks of the rank's own stages, by which it is remembered.
    """

    def __init__(self, problem: CutProblem) -> None:
        self.problem = problem
        self._keys = [[block.key for block in own.blocks] for own in problem.block_options]
        self._known: dict[tuple[object, ...], tuple[list[Modes], Memory]] = {}
        """By ranks and their blocks the modes of each of their stages."""

    def fitting(self, stops: Stops) -> Fitting | None:
        """Stages that end at these blocks; None where none fits."""
        problem, pp = self.problem, self.problem.pp
        if problem.candidate.moves:
            other = fitted(problem, exactly(stops, problem.num_blocks))
            return other if isinstance(other, Fitting) else None
        spans = problem.spans(stops)
        of_rank = [spans[rank::pp] for rank in range(pp)]
        keys = [
            (rank, *(tuple(self._keys[rank][start:stop]) for _, start, stop in own)) for rank, own in enumerate(of_rank)
        ]
        asked = [rank for rank, key in enumerate(keys) if key not in self._known]
        if asked:
            found = _covered(problem, stops, asked)
            if found is None:
                return None
            for rank, memory in zip(asked, found[1], strict=True):
                self._known[keys[rank]] = [found[0][start:stop] for _, start, stop in of_rank[rank]], memory
        known = [self._known[key] for key in keys]
        modes = tuple(mode for s, (rank, _, _) in enumerate(spans) for mode in known[rank][0][s // pp])
        made = problem.stages_of(stops, modes)
        return Fitting(stops=stops, modes=modes, made=made, memory=tuple(memory for _, memory in known))


class _Moves:
    """The cuts one move away from a cut, and how long the chains that are known take in each if no block recomputes.

    Args:
        found: the cut.
    """

    def __init__(self, problem: CutProblem, found: Fitting) -> None:
        self.problem = problem
        self.chains: list[Chain] = []
        kinds = list(dict.fromkeys(problem.block_options))
        self.kind = np.array([kinds.index(own) for own in problem.block_options * problem.candidate.virtual_stages])
        self.quickest_s = np.stack([own.quickest_s for own in kinds], axis=1)
        self.begin(found)
        self.add(found)

    def begin(self, found: Fitting) -> None:
        """Moves from another cut."""
        sizes = np.diff((0, *found.stops))
        source, target = ((sizes[:, None] > 1) & ~np.eye(len(sizes), dtype=bool)).nonzero()
        one = np.eye(len(sizes), dtype=np.int64)
        self.stops = np.cumsum(sizes - one[source] + one[target], axis=1)  # [moves, stages]
        starts = np.pad(self.stops[:, :-1], ((0, 0), (1, 0)))
        self.forward_s, both_s = self.quickest_s[:, self.kind, self.stops] - self.quickest_s[:, self.kind, starts]
        self.backward_s = both_s - self.forward_s
        self.times_s = self._longest_s(self.chains) if self.chains else np.zeros(len(source))

    def add(self, found: Fitting) -> float:
        """Seconds of the step of a cut, whose longest chains are known then, one for each rank at whose end one stands."""
        time_s, more = self.problem.model.longest_chains(found.made, self.problem.step)
        self.chains += more
        self.times_s = np.maximum(self.times_s, self._longest_s(more))
        return time_s

    def shortest(self, seen: set[Stops], goal_s: float, masks: list[list[NDArray[np.bool_]]]) -> Stops | None:
        """The cut that is not known yet and takes the least; None where all that are allowed take as long as ``goal_s``."""
        for place in np.argsort(self.times_s, kind="stable").tolist():
            if self.times_s[place] >= goal_s:
                return None
            other = tuple(self.stops[place].tolist())
            if other not in seen and any(allows(own, other) for own in masks):
                return other
        return None

    def _longest_s(self, chains: Sequence[Chain]) -> Array:
        """The longest of some chains in each cut."""
        forwards, backwards = (np.array([getattr(own, name) for own in chains]) for name in ("forwards", "backwards"))
        sends_s = np.array([own.sends_s for own in chains])
        found: Array = (self.forward_s @ forwards.T + self.backward_s @ backwards.T + sends_s).max(axis=1)
        return found
