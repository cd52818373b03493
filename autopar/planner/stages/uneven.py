"""Virtual stages that do not hold equal numbers of blocks: which of them have one more.

The cut of virtual stages balances what each rank takes. Which of its stages has one block more decides how the pipeline fills and
drains, which is worked out action by action: blocks move off the stages of which the longest chain of actions has the most to
others, as long as the step gets shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

TRIES = 60
"""Cuts that are made and simulated."""

LEAST_GAIN = 1e-6
"""Of a step, below which a move is none."""


def exactly(stops: Sequence[int], blocks: int) -> list[NDArray[np.bool_]]:
    """For each stage whether blocks i:j may be one: those that end here alone."""
    ways = []
    for start, stop in zip((0, *stops), stops, strict=False):
        way = np.zeros((blocks + 1, blocks + 1), dtype=bool)
        way[start, stop] = True
        ways.append(way)
    return ways


def moved(
    stops: Sequence[int],
    step_s: float,
    priced: Callable[[tuple[int, ...]], float],
    weights: Callable[[tuple[int, ...]], Sequence[float]],
) -> tuple[int, ...]:
    """Where stages end once no move of a block that was tried shortens the step.

    Args:
        stops: where they end.
        step_s: with these.
        priced: seconds of a step with other ends; infinite where they do not fit.
        weights: of ends that were priced, how much a block on each stage adds to the longest chain of actions.
    """
    seen, tries = {tuple(stops)}, 0
    sizes = [stop - start for start, stop in zip((0, *stops), stops, strict=False)]
    while tries < TRIES:
        each = weights(tuple(accumulate(sizes)))
        pairs = [(a, b) for a in range(len(sizes)) for b in range(len(sizes)) if sizes[a] > 1 and each[a] > each[b]]
        for a, b in sorted(pairs, key=lambda pair: each[pair[1]] - each[pair[0]]):
            sizes[a], sizes[b] = sizes[a] - 1, sizes[b] + 1
            ends = tuple(accumulate(sizes))
            if ends not in seen and tries < TRIES:
                seen.add(ends)
                tries += 1
                found_s = priced(ends)
                if found_s < step_s * (1 - LEAST_GAIN):
                    step_s = found_s
                    break
            sizes[a], sizes[b] = sizes[a] + 1, sizes[b] - 1
        else:
            break
    return tuple(accumulate(sizes))


def is_even(stops: Sequence[int], counted: Sequence[bool]) -> bool:
    """Whether all stages have as many of these blocks."""
    return len({sum(counted[start:stop]) for start, stop in zip((0, *stops), stops, strict=False)}) == 1
