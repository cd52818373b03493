"""Every plan of a small problem, one by one: what the search is held against (``tools.campaigns.brute``).

The product is over mesh degrees, micro-batches, ZeRO stages, schedules with virtual stages, every cut into stages, recompute
of each block, and on ``tp`` every strategy of every operator with every type of every parameter at rest for which the changes of
type exist; of some problems over sizes of buckets and what lives on the host too. Each plan is priced by what prices a plan
(``CostModel.memory`` and ``CostModel.breakdown``). Nothing of the search's candidates, bounds, solvers or cuts is used, and no
block stands for another; the typing on ``batch``, which is forced, alone is the search's own. Layouts of equal costs are priced once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations, pairwise, product
from typing import Literal

from autopar.api import PRECISIONS
from autopar.cost.blocks.block_work import BlockWork
from autopar.cost.model import BlockCost, CostModel, StageCost, Step
from autopar.cost.step.data_parallel import is_mixed
from autopar.errors import InternalError, RuleError, UsageError
from autopar.graph.graph import Graph, Op, Ref
from autopar.graph.rewrites import Compact
from autopar.hardware.cluster import Cluster
from autopar.plan.mesh import I, Mesh, R, S, Type, conversion
from autopar.plan.plan import BUCKET_BYTES, RECOMPUTES, Offload, PrecisionName, Recompute
from autopar.plan.schedule import SCHEDULES, ScheduleName, check_schedule
from autopar.planner.sharding.input_axes import solve_batch
from autopar.planner.space.space import load_space
from autopar.rules import table as rules
from autopar.rules.apply import shard
from autopar.rules.strategy import Strategy, Typing

TP = "tp"
Way = Recompute | Literal["offloaded"]
WITH_OFFLOAD: tuple[Way, ...] = ("none", "offloaded", "full")
"""Where blocks may keep on the host what their backward needs, none recomputes selectively."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """A problem: what :func:`autopar.api.search` is asked, but for the memory of a device.

    ``splits``: whether ``tp`` may be more than one; ``is_whole``: whether sizes of buckets and what lives on the host are gone through.
    """

    graph: Graph
    cluster: str
    global_batch_size: int
    precision: PrecisionName = "fp32"
    optimizer: str = "adamw"
    splits: bool = True
    is_whole: bool = False

    def on(self, memory_bytes: int | None) -> str:
        """The cluster with so much memory on each device."""
        if memory_bytes is None:
            return self.cluster
        return f"{self.cluster}{'&' if '?' in self.cluster else '?'}memory={memory_bytes}"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Choice:
    """An outer choice: the search calls it a candidate."""

    mesh: Mesh
    micro_batch_size: int
    zero_stage: int
    schedule: ScheduleName
    virtual_stages: int
    offload: tuple[Offload, ...] = ()
    moves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A plan: its time, the peak of its fullest rank, and what it is.

    ``ways``: of each block its mode of recompute, or ``offloaded``: it keeps on the host what its backward needs.
    """

    time_s: float
    peak_bytes: int
    stops: tuple[int, ...]
    ways: tuple[Way, ...]
    layout: int
    bucket_bytes: int = BUCKET_BYTES


@dataclass(slots=True)
class Product:
    """All plans of a problem.

    Attributes:
        fronts: for each outer choice the plans that no other of it is quicker than in as much memory, from lean to fast.
        plans: how many there are, those of equal costs counted each.
        priced: how many of them were priced.
        layouts: the most layouts of one micro-batch and degree of ``tp``.
    """

    fronts: dict[Choice, list[Point]] = field(default_factory=dict)
    plans: int = 0
    priced: int = 0
    layouts: int = 1

    def best(self, limit_bytes: float) -> tuple[Choice, Point] | None:
        """The fastest plan whose peak is no more than this."""
        found = [(p.time_s, c, p) for c, front in self.fronts.items() if (p := best_of(front, limit_bytes)) is not None]
        return min(found, key=lambda one: one[0])[1:] if found else None

    @property
    def least_bytes(self) -> int:
        """What the leanest plan needs."""
        return min(front[0].peak_bytes for front in self.fronts.values())


def best_of(front: Sequence[Point], limit_bytes: float) -> Point | None:
    """The fastest plan of a front that fits."""
    return next((p for p in reversed(front) if p.peak_bytes <= limit_bytes), None)


