"""Which blocks of a rank with several stages recompute.

The cut gives each stage an equal share of its rank's memory and counts the most micro-batches that it ever holds. But a rank's
stages are full at different moments, so the same block frees more on one stage than on another, and some stages never hold much.
Here a rank's blocks are weighed together against its fullest moments: of all steps to a leaner mode (of
:func:`autopar.planner.stages.activation_modes.lower_hull`) the one is taken that frees most of what the rank has too much for its
seconds, until no moment has too much, and steps that turn out not to be needed are taken back: the greedy algorithm of covering
programs (Dobson 1982).

Of choices that take equally long the quickest are those that recompute on the same turn on all ranks: ranks run their stages of one
turn side by side, and wait for each other. Which turn is best depends on the fill and the drain of the pipeline: each is tried, and
the simulation judges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.planner.stages.activation_modes import MOVED, BlockOption, Way, lower_hull
from autopar.planner.stages.cut_problem import CutProblem, Fitting, Modes
from autopar.planner.stages.recompute import Array

BEGUN = 2
"""Micro-batches for each pipeline rank by which choices are compared where a step has more."""

TIE = 1 + 1e-9
"""Ratio of times that are equal but for rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """From one mode to a leaner one for the equal blocks of a stage.

    Attributes:
        turn: of the stage on its rank.
        key: of the blocks.
        before, after: the modes.
        time_s, freed_bytes: of one block.
    """

    turn: int
    key: int
    before: Way
    after: Way
    time_s: float
    freed_bytes: float


def refined(problem: CutProblem, found: Fitting) -> Fitting:
    """The cut with other blocks recomputed where that is quicker and fits; never slower, nor too large where it was not.

    Cuts whose ranks hold one stage, or whose blocks may keep on the host what they need, are left as they are.
    """
    if problem.candidate.virtual_stages == 1 or problem.candidate.moves or not {"selective", "full"} & {*found.modes}:
        return found
    needs = _needs(problem, found)
    choices = [own for own in _choices(problem, found, needs) if own != found.modes]
    made = [problem.stages_of(found.stops, modes) for modes in choices]
    if not made:
        return found
    count = min(problem.candidate.num_micro_batches, BEGUN * problem.pp)
    ends_s = problem.model.finishes_s([*made, found.made], problem.step, count).max(axis=1)
    for place in np.argsort(ends_s, kind="stable"):
        if place == len(choices):
            return found
        other = problem.fitting(found.stops, choices[place])
        if problem.fits(other):
            return other if problem.time_s(other) < problem.time_s(found) else found
    return found


def _needs(problem: CutProblem, found: Fitting) -> list[Array]:
    """For each rank the bytes that it has too much at each of its fullest moments if all blocks take their quickest modes."""
    last = problem.num_stages - 1
    kept = [
        problem.model.stage_kept_bytes(stage, receives=s > 0, sends=s < last) for s, stage in enumerate(found.made)
    ]
    chosen = problem.quickest_modes(found.stops)
    more = [0.0] * problem.num_stages
    for s, (rank, start, stop) in enumerate(problem.spans(found.stops)):
        for i in range(start, stop):
            options = {option.mode: option for option in problem.block_options[rank].blocks[i].options}
            more[s] += options[chosen[i]].held_bytes - options[found.modes[i]].held_bytes
    needs = []
    for rank, limit in enumerate(problem.tensor_limits):
        memory = found.memory[rank]
        others = memory.parameters + memory.gradients + memory.optimizer + memory.transient
        held = np.array(kept[rank :: problem.pp]) + np.array(more[rank :: problem.pp])
        needs.append(problem.peaks(rank) @ held + others - limit)
    return needs


def _choices(problem: CutProblem, found: Fitting, needs: Sequence[Array]) -> Iterator[Modes]:
    """Modes of all blocks, one choice for each turn that is preferred."""
    ranks = [_Rank(problem, found, rank, needs[rank]) for rank in range(problem.pp)]
    seen = set()
    for turn in range(problem.candidate.virtual_stages):
        chosen = [own.choice(turn) for own in ranks]
        if any(own is None for own in chosen):
            return
        modes = list(problem.quickest_modes(found.stops))
        for own, counts in zip(ranks, chosen, strict=True):
            assert counts is not None
            own.apply(counts, modes)
        if tuple(modes) not in seen:
            seen.add(tuple(modes))
            yield tuple(modes)


