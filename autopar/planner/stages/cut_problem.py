"""What a stage cut is asked for: one candidate in one layout, what its pipeline ranks can hold, and a cut that fits in that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autopar.cost.model import CostModel, StageCost, Step
from autopar.cost.step.simulation import StageTimes, simulate
from autopar.errors import InfeasibleError
from autopar.plan.prediction import Memory
from autopar.plan.schedule import peak_table
from autopar.planner.layouts.layout import PricedLayout
from autopar.planner.space.candidates import Candidate
from autopar.planner.stages.activation_modes import Way
from autopar.planner.stages.stage_cut import Cut, CutBlocks, KnownTimes, Mask, cut, stage_masks

MAX_CUTS = 4
"""Times a cut is made again because the memory model finds more than the cut counted."""

MORE = 1.01
"""Of what a rank has too much, by which it is given less: what its device reserves grows with it."""

Stops = tuple[int, ...]
Modes = tuple[Way, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fitting:
    """A cut with its stages and the memory of each pipeline rank; see :class:`autopar.planner.stages.stage_cut.Cut`."""

    stops: Stops
    modes: Modes
    made: tuple[StageCost, ...]
    memory: tuple[Memory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a layout gave no plan: too slow to matter, or too large.

    Attributes:
        needs_bytes: of the fullest rank, of the leanest plan that was tried; 0 where that is not known.
        host_bytes: what it needs of a host that has less.
        is_slow: it was left unfinished, as no plan of it is faster than what there is.
    """

    needs_bytes: int = 0
    host_bytes: int = 0
    is_slow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutProblem:
    """One candidate in one layout.

    Attributes:
        candidate, step: what is cut; the step says how it runs.
        layout: with the prices of its blocks on the devices of each pipeline rank.
        model: the cost model of the cluster with its ranks in the candidate's order.
        block_options: for each pipeline rank the blocks as its devices run them; equal devices have the same ones.
        memory_limits: the largest predicted peak of each pipeline rank, in bytes.
        tensor_limits: likewise of its tensors, without what the device reserves.
        pinned: the stage of blocks that are pinned to one.
        allowed_stages: ways in which blocks may form stages, each a mask for every stage; None: as they are quickest.
        stages_of: stages that end at some blocks, whose blocks run in some modes.
        times: of stages, as its cuts work them out.
    """

    candidate: Candidate
    step: Step
    layout: PricedLayout
    model: CostModel
    block_options: tuple[CutBlocks, ...]
    memory_limits: tuple[int, ...]
    tensor_limits: tuple[float, ...]
    pinned: dict[int, int]
    allowed_stages: tuple[Sequence[Mask] | None, ...]
    stages_of: Callable[[Sequence[int], Sequence[Way]], tuple[StageCost, ...]]
    times: KnownTimes = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """Of the model."""
        return len(self.block_options[0].blocks)

    @property
    def devices_differ(self) -> bool:
        """Whether some pipeline rank runs the blocks in other times than another one."""
        return len({*self.block_options}) > 1

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return self.candidate.mesh.pp

    @property
    def num_stages(self) -> int:
        """Of all ranks."""
        return self.pp * self.candidate.virtual_stages

    def masks(self) -> list[list[Mask]]:
        """For each way of :attr:`allowed_stages` and each stage whether blocks i:j may be it."""
        return [stage_masks(self.num_blocks, self.num_stages, allowed, self.pinned) for allowed in self.allowed_stages]

    def peaks(self, rank: int) -> NDArray[np.int64]:
        """Micro-batches on a rank's stages at its fullest moments [moments, turns]."""
        own = self.candidate
        return peak_table(own.schedule, self.pp, own.virtual_stages, own.num_micro_batches, rank)

    def in_flight(self) -> list[int]:
        """Micro-batches that each stage holds at its peak."""
        by_rank = np.array([self.peaks(rank).max(axis=0) for rank in range(self.pp)])
        found: list[int] = by_rank.T.reshape(-1).tolist()
        return found

    def fitting(self, stops: Sequence[int], modes: Sequence[Way]) -> Fitting:
        """A cut with its memory, which may be too much."""
        made = self.stages_of(stops, modes)
        return Fitting(stops=tuple(stops), modes=tuple(modes), made=made, memory=self.model.memory(made, self.step))

    def spare_bytes(self, found: Fitting) -> list[int]:
        """What each rank has left; below zero: what it has too much."""
        return [limit - own.total for limit, own in zip(self.memory_limits, found.memory, strict=True)]

    def fits(self, found: Fitting) -> bool:
        """Whether each rank has room for what it needs."""
        return min(self.spare_bytes(found)) >= 0

    def time_s(self, found: Fitting) -> float:
        """Predicted seconds of a step."""
        return self.model.breakdown(found.made, self.step).total_s

    def with_buckets(self, num_bytes: int) -> CutProblem:
        """The same with gradients summed in buckets of another size."""
        return replace(self, step=replace(self.step, bucket_bytes=num_bytes))

    def spans(self, stops: Sequence[int]) -> list[tuple[int, int, int]]:
        """Rank, first block and end of each stage."""
        edges = zip((0, *stops), stops, strict=False)
        return [(s % self.pp, start, stop) for s, (start, stop) in enumerate(edges)]

    def quickest_modes(self, stops: Sequence[int]) -> Modes:
        """Of each block the mode of the least time, whatever memory it needs."""
        spans = self.spans(stops)
        return tuple(
            mode for rank, start, stop in spans for mode in self.block_options[rank].quickest_modes[start:stop]
        )

    def busy_s(self, stops: Sequence[int], modes: Sequence[Way]) -> float:
        """A bound from below on the step of a cut.

        For some rank its micro-batches, and one through the stages before it, there and back; or, where that is more, what its
        blocks add once a step after its last gradient. A rank's first forward and the last of its gradients are those of its first
        stage, whatever its virtual stages.
        """
        own_s, first_s, once_s = [0.0] * self.pp, [0.0] * self.pp, [0.0] * self.pp
        for s, (rank, start, stop) in enumerate(self.spans(stops)):
            options = self.block_options[rank]
            blocks = options.blocks[start:stop]
            time_s = sum(options.time_of[b.key, mode] for b, mode in zip(blocks, modes[start:stop], strict=True))
            own_s[rank] += time_s
            once_s[rank] += sum(block.once_s for block in blocks)
            if s < self.pp:
                first_s[rank] = time_s
        count, before_s, found = self.candidate.num_micro_batches, 0.0, 0.0
        for rank in range(self.pp):
            found = max(found, max(before_s, once_s[rank]) + count * own_s[rank])
            before_s += first_s[rank]
        return found

    def least_s(self, stops: Sequence[int]) -> float:
        """A tighter bound than :meth:`busy_s`, whatever a cut's blocks recompute: its stages simulated, without messages."""
        once_s, times = [0.0] * self.pp, []
        for rank, start, stop in self.spans(stops):
            options = self.block_options[rank]
            forward_s, time_s = options.quickest_s[:, stop] - options.quickest_s[:, start]
            times.append(StageTimes(forward_s=float(forward_s), backward_s=float(time_s - forward_s)))
            once_s[rank] += sum(block.once_s for block in options.blocks[start:stop])
        own = self.candidate
        finish_s = simulate(own.schedule, self.pp, own.num_micro_batches, times).finish_s
        return max(end_s + after_s for end_s, after_s in zip(finish_s, once_s, strict=True))


