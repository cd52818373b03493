"""What a stage cut is asked for: one candidate in one layout, which blocks may be a stage, what ranks can hold, and a cut that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autopar.cost.model import CostModel, StageCost, Step
from autopar.cost.step.step import own_times
from autopar.errors import InfeasibleError
from autopar.plan.prediction import Memory
from autopar.plan.schedule import peak_table
from autopar.planner.layouts.layout import PricedLayout
from autopar.planner.search import SearchContext
from autopar.planner.space.candidates import Candidate
from autopar.planner.stages.recompute import Mode
from autopar.planner.stages.stage_cut import Cut, CutBlocks, Mask, cut, stage_masks

LATE = 6
"""Parts of the pipeline's ranks, of which some have short first stages."""


class EqualBlocks:
    """Blocks of the model of a search, by kind.

    Args:
        context: of the search.
        moves: blocks may keep on the host what their backward needs, beside their modes of recompute, of which none is selective then.

    Attributes:
        modes: of recompute that each block of the compact graph may have.
        is_moved: whether what it keeps is pinned to the host.
        counts: blocks that it stands for.
    """

    def __init__(self, context: SearchContext, *, moves: bool) -> None:
        self.compact = compact = context.layouts.compact
        self.class_of, self.is_pinned, self.moves = compact.class_of, bool(context.stages), moves
        self.every = 0 if context.space.equal_stages else context.space.every
        plain = tuple(mode for mode in context.modes if mode != "selective") or context.modes
        modes, pinned = plain if moves else context.modes, context.recompute
        self.modes = [
            tuple(dict.fromkeys(m for i in members for m in ((pinned[i],) if i in pinned else modes)))
            for members in compact.members
        ]
        self.is_moved = [any(i in context.moved for i in members) for members in compact.members]
        self.counts = [len(members) for members in compact.members]

    def largest(self, option: PricedLayout) -> tuple[int, ...]:
        """The blocks of the compact graph that are the group of equal operators that takes longest.

        The first and the last block of all are no part of it, unless they stand for others too.
        """
        groups, inner = self.groups()
        times = [sum(own_times(cost, recompute="none")) for cost in option.costs]
        return tuple(max(groups, key=lambda own: sum(inner[k] * times[k] for k in own), default=()))

    def groups(self) -> tuple[list[list[int]], list[int]]:
        """Blocks of the compact graph by equal operators; and how many each stands for, the first and last of all left out."""
        inner = [*self.counts]
        inner[0] -= 1
        inner[-1] -= 1
        found: dict[str, list[int]] = {}
        for k, block in enumerate(self.compact.graph.blocks):
            if inner[k] > 0:
                found.setdefault(block.hash, []).append(k)
        return list(found.values()), inner

    def most_blocks(self, option: PricedLayout, stages: int) -> float:
        """How many blocks of the largest group a virtual stage may hold: the model's time in whole blocks, split evenly.

        No law with one stage a rank, where pins say what stages hold, or where all cuts are tried.
        """
        places = self.largest(option)
        if self.is_pinned or not places or self.tries_all(stages):
            return math.inf
        times = [sum(own_times(cost, recompute="none")) for cost in option.costs]
        total_s = sum(n * time_s for n, time_s in zip(self.counts, times, strict=True))
        return math.ceil(math.floor(total_s / min(times[k] for k in places) + 1e-9) / stages)

    def tries_all(self, stages: int) -> bool:
        """Whether all cuts into so many stages with every choice of recompute are few enough to be priced."""
        choices = [len(self.modes[k]) + self.moves for k in self.class_of]
        return math.comb(len(self.class_of) - 1, stages - 1) * math.prod(choices) <= self.every

    def even_stages(self, option: PricedLayout, pp: int, virtual_stages: int) -> list[list[NDArray[np.bool_]]]:
        """Ways to cut virtual stages: for each stage whether blocks i:j may be one, see :meth:`most_blocks`.

        Of two stages a rank, where blocks do not divide evenly, the first ranks' first ones may be those that are short: the pipeline
        fills sooner.
        """
        stages = pp * virtual_stages
        most = self.most_blocks(option, stages)
        if most == math.inf:
            return []
        places = set(self.largest(option))
        counted = np.concatenate([[0], np.cumsum([k in places for k in self.class_of])])
        held = counted[None, :] - counted[:, None]
        each, rest = divmod(int(counted[-1]), stages)
        even = [held <= most] * stages
        if not rest or virtual_stages != 2:
            return [even]
        fewer, larger = held <= each, held <= each + 1
        shares = sorted({pp * k // LATE for k in range(1, LATE)} - {0})
        return [even, *([fewer if s < late else larger for s in range(stages)] for late in shares)]

    def equal_stages(self, option: PricedLayout, stages: int) -> list[list[NDArray[np.bool_]]]:
        """The way to cut stages that hold equal numbers of blocks of the largest group, or one more; as in :meth:`even_stages`."""
        places = set(self.largest(option))
        counted = np.concatenate([[0], np.cumsum([k in places for k in self.class_of])])
        each, rest = divmod(int(counted[-1]), stages)
        held = counted[None, :] - counted[:, None]
        return [[(held >= each) & (held <= each + (rest > 0))] * stages]


MAX_CUTS = 4
"""Times a cut is made again because the memory model finds more than the cut counted."""

MORE = 1.01
"""Of what a rank has too much, by which it is given less: what its device reserves grows with it."""

Stops = tuple[int, ...]
Modes = tuple[Mode, ...]


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
    stages_of: Callable[[Sequence[int], Sequence[Mode]], tuple[StageCost, ...]]

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

    def fitting(self, stops: Sequence[int], modes: Sequence[Mode]) -> Fitting:
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

    def busy_s(self, stops: Sequence[int], modes: Sequence[Mode]) -> float:
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


def fitted(problem: CutProblem, allowed: Sequence[Mask] | None) -> Fitting | Failure:
    """A cut that fits into stages that are allowed; or why there is none.

    Raises:
        InfeasibleError: the stages that are pinned cannot be cut.
    """
    masks = stage_masks(problem.num_blocks, problem.num_stages, allowed, problem.pinned)
    needs = 0
    for found in _cuts(problem, masks):
        needs = max(memory.total for memory in found.memory)
        if problem.fits(found):
            return found
    lean_bytes = []
    for found in _lean(problem, masks):
        if problem.fits(found):
            return found
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
        modes: list[Mode] = []  # what a block needs in passing may be beside what its stage holds, or in its place
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
