"""Blocks of layouts priced: each once for all the layouts in which it runs alike.

Layouts of one split differ in few blocks. What a block costs depends on its operators, their strategies, the types in
which values arrive and what stays alive beside it: blocks of equal keys have equal costs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from autopar.cost.blocks.block_work import BlockWork
from autopar.cost.model import BlockCost, CostModel
from autopar.graph.ir import Block, Graph, Ref
from autopar.mesh import Mesh
from autopar.planner.sharding.block_chain import AxisSolution
from autopar.rules.apply import shard
from autopar.rules.types import Typing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedBlocks:
    """The blocks of one layout.

    Attributes:
        costs: of each block.
        keys: for each block a number, equal where the costs are equal.
        works: of each number.
        prelude_s: of the operators that every stage repeats.
        prelude: a graph with the prelude of the layout.
    """

    costs: tuple[BlockCost, ...]
    keys: tuple[int, ...]
    works: tuple[BlockWork, ...]
    prelude_s: float
    prelude: Graph


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Known:
    """A block in a typing; ``alike``: equal for blocks of equal cost."""

    alike: Hashable
    work: BlockWork
    cost: BlockCost


class BlockPrices:
    """Prices of the blocks of one micro-batch graph in one typing after the other.

    Args:
        graph: of one rank of all axes but the one that is typed.
        model: the cost model.
        mesh: whose groups communicate.
        owners: how many blocks read a parameter, by its name.
    """

    def __init__(
        self, graph: Graph, model: CostModel, mesh: Mesh, owners: Mapping[str, int], *, is_selective: bool
    ) -> None:
        self.graph, self.model, self.mesh, self.owners = graph, model, mesh, owners
        self.is_selective = is_selective
        self._frame: _Frame | None = None

    def of(self, solution: AxisSolution | None) -> PricedBlocks:
        """The blocks in a typing; None: nothing is split."""
        if solution is None:
            return self._untyped()
        if self._frame is None:
            self._frame = _Frame(graph=self.graph, owners=self.owners)
        frame = self._frame
        keys = frame.keys(solution)
        missing = {key: i for i, key in reversed(list(enumerate(keys))) if key not in frame.known}
        reads = frame.prelude_reads(solution.typing)
        if missing or reads not in frame.preludes:
            local = shard(frame.graph, solution.typing, only=frozenset(missing.values()))
            if reads not in frame.preludes:
                frame.preludes[reads] = local, self.model.prelude_time_s(local)
            for own, i in missing.items():
                frame.known[own] = self._priced(local, local.blocks[i], self._alike(local, local.blocks[i]))
        prelude, prelude_s = frame.preludes[reads]
        return _together([frame.known[own] for own in keys], prelude, prelude_s)

    def _untyped(self) -> PricedBlocks:
        graph, known = self.graph, dict[Hashable, _Known]()
        every = []
        for block in graph.blocks:
            alike = self._alike(graph, block)
            if alike not in known:
                known[alike] = self._priced(graph, block, alike)
            every.append(known[alike])
        return _together(every, graph, self.model.prelude_time_s(graph))

    def _priced(self, graph: Graph, block: Block, alike: Hashable) -> _Known:
        work = self.model.block_work(graph, block, selective=self.is_selective)
        return _Known(alike=alike, work=work, cost=self.model.price(work, self.mesh))

    def _alike(self, graph: Graph, block: Block) -> Hashable:
        """Equal for blocks of equal cost: equal operators at equal shapes, neither shared parameters nor other values sent."""
        known, key = graph._index.named, f"shared {block.start}:{block.stop}"  # by blocks of this model, for all sizes
        if key not in known:
            known[key] = tuple([p.name for p in graph.block_parameters(block) if self.owners[p.name] > 1])
        sent = tuple([graph.spec(ref) for ref in graph.block_outputs(block)])
        return block.hash, known[key], sent, graph._index.block_of.get(graph.loss.name) == block.index


def _together(every: list[_Known], prelude: Graph, prelude_s: float) -> PricedBlocks:
    first: dict[Hashable, _Known] = {}
    for known in every:
        first.setdefault(known.alike, known)
    number = {alike: i for i, alike in enumerate(first)}
    return PricedBlocks(
        costs=tuple(first[known.alike].cost for known in every),
        keys=tuple(number[known.alike] for known in every),
        works=tuple(known.work for known in first.values()),
        prelude_s=prelude_s,
        prelude=prelude,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _Frame:
    """A graph before the axis is applied, what its blocks cost in the typings so far, and its preludes.

    ``preludes``: by the types in which operators read the prelude, a graph that has it and the seconds that it takes.
    """

    graph: Graph
    owners: Mapping[str, int]
    known: dict[Hashable, _Known] = field(default_factory=dict)
    preludes: dict[Hashable, tuple[Graph, float]] = field(default_factory=dict)
    blocks: tuple[_Place, ...] = ()
    reads: tuple[tuple[str, int], ...] = ()
    uses: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.graph
        self.blocks = tuple(_place(graph, block, self.owners) for block in graph.blocks)
        uses: dict[str, list[tuple[str, int]]] = {}
        reads: list[tuple[str, int]] = []
        for op in graph.ops:
            for i, ref in enumerate(op.operands):
                if graph.is_prelude(ref):
                    reads.append((op.name, i))
                elif self.owners.get(ref.name, 1) > 1 and graph.is_parameter(ref):
                    uses.setdefault(ref.name, []).append((op.name, i))
        self.reads, self.uses = tuple(reads), {name: tuple(own) for name, own in uses.items()}

    def prelude_reads(self, typing: Typing) -> Hashable:
        """Equal for typings with equal changes of type in the prelude."""
        return tuple(typing.strategies[name].inputs[i] for name, i in self.reads)

    def keys(self, solution: AxisSolution) -> list[Hashable]:
        """For each block a key, equal for blocks of equal cost."""
        typing = solution.typing
        used = {
            name: frozenset(typing.strategies[op].inputs[i].kind for op, i in own) for name, own in self.uses.items()
        }
        return [
            (
                place.fixed,
                own.strategies,
                own.parameters,
                tuple(typing.strategies[ref.name].outputs[ref.index] for ref in place.others),
                tuple(used[name] for name in place.shared),
            )
            for place, own in zip(self.blocks, solution.blocks, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Place:
    """What of a block's cost no typing changes.

    ``others``: values that arrive, and those beside it that stay alive; ``shared``: parameters that other blocks read too.
    """

    fixed: Hashable
    others: tuple[Ref, ...]
    shared: tuple[str, ...]


def _place(graph: Graph, block: Block, owners: Mapping[str, int]) -> _Place:
    ops = graph.block_ops(block)
    number = {op.name: i for i, op in enumerate(ops)}
    inputs = graph.block_inputs(block)
    outside = dict.fromkeys(ref for op in ops for ref in op.operands if ref.name not in number)
    roles = tuple(
        ref if graph.is_prelude(ref) else "parameter" if graph.is_parameter(ref) else inputs.index(ref)
        for ref in outside
    )
    shared = tuple(p.name for p in graph.block_parameters(block) if owners[p.name] > 1)
    across = graph.live_across(block.stop)
    beside = tuple(ref for ref in across if ref.name not in number)
    is_last = block.index == len(graph.blocks) - 1
    others = (*inputs, *beside, *((graph.loss,) if is_last and graph.loss.name not in number else ()))
    fixed = (
        block.hash,
        roles,
        shared,
        tuple((number[ref.name], ref.index) for ref in graph.block_outputs(block)),
        tuple(graph.spec(ref) for ref in others),
        tuple(number.get(ref.name, inputs.index(ref) if ref in inputs else None) for ref in across),
        tuple(number[m.value.name] for m in graph.block_mutations(block)),
        graph.loss.name in number,
        is_last,
    )
    return _Place(fixed=fixed, others=others, shared=shared)
