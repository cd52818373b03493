"""Lower bounds of pipelines whose ranks differ, from the chains of actions that a schedule itself names.

A schedule's actions wait for each other: each for the one before it on its rank, and for the message that it needs. Any
chain of actions of which each waits for the one before takes no longer than the step; with n blocks of the group on a stage
and x of them recomputed it takes a number of seconds that is linear in n and x. The longest chain is the simulated step.

So the least step over all cuts *into parts of blocks* is a linear program: n and x for each stage, the step no shorter than
any chain, what each rank keeps in its memory. Chains are added one by one: the program is solved with those that are known,
its cut is simulated, and the longest chain of that simulation is added, until the two agree.

A solution of the program weighs the chains (the weights sum to one) and prices the bytes of each rank. Weights of any kind
give a bound: the weighed chain is linear in n, so that all blocks that are not bound to a stage stand where they add the
least. A bound is always taken from there, never from the solver's own value; and weights found for one candidate are tried
on all others of the same schedule, which takes no program.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.planner.bounds.mixed_program import Program
from autopar.planner.bounds.mixed_rows import MixedRow, work_bound_s
from autopar.planner.bounds.mixed_stages import Chain, Stages, busy, key_of, side_by_side

ROUNDS, FEW_ROUNDS = 60, 20
"""Programs that are solved for a candidate at most; the second where a cut may as well be looked for."""

MOST_ACTIONS = 60_000
"""Of a schedule whose chains are looked for: beyond it a simulation takes too long."""

MOST_CHAINS, MOST_WEIGHED = 96, 12
"""Chains, and weighed ones, that are kept of a schedule: those that were found last."""


class Chains:
    """Chains of the schedules of one search; remembers those that were the longest of some cut."""

    def __init__(self) -> None:
        self._chains: dict[tuple[object, ...], list[Chain]] = {}
        self._weighed: dict[tuple[object, ...], list[Chain]] = {}
        self._beside: dict[tuple[object, ...], Chain] = {}
        """The weighed ones side by side."""

    def bound_s(self, row: MixedRow, at_most_s: float, *, precision: float | None = None) -> float:
        """Seconds below which no cut of a row exists.

        Args:
            at_most_s: the program is left where its bound is no less, or where it cannot get there.
            precision: of the bound; None: it ends as soon as some cut into parts of blocks takes less than ``at_most_s``.
        """
        schedule, pp, v, m = key = key_of(row)
        if 2 * pp * v * m > MOST_ACTIONS or not row.ranks[0].count:
            return 0.0
        stages = Stages(row)
        weighed, chains = self._weighed.setdefault(key, []), self._chains.setdefault(key, [])
        if not chains:
            chains += busy(pp, v, m)
        if weighed and key not in self._beside:
            self._beside[key] = side_by_side(weighed)
        best = stages.least_s(self._beside[key]) if weighed else 0.0
        if best >= at_most_s:
            return best
        solver = Program(stages, chains, at_most_s if np.isfinite(at_most_s) else work_bound_s(row))
        for _ in range(FEW_ROUNDS if precision is None else ROUNDS):
            solved = solver.solve()
            if solved is None:
                break
            blocks, again, chain = solved
            own_s = stages.least_s(chain)
            if own_s > best:
                best = own_s
                weighed.append(chain)
                self._beside.pop(key, None)
                del weighed[: len(weighed) - MOST_WEIGHED]
            time_s, longest = stages.longest(schedule, blocks, again)
            if best >= at_most_s or (precision is None and time_s < at_most_s):
                break
            if time_s - best <= (precision or 1e-3) * time_s:
                break
            chains.append(longest)
            solver.add([longest])
            del chains[pp : pp + len(chains) - MOST_CHAINS]
        return best

    def of(self, row: MixedRow) -> list[Chain]:
        """Those of a row's schedule."""
        return list(self._chains.get(key_of(row), ()))


def adds_s(row: MixedRow, sizes: Sequence[int], some: Sequence[int], full: Sequence[int]) -> list[float]:
    """Seconds that a block more on each stage adds to the longest chain of a cut.

    Args:
        sizes: blocks on each stage.
        some, full: of which so many recompute, and so many fully.
    """
    stages = Stages(row)
    again = np.concatenate([some, full] if stages.num_parts > 1 else [full])
    blocks = np.array(sizes, dtype=float) - (np.arange(len(sizes)) == 0) - (np.arange(len(sizes)) == len(sizes) - 1)
    _, chain = stages.longest(row.ranks[0].schedule, blocks, again.astype(float))
    found: list[float] = stages.each_s(chain)[0].tolist()
    return found
