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
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from autopar.cost.critical import longest_chains
from autopar.cost.pipeline import StageTimes
from autopar.search.bound_rows import Array, forwards_done
from autopar.search.mixed_bounds import MixedRow, work_bound_s

ROUNDS, FEW_ROUNDS = 60, 20
"""Programs that are solved for a candidate at most; the second where a cut may as well be looked for."""

MOST_ACTIONS = 60_000
"""Of a schedule whose chains are looked for: beyond it a simulation takes too long."""

MOST_CHAINS, MOST_WEIGHED = 96, 12
"""Chains, and weighed ones, that are kept of a schedule: those that were found last."""

ROUNDING = 1e-9
GIB = float(2**30)
_COUNTS = ("forwards", "backwards", "gathers", "sends", "sends_back", "ends", "byte_s")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """A chain of actions, or several of them weighed.

    Attributes:
        forwards, backwards, gathers: for each stage how often; gathers are those of the step's first forward.
        sends, sends_back: for each stage its messages to the next stage and to the one before.
        ends: for each rank 1 where the chain ends with what that rank does once a step.
        byte_s: for each rank the price of a byte in its memory.
    """

    forwards: Array
    backwards: Array
    gathers: Array
    sends: Array
    sends_back: Array
    ends: Array
    byte_s: Array


