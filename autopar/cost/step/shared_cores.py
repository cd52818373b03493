"""Where a step goes on pipeline ranks that share cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from autopar.cost.step.simulation import After, PipelineTimes, StageTimes, shared_ends_s
from autopar.cost.step.step import Step
from autopar.plan import Breakdown


def shared(
    every: Sequence[Breakdown],
    pipeline: PipelineTimes,
    times: Sequence[StageTimes],
    step: Step,
    *,
    core_share: float,
    is_work: bool,
) -> list[Breakdown]:
    """Breakdowns of all ranks as they are where who works while others wait has more than its share of the cores.

    What a rank does once a step, after its last action, is work as its actions are: on 2 cores 4 ranks took 176 to 183 ms a step
    wherever the blocks of a model were cut (6 blocks, 2 stages, 30 % of the step after the last action), as all their work did over
    the cores; with what follows at its stated time they were predicted to differ by 12 %.

    Args:
        every: of each rank, if it is the last one to finish: the end of its last action by stated times and what follows.
        pipeline: in stated times.
        times: of the stages; as they are while all ranks work.
        core_share: cores for each rank, below 1.
        is_work: whether sums of gradients take the cores; else a rank waits for them, and the optimizer alone is work.
    """
    after = [
        after_of(found, finish_s, is_work=is_work) for found, finish_s in zip(every, pipeline.finish_s, strict=True)
    ]
    ends_s = shared_ends_s(step.schedule, step.mesh.pp, step.num_micro_batches, times, after, core_share)
    return [_times(found, end_s / found.total_s) for found, end_s in zip(every, ends_s, strict=True)]


def after_of(found: Breakdown, finish_s: float, *, is_work: bool) -> After:
    """What follows the last action of a rank, by its breakdown and the end of that action in it; ``is_work``: see :func:`shared`."""
    follows_s = max(found.total_s - finish_s, 0.0)
    work_s = follows_s if is_work else min(found.optimizer_s, follows_s)
    return After(wait_s=follows_s - work_s, work_s=work_s)


def _times(parts: Breakdown, factor: float) -> Breakdown:
    """Parts that take ``factor`` of their time each."""
    return replace(parts, **{part.name: factor * getattr(parts, part.name) for part in fields(parts)})
