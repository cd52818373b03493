"""Layouts as data: what they depend on, typings of all axes, and typings with the costs of their blocks, each block priced once.

Layouts of one key differ in few blocks. What a block costs depends on its operators, their strategies, the types in which values arrive and
what stays alive beside it: blocks of equal keys have equal costs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.cost.blocks.block_work import BlockWork
from autopar.cost.model import BlockCost, CostModel
from autopar.graph.graph import Block, Graph, Ref
from autopar.plan.mesh import Mesh, Type
from autopar.plan.plan import PaddedParameter
from autopar.planner.sharding.block_chain import AxisSolution
from autopar.planner.space.candidates import Candidate
from autopar.rules.apply import shard
from autopar.rules.other_kernels import EXPERT_TARGETS


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutKey:
    """What a layout depends on: samples of a micro-batch and the degrees of the axes inside of the model.

    Attributes:
        micro_batch_size: samples.
        ep_data: data ranks over which experts are split.
        cp, tp: ranks of these axes.
        vocab_multiple: of the rows of each rank's part of a vocabulary.
    """

    micro_batch_size: int
    ep_data: int = 1
    cp: int = 1
    tp: int = 1
    vocab_multiple: int = 1

    def __str__(self) -> str:
        degrees = f"ep_data={self.ep_data} cp={self.cp} tp={self.tp} vocab_multiple={self.vocab_multiple}"
        return f"micro_batch={self.micro_batch_size} {degrees}"

    @property
    def unsplit(self) -> LayoutKey:
        """The same micro-batch with neither ``cp`` nor ``tp``."""
        return replace(self, cp=1, tp=1)

    def mesh(self, world_size: int) -> Mesh:
        """Of so many ranks with these degrees; groups of the inner axes are the same in every other."""
        outside = max(world_size // (self.cp * self.tp), 1)
        return Mesh(dp_replicate=outside, cp=self.cp, tp=self.tp, ep=self.ep_data, ep_data=self.ep_data)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TypedLayout:
    """A typing of the whole model on ``cp`` and ``tp``, before its blocks are priced.

    Attributes:
        key: what it depends on.
        kind: of attention on ``cp``; empty where that axis has one rank.
        solution: the typing on ``tp``; None where that axis has one rank.
        identity: a text, equal for equal layouts in every process.
    """

    key: LayoutKey
    kind: str
    solution: AxisSolution | None
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        signature = self.solution.signature if self.solution is not None else ""
        digest = hashlib.blake2b(repr(signature).encode(), digest_size=12).hexdigest()
        object.__setattr__(self, "identity", f"{self.key} {self.kind} {digest}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedLayout:
    """One layout of the whole model with the costs of its blocks.

    Attributes:
        key, kind, solution: as in :class:`TypedLayout`.
        identity: of the typed layout; with the devices behind it, where costs are those of some groups of devices.
        sequence: the typing on ``cp``; None where that axis has one rank.
        costs: of each block of the compact graph.
        keys: for each of these blocks a number, equal where the costs are equal.
        prelude_s: of the operators that every stage repeats.
        padding: of vocabularies.
        totals: bytes of each count of the global batch that the loss divides by.
        at_best: costs are those of devices at their best rates, which no padding and no alignment goes below.
        ranks: for each pipeline rank the layout as its devices run it; empty where they are alike.
    """

    key: LayoutKey
    kind: str
    solution: AxisSolution | None
    identity: str
    sequence: AxisSolution | None
    costs: tuple[BlockCost, ...]
    keys: tuple[int, ...]
    prelude_s: float
    padding: tuple[PaddedParameter, ...] = ()
    totals: tuple[int, ...] = ()
    at_best: bool = False
    ranks: tuple[PricedLayout, ...] = ()

    def of_rank(self, pp_rank: int) -> PricedLayout:
        """The layout as the devices of a pipeline rank run it."""
        return self.ranks[pp_rank] if self.ranks else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the price of a layout depends on besides its key.

    Only orders of magnitude count.

    Attributes:
        num_micro_batches: over which a gradient sum is spread.
        in_flight: micro-batches that a stage holds.
    """

    num_micro_batches: int
    in_flight: int

    @property
    def order(self) -> tuple[int, int]:
        """Equal for loads of equal prices."""
        return _round(self.num_micro_batches), _round(self.in_flight)


