"""How a block may run: the activation modes of one block with their seconds and bytes, and which of them are worth trying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.plan.plan import Recompute

MOVED: Literal["moved"] = "moved"
"""Recomputes nothing, and keeps on the host what backward needs."""

Way = Recompute | Literal["moved"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBlock:
    """A block as the cut sees it: equal ``key`` means equal in everything else.

    Attributes:
        static_bytes: parameters, gradients and optimizer states.
        once_s: the least that it adds to a step once.
        more_s: what counts beside its time where stages are balanced.
    """

    key: int
    options: tuple[BlockOption, ...]
    static_bytes: float
    once_s: float = 0.0
    more_s: float = 0.0


def useful(options: Sequence[BlockOption]) -> tuple[BlockOption, ...]:
    """Those than which no other one is as good in everything; of equal ones the first. What moves is as good as nothing else."""

    def parts(option: BlockOption) -> tuple[float, float, float]:
        return option.time_s, option.held_bytes, option.transient_bytes

    def beats(i: int, k: int) -> bool:
        a, b = parts(options[i]), parts(options[k])
        return options[i].mode != MOVED and all(x <= y for x, y in zip(a, b, strict=True)) and (a != b or i < k)

    return tuple(o for k, o in enumerate(options) if not any(beats(i, k) for i in range(len(options)) if i != k))


def with_moved(modes: Sequence[Way]) -> tuple[Way, ...]:
    """The modes of a block that may keep on the host what it needs; which it does not where it recomputes selectively."""
    some = [mode for mode in modes if mode != "selective"]
    return tuple(way for mode in some for way in ((mode, MOVED) if mode == "none" else (mode,))) or tuple(modes)


def none_if_moved(way: Way) -> Recompute:
    """What a block recomputes."""
    return "none" if way == MOVED else way


def lower_hull(options: Sequence[BlockOption]) -> list[int]:
    """Positions of options on the lower hull of seconds against held bytes, from the quickest to the one that holds least.

    Each step from one to the next frees more bytes for a second than the step after it.
    """
    if not options:
        return []
    found = [min(range(len(options)), key=lambda i: (options[i].time_s, options[i].held_bytes, i))]
    while True:
        here = options[found[-1]]
        less = [i for i, option in enumerate(options) if option.held_bytes < here.held_bytes]
        if not less:
            return found
        found.append(max(less, key=lambda i: (_gain(here, options[i]), -options[i].held_bytes)))


def _gain(before: BlockOption, after: BlockOption) -> float:
    """Bytes that are freed for each second more."""
    more_s = after.time_s - before.time_s
    return (before.held_bytes - after.held_bytes) / more_s if more_s > 0 else float("inf")
