"""Lower bounds that know neither memory nor whole blocks: the chains of the ranks, on average."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.planner.bounds.bound_rows import Row, counts_of

Array = NDArray[np.float64]


Around = tuple[Array, Array, Array]


def flow_s(row: Row, beside: Around | None = None) -> float:
    """The bound without memory, with blocks that can be cut anywhere: the chains of the ranks, on average.

    Args:
        beside: of :func:`around`, where it is known.

    With one stage a rank, for some rank r the step takes at least (time of the stages before r) + m * (its own). The
    split that makes the largest of these smallest is geometric and gives total / (1 - (1 - 1/m)^p); it holds for
    virtual stages too, over all stages.
    """
    m, pp, stages = row.num_micro_batches, row.pp, row.pp * row.virtual_stages
    waits = row.virtual_stages == 1
    total_s = row.total_s + stages * row.every_s
    gathers_s = row.gathers_s + row.stage_gathers_s[-1]
    backward_s = row.total_s - row.forward_s
    work_s = m * total_s + gathers_s
    counts = counts_of(row.schedule, pp, row.virtual_stages, m, row.others)
    around_s = backward_s * (1 - 1 / pp)
    before_s, before_forward_s, after_s = (float(found.sum()) for found in beside or around(row))
    if not waits:
        around_s = (after_s + before_s - before_forward_s) / pp
    third = row.forward_s + stages * (row.every_s + row.send_s) - row.send_s + gathers_s + around_s
    third += (pp - 1) * row.send_back_s
    third += (m * backward_s + float(counts.todo.min()) * row.forward_s) / pp
    return max(
        total_s / (1 - (1 - 1 / m) ** stages),
        (work_s + row.once_s + before_forward_s) / pp,
        (work_s + before_s) / pp + row.least_once_s,
        third + row.least_once_s if row.tells_apart else 0.0,
    )


def least_flow_s(total_s: float, num_micro_batches: int, pp: int, stages: int) -> float:
    """A part of :func:`flow_s` from the seconds of a micro-batch on all ranks together."""
    return max(total_s / (1 - (1 - 1 / num_micro_batches) ** stages), num_micro_batches * total_s / pp)


def whole_s(row: Row) -> float | None:
    """The bound of a row without a pipeline whose blocks fit as they are: nothing is cut, and :func:`flow_s` is all of it.

    They fit as far as prices tell, which have the least bytes in passing of all modes; a bound it is in any case. None where there is a pipeline, or where memory may ask for recompute.
    """
    if row.pp * row.virtual_stages > 1 or row.most < row.count:
        return None
    held = float(counts_of(row.schedule, 1, 1, row.num_micro_batches, row.others).held[0])
    parts = ((row.first, 1), (row.last, 0 if row.alone else 1), (row.group, row.count))
    kept = sum(n * (part.static_bytes + held * max(part.held_bytes, part.held_again_bytes)) for part, n in parts)
    passing = max(row.group.passing_bytes, *(part.lean_bytes for part, _ in parts))
    return flow_s(row) if kept + passing <= row.limit_bytes else None


def around(row: Row) -> Around:
    """For each rank seconds of the blocks on the stages before its first one, of their forwards, of the backwards after its last."""
    before_s, forward_s, after_s = (np.array(v) for v in (row.before_s, row.before_forward_s, row.after_backward_s))
    if row.most < row.count and row.virtual_stages > 1:
        stages, group = np.arange(row.pp), row.group
        before, after = row.least_on(stages), row.least_on(stages[::-1])
        before_s = np.maximum(before_s, (before > 0) * row.first.time_s + before * group.time_s)
        forward_s = np.maximum(forward_s, (before > 0) * row.first.forward_s + before * group.forward_s)
        last_s = row.last.time_s - row.last.forward_s
        after_s = np.maximum(after_s, (after > 0) * last_s + after * (group.time_s - group.forward_s))
    return before_s, forward_s, after_s
