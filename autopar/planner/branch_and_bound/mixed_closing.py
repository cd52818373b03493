"""The certificate where pipeline ranks differ: the time below which no candidate has a plan, up to a time that is aimed at.

Layouts of a candidate that may take less than the goal by the laws of :mod:`autopar.planner.bounds.mixed_bounds` are bounded by chains
(:mod:`autopar.planner.bounds.mixed_chains`) and, where that is not enough, by whole blocks (:mod:`autopar.planner.bounds.mixed_whole`). Chains of
one schedule hold for all candidates of it: what is found for one spares most others a program of their own. So candidates of a
schedule are a group, which one process goes through in an order of its own, that of their work alone, from no chain at all.

What a group gives is a function of the goal and of the candidates in it, and a candidate is in it if the laws say so: by
whom and when a group is worked out, and what the search has learned on its way, leaves no trace.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.planner.bounds.mixed_bounds import mixed_bounds
from autopar.planner.bounds.mixed_chains import Chains
from autopar.planner.bounds.mixed_rows import MixedRow
from autopar.planner.bounds.mixed_stages import key_of
from autopar.planner.bounds.mixed_whole import whole_bound_s
from autopar.planner.space.candidates import Candidate

PRECISION = 4e-3
"""Of the programs, which cost little."""

MOST, MOST_WHOLE = 256, 32
"""Candidates of a group whose chains are looked at, and those whose whole blocks are."""

Key = tuple[str, int, int, int]


def key_of_candidate(candidate: Candidate) -> Key:
    """Equal for candidates whose chains are of one schedule: :func:`autopar.planner.bounds.mixed_stages.key_of` of their rows."""
    return candidate.schedule, candidate.mesh.pp, candidate.virtual_stages, candidate.num_micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A candidate whose bound is to be raised.

    Attributes:
        first_s: of the work of its layouts alone, which says when it has its turn.
        bound_s: of what is not in ``rows``, up to the goal.
        rows: of the layouts that may take less than the goal.
    """

    first_s: float
    bound_s: float
    rows: tuple[MixedRow, ...] = ()


def grouped(opened: Mapping[int, Opened]) -> dict[Key, list[int]]:
    """Positions of candidates by their schedule, those of the least work first; those without rows are in none."""
    found: dict[Key, list[int]] = {}
    for i in sorted(opened, key=lambda i: (opened[i].first_s, i)):
        if opened[i].rows:
            found.setdefault(key_of(opened[i].rows[0]), []).append(i)
    return found


class Closing:
    """The groups of one certificate, with the chains of each."""

    def __init__(self) -> None:
        self._chains: dict[Key, Chains] = {}

    def least_s(self, key: Key, group: Sequence[Opened], goal_s: float, *, whole_s: float) -> tuple[float, bool]:
        """What none of a group goes below, up to ``goal_s``; and whether whole blocks were needed for it.

        Args:
            group: of one schedule, in order.
            whole_s: up to here bounds are raised by whole blocks too.
        """
        chains, made = self._chains.setdefault(key, Chains()), Counter[str]()
        least_s, is_whole = goal_s, False
        for own in group:
            if min(own.first_s, own.bound_s) >= least_s:
                continue
            if made["chains"] == MOST:
                return min(least_s, own.first_s), is_whole
            made["chains"] += 1
            found = [_chained_s(row, chains, least_s) for row in own.rows]
            for place, row in enumerate(own.rows):
                if found[place] < min(least_s, whole_s) and made["whole"] < MOST_WHOLE:
                    made["whole"] += 1
                    is_whole = True
                    found[place] = whole_bound_s(row, chains.of(row), found[place], min(least_s, whole_s))
            least_s = min(least_s, own.bound_s, min(found, default=math.inf))
        return least_s, is_whole


def _chained_s(row: MixedRow, chains: Chains, aim_s: float) -> float:
    """Of one layout, up to ``aim_s``; no less than by the laws that say which candidates are in a group."""
    found = chains.bound_s(row, aim_s, precision=PRECISION)
    return found if found >= aim_s else max(found, float(mixed_bounds([row], aim_s)[0]))
