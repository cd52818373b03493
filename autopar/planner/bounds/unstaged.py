"""A bound of a candidate without a pipeline: its blocks stand where they are, so that only what recomputes is open.

Beside what a row counts of each block (:mod:`autopar.planner.bounds.rows`) the step has parts that depend on what is beside what:
gathers and reductions at both ends of the model, those of the last micro-batch, sums in buckets. The more a block
recomputes the more is hidden beside it, so that they are least where all blocks recompute as much as they may: what the whole
step then takes over the row is a part of every step, whatever recomputes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.cost.model import Step
from autopar.plan import Recompute
from autopar.planner.bounds.bound_rows import Row
from autopar.planner.bounds.rows import RowMaker
from autopar.planner.layouts.types import PricedLayout
from autopar.planner.space.candidates import Candidate


def unstaged(
    rows: RowMaker,
    candidate: Candidate,
    option: PricedLayout,
    step: Step,
    step_s: Callable[[Sequence[Recompute]], float],
) -> Row:
    """The row of a candidate with one stage, with what every step of it takes besides.

    Args:
        step_s: seconds of the step with these modes of recompute, of each block of the original graph.
    """
    row, costs = rows.exact(candidate, option, step), rows.priced(option, step)[0]
    slowest: list[Recompute] = []
    more_s = 0.0
    for k, count in enumerate(rows.counts):
        times = {mode: rows.block_s(costs, k, step, mode) for mode in rows.modes[k]}
        slowest.append(max(times, key=lambda mode: times[mode]))
        more_s += count * (max(times.values()) - min(times.values()))
    counted_s = row.num_micro_batches * (row.total_s + row.every_s + more_s)
    counted_s += row.gathers_s + row.stage_gathers_s[1] + row.once_s
    beside_s = max(step_s([slowest[k] for k in rows.class_of]) - counted_s, 0.0)
    first = replace(row.first, once_s=row.first.once_s + beside_s)
    return replace(row, first=first, once_s=row.once_s + beside_s)
