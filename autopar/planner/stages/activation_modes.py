"""How a block may recompute: its options, which of them are worth trying, and of equal blocks how many take each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autopar.plan import Recompute

MOVED: Literal["moved"] = "moved"
"""Recomputes nothing, and keeps on the host what backward needs."""

Way = Recompute | Literal["moved"]

MAX_TRADE = 8
"""Blocks at most that :class:`Ways` trades for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOption:
    """A block run in one way.

    Attributes:
        time_s: forward, backward and recompute of one micro-batch.
        forward_s: the forward of it, where something moves.
        down_s, up_s: copies to the host and back, beside the forwards and the backwards of the stage.
        held_bytes: of one micro-batch between forward and backward.
        transient_bytes: at its peak inside.
    """

    mode: Way
    time_s: float
    held_bytes: float
    transient_bytes: float
    forward_s: float = 0.0
    down_s: float = 0.0
    up_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ways:
    """In which ways equal blocks of a stage may recompute, as counts of each option.

    Where ``first`` blocks of the first of three options and ``last`` ones of the last may all take the second one instead, and
    then neither take more time nor keep more bytes, no stage needs as many as both: those counts are left out. Likewise those
    of ``middle`` blocks and more of the second one, which may take the first and the last instead.

    Attributes:
        options: how many a block has.
        first, last, middle: see above; 0: there are no such numbers.
        anyway: the second option needs the most in passing: nothing is left out where no block takes it.
    """

    options: int
    first: int = 0
    last: int = 0
    middle: int = 0
    anyway: bool = False

    def counts(self, blocks: int) -> NDArray[np.int64]:
        """All counts worth trying [ways, options], of so many blocks."""
        if self.options == 1:
            return np.array([[blocks]], dtype=np.int64)
        if self.options == 2:
            second = np.arange(blocks + 1)
            return np.stack([blocks - second, second], axis=1)
        second, third = (
            n.reshape(-1) for n in np.meshgrid(np.arange(blocks + 1), np.arange(blocks + 1), indexing="ij")
        )
        first = blocks - second - third
        needed = first >= 0
        if self.first:
            needed &= (first < self.first) | (third < self.last) | (self.anyway & (second == 0))
        if self.middle:  # something of the third option is there, which needs the most in passing
            needed &= (second < self.middle) | (third == 0)
        return np.stack([first, second, third], axis=1)[needed]


def ways_of(options: Sequence[BlockOption]) -> Ways:
    """The ways of blocks with these options, by the trade of :class:`Ways` with the fewest blocks.

    Its numbers are rounded up to powers of two, which leaves out fewer counts, so that most prices have the same ways.
    """
    if len(options) != 3 or any(option.down_s for option in options):  # copies do not add up
        return Ways(len(options))
    one, two, three = options
    for both in range(2, MAX_TRADE + 1):
        for last in range(1, both):
            first = both - last
            quicker = first * (two.time_s - one.time_s) <= last * (three.time_s - two.time_s)
            if quicker and first * (one.held_bytes - two.held_bytes) >= last * (two.held_bytes - three.held_bytes):
                anyway = two.transient_bytes > max(one.transient_bytes, three.transient_bytes)
                return Ways(3, _rounded(first), _rounded(last), anyway=anyway)
    for both in range(2, MAX_TRADE + 1) if one.transient_bytes <= three.transient_bytes else ():
        for last in range(1, both):
            first = both - last
            quicker = first * (two.time_s - one.time_s) >= last * (three.time_s - two.time_s)
            if quicker and first * (one.held_bytes - two.held_bytes) <= last * (two.held_bytes - three.held_bytes):
                return Ways(3, middle=_rounded(both))
    return Ways(3)


def _rounded(count: int) -> int:
    """Up to a power of two."""
    return 1 << (count - 1).bit_length()


def useful(options: Sequence[BlockOption]) -> tuple[BlockOption, ...]:
    """Those than which no other one is as good in everything; of equal ones the first. What moves is as good as nothing else."""

    def parts(option: BlockOption) -> tuple[float, float, float]:
        return option.time_s, option.held_bytes, option.transient_bytes

    def beats(i: int, k: int) -> bool:
        a, b = parts(options[i]), parts(options[k])
        return options[i].mode != MOVED and all(x <= y for x, y in zip(a, b, strict=True)) and (a != b or i < k)

    return tuple(o for k, o in enumerate(options) if not any(beats(i, k) for i in range(len(options)) if i != k))


def lighter(options: Sequence[BlockOption], now: Way) -> int:
    """The option that a block takes next as it recomputes less, along those that free the most for their seconds; -1: none."""
    way = along(options)
    place = next((k for k, i in enumerate(way) if options[i].mode == now), 0)
    own = next((i for i, o in enumerate(options) if o.mode == now), 0)
    if way[place] != own:  # beside the way: to where nothing is recomputed
        return 0
    return way[place - 1] if place else -1


def with_moved(modes: Sequence[Way]) -> tuple[Way, ...]:
    """The modes of a block that may keep on the host what it needs; which it does not where it recomputes selectively."""
    some = [mode for mode in modes if mode != "selective"]
    return tuple(way for mode in some for way in ((mode, MOVED) if mode == "none" else (mode,))) or tuple(modes)


def none_if_moved(way: Way) -> Recompute:
    """What a block recomputes."""
    return "none" if way == MOVED else way


def along(options: Sequence[BlockOption]) -> list[int]:
    """Positions of options from the first to the one that keeps least, each step freeing more for a second than the next."""
    found = [0]
    while True:
        here = options[found[-1]]
        less = [i for i in range(found[-1] + 1, len(options)) if options[i].held_bytes < here.held_bytes]
        if not less:
            return found
        found.append(max(less, key=lambda i: (gain(here, options[i]), -i)))


def gain(before: BlockOption, after: BlockOption) -> float:
    """Bytes that recompute frees for each second it takes."""
    return (before.held_bytes - after.held_bytes) / max(after.time_s - before.time_s, 1e-12)
