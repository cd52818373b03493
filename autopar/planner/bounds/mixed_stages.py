"""Rows by stages, and the chains of actions that a schedule names; see :mod:`autopar.planner.bounds.mixed_chains`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from autopar.cost.step.critical_path import chains_of
from autopar.cost.step.simulation import compiled
from autopar.planner.bounds.bound_rows import Array, BlockPrice, forwards_done
from autopar.planner.bounds.mixed_rows import MixedRow

ROUNDING = 1e-9

CLOSE = 1e-6
"""Of the bytes that a block frees, up to which two numbers of them are equal."""


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


PARTS = tuple(field.name for field in fields(Chain))


class Stages:
    """A row by stages: what a block of the group adds to each, and what is there without any.

    Attributes:
        pp, m, count: pipeline ranks, micro-batches, blocks of the group on all stages.
        rank: of each stage.
        forward_s, backward_s, gather_s: what a block adds to an action of each stage: a forward, a backward, the first forward.
        once_s: what it adds to what a stage's rank does once a step.
        forward0_s, backward0_s, gather0_s, once0_s: these without any block; the last one of each rank.
        least: blocks that each stage has at least.
        num_bytes: of a block and the micro-batches that each stage holds at its peak.
        room_bytes: of each rank for the blocks of its stages.
        send_s, send_back_s: of each stage's messages to the next stage and to the one before.
        again_s, freed_bytes: what a block that recomputes adds, and of its micro-batches what it frees. Where modes of
            recompute have two lines below them, there are two parts, one after the other: up to where the lines meet, and from
            there on, which takes longer for a byte.
        num_parts: of recompute.
        counts_again: whether these are what modes free, so that of whole blocks each part is of a whole number of them.
    """

    def __init__(self, row: MixedRow) -> None:
        own, pp = row.ranks[0], len(row.ranks)
        v, m = own.virtual_stages, own.num_micro_batches
        stages = np.arange(pp * v)
        self.pp, self.m, self.rank, self.count = pp, m, stages % pp, own.count
        kinds = {id(r): i for i, r in enumerate({id(r): r for r in row.ranks}.values())}
        names = ("forward_s", "time_s", "again_s", "gather_s", "once_s", "static_bytes", "held_bytes",
                 "held_again_bytes", "passing_bytes", "more_byte_s", "more_free_s")  # fmt: skip
        rows = list({id(r): r for r in row.ranks}.values())
        table = np.array([[*(getattr(r.group, name) for name in names), r.limit_bytes, r.every_s] for r in rows])
        where = np.array([kinds[id(r)] for r in row.ranks])
        by_rank = table[where]
        by_stage = by_rank[self.rank].T
        self.forward_s, time_s, again_s, self.gather_s, self.once_s = by_stage[:5]
        self.backward_s = np.maximum(time_s - self.forward_s, 0.0)
        static, full, again = by_stage[5:8]
        first, last = row.ranks[0].first, row.ranks[-1].last
        ends = [(0, 0, first)] + ([] if own.alone else [(pp * v - 1, pp - 1, last)])
        self.forward0_s, self.backward0_s = by_stage[12].copy(), np.zeros(pp * v)
        self.gather0_s, self.once0_s = np.zeros(pp * v), np.zeros(pp)
        self.least = np.ones(pp * v) if not own.others else np.zeros(pp * v)
        done = forwards_done(own.schedule, pp, v, m).T.reshape(-1).astype(float)
        limit, beside = by_rank[:, 11] * (1 + 1e-9), by_rank[:, 8].copy()  # what fits exactly, fits
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
            if block is last and not own.alone:  # see autopar.planner.bounds.bound_rows.passing_bytes
                beside[rank] = max(beside[rank] - kept, block.passing_bytes)
        self.least = np.maximum(self.least, own.least)
        sure = np.bincount(self.rank, weights=self.least, minlength=pp) > 0
        self.room_bytes = limit - np.where(sure, beside, np.minimum(alone, beside))
        self.num_bytes = static + done * full
        self.again_s, freed = _parts(again_s, full - again, *by_stage[9:11])
        self.num_parts = len(freed) // len(done)
        self.freed_bytes = np.tile(done, self.num_parts) * freed
        self.counts_again = all(
            own.is_one and _ends_parts(own.group, freed[place::pp]) for place, own in enumerate(row.ranks)
        )
        none = (0.0,) * (pp - 1)
        self.send_s = np.array([*(row.sends_s or none), row.around_s])[self.rank]
        self.send_back_s = np.array([row.around_back_s, *(row.sends_back_s or none)])[self.rank]
        self.once0_s[[0, -1]] += row.tie_s

    def each_s(self, chain: Chain) -> tuple[Array, Array, Array]:
        """Seconds that a block adds to a chain on each stage, that each part of its recompute adds, and those without blocks."""
        byte_s = chain.byte_s[..., self.rank]
        block = chain.forwards * self.forward_s + chain.backwards * self.backward_s + chain.gathers * self.gather_s
        block += chain.ends[..., self.rank] * self.once_s + byte_s * self.num_bytes
        backwards, prices = chain.backwards, byte_s
        if self.num_parts > 1:
            backwards, prices = (np.concatenate([own] * self.num_parts, axis=-1) for own in (backwards, prices))
        again = backwards * self.again_s - prices * self.freed_bytes
        fixed = chain.forwards @ self.forward0_s + chain.backwards @ self.backward0_s
        fixed += chain.gathers @ self.gather0_s + chain.sends @ self.send_s + chain.sends_back @ self.send_back_s
        fixed += chain.ends @ self.once0_s - chain.byte_s @ self.room_bytes
        return block, again, fixed

    def least_s(self, chain: Chain) -> float:
        """Seconds of a chain at least, wherever the blocks stand and however many recompute; of several the longest."""
        block, again, fixed = self.each_s(chain)
        some, size = np.minimum(again, 0.0), len(self.rank)
        for part in range(self.num_parts):
            block = block + some[..., part * size : (part + 1) * size]
        found = fixed + block @ self.least + max(self.count - self.least.sum(), 0.0) * block.min(axis=-1)
        return float(np.max(found)) * (1 - ROUNDING)

    def holds(self, blocks: Array) -> bool:
        """Whether all ranks can hold so many blocks on each stage, none of them recomputed."""
        return bool(
            (np.bincount(self.rank, weights=self.num_bytes * blocks, minlength=self.pp) <= self.room_bytes).all()
        )

    def longest(self, schedule: str, blocks: Array, again: Array) -> tuple[float, Chain]:
        """Seconds of the step of a cut, and its longest chain; ``again``: of how many blocks each part is recomputed."""
        pp = self.pp
        again_s = (self.again_s * again).reshape(self.num_parts, -1).sum(axis=0)
        once_s = self.once0_s + np.bincount(self.rank, weights=self.once_s * blocks, minlength=pp)
        forward_s = self.forward0_s + self.forward_s * blocks
        backward_s = self.backward0_s + self.backward_s * blocks + again_s
        first_s = forward_s + (self.gather0_s + self.gather_s * blocks)
        durations = np.array([forward_s, backward_s, first_s]).T.ravel().tolist()
        messages = [*np.array([self.send_s, self.send_back_s]).T.ravel().tolist(), 0.0]
        actions = compiled(schedule, pp, len(blocks) // pp, self.m)
        found = chains_of(actions, durations, messages, once_s.tolist(), 1)[0]
        counts = (found.forwards, found.backwards, found.firsts, found.sends, found.sends_back)
        forwards, backwards, gathers, sends, back = (own.astype(float) for own in counts)
        return found.time_s, Chain(
            forwards=forwards, backwards=backwards, gathers=gathers, sends=sends, sends_back=back,
            ends=np.eye(pp)[found.rank], byte_s=np.zeros(pp),
        )  # fmt: skip


def _ends_parts(price: BlockPrice, freed: Array) -> bool:
    """Whether the parts that a block of this price frees (of each of its rank's stages and parts) end where modes of recompute do."""
    most = price.held_bytes - price.held_again_bytes
    if most <= 0:
        return True
    between = price.held_bytes - price.some_bytes
    return price.full_s > 0 and (between <= ROUNDING * most or abs(freed[0] - between) <= CLOSE * most)


def _parts(again_s: Array, freed: Array, byte_s: Array, free_s: Array) -> tuple[Array, Array]:
    """Seconds and bytes of each part of what a block recomputes, by :class:`autopar.planner.bounds.bound_rows.BlockPrice`.

    One line goes to ``again_s`` where all is ``freed``, the other one takes ``byte_s`` for each byte, less ``free_s``.
    """
    rate_s = again_s / np.where(freed > 0, freed, 1.0)
    meet = np.where((free_s > 0) & (byte_s > rate_s), free_s / np.where(byte_s > rate_s, byte_s - rate_s, 1.0), freed)
    more = freed - meet
    more = np.where(more > ROUNDING * freed, more, 0.0)
    if not more.any():
        return again_s, freed
    is_two = more > 0
    first_s, first = np.where(is_two, rate_s * meet, again_s), np.where(is_two, meet, freed)
    return np.concatenate([first_s, np.where(is_two, byte_s * more, 0.0)]), np.concatenate([first, more])


def key_of(row: MixedRow) -> tuple[str, int, int, int]:
    """What the chains of a row are chains of: schedule, pipeline ranks, virtual stages and micro-batches."""
    own = row.ranks[0]
    return own.schedule, len(row.ranks), own.virtual_stages, own.num_micro_batches


def side_by_side(chains: Sequence[Chain]) -> Chain:
    """Several chains as one, with a dim more in front."""
    if len(chains) == 1:
        return Chain(**{name: getattr(chains[0], name)[None] for name in PARTS})
    return Chain(**{name: np.array([getattr(chain, name) for chain in chains]) for name in PARTS})


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
