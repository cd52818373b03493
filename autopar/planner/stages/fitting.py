"""Cuts that fit in memory: how quick they can be, and what of a rank's memory several stages leave over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from autopar.cost.model import StageCost
from autopar.plan import Memory
from autopar.planner.stages.stage_cut import Cut, StageCutter

MAX_CUTS = 4
"""Times a cut is made again because the memory model finds more than the cut counted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fitting:
    """A cut that fits, its stages and the memory of each pipeline rank."""

    cut: Cut
    made: Sequence[StageCost]
    memory: tuple[Memory, ...]


def busy_s(
    cut: Cut,
    cutter: StageCutter,
    pp: int,
    num_micro_batches: int,
    *,
    by_rank: Sequence[StageCutter] = (),
    with_once: bool = False,
) -> float:
    """A bound from below: for some rank its micro-batches, and one through the stages before it, there and back.

    A rank's first forward and the last of its gradients are those of its first stage, whatever its virtual stages.

    Args:
        by_rank: see :meth:`StageCutter.cut`.
        with_once: what the rank's blocks add once a step counts too, after its own last gradient.
    """
    cutters = by_rank or [cutter] * pp
    known = {id(c): {(b.key, o.mode): o.time_s for b in c.blocks for o in b.options} for c in {*cutters}}
    stages, once = [], once_s(cut, cutters) if with_once else [0.0] * pp
    for s, (start, stop) in enumerate(zip((0, *cut.stops), cut.stops, strict=False)):
        blocks, times = cutters[s % pp].blocks[start:stop], known[id(cutters[s % pp])]
        stages.append(sum(times[b.key, mode] for b, mode in zip(blocks, cut.modes[start:stop], strict=True)))
    before = accumulate(stages[: pp - 1], initial=0.0)
    return max(max(b, once[r]) + num_micro_batches * sum(stages[r::pp]) for r, b in enumerate(before))


def once_s(cut: Cut, cutters: Sequence[StageCutter]) -> list[float]:
    """For each pipeline rank what its blocks add once a step at least, after its last action; ``cutters``: one for each rank."""
    pp = len(cutters)
    found = [0.0] * pp
    for s, (start, stop) in enumerate(zip((0, *cut.stops), cut.stops, strict=False)):
        found[s % pp] += sum(b.once_s for b in cutters[s % pp].blocks[start:stop])
    return found


def relaxable(cut: Cut, cutter: StageCutter, in_flight: Sequence[int], pp: int) -> list[list[int]]:
    """For each pipeline rank the blocks that recompute and need not, first those that keep the least for the time they take.

    A block stands there as often as it may go over to a mode that recomputes less.

    Args:
        in_flight: micro-batches that each stage holds at its peak.
    """
    found: list[list[tuple[float, int]]] = [[] for _ in range(pp)]
    for s, (start, stop) in enumerate(zip((0, *cut.stops), cut.stops, strict=False)):
        for i in range(start, stop):
            options, key, mode = cutter.blocks[i].options, cutter.blocks[i].key, cut.modes[i]
            while (less := cutter.lighter[key, mode]) >= 0:
                plain, other = options[less], next(o for o in options if o.mode == mode)
                gain_s, mode = other.time_s - plain.time_s, plain.mode
                if gain_s <= 0:
                    break
                found[s % pp].append((in_flight[s] * (plain.held_bytes - other.held_bytes) / gain_s, i))
    return [[i for _, i in sorted(own)] for own in found]


def relaxed(
    first: Fitting,
    orders: Sequence[Sequence[int]],
    cutter: StageCutter,
    refit: Callable[[Cut], Fitting],
    limits: Sequence[int],
) -> Fitting:
    """The cut with as many of these blocks not recomputed as fit, rank by rank in their order.

    A cut gives each of a rank's stages an equal share of its memory, and counts the most that a stage holds at any time;
    but a rank's stages hold it at different times, and some never much.

    Args:
        orders: see :func:`relaxable`.
        refit: a cut with its memory.
        limits: bytes that fit on each pipeline rank.
    """
    low, high, best = [0] * len(orders), [len(own) for own in orders], first
    while low != high:
        middle = [(a + b + 1) // 2 for a, b in zip(low, high, strict=True)]
        found = refit(_lighter(first.cut, orders, middle, cutter))
        fits = [m.total <= limit for m, limit in zip(found.memory, limits, strict=True)]
        low = [m if ok else a for a, m, ok in zip(low, middle, fits, strict=True)]
        high = [b if ok else m - 1 for b, m, ok in zip(high, middle, fits, strict=True)]
        best = found if all(fits) else best
    found = refit(_lighter(first.cut, orders, low, cutter))
    return found if all(m.total <= limit for m, limit in zip(found.memory, limits, strict=True)) else best


def lightest(cut: Cut, orders: Sequence[Sequence[int]], cutter: StageCutter) -> Cut:
    """The cut with none of these blocks recomputed, whatever memory it takes."""
    return _lighter(cut, orders, [len(own) for own in orders], cutter)


def _lighter(cut: Cut, orders: Sequence[Sequence[int]], counts: Sequence[int], cutter: StageCutter) -> Cut:
    modes = list(cut.modes)
    for own, count in zip(orders, counts, strict=True):
        for i in own[:count]:
            block = cutter.blocks[i]
            modes[i] = block.options[max(cutter.lighter[block.key, modes[i]], 0)].mode
    return replace(cut, modes=tuple(modes))