def layout_key_of(candidate: Candidate) -> LayoutKey:
    """What of a candidate a layout depends on."""
    mesh = candidate.mesh
    return LayoutKey(
        micro_batch_size=candidate.micro_batch_size,
        ep_data=mesh.ep_data,
        cp=mesh.cp,
        tp=mesh.tp,
        vocab_multiple=candidate.vocab_multiple,
    )


def expert_degree(layout: PricedLayout, tp: int) -> int:
    """Over how many ranks a layout splits experts: those of ``ep_data``, times ``tp`` where any mixture does."""
    chosen = layout.solution.typing.strategies.values() if layout.solution is not None else ()
    return layout.key.ep_data * (tp if any(strategy.target in EXPERT_TARGETS for strategy in chosen) else 1)


def _round(n: int) -> int:
    """The power of 8 at or below: layouts change with the order of magnitude alone."""
    return int(8 ** ((n.bit_length() - 1) // 3))


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
class _PricedBlock:
    """A block in a typing; ``cost_class``: equal for blocks of equal cost."""

    cost_class: Hashable
    work: BlockWork
    cost: BlockCost


@dataclass(frozen=True, slots=True)
class _TypedBlockKey:
    """What the cost of a typed block depends on.

    Attributes:
        block: what no typing changes, see :func:`_surroundings`.
        strategies, parameters: of its operators, and its parameters at rest.
        around: types in which values arrive, and of those beside it that stay alive.
        uses: in which kinds of types all blocks read each parameter that it shares with others.
    """

    block: Hashable
    strategies: tuple[str, ...]
    parameters: tuple[Type, ...]
    around: tuple[Type, ...]
    uses: tuple[frozenset[str], ...]


class BlockPricing:
    """Prices of the blocks of one micro-batch graph in one typing after the other.

    Args:
        graph: of one rank of all axes but the one that is typed.
        model: the cost model.
        mesh: whose groups communicate.
        owners: how many blocks read a parameter, by its name.
        is_selective: whether blocks may recompute selectively.
    """

    def __init__(
        self, graph: Graph, model: CostModel, mesh: Mesh, owners: Mapping[str, int], *, is_selective: bool
    ) -> None:
        self.graph, self.model, self.mesh, self.owners = graph, model, mesh, owners
        self.is_selective = is_selective
        self._typed: _TypedBlocks | None = None

    def unsplit(self) -> PricedBlocks:
        """The blocks with nothing split."""
        graph, priced = self.graph, dict[Hashable, _PricedBlock]()
        classes = [self._cost_class(graph, block) for block in graph.blocks]
        for block, cost_class in zip(graph.blocks, classes, strict=True):
            if cost_class not in priced:
                priced[cost_class] = self._priced(graph, block, cost_class)
        return _together([priced[cost_class] for cost_class in classes], graph, self.model.prelude_time_s(graph))

    def of(self, solution: AxisSolution) -> PricedBlocks:
        """The blocks in a typing."""
        if self._typed is None:
            self._typed = _TypedBlocks(graph=self.graph, owners=self.owners)
        typed = self._typed
        keys, strategies = typed.block_keys(solution), solution.typing.strategies
        reads = tuple(
            [strategies[name].inputs[i] for name, i in typed.prelude_reads]
        )  # equal for equal changes of type
        missing = {key: i for i, key in reversed(list(enumerate(keys))) if key not in typed.priced}
        if missing or reads not in typed.preludes:
            local = shard(self.graph, solution.typing, only=frozenset(missing.values()))
            if reads not in typed.preludes:
                typed.preludes[reads] = local, self.model.prelude_time_s(local)
            for key, i in missing.items():
                block = local.blocks[i]
                typed.priced[key] = self._priced(local, block, self._cost_class(local, block))
        prelude, prelude_s = typed.preludes[reads]
        return _together([typed.priced[key] for key in keys], prelude, prelude_s)

    def _priced(self, graph: Graph, block: Block, cost_class: Hashable) -> _PricedBlock:
        work = self.model.block_work(graph, block, selective=self.is_selective)
        return _PricedBlock(cost_class=cost_class, work=work, cost=self.model.price(work, self.mesh))

    def _cost_class(self, graph: Graph, block: Block) -> Hashable:
        """Equal for blocks of equal cost: equal operators at equal shapes, neither shared parameters nor other values sent."""
        shared = tuple([p.name for p in graph.block_parameters(block) if self.owners[p.name] > 1])
        sent = tuple([graph.spec(ref) for ref in graph.block_outputs(block)])
        return block.hash, shared, sent, graph._index.block_of.get(graph.loss.name) == block.index


def _together(blocks: Sequence[_PricedBlock], prelude: Graph, prelude_s: float) -> PricedBlocks:
    first: dict[Hashable, _PricedBlock] = {}
    for block in blocks:
        first.setdefault(block.cost_class, block)
    number = {cost_class: i for i, cost_class in enumerate(first)}
    return PricedBlocks(
        costs=tuple(first[block.cost_class].cost for block in blocks),
        keys=tuple(number[block.cost_class] for block in blocks),
        works=tuple(block.work for block in first.values()),
        prelude_s=prelude_s,
        prelude=prelude,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _TypedBlocks:
    """A graph before the axis is applied, and what its blocks cost in the typings so far.

    Attributes:
        priced: blocks by what their cost depends on.
        preludes: by the types in which operators read the prelude, a graph that has it and the seconds that it takes.
    """

    graph: Graph
    owners: Mapping[str, int]
    priced: dict[_TypedBlockKey, _PricedBlock] = field(default_factory=dict)
    preludes: dict[tuple[Type, ...], tuple[Graph, float]] = field(default_factory=dict)
    _blocks: tuple[_Surroundings, ...] = ()
    prelude_reads: tuple[tuple[str, int], ...] = ()
    _uses: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.graph
        self._blocks = tuple(_surroundings(graph, block, self.owners) for block in graph.blocks)
        uses: dict[str, list[tuple[str, int]]] = {}
        reads: list[tuple[str, int]] = []
        for op in graph.ops:
            for i, ref in enumerate(op.operands):
                if graph.is_prelude(ref):
                    reads.append((op.name, i))
                elif self.owners.get(ref.name, 1) > 1 and graph.is_parameter(ref):
                    uses.setdefault(ref.name, []).append((op.name, i))
        self.prelude_reads, self._uses = tuple(reads), uses

    def block_keys(self, solution: AxisSolution) -> list[_TypedBlockKey]:
        """For each block a key, equal for blocks of equal cost."""
        strategies = solution.typing.strategies
        kinds = {
            name: frozenset([strategies[op].inputs[i].kind for op, i in uses]) for name, uses in self._uses.items()
        }
        return [
            _TypedBlockKey(
                block=block.fixed,
                strategies=typing.strategies,
                parameters=typing.parameters,
                around=tuple([strategies[ref.name].outputs[ref.index] for ref in block.around]),
                uses=tuple([kinds[name] for name in block.shared]),
            )
            for block, typing in zip(self._blocks, solution.blocks, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Surroundings:
    """What of a block's cost no typing changes, and what of a typing it depends on beside the block's own part.

    Attributes:
        fixed: equal for blocks that cost the same in equal typings.
        around: values that arrive, and those beside it that stay alive.
        shared: parameters that other blocks read too.
    """

    fixed: Hashable
    around: tuple[Ref, ...]
    shared: tuple[str, ...]


def _surroundings(graph: Graph, block: Block, owners: Mapping[str, int]) -> _Surroundings:
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
    around = (*inputs, *beside, *((graph.loss,) if is_last and graph.loss.name not in number else ()))
    fixed = (
        block.hash,
        roles,
        shared,
        tuple((number[ref.name], ref.index) for ref in graph.block_outputs(block)),
        tuple(graph.spec(ref) for ref in around),
        tuple(number.get(ref.name, inputs.index(ref) if ref in inputs else None) for ref in across),
        tuple(number[m.value.name] for m in graph.block_mutations(block)),
        graph.loss.name in number,
        is_last,
    )
    return _Surroundings(fixed=fixed, around=around, shared=shared)