def evenly(blocks: int, stages: int) -> Stops:
    """Where stages of as equal numbers of blocks as can be end."""
    return tuple(round((s + 1) * blocks / stages) for s in range(stages))


def allows(masks: Sequence[Mask], stops: Sequence[int]) -> bool:
    """Whether stages that end at these blocks are allowed."""
    edges = zip((0, *stops), stops, strict=False)
    return all(bool(mask[start, stop]) for mask, (start, stop) in zip(masks, edges, strict=True))


def exactly(stops: Sequence[int], blocks: int) -> list[Mask]:
    """For each stage whether blocks i:j may be one: those that end here alone."""
    masks = []
    for start, stop in zip((0, *stops), stops, strict=False):
        mask = np.zeros((blocks + 1, blocks + 1), dtype=bool)
        mask[start, stop] = True
        masks.append(mask)
    return masks


# --- a cut that fits in memory as the memory model counts it


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
            return Failure(is_slow=True) if problem.least_s(found.stops) >= at_most_s else found
    lean_bytes = []
    for found in _lean(problem, masks):
        if problem.fits(found):
            return Failure(is_slow=True) if problem.least_s(found.stops) >= at_most_s else found
        lean_bytes.append(max(memory.total for memory in found.memory))
    return Failure(needs_bytes=min(lean_bytes, default=needs) or leanest_bytes(problem))


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
