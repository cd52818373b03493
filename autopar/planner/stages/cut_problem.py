"""The problem of a stage cut: one candidate in one layout, the blocks that may form a stage, the limits of ranks, and a cut that fits."""

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
from autopar.planner.bounds.instance import PipelineInstance
from autopar.planner.layouts.layout import PricedLayout
from autopar.planner.search import SearchContext
from autopar.planner.space.candidates import Candidate
from autopar.planner.stages.recompute import Mode
from autopar.planner.stages.stage_cut import Cut, CutBlocks, Mask, Tails, cut, stage_masks

RANK_SHARES = 6
"""With short first stages, the ranks that have them are the first sixth, the first third and so on of all ranks (ADR 0011)."""


class BlockClasses:
    """The blocks of a model by class of equal blocks, and the limits on the blocks that virtual stages may hold (ADR 0011).

    Args:
        context: the context of the search.
        may_offload: whether blocks may keep on the host what their backward needs; then only pinned blocks recompute selectively.

    Attributes:
        compact: the compact graph.
        class_of: the block of the compact graph that represents each block.
        is_pinned: whether pins say what stages hold.
        max_enumerated: the number of cuts up to which all are tried.
        modes: the modes of recompute that each block of the compact graph may have.
        is_offloaded: whether each of them is pinned to keep on the host what it needs.
        counts: how many blocks each of them represents.
    """

    def __init__(self, context: SearchContext, *, may_offload: bool) -> None:
        self.compact = compact = context.layouts.compact
        self.class_of, self.is_pinned, self.may_offload = compact.class_of, bool(context.stages), may_offload
        self.max_enumerated = 0 if context.space.equal_stages else context.space.max_enumerated
        unselective = tuple(mode for mode in context.modes if mode != "selective") or context.modes
        modes, pinned = unselective if may_offload else context.modes, context.recompute
        self.modes = [
            tuple(dict.fromkeys(m for i in members for m in ((pinned[i],) if i in pinned else modes)))
            for members in compact.members
        ]
        self.is_offloaded = [any(i in context.offloaded for i in members) for members in compact.members]
        self.counts = [len(members) for members in compact.members]

    def largest(self, layout: PricedLayout) -> tuple[int, ...]:
        """Return the blocks of the compact graph that make up the group of equal operators with the longest total time.

        The first and the last block of the model do not count, unless they represent others too.
        """
        groups, inner = self.groups()
        times = [sum(own_times(cost, recompute="none")) for cost in layout.costs]
        return tuple(max(groups, key=lambda group: sum(inner[k] * times[k] for k in group), default=()))

    def groups(self) -> tuple[list[list[int]], list[int]]:
        """Return the groups of blocks of the compact graph with equal operators, and how many blocks each block represents.

        The first and the last block of the model are left out.
        """
        inner = [*self.counts]
        inner[0] -= 1
        inner[-1] -= 1
        by_hash: dict[str, list[int]] = {}
        for k, block in enumerate(self.compact.graph.blocks):
            if inner[k] > 0:
                by_hash.setdefault(block.hash, []).append(k)
        return list(by_hash.values()), inner

    def most_blocks(self, layout: PricedLayout, stages: int) -> float:
        """Return how many blocks of the largest group a virtual stage may hold: an even share of the time of the model, in blocks.

        The share is rounded up. It limits ranks of several stages. The result is infinite if pins say what stages hold, if all cuts are
        tried, or if there is no such group.
        """
        group = self.largest(layout)
        if self.is_pinned or not group or self.tries_all(stages):
            return math.inf
        times = [sum(own_times(cost, recompute="none")) for cost in layout.costs]
        total_s = sum(n * time_s for n, time_s in zip(self.counts, times, strict=True))
        return math.ceil(math.floor(total_s / min(times[k] for k in group) + 1e-9) / stages)

    def tries_all(self, stages: int) -> bool:
        """Return whether the cuts into so many stages, with every choice of recompute, are few enough to price them all."""
        choices = [len(self.modes[k]) + self.may_offload for k in self.class_of]
        return math.comb(len(self.class_of) - 1, stages - 1) * math.prod(choices) <= self.max_enumerated

    def even_stages(self, layout: PricedLayout, pp: int, virtual_stages: int) -> list[list[NDArray[np.bool_]]]:
        """Return the ways to cut virtual stages within the limit of :meth:`most_blocks`, each a mask of allowed blocks i:j for every stage.

        If there are two stages a rank and the blocks do not divide evenly, some ways give short first stages to the first ranks, which
        fills the pipeline sooner.
        """
        stages = pp * virtual_stages
        most = self.most_blocks(layout, stages)
        if most == math.inf:
            return []
        group = set(self.largest(layout))
        prefix_counts = np.concatenate([[0], np.cumsum([k in group for k in self.class_of])])
        num_blocks = prefix_counts[None, :] - prefix_counts[:, None]
        each, remainder = divmod(int(prefix_counts[-1]), stages)
        even = [num_blocks <= most] * stages
        if not remainder or virtual_stages != 2:
            return [even]
        short, long = num_blocks <= each, num_blocks <= each + 1
        shares = sorted({pp * k // RANK_SHARES for k in range(1, RANK_SHARES)} - {0})
        return [even, *([short if s < count else long for s in range(stages)] for count in shares)]

    def equal_stages(self, layout: PricedLayout, stages: int) -> list[list[NDArray[np.bool_]]]:
        """Return the one way to cut stages that hold equal numbers of blocks of the largest group, or one more; see :meth:`even_stages`."""
        group = set(self.largest(layout))
        prefix_counts = np.concatenate([[0], np.cumsum([k in group for k in self.class_of])])
        each, remainder = divmod(int(prefix_counts[-1]), stages)
        num_blocks = prefix_counts[None, :] - prefix_counts[:, None]
        return [[(num_blocks >= each) & (num_blocks <= each + (remainder > 0))] * stages]


MAX_CUTS = 4
"""How often a cut is made again with lower limits because the memory model finds more bytes than the cut counted."""

EXCESS_FACTOR = 1.01
"""How much the limit of a rank is lowered for each byte in excess; more than 1, as what a device reserves grows with its tensors."""

Stops = tuple[int, ...]
"""The end of each stage, as the index behind its last block."""

Modes = tuple[Mode, ...]
"""The activation mode of each block."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fitting:
    """A cut with its stages and the memory of each pipeline rank, which may exceed the limits.

    Attributes:
        stops: the end of each stage.
        modes: the activation mode of each block.
        stages: the costs of the stages.
        memory: the predicted memory of each pipeline rank.
    """

    stops: Stops
    modes: Modes
    stages: tuple[StageCost, ...]
    memory: tuple[Memory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a layout gives no plan: it is too slow to matter, or too large.

    Attributes:
        needs_bytes: bytes of the fullest rank in the leanest plan that was tried; 0 if unknown.
        host_bytes: bytes that it needs of a host that has less.
        is_slow: whether it was abandoned because none of its plans is faster than the incumbent.
    """

    needs_bytes: int = 0
    host_bytes: int = 0
    is_slow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutProblem:
    """One candidate in one layout.

    Attributes:
        candidate: the candidate.
        step: how it runs.
        layout: the layout, with the prices of its blocks on the devices of each pipeline rank.
        model: the cost model of the cluster with its ranks in the order of the candidate.
        block_options: the blocks as the devices of each pipeline rank run them; equal devices share one object.
        memory_limits: the largest predicted peak of each pipeline rank, in bytes.
        tensor_limits: the same for tensors, without what the device reserves, in bytes.
        pinned: the stage of each pinned block, by index of the block.
        allowed_stages: the ways in which blocks may form stages, each a mask for every stage; None allows all stages.
        floors: the same problem as relaxations see it.
        stages_of: returns the costs of the stages of some stops, whose blocks run in some modes.
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
    floors: PipelineInstance
    stages_of: Callable[[Sequence[int], Sequence[Mode]], tuple[StageCost, ...]]

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the model."""
        return len(self.block_options[0].blocks)

    @property
    def devices_differ(self) -> bool:
        """Whether some pipeline rank prices the blocks differently from another one."""
        return len({*self.block_options}) > 1

    @property
    def pp(self) -> int:
        """The number of pipeline ranks."""
        return self.candidate.mesh.pp

    @property
    def num_stages(self) -> int:
        """The number of stages of all ranks together."""
        return self.pp * self.candidate.virtual_stages

    def may_exchange(self, fitting: Fitting) -> bool:
        """Return whether blocks of one rank may exchange who recomputes: some do, on ranks of several stages, and none offloads."""
        c, recomputes = self.candidate, {"selective", "full"} & {*fitting.modes}
        return c.virtual_stages > 1 and not c.offloads_activations and bool(recomputes)

    def masks(self) -> list[list[Mask]]:
        """Return for each way of :attr:`allowed_stages` a mask for every stage, with the pinned blocks taken into account."""
        return [stage_masks(self.num_blocks, self.num_stages, allowed, self.pinned) for allowed in self.allowed_stages]

    def peaks(self, rank: int) -> NDArray[np.int64]:
        """Return the micro-batches on each stage of a rank at the fullest moments of the rank [moments, stages of the rank]."""
        c = self.candidate
        return peak_table(c.schedule, self.pp, c.virtual_stages, c.num_micro_batches, rank)

    def tails(self) -> Tails | None:
        """Return what ranks with one stage do once a step, with blocks in their quickest modes; None without a pipeline, or with more stages."""
        one = self.floors
        if one.pp == 1 or one.virtual_stages > 1:
            return None
        ends_s = []
        for table in one.floors:
            blocks = [table.blocks[kind] for kind in one.kind_of_block]
            once_s = np.cumsum([0.0, *(block.once_s for block in blocks)])
            back_s = np.cumsum([0.0, *(block.least_s - block.forward_s for block in blocks)])
            ends_s.append((once_s + back_s, once_s))
        starts, stops = zip(*(ends_s[device] for device in one.device_of_rank), strict=True)
        backs_s = [b + one.backward_s[d] for b, d in zip(one.sends_back_s, one.device_of_rank, strict=True)]
        before_s = np.cumsum([0.0, *backs_s[:-1]]).tolist()
        fixed_s = tuple(rank_s - back_s for rank_s, back_s in zip(one.ranks_s, before_s, strict=True))
        return Tails(fixed_s=fixed_s, start_s=starts, stop_s=stops)

    def in_flight(self) -> list[int]:
        """Return the micro-batches that each stage holds at its peak."""
        by_rank = np.array([self.peaks(rank).max(axis=0) for rank in range(self.pp)])
        peaks: list[int] = by_rank.T.reshape(-1).tolist()
        return peaks

    def fitting(self, stops: Sequence[int], modes: Sequence[Mode]) -> Fitting:
        """Return a cut with its stages and its memory, which may exceed the limits."""
        cost = self.stages_of(stops, modes)
        return Fitting(stops=tuple(stops), modes=tuple(modes), stages=cost, memory=self.model.memory(cost, self.step))

    def spare_bytes(self, fitting: Fitting) -> list[int]:
        """Return the bytes that each rank has to spare; negative where it exceeds its limit."""
        return [limit - memory.total for limit, memory in zip(self.memory_limits, fitting.memory, strict=True)]

    def fits(self, fitting: Fitting) -> bool:
        """Return whether no rank exceeds its limit."""
        return min(self.spare_bytes(fitting)) >= 0

    def time_s(self, fitting: Fitting) -> float:
        """Return the predicted seconds of a step."""
        return self.model.breakdown(fitting.stages, self.step).total_s

    def with_buckets(self, num_bytes: int) -> CutProblem:
        """Return the same problem with gradients summed in buckets of another size, in bytes."""
        return replace(self, step=replace(self.step, bucket_bytes=num_bytes))

    def spans(self, stops: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return the rank, the first block and the end of each stage."""
        edges = zip((0, *stops), stops, strict=False)
        return [(s % self.pp, start, stop) for s, (start, stop) in enumerate(edges)]

    def quickest_modes(self, stops: Sequence[int]) -> Modes:
        """Return the quickest mode of each block, whatever memory it needs."""
        spans = self.spans(stops)
        return tuple(
            mode for rank, start, stop in spans for mode in self.block_options[rank].quickest_modes[start:stop]
        )

    def busy_s(self, stops: Sequence[int], modes: Sequence[Mode]) -> float:
        """Return a lower bound on the seconds of the step of a cut.

        A rank runs all of its micro-batches. Before its first forward and after its last backward a micro-batch runs through the first
        stages of the ranks before it. After its last gradient the rank also spends what its blocks take once a step. Only the longer of
        these two counts.
        """
        rank_s, first_s, once_s = [0.0] * self.pp, [0.0] * self.pp, [0.0] * self.pp
        for s, (rank, start, stop) in enumerate(self.spans(stops)):
            options = self.block_options[rank]
            blocks = options.blocks[start:stop]
            time_s = sum(options.time_of[b.key, mode] for b, mode in zip(blocks, modes[start:stop], strict=True))
            rank_s[rank] += time_s
            once_s[rank] += sum(block.once_s for block in blocks)
            if s < self.pp:
                first_s[rank] = time_s
        count, before_s, bound_s = self.candidate.num_micro_batches, 0.0, 0.0
        for rank in range(self.pp):
            bound_s = max(bound_s, max(before_s, once_s[rank]) + count * rank_s[rank])
            before_s += first_s[rank]
        return bound_s


def evenly(blocks: int, stages: int) -> Stops:
    """Return the stops of stages with numbers of blocks as equal as possible."""
    return tuple(round((s + 1) * blocks / stages) for s in range(stages))


def allows(masks: Sequence[Mask], stops: Sequence[int]) -> bool:
    """Return whether the masks allow the stages of these stops."""
    edges = zip((0, *stops), stops, strict=False)
    return all(bool(mask[start, stop]) for mask, (start, stop) in zip(masks, edges, strict=True))


# --- a cut that fits in memory as the memory model counts it


def fitted(problem: CutProblem, allowed: Sequence[Mask] | None) -> Fitting | Failure:
    """Return a cut into allowed stages that fits, or the reason why there is none.

    Args:
        problem: the problem.
        allowed: a mask for each stage; None allows all stages.

    Raises:
        InfeasibleError: the pinned stages cannot be cut.
    """
    masks = stage_masks(problem.num_blocks, problem.num_stages, allowed, problem.pinned)
    needs_bytes = 0
    for fitting in _cuts(problem, masks):
        needs_bytes = max(memory.total for memory in fitting.memory)
        if problem.fits(fitting):
            return fitting
    lean_bytes = []
    for fitting in _lean_cuts(problem, masks):
        if problem.fits(fitting):
            return fitting
        lean_bytes.append(max(memory.total for memory in fitting.memory))
    return Failure(needs_bytes=min(lean_bytes, default=needs_bytes) or leanest_bytes(problem))


def _cuts(problem: CutProblem, masks: Sequence[Mask]) -> Iterator[Fitting]:
    """Yield cuts whose stages fit into equal shares of the memory of their ranks.

    The shares shrink each time by what the memory model finds in excess.
    """
    v, pp = problem.candidate.virtual_stages, problem.pp
    limits = [limit / v for limit in problem.tensor_limits] * v
    for _ in range(MAX_CUTS):
        best = _cut(problem, masks, limits)
        if best is None:
            return
        fitting = problem.fitting(best.stops, best.modes)
        yield fitting
        spare = problem.spare_bytes(fitting)
        limits = [limit + EXCESS_FACTOR * min(spare[s % pp], 0) / v for s, limit in enumerate(limits)]


def _cut(problem: CutProblem, masks: Sequence[Mask], limits: Sequence[float]) -> Cut | None:
    """Return the best cut under a limit on the bytes of each stage; None if there is none."""
    if problem.num_stages > problem.num_blocks:
        return None
    return cut(
        problem.block_options,
        in_flight=problem.in_flight(),
        limit_bytes=limits,
        num_micro_batches=problem.candidate.num_micro_batches,
        allowed=masks,
        tails=problem.tails(),
    )


def _lean_cuts(problem: CutProblem, masks: Sequence[Mask]) -> Iterator[Fitting]:
    """Yield cuts whose blocks all need as little memory as possible: equal numbers of blocks, or the quickest cut without limits.

    They may fit where equal shares of the memory of a rank allow no cut, as the transient bytes of a stage with the loss exceed a share.
    """
    unlimited = _cut(problem, masks, [math.inf] * problem.num_stages)
    if unlimited is None:
        if problem.pinned and problem.num_stages <= problem.num_blocks:
            raise InfeasibleError(
                f"The pinned stages cannot be cut into {problem.num_stages} stages",
                fix="Drop a pin of stages, or pin another pp",
            )
        return
    even, in_flight = evenly(problem.num_blocks, problem.num_stages), problem.in_flight()
    is_allowed = allows(masks, even)
    seen = set()
    for stops, weight in product(dict.fromkeys([*([even] if is_allowed else []), unlimited.stops]), (0.0, 1.0)):
        modes: list[Mode] = []  # the leanest mode by held bytes alone, or by held and transient bytes together
        for s, (rank, start, stop) in enumerate(problem.spans(stops)):
            for block in problem.block_options[rank].blocks[start:stop]:
                least = min(block.options, key=lambda o: in_flight[s] * o.held_bytes + weight * o.transient_bytes)
                modes.append(least.mode)
        if (stops, tuple(modes)) not in seen:
            seen.add((stops, tuple(modes)))
            yield problem.fitting(stops, modes)


def leanest_bytes(problem: CutProblem) -> int:
    """Return the bytes of the fullest rank if blocks are spread evenly and recompute wherever they may."""
    stops = evenly(problem.num_blocks, problem.num_stages)
    modes = [
        min(block.options, key=lambda option: option.held_bytes).mode
        for rank, start, stop in problem.spans(stops)
        for block in problem.block_options[rank].blocks[start:stop]
    ]
    return max(memory.total for memory in problem.fitting(stops, modes).memory)
