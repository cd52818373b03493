"""Local search: a block moves from one stage to another as long as the simulated step gets shorter.

The cut balances what each rank takes. Which of several stages has one block more decides how the pipeline fills and drains, and
what ranks that differ wait for; the simulation works that out action by action. A step is as long as its longest chain of actions
(:mod:`autopar.cost.step.simulation`), and with other stages the same actions still follow each other: so each chain that was the
longest of some cut says how long other cuts take at least, if no block recomputes. Moves are simulated in the order of the longest of
all chains that are known, until none is left that may be shorter than the best cut.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.cost.step.simulation import Chain
from autopar.planner.stages.cut_problem import CutProblem, Fitting, Stops, allows, exactly, fitted
from autopar.planner.stages.recompute import Array
from autopar.planner.stages.refinement import covered, refined

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
    masks = problem.masks()
    bound = _ChainBound(problem)
    bound.add(found)
    seen, best = {found.stops}, found
    while len(seen) <= TRIES:
        stops = _next(bound, best.stops, seen, time_s * (1 - LEAST_GAIN), masks)
        if stops is None:
            break
        seen.add(stops)
        other = _fitted(problem, stops)
        if other is None:
            continue
        bound.add(other)
        other_s = problem.time_s(other)
        if other_s < time_s * (1 - LEAST_GAIN):
            best, time_s = other, other_s
    return refined(problem, best) if best is not found else found


def _fitted(problem: CutProblem, stops: Stops) -> Fitting | None:
    if not problem.candidate.moves:
        return covered(problem, stops)
    other = fitted(problem, exactly(stops, problem.num_blocks), float("inf"))
    return other if isinstance(other, Fitting) else None


def _next(
    bound: _ChainBound, stops: Stops, seen: set[Stops], goal_s: float, masks: list[list[NDArray[np.bool_]]]
) -> Stops | None:
    """The cut one move away that is not known yet and has the least bound; None where none is below a time."""
    sizes = np.diff((0, *stops))
    pairs = [(a, b) for a in np.flatnonzero(sizes > 1).tolist() for b in range(len(sizes)) if a != b]
    if not pairs:
        return None
    one = np.eye(len(sizes), dtype=np.int64)
    every = np.cumsum([sizes - one[a] + one[b] for a, b in pairs], axis=1)
    times = bound.times_s(every)
    for place in np.argsort(times, kind="stable").tolist():
        if times[place] >= goal_s:
            return None
        other = tuple(every[place].tolist())
        if other not in seen and any(allows(own, other) for own in masks):
            return other
    return None


class _ChainBound:
    """Of cuts into stages how long the chains that are known take, if no block recomputes."""

    def __init__(self, problem: CutProblem) -> None:
        self.problem = problem
        self.chains: list[Chain] = []
        kinds = list(dict.fromkeys(problem.block_options))
        self.kind = np.array([kinds.index(own) for own in problem.block_options * problem.candidate.virtual_stages])
        self.forward_s, self.time_s = np.stack([own.quickest_s for own in kinds], axis=1)

    def add(self, found: Fitting) -> None:
        """The longest chains of a cut, one for each rank at whose end one stands."""
        self.chains += self.problem.model.longest_chains(found.made, self.problem.step)

    def times_s(self, stops: NDArray[np.int64]) -> Array:
        """The longest chain of each of some cuts [cuts]."""
        starts = np.concatenate([np.zeros((len(stops), 1), dtype=np.int64), stops[:, :-1]], axis=1)
        forward_s = self.forward_s[self.kind, stops] - self.forward_s[self.kind, starts]
        backward_s = self.time_s[self.kind, stops] - self.time_s[self.kind, starts] - forward_s
        forwards, backwards = (
            np.array([getattr(own, name) for own in self.chains]) for name in ("forwards", "backwards")
        )
        sends_s = np.array([own.sends_s for own in self.chains])
        found: Array = (forward_s @ forwards.T + backward_s @ backwards.T + sends_s).max(axis=1)
        return found
