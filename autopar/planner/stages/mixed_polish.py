"""Blocks moved between stages of a plan on devices that differ, as long as the simulated step gets shorter.

The cut of virtual stages balances what each takes; which of a rank's stages has one block more decides how the pipeline
fills and drains, and is judged here by the cost model itself. Plans with pinned or equal stages are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

MOST_TRIES = 400
"""Plans that are simulated at most."""

LEAST_GAIN = 1e-6
"""Of a step, below which a move is none."""


def polished(
    sizes: Sequence[int],
    step_s: float,
    priced: Callable[[Sequence[int]], float],
    adds_s: Callable[[Sequence[int]], Sequence[float]],
) -> tuple[int, ...]:
    """Where each stage ends once no move of one block from a stage to another shortens the step.

    Args:
        sizes: blocks of each stage.
        step_s: of the plan as it is.
        priced: seconds of a step with other ends of the stages; infinite where they do not fit.
        adds_s: of stages of these sizes, what a block more on each adds to the step's longest chain of actions: a move that
            lengthens that chain is not tried.
    """
    sizes, tries, each_s = list(sizes), 0, adds_s(sizes)
    pairs = [(a, b) for a in range(len(sizes)) for b in range(len(sizes)) if a != b]
    waiting = list(pairs)
    while waiting and tries < MOST_TRIES:
        a, b = waiting.pop(0)
        if sizes[a] < 2 or each_s[b] >= each_s[a]:
            continue
        sizes[a] -= 1
        sizes[b] += 1
        tries += 1
        found_s = priced(tuple(accumulate(sizes)))
        if found_s < step_s * (1 - LEAST_GAIN):
            step_s, place = found_s, pairs.index((a, b))
            waiting, each_s = pairs[place + 1 :] + pairs[: place + 1], adds_s(sizes)
        else:
            sizes[a] += 1
            sizes[b] -= 1
    return tuple(accumulate(sizes))
