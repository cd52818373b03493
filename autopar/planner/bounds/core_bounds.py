"""Bounds of pipelines of given stage times whose ranks share cores, for many of them at once.

With k of p pipeline ranks at work these do min(p, k / c) seconds of stated work in a second, where c is the cores for each rank
(:func:`autopar.cost.step.simulation.shared_ends_s`), and no action takes less than a part s of its time (:mod:`autopar.planner.bounds.cores`).
Whatever stands before what, in any order of what ranks may do:

- an action begins no sooner than those that it needs, by chains of s times their work and the messages, have ended;
- nor before all that it needs is done, by all ranks together. Rank r cannot work before the first forward has come to it, by
  such a chain after u[r]. So at most R(t), the integral of min(p, k / c) with k the ranks of u[r] <= t, is done up to t. R is
  convex and made of straight lines, so that R(t) >= w just if one of them is: the least t is the least over these;
- the last action of all, which is the first rank's, ends no sooner than W, the work of all actions, is done, where rank r has none
  left for a time v[r] before that end: the last gradients go down from it, by a chain. No rank's u and v overlap, as the chain of its
  first and last action has both. So p times the end is no less than W and what is lost in fill and drain;
- what follows on the ranks once a step, after a wait, is work too: with W and what is lost in the fill it takes p times the step.

Each is larger, or as large, where any stage takes longer: bounds of the quickest stages hold whatever recomputes.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.cost.step.simulation import Compiled, compiled
from autopar.planner.bounds.cores import least_part

Array = NDArray[np.float64]


@lru_cache(maxsize=16)
def _needed(name: str, pp: int, virtual_stages: int, num_micro_batches: int) -> Array:
    """Of each action all that it needs, by what they take: numbers of actions [actions, durations]; see :class:`Compiled`."""
    actions = compiled(name, pp, virtual_stages, num_micro_batches)
    before: list[int] = []  # of each action a bit for each that it needs
    kinds = [0] * (3 * pp * virtual_stages)
    found = np.zeros((len(actions.rank), len(kinds)))
    for i, (need, own, kind) in enumerate(zip(actions.need, actions.before, actions.duration, strict=True)):
        bits = 0
        for other in (need, own):
            if other >= 0:
                bits |= before[other] | 1 << other
        before.append(bits)
        found[i] = [(bits & mask).bit_count() for mask in kinds]
        kinds[kind] |= 1 << i
    return found


def least_ends_s(
    degrees: tuple[str, int, int, int],
    durations_s: Array,
    sends_s: Array,
    wait_s: Array,
    after_s: Array,
    core_share: float,
) -> Array:
    """Seconds that a step takes at least [pipelines].

    Args:
        degrees: schedule, pipeline ranks, virtual stages and micro-batches.
        durations_s: of each stage's forward, backward and first forward [3 * stages, pipelines].
        sends_s: of each stage's message to the next one and of that back, and one zero [2 * stages + 1, pipelines].
        wait_s, after_s: what each rank waits for after its actions, and the work that follows [ranks, pipelines].
        core_share: cores for each rank, below 1.
    """
    _, pp, virtual_stages, count = degrees
    actions, part = compiled(*degrees), least_part(core_share, pp)
    quick_s = part * durations_s
    backward_s, first_s = quick_s[1::3][:pp], quick_s[2::3][:pp]  # of each rank's first stage
    rates = np.minimum(pp, np.arange(1, pp + 1) / core_share)
    # when a rank more may begin, and what the others might have done by then
    fill_s = first_s[:-1] + sends_s[0 : 2 * pp - 2 : 2]
    starts_s, done_s = _sums(fill_s), _sums(fill_s * rates[:-1, None])
    lost_s = pp * starts_s[-1] - done_s[-1]
    drain_s = backward_s[:-1] + sends_s[3 : 2 * pp : 2]
    idle_s = (drain_s * (pp - rates[:-1, None])).sum(axis=0)
    needed_s = _needed(*degrees) @ durations_s
    ready_s = np.full_like(needed_s, np.inf)
    for start_s, by_then_s, rate in zip(starts_s, done_s, rates, strict=True):
        np.minimum(ready_s, start_s + (needed_s - by_then_s) / rate, out=ready_s)
    ends_s = _chained(actions, quick_s, sends_s, ready_s)
    work_s = _all_work_s(pp * virtual_stages, count, durations_s)
    last_s = ends_s[list(actions.last)]
    last_s[0] = np.maximum(last_s[0], (work_s + lost_s + idle_s) / pp)
    found: Array = np.maximum(
        (last_s + wait_s + part * after_s).max(axis=0), (work_s + after_s.sum(axis=0) + lost_s) / pp
    )
    return found


def _sums(own_s: Array) -> Array:
    """Of the first 0, 1, ... of them."""
    return np.concatenate([np.zeros((1, own_s.shape[1])), np.cumsum(own_s, axis=0)])


def _chained(actions: Compiled, quick_s: Array, sends_s: Array, ready_s: Array) -> Array:
    """When actions end at the soonest [actions + 1, pipelines]; the last one is what actions need that need nothing.

    Args:
        ready_s: before which each does not begin.
    """
    ends_s = np.zeros((len(ready_s) + 1, ready_s.shape[1]))
    columns = zip(actions.need, actions.before, actions.duration, actions.message, strict=True)
    for i, (need, before, duration, message) in enumerate(columns):
        begins_s = np.maximum(ends_s[need] + sends_s[message], ends_s[before])
        ends_s[i] = np.maximum(begins_s, ready_s[i]) + quick_s[duration]
    return ends_s


def _all_work_s(stages: int, num_micro_batches: int, durations_s: Array) -> Array:
    """Of all actions."""
    forward_s, backward_s, first_s = (durations_s[k::3][:stages].sum(axis=0) for k in range(3))
    return np.asarray((num_micro_batches - 1) * forward_s + first_s + num_micro_batches * backward_s)
