"""Local search: a block moves from one stage to another as long as the simulated step gets shorter.

The cut balances what each rank takes. Which of several stages has one block more decides how the pipeline fills and drains, and
what ranks that differ wait for; the simulation works that out action by action. A step is as long as its longest chain of actions
(:mod:`autopar.cost.step.critical_path`): blocks move off the stages of which that chain has the most to those of which it has fewer,
nothing else can make it shorter.
"""

from __future__ import annotations

from itertools import accumulate

from autopar.planner.stages.cut_problem import CutProblem, Failure, Fitting, Stops, allows, exactly
from autopar.planner.stages.fit import fitted
from autopar.planner.stages.refinement import refined

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
    seen, best, ways = {found.stops}, found, problem.masks()
    while len(seen) <= TRIES:
        for stops in _beside(problem, best):
            if stops in seen or len(seen) > TRIES or not any(allows(masks, stops) for masks in ways):
                continue
            seen.add(stops)
            other = fitted(problem, exactly(stops, problem.num_blocks), time_s)
            if isinstance(other, Failure):
                continue
            other = refined(problem, other)
            other_s = problem.time_s(other)
            if other_s < time_s * (1 - LEAST_GAIN):
                best, time_s = other, other_s
                break
        else:
            break
    return best


def _beside(problem: CutProblem, found: Fitting) -> list[Stops]:
    """Stops with one block moved off a stage to one of which the longest chain has fewer actions, those of most fewer first."""
    (chain, *_) = problem.model.longest_chains(found.made, problem.step)
    weights = (chain.forwards + 2.0 * chain.backwards).tolist()
    sizes = [stop - start for _, start, stop in problem.spans(found.stops)]
    stages = range(len(sizes))
    pairs = [(weights[a] - weights[b], a, b) for a in stages for b in stages if sizes[a] > 1 and weights[a] > weights[b]]
    moved = []
    for _, a, b in sorted(pairs, key=lambda pair: -pair[0]):
        own = [*sizes]
        own[a], own[b] = own[a] - 1, own[b] + 1
        moved.append(tuple(accumulate(own)))
    return moved
