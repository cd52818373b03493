"""Rows of :mod:`autopar.planner.bounds.bounds` side by side, as arrays of what decides which blocks ranks can take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from autopar.planner.bounds.bound_rows import BlockPrice, Counts, Row, passing_bytes, table_of_counts
from autopar.planner.bounds.flow import around

Array = NDArray[np.float64]

_TINY = 1e-30
_PRICES = tuple(field.name for field in fields(BlockPrice))
_prices_of = attrgetter(*_PRICES)


class Columns:
    """Rows side by side, arrays over them; two dims are ranks and rows.

    Attributes:
        slopes: seconds that a block of the group adds to each of the three chains of a rank.
        fixed_s: seconds of the chains that do not depend on what ranks take.
        before_s: seconds that each block that is left adds to the chains, the rank's own included (those are in ``slopes``
            less that).
        plain, lean: bytes of a block of the group, without and with recompute.
        room, for_byte: bytes that there are for blocks, and seconds that recompute takes for each byte more, in two
            relaxations: what recompute frees, it frees of the stage that holds the most; or what stages hold over the one
            that holds the fewest is recomputed for nothing.
        least, reserved: blocks that a rank has to take, and has to leave for the ranks before.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        def column(values: list[float]) -> Array:
            return np.array(values, dtype=np.float64)

        self.ranks = max(r.pp for r in rows)
        self.around = [around(r) for r in rows]
        self.first, self.last, self.group = (
            dict(zip(_PRICES, np.array([_prices_of(part) for part in own], dtype=np.float64).T.copy(), strict=True))
            for own in ([r.first for r in rows], [r.last for r in rows], [r.group for r in rows])
        )
        alone = np.array([r.alone for r in rows])
        for name, values in self.last.items():  # one block alone is counted as the first
            self.last[name] = np.where(alone, 0.0, values)
        self.count = column([r.count for r in rows])
        self.others = column([r.others for r in rows])
        self.every_s = column([r.every_s for r in rows])
        self.pp = column([r.pp for r in rows])
        self.v = column([r.virtual_stages for r in rows])
        self.m = column([r.num_micro_batches for r in rows])
        self.waits = self.v == 1
        self.once_s = column([r.least_once_s for r in rows])
        rank = np.arange(self.ranks)[:, None]
        self.active = rank < self.pp
        self.is_first, self.is_last = (rank == 0) & self.active, rank + 1 == self.pp
        table = np.zeros((len(Counts._fields), self.ranks, len(rows)))
        for i, r in enumerate(rows):
            table[:, : r.pp, i] = table_of_counts(r.schedule, r.pp, r.virtual_stages, r.num_micro_batches, r.others)
        counts = Counts(*table)
        # blocks that every stage has, because the others cannot hold them; then no stage has another block alone
        each = column([r.least_each for r in rows])
        counts = counts._replace(
            held_more=np.maximum(counts.held_more, each * counts.held_over),
            todo_more=np.maximum(counts.todo_more, each * counts.todo_over),
        )
        self._times(rows, rank, counts)
        self._bytes(rows, counts)
        own = np.maximum(self.v - self.others - self.is_first - self.is_last, self.v * each)
        self.least = np.where(self.active, np.maximum(own, 0), 0.0)
        self.most = self.v * column([r.most for r in rows])
        self._recomputed()
        self._stack()
        self.reserved = np.maximum(rank * self.v - self.others - (rank > 0), 0)

    def _by_rank(self, values: Sequence[Sequence[float] | Array]) -> Array:
        found = np.zeros((len(values), self.ranks))
        for i, own in enumerate(values):
            found[i, : len(own)] = own
        return found.T

    def _times(self, rows: Sequence[Row], rank: NDArray[np.int64], counts: Counts) -> None:
        first, last, group, m, every_s = self.first, self.last, self.group, self.m, self.every_s
        waits, is_first, is_last = self.waits, self.is_first, self.is_last
        before_s, before_forward_s, after_s = (self._by_rank(found) for found in zip(*self.around, strict=True))
        gathers_before_s = self._by_rank([r.stage_gathers_s[: r.pp] for r in rows])
        own_gathers_s = np.array([r.stage_gathers_s[r.virtual_stages] for r in rows])
        gathers_s = np.array([r.gathers_s + r.stage_gathers_s[-1] for r in rows])
        backward = {name: part["time_s"] - part["forward_s"] for name, part in
                    (("first", first), ("last", last), ("group", group))}  # fmt: skip
        total_s, forward_s = (np.array([getattr(r, name) for r in rows]) for name in ("total_s", "forward_s"))
        later = rank > 0
        send_s, send_back_s = (np.array([getattr(r, name) for r in rows]) for name in ("send_s", "send_back_s"))
        # the stages before: where there is one a rank, what is left is counted as the ranks take it
        start_s = np.where(waits, later * first["forward_s"], before_forward_s)
        start_s = (
            start_s + rank * (every_s + send_s) + gathers_before_s + np.where(waits, later * first["gather_s"], 0.0)
        )
        end_s = rank * send_back_s + np.where(waits, later * backward["first"], before_s - before_forward_s)
        own_s = m * (is_first * first["time_s"] + is_last * last["time_s"] + self.v * every_s)
        own_s = own_s + is_first * first["gather_s"] + is_last * last["gather_s"] + own_gathers_s
        once_s = is_first * first["once_s"] + is_last * last["once_s"]
        third = forward_s + gathers_s + self.pp * self.v * (every_s + send_s) - send_s + (self.pp - 1) * send_back_s
        third = third + np.where(waits, total_s - forward_s, after_s + before_s - before_forward_s)
        third = third + is_first * ((m - waits) * backward["first"] + (m - counts.first) * first["forward_s"])
        third = third + is_last * ((m - waits) * backward["last"] + (m - counts.last) * last["forward_s"])
        third = third + counts.todo_more * group["forward_s"] + counts.left * every_s
        third = np.where([r.tells_apart for r in rows], third, -np.inf)
        self.fixed_s = (start_s + own_s + once_s, start_s + own_s + end_s, third)
        back = group["time_s"] - group["forward_s"]
        passes = group["forward_s"] + group["gather_s"]
        self.before_s = (waits * passes, waits * (passes + back), np.zeros(len(m)))
        # a block that a rank takes is no longer before it; never below zero by rounding
        own_gather_s = (1 - waits) * group["gather_s"]
        self.slopes = tuple(
            np.broadcast_to(slope, self.active.shape) + _TINY
            for slope in (
                (m - waits) * group["time_s"] + waits * back + own_gather_s + group["once_s"],
                (m - waits) * group["time_s"] + own_gather_s,
                (m - waits) * back + counts.todo * group["forward_s"],
            )
        )

    def _bytes(self, rows: Sequence[Row], counts: Counts) -> None:
        first, last, group = self.first, self.last, self.group
        full, again = group["held_bytes"], group["held_again_bytes"]
        self.plain = group["static_bytes"] + counts.held * full + _TINY
        self.lean = group["static_bytes"] + counts.held * again + _TINY
        self.freed = tuple(np.maximum(own * (full - again), _TINY) for own in (counts.held_most, counts.held))
        self.again_s = self.m * group["least_again_s"]  # of a whole block; of a part of one by what it frees
        self.for_byte = tuple(self.m * group["again_s"] / own for own in self.freed)
        self.more_for_byte = tuple(
            self.m * group["more_byte_s"] / np.maximum(own, _TINY) for own in (counts.held_most, counts.held)
        )
        self.more_free_s = self.m * group["more_free_s"]
        room = np.array([r.limit_bytes for r in rows]) * (1 + 1e-9)  # what fits exactly, fits
        for part, mask, held in ((first, self.is_first, counts.first), (last, self.is_last, counts.last)):
            kept = held * np.minimum(part["held_bytes"], part["held_again_bytes"])
            room = room - mask * (part["static_bytes"] + kept)
        last_stage = self.is_last * counts.last
        room = room - (counts.all - last_stage) * np.array([r.stage_bytes for r in rows])
        kept_last = np.minimum(last["held_bytes"], last["held_again_bytes"])
        alone, beside = passing_bytes(first, last, group, self.is_first, self.is_last)
        self.fits = ~self.active | (room >= np.minimum(alone, beside))
        # where all keep the least that they can, one stands last and has its peak
        leanest = np.maximum(group["lean_bytes"] - self.is_last * kept_last, beside)
        self.lean_room = room - leanest - counts.held_more * again
        room = room - beside
        self.room = (room - counts.held_more * full, room - counts.held_more * again)
        self._lean(group, room, counts)

    def _lean(self, group: dict[str, Array], room: Array, counts: Counts) -> None:
        """As if no block kept more than in any mode but the leanest, where there are three: so many are in that one at least."""
        self.has_some = bool(self.more_for_byte[0].any())
        self.each, self.each_room, self.each_freed = self.plain, self.room, self.freed
        self.each_s, self.over_s = self.again_s, np.zeros_like(self.again_s)
        if self.has_some:
            is_known = group["full_s"] > 0
            full, again = group["held_bytes"], group["held_again_bytes"]
            some = np.where(is_known, np.minimum(full, group["some_bytes"]), full)
            self.each = group["static_bytes"] + counts.held * some + _TINY
            self.each_room = (room - counts.held_more * some, self.room[1])
            self.each_freed = tuple(np.maximum(own * (some - again), _TINY) for own in (counts.held_most, counts.held))
            self.each_s = np.where(is_known, self.m * group["full_s"], self.again_s)
            self.over_s = np.where(is_known, self.m * np.maximum(group["full_s"] - group["again_s"], 0.0), 0.0)

    def _recomputed(self) -> None:
        """Adds to the chains what the ranks before recompute even with as few blocks as they can have."""
        need = self.whole_again(self.least)
        # with virtual stages it is only known that the first one recomputes where all of them do
        sure = np.where(self.waits, np.minimum(need, self.least), (need >= self.least) & (self.least > 0))
        before_s = (np.cumsum(sure, axis=0) - sure) * self.again_s / self.m
        self.fixed_s = (self.fixed_s[0], self.fixed_s[1] + before_s, self.fixed_s[2] + before_s)

    def whole_again(self, taken: Array) -> Array:
        """How many of so many blocks of each rank recompute at least."""
        found = np.zeros(taken.shape)
        for room, freed in zip(self.room, self.freed, strict=True):
            found = np.maximum(found, np.ceil((taken * self.plain - room) / freed - 1e-6))
        return found

    def _stack(self) -> None:
        """The chains and the lines of memory side by side: ranks, lines, chains, rows.

        A rank that a row has not got takes nothing and has time without end. Of the lines the first is of chains alone.
        """
        shape = (self.ranks, 1, len(self.fixed_s), len(self.count))
        self.chain_fixed_s = np.where(self.active[:, None], np.stack(self.fixed_s, axis=1), -np.inf)
        self.chain_before_s = np.stack(self.before_s)
        slope = np.stack(self.slopes, axis=1)
        self.chain_slope, slope = slope, slope.reshape(shape)
        room, for_byte = (np.stack(own, axis=1)[:, :, None, :] for own in (self.room, self.for_byte))
        plain = self.plain[:, None, None, :]
        unhurried, rooms_s, slopes = [(room / plain)[:, :, 0]], [for_byte * room], [slope + for_byte * plain]
        if self.has_some:  # each of the two relaxations with each of the two lines
            more = np.stack(self.more_for_byte, axis=1)[:, :, None, :]
            ends_s = self.m * (self.is_first * self.first["beside_s"] + self.is_last * self.last["beside_s"])
            unhurried *= 2
            rooms_s.append(more * room + ends_s[:, None, None, :])
            slopes.append(np.maximum(slope + more * plain - self.more_free_s, _TINY))
        alone = np.zeros((self.ranks, 1, 1, len(self.count)))
        self.unhurried = np.concatenate([alone[:, 0] - np.inf, *unhurried], axis=1)
        self.room_s, self.slope = np.concatenate([alone, *rooms_s], axis=1), np.concatenate([slope, *slopes], axis=1)
        freed, less = np.stack(self.each_freed, axis=1), np.stack(self.each_room, axis=1)
        whole, whole_less = [self.each[:, None, :] / freed], [less / freed + 1e-6]
        if self.has_some:
            whole.append((for_byte * plain)[:, :, 0])
            whole_less.append((for_byte * room)[:, :, 0])
        self.whole, self.whole_less = np.concatenate(whole, axis=1), np.concatenate(whole_less, axis=1)
        leanest = np.minimum(self.most, np.maximum(self.room[1] / self.lean, self.room[0] / self.plain))
        self.leanest = np.where(self.active, np.minimum(leanest, self.lean_room / self.lean), 0.0)

    def only(self, rows: NDArray[np.intp]) -> Ranks:
        """Some of the rows, by position, each as often as it is named."""
        ranks = int(self.pp[rows].max())

        def of(values: Array) -> Array:
            return np.take(values[:ranks], rows, axis=-1)

        return Ranks(
            ranks=ranks,
            count=self.count[rows],
            first_once_s=self.first["once_s"][rows],
            group_once_s=self.group["once_s"][rows],
            least=of(self.least),
            reserved=of(self.reserved),
            leanest=of(self.leanest),
            again_s=self.each_s[rows],
            over_s=self.over_s[rows],
            whole=of(self.whole),
            whole_less=of(self.whole_less),
            has_some=self.has_some,
            unhurried=of(self.unhurried),
            room_s=of(self.room_s),
            slope=of(self.slope),
            chain_fixed_s=of(self.chain_fixed_s),
            chain_before_s=np.take(self.chain_before_s, rows, axis=-1),
            chain_slope=of(self.chain_slope),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranks:
    """What of :class:`Columns` decides which blocks ranks can take in a time; the first dim is that of ranks, the last that of rows."""

    ranks: int
    count: Array
    first_once_s: Array
    group_once_s: Array
    least: Array
    reserved: Array
    leanest: Array
    again_s: Array
    over_s: Array
    whole: Array
    whole_less: Array
    has_some: bool
    unhurried: Array
    room_s: Array
    slope: Array
    chain_fixed_s: Array
    chain_before_s: Array
    chain_slope: Array