def every_plan(small: Small) -> Product:
    """The product of a problem."""
    return _Enumeration(small).run()


class _Enumeration:
    """The state of one :func:`every_plan`."""

    def __init__(self, small: Small) -> None:
        self.small, self.graph = small, small.graph
        self.cluster = Cluster.parse(small.cluster)
        self.model = CostModel(self.cluster, PRECISIONS[small.precision], small.optimizer)
        whole = Compact(graph=self.graph, members=tuple((i,) for i in range(len(self.graph.blocks))), alike=())
        self.batch = solve_batch(whole)
        self.found = Product()
        self.is_mixed = is_mixed(self.model.precision)
        may = small.is_whole and all(device.host is not None for device in self.cluster.devices)
        self.offloads: tuple[tuple[Offload, ...], ...] = ((), ("optimizer",)) if may else ((),)
        self.moves = (False, True) if may else (False,)
        self._hosted: dict[int, tuple[BlockCost, BlockCost]] = {}  # a block is kept too, so that its id stays its own
        self.buckets = load_space("exhaustive").bucket_bytes if small.is_whole else (BUCKET_BYTES,)
        self.tied = any(_readers(self.graph, p.name) > 1 for p in self.graph.parameters)
        self._layouts: dict[tuple[int, int], list[_Layout]] = {}

    def run(self) -> Product:
        batch = self.small.global_batch_size
        for mesh in meshes(self.cluster.world_size, splits=self.small.splits):
            if batch % mesh.data:
                continue
            for micro in (m for m in range(1, batch // mesh.data + 1) if batch // mesh.data % m == 0):
                for layout, (costs, prelude_s, totals, times) in enumerate(self._priced(mesh, micro)):
                    self._runs(mesh, micro, layout, costs, prelude_s, totals, times)
        for choice, points in self.found.fronts.items():
            self.found.fronts[choice] = front_of(points)
        return self.found

    # --- layouts

    def _priced(self, mesh: Mesh, micro: int) -> list[tuple[tuple[BlockCost, ...], float, tuple[int, ...], int]]:
        """Costs of all blocks in each layout that differs in them, with how many layouts have these costs."""
        if (micro, mesh.tp) not in self._layouts:
            self._layouts[micro, mesh.tp] = list(self._every_layout(micro, mesh.tp))
        layouts = self._layouts[micro, mesh.tp]
        self.found.layouts = max(self.found.layouts, len(layouts))
        made: dict[int, BlockCost] = {}
        equal: dict[BlockCost, BlockCost] = {}
        different: dict[tuple[tuple[int, ...], float, tuple[int, ...]], tuple[tuple[BlockCost, ...], int]] = {}
        for own in layouts:
            for work in own.works:
                if id(work) not in made:
                    cost = replace(self.model.price(work, mesh), key="")  # which names what it is of
                    made[id(work)] = equal.setdefault(cost, cost)
            costs = tuple(made[id(work)] for work in own.works)
            key = (tuple(map(id, costs)), own.prelude_s, own.totals)
            different[key] = (costs, different[key][1] + 1 if key in different else 1)
        return [(costs, key[1], key[2], times) for key, (costs, times) in different.items()]

    def _every_layout(self, micro: int, tp: int) -> Iterator[_Layout]:
        graph = shard(
            self.graph,
            replace(self.batch, size=Fraction(self.graph.batch_size, micro)),
            global_batch_size=self.small.global_batch_size,
            micro_batch_size=micro,
        )
        known: dict[object, BlockWork] = {}
        for typing in typings(graph, tp) if tp > 1 else (None,):
            keys = [_block_key(graph, i, typing, self.tied) for i in range(len(graph.blocks))]
            local = None
            for i, key in enumerate(keys):
                if key not in known:
                    try:
                        local = local or (graph if typing is None else shard(graph, typing))
                    except (RuleError, InternalError):
                        break
                    known[key] = self.model.block_work(local, local.blocks[i])
            else:
                yield _Layout(
                    works=tuple(known[key] for key in keys),
                    prelude_s=self.model.prelude_time_s(graph),
                    totals=tuple(graph.spec(ref).num_bytes for ref in graph.sums),
                )

    # --- runs of a layout

    def _runs(
        self,
        mesh: Mesh,
        micro: int,
        layout: int,
        costs: Sequence[BlockCost],
        prelude_s: float,
        totals: tuple[int, ...],
        times: int,
    ) -> None:
        num_micro_batches = self.small.global_batch_size // mesh.data // micro
        for schedule, virtual_stages in pipelines(mesh.pp, len(costs), num_micro_batches):
            degrees = product(zero_stages(mesh, is_mixed=self.is_mixed), self.offloads, self.moves)
            for zero, offload, moves in degrees:
                choice = Choice(
                    mesh=mesh, micro_batch_size=micro, zero_stage=zero, schedule=schedule, virtual_stages=virtual_stages,
                    offload=offload, moves=moves,
                )  # fmt: skip
                step = Step(
                    mesh=mesh,
                    schedule=schedule,
                    num_micro_batches=num_micro_batches,
                    zero_stage=zero,
                    global_batch_size=self.small.global_batch_size,
                    flops_per_sample=1.0,
                    tokens_per_sample=1,
                    prelude_s=prelude_s,
                    adds_gradients=True,
                    totals=totals,
                    offload=offload,
                )
                whole = StageCost(blocks=tuple(costs), recompute=tuple("none" for _ in costs))
                sizes = self.buckets if self.model.sums_in_buckets([whole], step) else (BUCKET_BYTES,)
                points = self.found.fronts.setdefault(choice, [])
                before = len(points)
                for size in sizes:
                    own = replace(step, bucket_bytes=size)
                    points += self._points(costs, own, virtual_stages, layout, moves=moves)
                self.found.priced += len(points) - before
                self.found.plans += (len(points) - before) * times
                if len(points) > MAX_POINTS:
                    self.found.fronts[choice] = front_of(points)

    def _points(
        self, costs: Sequence[BlockCost], step: Step, virtual_stages: int, layout: int, *, moves: bool
    ) -> Iterator[Point]:
        """Every cut with every choice of recompute, or of what lives on the host, that fits there."""
        every = [[(way, self._run(cost, way)) for way in (WITH_OFFLOAD if moves else modes(cost))] for cost in costs]
        for stops, chosen in product(cuts(len(costs), step.mesh.pp * virtual_stages), product(*every)):
            stages = [
                StageCost(
                    blocks=tuple(run[0] for _, run in chosen[start:stop]),
                    recompute=tuple(run[1] for _, run in chosen[start:stop]),
                )
                for start, stop in pairwise((0, *stops))
            ]
            memory = self.model.memory(stages, step)
            host_bytes = max(rank.host for rank in memory)
            if host_bytes and self.model.host.memory_bytes and host_bytes > self.model.host.memory_bytes:
                continue
            yield Point(
                time_s=self.model.breakdown(stages, step).total_s,
                peak_bytes=max(rank.total for rank in memory),
                stops=stops,
                ways=tuple(way for way, _ in chosen),
                layout=layout,
                bucket_bytes=step.bucket_bytes,
            )

    def _run(self, cost: BlockCost, way: Way) -> tuple[BlockCost, Recompute]:
        """A block as it runs, and what it recomputes."""
        if way != "offloaded":
            return cost, way
        if id(cost) not in self._hosted:
            self._hosted[id(cost)] = (cost, replace(cost, offloads=True))
        return self._hosted[id(cost)][1], "none"


def modes(cost: BlockCost) -> tuple[Recompute, ...]:
    """Of recompute that a block has; what is cheap is left out where nothing of it is worth making again."""
    plain = (cost.saved_bytes, cost.saved_input_bytes, cost.forward_transient_bytes, cost.backward_transient_bytes)
    again = cost.remade
    same = plain == (
        again.saved_bytes, again.saved_input_bytes, again.forward_transient_bytes, again.backward_transient_bytes
    )  # fmt: skip
    return ("none", "full") if same and not again.time_s else RECOMPUTES


MAX_POINTS = 20_000
"""Plans of an outer choice that are kept before those that others dominate are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The work of each block in one layout, and what every stage repeats."""

    works: tuple[BlockWork, ...]
    prelude_s: float
    totals: tuple[int, ...]


# --- the parts of the product


def meshes(world_size: int, *, splits: bool) -> list[Mesh]:
    """All degrees of pipeline, data and tensor parallelism that multiply to the world size."""
    found = []
    for pp, replicate, shards, tp in product(range(1, world_size + 1), repeat=4):
        if pp * replicate * shards * tp == world_size and (splits or tp == 1):
            found.append(Mesh(pp=pp, dp_replicate=replicate, dp_shard=shards, tp=tp))
    return found


def zero_stages(mesh: Mesh, *, is_mixed: bool) -> tuple[int, ...]:
    """Those that a plan may have: without ZeRO no rank shards; with one shard and one dtype FSDP has nothing to do."""
    if mesh.dp_shard == 1:
        return (0, 1, 2, 3) if is_mixed else (0,)
    return (1, 2, 3)


def pipelines(pp: int, num_blocks: int, num_micro_batches: int) -> Iterator[tuple[ScheduleName, int]]:
    """Schedules that exist for so many ranks and micro-batches, with virtual stages of at least one block."""
    for schedule, virtual_stages in product(SCHEDULES, range(1, num_blocks // pp + 1)):
        if (schedule == "none") != (pp == 1):
            continue
        try:
            check_schedule(schedule, pp, virtual_stages, num_micro_batches)
        except UsageError:
            continue
        yield schedule, virtual_stages


def cuts(num_blocks: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Where stages of at least one block each may end."""
    for inner in combinations(range(1, num_blocks), stages - 1):
        yield (*inner, num_blocks)


def typings(graph: Graph, size: int) -> Iterator[Typing]:
    """Every choice of strategies and types at rest for which the changes of type exist."""
    offered = {
        op.name: rules.default_table().strategies(
            op, tuple(graph.spec(r) for r in op.operands), axis=TP, size=Fraction(size), fallback=True
        )
        for op in graph.ops
    }
    rests = {p.name: (I, *(S(d) for d, n in enumerate(p.spec.shape) if n % size == 0 and n)) for p in graph.parameters}
    strategies: dict[str, Strategy] = {}
    parameters: dict[str, Type] = {}

    def arrives(op: Op, strategy: Strategy) -> bool:
        return all(
            _changes(graph, ref, _made(graph, ref, strategies, parameters), wanted)
            for ref, wanted in zip(op.operands, strategy.inputs, strict=True)
        )

    def after(i: int) -> Iterator[Typing]:
        if i == len(graph.ops):
            if _changes(graph, graph.loss, _made(graph, graph.loss, strategies, parameters), I):
                own = dict(strategies), dict(parameters)
                yield Typing(axis=TP, size=Fraction(size), strategies=own[0], parameters=own[1])
            return
        op = graph.ops[i]
        new = [r.name for r in dict.fromkeys(op.operands) if graph.is_parameter(r) and r.name not in parameters]
        for types in product(*(rests[name] for name in new)):
            parameters.update(zip(new, types, strict=True))
            for strategy in offered[op.name]:
                if arrives(op, strategy):
                    strategies[op.name] = strategy
                    yield from after(i + 1)
        for name in new:
            del parameters[name]

    return after(0)


def _made(graph: Graph, ref: Ref, strategies: Mapping[str, Strategy], parameters: Mapping[str, Type]) -> Type:
    if graph.is_parameter(ref):
        return parameters[ref.name]
    return strategies[ref.name].outputs[ref.index] if ref.name in strategies else R


def _changes(graph: Graph, ref: Ref, made: Type, wanted: Type) -> bool:
    return conversion(made, wanted, requires_grad=graph.spec(ref).requires_grad) is not None


def _block_key(graph: Graph, index: int, typing: Typing | None, tied: bool) -> object:
    """Equal where the block's local graph is: by its own choices and the types of what crosses its start."""
    if typing is None:
        return index
    block = graph.blocks[index]
    crossing = () if index == 0 else graph.live_across(block.start)
    ops = graph.ops if tied else graph.block_ops(block)
    owned = graph.parameters if tied else graph.block_parameters(block)
    return (
        index,
        tuple(_made(graph, ref, typing.strategies, typing.parameters) for ref in crossing),
        tuple(id(typing.strategies[op.name]) for op in ops),
        tuple(typing.parameters[p.name] for p in owned),
    )


def _readers(graph: Graph, parameter: str) -> int:
    return sum(any(p.name == parameter for p in graph.block_parameters(block)) for block in graph.blocks)


def front_of(points: Sequence[Point]) -> list[Point]:
    """Those that no other is quicker than in as much memory, from lean to fast."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.peak_bytes, p.time_s)):
        if not found or point.time_s < found[-1].time_s:
            found.append(point)
    return found
