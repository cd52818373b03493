"""Why there is no plan: the smallest set of constraints that conflict, what memory would be needed, or a limit that stopped the search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.search import Limits, Misfit, Outcome, Task, memory_of_devices, readable
from autopar.planner.space.candidates import Candidate, conflict, remedies
from autopar.planner.space.constraints import Problem
from autopar.planner.space.pin_syntax import ParameterPin, StagePin
from autopar.planner.space.pins import Pins
from autopar.planner.space.variants import against, offloaded

MAX_CONFLICT_TRIALS = 24
"""Candidates tried, leanest first, before a set of pins counts as too large for the memory."""

MAX_EVALUATED = 24
"""Candidates that a bound excluded of which it is worked out what memory they would need, where no plan fits."""

MayFit = Callable[[Pins, Problem], bool]
"""Whether something fits under these pins, for this problem."""


def conflicting(problem: Problem, pins: Pins) -> InfeasibleError:
    """Constraints leave no candidate: the smallest set of them that conflicts, with what resolves it."""
    unequal_shares = against(problem, pins)
    if unequal_shares is not None:
        return unequal_shares
    names = conflict(problem, pins)
    return InfeasibleError(
        "These constraints conflict",
        got="; ".join(names or pins.texts),
        fix=", or ".join(("Drop one of the pins named", *remedies(problem, pins, names))),
    )


def unfound(
    task: Task, problem: Problem, pool: Sequence[Candidate], evaluator: Evaluator, outcome: Outcome, limits: Limits,
    may_fit: MayFit,
) -> InfeasibleError:  # fmt: skip
    """A search ended without a plan."""
    if not outcome.finished:
        return InfeasibleError(
            f"No plan was found within the given trials and time: none of {outcome.evaluated} of {outcome.candidates} candidates fits",
            fix="Raise trials (--trials) or search_timeout_s (--timeout)",
        )
    if limits.max_step_time_s is not None:
        return _too_slow(outcome, limits.max_step_time_s)
    misfits = (*outcome.misfits, *_excluded_misfits(pool, evaluator, outcome))
    return too_large(task, problem, pool, evaluator, misfits, may_fit)


def _too_slow(outcome: Outcome, most_s: float) -> InfeasibleError:
    bound_s = outcome.lower_bound_s
    found = f"none in {bound_s:.4g} s or less" if bound_s < float("inf") else "none fits in memory in any layout"
    return InfeasibleError(
        f"No plan takes at most {most_s:g} s a step",
        got=found if bound_s > most_s else f"none of {outcome.candidates} candidates does",
        fix="Allow more time, or take more devices",
    )


def _excluded_misfits(pool: Sequence[Candidate], evaluator: Evaluator, outcome: Outcome) -> list[Misfit]:
    """What candidates would need that a bound excluded for their memory."""
    evaluated = {misfit.candidate for misfit in outcome.misfits}
    rest = [candidate for candidate in pool if candidate not in evaluated]
    hopeless = [evaluator.hopeless(candidate) for candidate in rest]
    others = [candidate for candidate, misfit in zip(rest, hopeless, strict=True) if misfit is None]
    found = [evaluator.evaluate(candidate) for candidate in others[:MAX_EVALUATED]]
    return [misfit for misfit in (*hopeless, *found) if isinstance(misfit, Misfit)]


def too_large(
    task: Task, problem: Problem, pool: Sequence[Candidate], evaluator: Evaluator, misfits: Sequence[Misfit],
    may_fit: MayFit,
) -> InfeasibleError:  # fmt: skip
    """Nothing fits in memory: the pins, the memory, the devices and the batch that conflict.

    Found by deletion: a pin is named unless without it, and those already found needless, still nothing fits.

    Args:
        pool: the candidates.
        misfits: why they do not fit.
    """
    needs = [misfit.needs_bytes for misfit in misfits if misfit.needs_bytes]
    if not needs:
        reasons = sorted({misfit.reason for misfit in misfits})
        pins = ", ".join(pin.text for pin in task.pins.pins if isinstance(pin, StagePin | ParameterPin))
        return InfeasibleError(
            "These constraints conflict",
            got="; ".join((*([pins] if pins else ()), *reasons[:3])),
            fix="Drop one of the pins" if pins else "Take more or larger devices",
        )
    left = task.pins
    for pin in task.pins.pins:
        without = left.without(pin.text)
        if not may_fit(without, problem):
            left = without
    needed = readable(min(needs) * evaluator.model.memory_spread)
    memory = f"{memory_of_devices(evaluator.model)} of memory a device (the leanest plan needs {needed})"
    world = f"{problem.world_size} device{'s' * (problem.world_size > 1)}"
    larger = replace(problem, global_batch_size=task.global_batch_size * problem.world_size)
    batch = (f"a global batch of {task.global_batch_size}",) if may_fit(left, larger) else ()
    fix = "Drop one of the pins named, or take more devices" if left.texts else "Take more or larger devices"
    return InfeasibleError(
        "These constraints conflict",
        got="; ".join((*left.texts, memory, world, *batch)),
        fix=fix + ", or search --space wide, where optimizers may live on the host" * _may_offload(task, pool),
    )


def _may_offload(task: Task, pool: Sequence[Candidate]) -> bool:
    """Whether optimizers could live on the host, but the space has none there."""
    if task.space.offload or not task.pins.allows("offload", "optimizer"):
        return False
    return len(offloaded(pool[:1], task.cluster, task.pins, ("optimizer",), task.optimizer)) > 1