class Stages:
    """A row by stages: what a block of the group adds to each, and what is there without any."""

    def __init__(self, row: MixedRow) -> None:
        own, pp = row.ranks[0], len(row.ranks)
        v, m = own.virtual_stages, own.num_micro_batches
        stages = np.arange(pp * v)
        self.pp, self.m, self.rank, self.count = pp, m, stages % pp, own.count
        kinds = {id(r): i for i, r in enumerate({id(r): r for r in row.ranks}.values())}
        names = ("forward_s", "time_s", "again_s", "gather_s", "once_s", "static_bytes", "held_bytes",
                 "held_again_bytes", "passing_bytes")  # fmt: skip
        rows = list({id(r): r for r in row.ranks}.values())
        table = np.array([[*(getattr(r.group, name) for name in names), r.every_s, r.limit_bytes] for r in rows])
        where = np.array([kinds[id(r)] for r in row.ranks])
        by_rank = table[where]
        by_stage = by_rank[self.rank].T
        self.forward_s, time_s, self.again_s, self.gather_s, self.once_s = by_stage[:5]
        self.backward_s = np.maximum(time_s - self.forward_s, 0.0)
        static, full, again = by_stage[5:8]
        first, last = row.ranks[0].first, row.ranks[-1].last
        ends = [(0, 0, first)] + ([] if own.alone else [(pp * v - 1, pp - 1, last)])
        self.forward0_s, self.backward0_s = by_stage[9].copy(), np.zeros(pp * v)
        self.gather0_s, self.once0_s = np.zeros(pp * v), np.zeros(pp)
        self.least = np.ones(pp * v) if not own.others else np.zeros(pp * v)
        done = forwards_done(own.schedule, pp, v, m).T.reshape(-1).astype(float)
        limit, beside = by_rank[:, 10] * (1 + 1e-9), by_rank[:, 8].copy()  # what fits exactly, fits
        limit -= np.bincount(self.rank, weights=done * row.stage_bytes * (stages < pp * v - 1), minlength=pp)
        alone = np.zeros(pp)
        for stage, rank, block in ends:
            self.forward0_s[stage] += block.forward_s
            self.backward0_s[stage] += max(block.time_s - block.forward_s, 0.0)
            self.gather0_s[stage] += block.gather_s
            self.once0_s[rank] += block.once_s
            self.least[stage] = 0.0  # it may have no other
            kept = min(block.held_bytes, block.held_again_bytes)
            limit[rank] -= block.static_bytes + done[stage] * kept
            alone[rank] = block.passing_bytes
            if block is last and not own.alone:  # see autopar.search.bounds.passing_bytes
                beside[rank] = max(beside[rank] - kept, block.passing_bytes)
        self.least = np.maximum(self.least, own.least)
        sure = np.bincount(self.rank, weights=self.least, minlength=pp) > 0
        self.room = limit - np.where(sure, beside, np.minimum(alone, beside))
        self.bytes, self.freed = static + done * full, done * (full - again)
        none = (0.0,) * (pp - 1)
        self.send_s = np.array([*(row.sends_s or none), row.around_s])[self.rank]
        self.send_back_s = np.array([row.around_back_s, *(row.sends_back_s or none)])[self.rank]
        self.once0_s[[0, -1]] += row.tie_s

    def each_s(self, chain: Chain) -> tuple[Array, Array, Array]:
        """Seconds that a block adds to a chain on each stage, that its recompute adds, and those without blocks."""
        byte_s = chain.byte_s[..., self.rank]
        block = chain.forwards * self.forward_s + chain.backwards * self.backward_s + chain.gathers * self.gather_s
        block += chain.ends[..., self.rank] * self.once_s + byte_s * self.bytes
        again = chain.backwards * self.again_s - byte_s * self.freed
        fixed = chain.forwards @ self.forward0_s + chain.backwards @ self.backward0_s
        fixed += chain.gathers @ self.gather0_s + chain.sends @ self.send_s + chain.sends_back @ self.send_back_s
        fixed += chain.ends @ self.once0_s - chain.byte_s @ self.room
        return block, again, fixed

    def least_s(self, chain: Chain) -> float:
        """Seconds of a chain at least, wherever the blocks stand and however many recompute; of several the longest."""
        block, again, fixed = self.each_s(chain)
        block = block + np.minimum(again, 0.0)
        found = fixed + block @ self.least + max(self.count - self.least.sum(), 0.0) * block.min(axis=-1)
        return float(np.max(found)) * (1 - ROUNDING)

    def holds(self, blocks: Array) -> bool:
        """Whether all ranks can hold so many blocks on each stage, none of them recomputed."""
        return bool((np.bincount(self.rank, weights=self.bytes * blocks, minlength=self.pp) <= self.room).all())

    def longest(self, schedule: str, blocks: Array, again: Array) -> tuple[float, Chain]:
        """Seconds of the step of a cut, and its longest chain."""
        pp = self.pp
        once_s = self.once0_s + np.bincount(self.rank, weights=self.once_s * blocks, minlength=pp)
        columns = (
            self.forward0_s + self.forward_s * blocks,
            self.backward0_s + self.backward_s * blocks + self.again_s * again,
            self.gather0_s + self.gather_s * blocks,
            self.send_s,
            self.send_back_s,
        )
        times = [
            StageTimes(
                forward_s=own[0],
                backward_s=own[1],
                first_forward_s=own[2],
                send_forward_s=own[3],
                send_backward_s=own[4],
            )
            for own in np.stack(columns, axis=1).tolist()
        ]
        found = longest_chains(schedule, pp, self.m, times, once_s.tolist(), 1)[0]
        counts = (found.forwards, found.backwards, found.firsts, found.sends, found.sends_back)
        forwards, backwards, gathers, sends, back = (own.astype(float) for own in counts)
        return found.time_s, Chain(
            forwards=forwards, backwards=backwards, gathers=gathers, sends=sends, sends_back=back,
            ends=np.eye(pp)[found.rank], byte_s=np.zeros(pp),
        )  # fmt: skip


class Chains:
    """Chains of the schedules of one search; remembers those that were the longest of some cut."""

    def __init__(self) -> None:
        self._chains: dict[tuple[object, ...], list[Chain]] = {}
        self._weighed: dict[tuple[object, ...], list[Chain]] = {}

    def known_s(self, row: MixedRow, at_most_s: float = np.inf) -> float:
        """The bound of the weighed chains that are known; 0 where none are, or total work says more than ``at_most_s``."""
        known = self._weighed.get(key_of(row))
        if not known or work_bound_s(row) >= at_most_s:
            return 0.0
        return Stages(row).least_s(side_by_side(known))

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
        best = stages.least_s(side_by_side(weighed)) if weighed else 0.0
        with_memory = False
        for _ in range(FEW_ROUNDS if precision is None else ROUNDS):
            if best >= at_most_s:
                break
            solved = _program(stages, chains, with_memory=with_memory)
            if solved is not None and not with_memory and not stages.holds(solved[0]):
                with_memory = True
                solved = _program(stages, chains, with_memory=True)
            if solved is None:
                break
            blocks, again, chain = solved
            own_s = stages.least_s(chain)
            if own_s > best:
                best = own_s
                weighed.append(chain)
                del weighed[: len(weighed) - MOST_WEIGHED]
            time_s, longest = stages.longest(schedule, blocks, again)
            if best >= at_most_s or (precision is None and time_s < at_most_s):
                break
            if time_s - best <= (precision or 1e-3) * time_s:
                break
            chains.append(longest)
            del chains[pp : pp + len(chains) - MOST_CHAINS]
        return best

    def of(self, row: MixedRow) -> list[Chain]:
        """Those of a row's schedule."""
        return list(self._chains.get(key_of(row), ()))


