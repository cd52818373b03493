"""A cut that fits in memory as the memory model counts it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

from autopar.errors import InfeasibleError
from autopar.planner.stages.activation_modes import Way
from autopar.planner.stages.cut_problem import CutProblem, Failure, Fitting, allows, evenly
from autopar.planner.stages.stage_cut import Cut, Mask, cut, stage_masks

MAX_CUTS = 4
"""Times a cut is made again because the memory model finds more than the cut counted."""

MORE = 1.01
"""Of what a rank has too much, by which it is given less: what its device reserves grows with it."""


def fitted(problem: CutProblem, allowed: Sequence[Mask] | None, at_most_s: float) -> Fitting | Failure:
    """A cut that fits into stages that are allowed; or why there is none.

    Args:
        at_most_s: cuts that take no less whatever they recompute are left unfinished.

    Raises:
        InfeasibleError: the stages that are pinned cannot be cut.
    """
    masks = stage_masks(problem.num_blocks, problem.num_stages, allowed, problem.pinned)
    needs = 0
    for found in _cuts(problem, masks):
        needs = max(memory.total for memory in found.memory)
        if problem.fits(found):
            return Failure(is_slow=True) if _is_slow(problem, found, at_most_s) else found
    lean_bytes = []
    for found in _lean(problem, masks):
        if problem.fits(found):
            return Failure(is_slow=True) if _is_slow(problem, found, at_most_s) else found
        lean_bytes.append(max(memory.total for memory in found.memory))
    return Failure(needs_bytes=min(lean_bytes, default=needs) or leanest_bytes(problem))


def _is_slow(problem: CutProblem, found: Fitting, at_most_s: float) -> bool:
    """Whether stages that end at these blocks take no less than a time, whatever they recompute."""
    return problem.busy_s(found.stops, problem.quickest_modes(found.stops)) >= at_most_s


def _cuts(problem: CutProblem, masks: Sequence[Mask]) -> Iterator[Fitting]:
    """Cuts into stages that fit into equal shares of their ranks' memory, less of it each time the memory model finds too much."""
    v, pp = problem.candidate.virtual_stages, problem.pp
    limits = [limit / v for limit in problem.tensor_limits] * v
    for _ in range(MAX_CUTS):
        own = _cut(problem, masks, limits)
        if own is None:
            return
        found = problem.fitting(own.stops, own.modes)
        yield found
        spare = problem.spare_bytes(found)
        limits = [limit + MORE * min(spare[s % pp], 0) / v for s, limit in enumerate(limits)]


def _cut(problem: CutProblem, masks: Sequence[Mask], limits: Sequence[float]) -> Cut | None:
    if problem.num_stages > problem.num_blocks:
        return None
    return cut(
        problem.block_options,
        in_flight=problem.in_flight(),
        limit_bytes=limits,
        num_micro_batches=problem.candidate.num_micro_batches,
        allowed=masks,
        known=problem.times,
    )


def _lean(problem: CutProblem, masks: Sequence[Mask]) -> Iterator[Fitting]:
    """Stages of equal numbers of blocks, and those that are quickest in memory without end, all blocks as they need the least of it.

    They fit where equal shares of a rank's memory hold no cut: a stage with the loss needs more in passing than such a share.
    """
    free = _cut(problem, masks, [math.inf] * problem.num_stages)
    if free is None:
        if problem.pinned and problem.num_stages <= problem.num_blocks:
            raise InfeasibleError(
                f"The pinned stages cannot be cut into {problem.num_stages} stages",
                fix="Drop a pin of stages, or pin another pp",
            )
        return
    even, in_flight = evenly(problem.num_blocks, problem.num_stages), problem.in_flight()
    may = allows(masks, even)
    seen = set()
    for stops, passes in product(dict.fromkeys([*([even] if may else []), free.stops]), (0.0, 1.0)):
        modes: list[Way] = []  # what a block needs in passing may be beside what its stage holds, or in its place
        for s, (rank, start, stop) in enumerate(problem.spans(stops)):
            for block in problem.block_options[rank].blocks[start:stop]:
                least = min(block.options, key=lambda o: in_flight[s] * o.held_bytes + passes * o.transient_bytes)
                modes.append(least.mode)
        if (stops, tuple(modes)) not in seen:
            seen.add((stops, tuple(modes)))
            yield problem.fitting(stops, modes)


def leanest_bytes(problem: CutProblem) -> int:
    """Bytes of the fullest rank when blocks are spread evenly and recompute wherever they may."""
    stops = evenly(problem.num_blocks, problem.num_stages)
    modes = [
        min(block.options, key=lambda option: option.held_bytes).mode
        for rank, start, stop in problem.spans(stops)
        for block in problem.block_options[rank].blocks[start:stop]
    ]
    return max(memory.total for memory in problem.fitting(stops, modes).memory)
