"""The certificate: how much faster than the best plan another plan may be.

The least dual bound of all candidates says it. It is raised where that costs little: the candidate of the least bound gets the
tightest relaxation that there is, until the least bound is that of the best plan, or cannot be raised. What each step gives is a
function of the candidate, the goal and the proofs before it alone, so that the certificate is the same for any number of processes and any timing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, MutableMapping, Sequence

from autopar.planner.bounds.chain_program import KEPT
from autopar.planner.bounds.chain_proof import ChainProof, Key, key_of
from autopar.planner.space.candidates import Candidate

WHOLE_GAP = 0.05
"""Of a bound, up to which the best time above it is near enough to look at no integer program."""

MOST = 256
"""Candidates whose bounds are raised at most."""


def close_gap(
    pool: Sequence[Candidate],
    bounds: MutableMapping[Candidate, float],
    best_s: float,
    asked: Collection[int],
    closest_s: Callable[[int, float, Sequence[ChainProof], float], tuple[float, tuple[ChainProof, ...]]],
) -> None:
    """Raise the least of some bounds, until it comes to ``best_s``, or cannot be raised.

    Args:
        bounds: of each candidate of the pool; raised in place.
        best_s: of the best plan; infinite: there is none, and nothing to raise.
        asked: positions of those that the search came to, whose bounds are of their priced layouts.
        closest_s: the tightest bound of the candidate at a position, up to a goal, from proofs of its schedule, whole blocks looked
            at up to another time; and new proofs.
    """
    if math.isinf(best_s):
        return
    goal_s, made = best_s, 0
    proofs: dict[Key, list[ChainProof]] = {}
    heap = [(bounds[candidate], i) for i, candidate in enumerate(pool) if bounds[candidate] < goal_s]
    heapq.heapify(heap)
    while heap and made < MOST:
        before_s, i = heapq.heappop(heap)
        if i not in asked or before_s >= goal_s:
            return
        made += 1
        known = proofs.setdefault(key_of(pool[i]), [])
        bound_s, more = closest_s(i, goal_s, known, min(goal_s, best_s / (1 + WHOLE_GAP)))
        known += more
        del known[: len(known) - KEPT]
        bounds[pool[i]] = max(bound_s, before_s)
        goal_s = min(goal_s, bounds[pool[i]])  # which is the least of all if no other one is below