def adds_s(row: MixedRow, sizes: Sequence[int], again: Sequence[int]) -> list[float]:
    """Seconds that a block more on each stage adds to the longest chain of a cut.

    Args:
        sizes: blocks on each stage.
        again: of which so many recompute.
    """
    stages = Stages(row)
    blocks = np.array(sizes, dtype=float) - (np.arange(len(sizes)) == 0) - (np.arange(len(sizes)) == len(sizes) - 1)
    _, chain = stages.longest(row.ranks[0].schedule, blocks, np.array(again, dtype=float))
    found: list[float] = stages.each_s(chain)[0].tolist()
    return found


def key_of(row: MixedRow) -> tuple[str, int, int, int]:
    """What the chains of a row are chains of: schedule, pipeline ranks, virtual stages and micro-batches."""
    own = row.ranks[0]
    return own.schedule, len(row.ranks), own.virtual_stages, own.num_micro_batches


def side_by_side(chains: Sequence[Chain]) -> Chain:
    """Several chains as one, with a dim more in front."""
    return Chain(**{name: np.array([getattr(chain, name) for chain in chains]) for name in _COUNTS})


def busy(pp: int, v: int, m: int) -> list[Chain]:
    """For each rank the chain of all its actions."""
    stages = np.arange(pp * v)
    zero = np.zeros(pp * v)
    return [
        Chain(
            forwards=m * (stages % pp == rank), backwards=m * (stages % pp == rank),
            gathers=1.0 * (stages % pp == rank), sends=zero, sends_back=zero,
            ends=np.eye(pp)[rank], byte_s=np.zeros(pp),
        )
        for rank in range(pp)
    ]  # fmt: skip


def _program(stages: Stages, chains: Sequence[Chain], *, with_memory: bool) -> tuple[Array, Array, Chain] | None:
    """Blocks and recomputed ones on each stage in the shortest step under these chains, and the chains weighed."""
    n, pp = len(stages.rank), stages.pp
    every, some = side_by_side(chains), len(chains)
    block, again, fixed = stages.each_s(every)
    columns = 2 * n + 1 if with_memory else n + 1
    above = np.zeros((some + (pp + n) * with_memory, columns))
    limits = np.zeros(len(above))
    above[:some, :n], above[:some, -1], limits[:some] = block, -1.0, -fixed
    if with_memory:
        above[:some, n : 2 * n] = again
        own = (stages.rank == np.arange(pp)[:, None]).astype(float)
        above[some : some + pp, :n] = own * stages.bytes / GIB
        above[some : some + pp, n : 2 * n] = -own * stages.freed / GIB
        limits[some : some + pp] = stages.room / GIB
        above[some + pp :, :n], above[some + pp :, n : 2 * n] = -np.eye(n), np.eye(n)
    cost, total = np.zeros(columns), np.zeros((1, columns))
    cost[-1], total[0, :n] = 1.0, 1.0
    least = np.zeros(columns)
    least[:n] = stages.least
    bounds = np.stack([least, np.full(columns, np.inf)], axis=1)
    solved = linprog(cost, A_ub=above, b_ub=limits, A_eq=total, b_eq=[stages.count], bounds=bounds, method="highs")
    if solved.x is None:
        return None
    weights = np.maximum(-solved.ineqlin.marginals, 0.0)
    scale = float(weights[:some].sum())
    if not scale:
        return None
    weighed = {name: weights[:some] / scale @ getattr(every, name) for name in _COUNTS[:-1]}
    byte_s = weights[some : some + pp] / scale / GIB if with_memory else np.zeros(pp)
    recomputed = solved.x[n : 2 * n] if with_memory else np.zeros(n)
    return solved.x[:n], recomputed, Chain(**weighed, byte_s=byte_s)