class _Rank:
    """The blocks of one rank's stages, and what it has too much at its fullest moments."""

    def __init__(self, problem: CutProblem, found: Fitting, rank: int, needs: Array) -> None:
        self.needs = needs
        self.blocks: dict[tuple[int, int], list[int]] = {}
        """Positions of the equal blocks of each stage, by turn and key."""
        options: dict[int, Sequence[BlockOption]] = {}
        own = problem.block_options[rank].blocks
        for turn, (_, start, stop) in enumerate(problem.spans(found.stops)[rank :: problem.pp]):
            for i in range(start, stop):
                self.blocks.setdefault((turn, own[i].key), []).append(i)
                options[own[i].key] = [option for option in own[i].options if option.mode != MOVED]
        self.steps = [step for turn, key in self.blocks for step in _steps(turn, key, options[key])]
        peaks = problem.peaks(rank)
        self.freed = np.array([peaks[:, step.turn] * step.freed_bytes for step in self.steps])
        self.time_s = np.array([step.time_s for step in self.steps])
        self.turns = np.array([step.turn for step in self.steps])
        self.sizes = np.array([len(self.blocks[step.turn, step.key]) for step in self.steps])
        place = {(step.turn, step.key, step.after): i for i, step in enumerate(self.steps)}
        self.previous = np.array([place.get((s.turn, s.key, s.before), -1) for s in self.steps], dtype=np.int64)
        self._least_s = np.inf

    def choice(self, turn: int) -> Array | None:
        """How often each step is taken, of choices of the least time one with most on a turn; None: all free too little."""
        if not len(self.steps):
            return np.zeros(0) if self.needs.max() <= 0 else None
        best: Array | None = None
        if np.isinf(self._least_s):
            for own in range(-1, self.turns.max() + 1):
                found = self._greedy(own)
                if found is not None:
                    self._least_s = min(self._least_s, float(found @ self.time_s))
        for found in (self._greedy(turn), self._greedy(-1)):
            if found is not None and float(found @ self.time_s) <= self._least_s * TIE:
                return found
            best = best if best is not None else found
        return best

    def _greedy(self, first: int) -> Array | None:
        """Steps that free enough; those of turn ``first`` before others of the same seconds."""
        taken, left = np.zeros(len(self.steps)), self.needs.astype(float)
        while left.max() > 0:
            limit = np.where(self.previous >= 0, taken[self.previous], self.sizes)
            useful = np.minimum(self.freed, np.maximum(left, 0.0)).sum(axis=1)
            may = (taken < limit) & (useful > 0)
            if not may.any():
                return None
            gains = np.where(may, useful / np.maximum(self.time_s, 1e-12), -1.0)
            if first >= 0 and (may & (self.turns == first)).any():
                gains = np.where(self.turns == first, gains, -1.0)
            best = int(gains.argmax())
            taken[best] += 1
            left = left - self.freed[best]
        for i in np.argsort(-self.time_s, kind="stable"):
            onward = taken[self.previous == i].sum()
            while taken[i] > onward and (left + self.freed[i]).max() <= 0:
                taken[i] -= 1
                left = left + self.freed[i]
        return taken

    def apply(self, counts: Array, modes: list[Way]) -> None:
        """Write the modes of this rank's blocks; of equal ones of a stage the first recompute the most."""
        left = {key: list(places) for key, places in self.blocks.items()}
        onward = [counts[self.previous == i].sum() for i in range(len(self.steps))]
        for i in reversed(range(len(self.steps))):  # steps of one kind stand in order
            step = self.steps[i]
            for _ in range(int(counts[i] - onward[i])):
                modes[left[step.turn, step.key].pop(0)] = step.after


def _steps(turn: int, key: int, options: Sequence[BlockOption]) -> Iterator[_Step]:
    hull = [options[i] for i in lower_hull(options)]
    for one, other in zip(hull, hull[1:], strict=False):
        yield _Step(
            turn=turn, key=key, before=one.mode, after=other.mode,
            time_s=other.time_s - one.time_s, freed_bytes=one.held_bytes - other.held_bytes,
        )  # fmt: skip
