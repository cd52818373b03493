"""Pipeline schedules as data: the actions of each pipeline rank, in order.

The same actions are simulated for time, counted for memory, and drawn for people. The orders are those of
``torch.distributed.pipelining``: GPipe, 1F1B, and interleaved 1F1B with torch's relaxed rounds (after https://arxiv.org/pdf/2104.04473).
Stage ``s`` runs on pipeline rank ``s % pp``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autopar.errors import UsageError

ScheduleName = Literal["none", "GPipe", "1F1B", "Interleaved1F1B"]
"""The pipeline schedule; ``none`` means one stage, which accumulates its micro-batches in sequence."""
SCHEDULES: tuple[ScheduleName, ...] = ("none", "GPipe", "1F1B", "Interleaved1F1B")


def check_schedule(name: str, pp: int, virtual_stages: int, num_micro_batches: int) -> None:
    """Check that the schedule supports these numbers.

    Raises:
        UsageError: the name is unknown, or the schedule does not support one of the numbers, which the error names.
    """
    if name not in SCHEDULES:
        raise UsageError.unknown("schedule", name, SCHEDULES)
    if min(pp, virtual_stages, num_micro_batches) < 1:
        raise UsageError(
            f"A pipeline cannot have {pp} ranks, {virtual_stages} virtual stages and {num_micro_batches} micro-batches",
            fix="Use at least 1 of each",
        )
    if name == "none" and pp > 1:
        raise UsageError(f"A pipeline (pp={pp}) needs a schedule, but schedule is 'none'", fix="Use schedule=1F1B")
    if name == "Interleaved1F1B":
        _check_interleaved(pp, virtual_stages, num_micro_batches)
    elif virtual_stages > 1:
        raise UsageError(
            f"The schedule {name} cannot have {virtual_stages} virtual stages",
            fix="Use schedule=Interleaved1F1B or virtual_stages=1",
        )
    if name == "1F1B" and num_micro_batches < pp:
        raise UsageError(
            f"The schedule 1F1B with {pp} stages needs at least {pp} micro-batches, but there are {num_micro_batches}",
            fix="Use smaller micro-batches, a smaller pp or schedule=GPipe",
        )


def _check_interleaved(pp: int, virtual_stages: int, num_micro_batches: int) -> None:
    if pp < 2 or virtual_stages < 2:
        raise UsageError(
            f"Interleaved1F1B needs at least 2 pipeline ranks and 2 virtual stages, but has {pp} and {virtual_stages}",
            fix="Use schedule=1F1B",
        )
    rounds = max(1, num_micro_batches // pp)
    if num_micro_batches % rounds:
        raise UsageError(
            f"Interleaved1F1B cannot cut {num_micro_batches} micro-batches into {rounds} equal rounds",
            fix=f"Use a number of micro-batches that is a multiple of pp={pp}",
        )


@lru_cache(maxsize=8)  # callers need it for one rank after the other
def schedule_numbers(name: str, pp: int, virtual_stages: int, num_micro_batches: int) -> NDArray[np.int64]:
    """Return the actions of each pipeline rank in order, as numbers [ranks, actions].

    The actions of a stage have consecutive numbers: first the forwards of its micro-batches, then the backwards.

    Args:
        name: one of :data:`SCHEDULES`; ``none`` accumulates gradients on one stage.
        pp: the number of pipeline ranks.
        virtual_stages: the number of stages of each rank.
        num_micro_batches: the micro-batches of one step.

    Raises:
        UsageError: see :func:`check_schedule`.
    """
    check_schedule(name, pp, virtual_stages, num_micro_batches)
    m, rank = num_micro_batches, np.arange(pp)[:, None]
    is_backward, step = _steps(name, pp, virtual_stages, m)
    if name != "Interleaved1F1B":
        plain: NDArray[np.int64] = (2 * rank + is_backward) * m + step
        return plain
    per_round = m // max(1, m // pp)
    rounds, within = np.divmod(step, per_round * virtual_stages)
    turn, batch = np.divmod(within, per_round)
    turn = np.where(is_backward, virtual_stages - 1 - turn, turn)
    numbers: NDArray[np.int64] = (2 * (turn * pp + rank) + is_backward) * m + rounds * per_round + batch
    return numbers


def _steps(
    name: str, pp: int, virtual_stages: int, num_micro_batches: int
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return for each action [ranks, actions] whether it is a backward, and its index among the forwards or backwards of its rank.

    A rank first runs a fill of forwards, then forwards and backwards in turn. Without virtual stages the backward comes first, which is the
    same order with one forward less in the fill.
    """
    m, count, rank = num_micro_batches, virtual_stages * num_micro_batches, np.arange(pp)[:, None]
    if name == "Interleaved1F1B":
        per_round = m // max(1, m // pp)
        fill = np.minimum((virtual_stages - 1) * per_round + 2 * (pp - 1 - rank), count)
    else:
        fill = np.full_like(rank, m - 1) if name == "GPipe" else np.minimum(m, pp - rank) - 1
    position = np.arange(2 * count)
    after_fill, is_drain = position - fill, position >= 2 * count - fill
    is_backward = is_drain | ((after_fill >= 0) & (after_fill % 2 == 1))
    alternating = after_fill // 2 + np.where(is_backward, 0, fill)
    return is_backward, np.where(after_fill < 0, position, np.where(is_drain, position - count, alternating))


@lru_cache(maxsize=4096)
def peak_table(name: str, pp: int, virtual_stages: int, num_micro_batches: int, rank: int) -> NDArray[np.int64]:
    """Return how many micro-batches each stage of a rank holds at the moments of highest memory.

    Returns:
        Counts [moments, virtual stages], in which virtual stage ``v`` is stage ``v * pp + rank``. The moments are those that no other
        moment exceeds on every stage, so that any weighted sum over the stages has its peak at one of them.
    """
    check_schedule(name, pp, virtual_stages, num_micro_batches)
    if name == "Interleaved1F1B" and num_micro_batches % pp == 0:  # rounds of pp repeat, so that a few have the peak
        num_micro_batches = min(num_micro_batches, 4 * pp)
    elif name == "1F1B":
        return np.array([[min(num_micro_batches, pp - rank)]])
    elif name != "Interleaved1F1B":
        return np.array([[num_micro_batches if name == "GPipe" else 1]])
    m = num_micro_batches
    row = schedule_numbers(name, pp, virtual_stages, m)[rank] // m  # twice the stage, plus one for a backward
    is_backward = row % 2
    # only the last forward of a run can be a peak
    last = np.flatnonzero((is_backward == 0) & (np.append(is_backward[1:], 1) == 1))
    live = np.cumsum(np.eye(virtual_stages, dtype=np.int64)[row // 2 // pp] * (1 - 2 * is_backward)[:, None], axis=0)
    moments = np.unique(live[last], axis=0)
    num_covering = (moments[:, None] <= moments[None]).all(axis=2).sum(axis=1)  # each moment covers itself
    peaks: NDArray[np.int64] = moments[num_covering == 1]
    return peaks
