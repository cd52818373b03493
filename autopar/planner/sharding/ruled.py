"""Layouts by rule: one typing on ``tp`` for all micro-batches and degrees (``docs/adr/0018-layouts-by-rule.md``).

The rule: a product or a look-up splits its weight wherever that divides, unless the weight is small or pinned. What is left
open is what takes the least time of one micro-batch, solved once: at the least prime factor of the degree, and with a
micro-batch of one sample more than that, which no rank can split by samples. Other micro-batches and degrees take the same
strategies, operator by operator. Where these are not offered (a dim that 2 divides and 4 does not), the degree itself is solved
for in the same way, and where that does not hold either (the dims are sizes of samples), the very micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from autopar import rules
from autopar.cost.operators.matmul import PRODUCTS
from autopar.errors import InfeasibleError, RuleError
from autopar.graph.ir import Block, Graph, Op, Ref, TensorSpec
from autopar.layout import Type
from autopar.planner.layouts.types import Split
from autopar.planner.sharding.block_chain import AxisSolution
from autopar.planner.sharding.block_table import Narrow
from autopar.planner.sharding.strategy_energy import rests_of
from autopar.planner.sharding.tables import Weights
from autopar.rules.conversions import collective_bytes, conversion
from autopar.rules.types import Strategy, Typing

READERS = frozenset((*PRODUCTS, "aten.embedding.default", "autopar.embedding_vocabulary"))
"""Operators that split their weights: products, experts, look-ups."""

SMALL = 0.01
"""Of the trained elements of its block, below which a weight is free: a router, the keys of a single head."""

ROUNDS = 8
"""Micro-batches over which a gradient sum counts as spread."""

WEIGHTS = Weights(per_step_s=1 / ROUNDS)


class SplitWeights:
    """Keeps the strategies of products and look-ups that split their weights, where there are any.

    Args:
        graph: before ``tp`` is applied.
        free: names of parameters that are left alone, because they are pinned.
        before: what an operator may take otherwise.
    """

    def __init__(self, graph: Graph, free: Collection[str], before: Narrow) -> None:
        self.weights, self.before = weights_of(graph, free), before
        # kept with the graph: what is shared by equal strategies knows them by their ids
        self._known: dict[tuple[int, tuple[int, ...]], tuple[tuple[Strategy, ...], tuple[Strategy, ...]]]
        self._known = graph.passes.setdefault(SplitWeights, {})

    def __call__(self, op: Op, offered: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        offered = self.before(op, offered)
        where = self.places(op)
        if not where:
            return offered
        key = id(offered), where
        if key not in self._known:  # what is offered is kept too, so that its id stays its own
            kept = tuple(s for s in offered if all(s.inputs[i].is_split for i in where))
            self._known[key] = offered, kept or offered
        return self._known[key][1]

    def places(self, op: Op) -> tuple[int, ...]:
        """Of the operands that are to be split."""
        if op.target not in READERS:
            return ()
        return tuple([i for i, ref in enumerate(op.operands) if ref in self.weights])

    def has(self, graph: Graph, op: Op, strategy: Strategy, size: Fraction) -> bool:
        """Whether the rule leaves an operator a strategy that it is offered."""
        if all(strategy.inputs[i].is_split for i in self.places(op)):
            return True
        operands = tuple([graph.spec(ref) for ref in op.operands])
        return strategy in self(op, rules.strategies(op, operands, axis="tp", size=size, fallback=True))


def weights_of(graph: Graph, free: Collection[str]) -> frozenset[Ref]:
    """Trained matrices that are not small, and what is made of them alone (views, casts); kept with the names of the graph.

    Args:
        free: see :class:`SplitWeights`.
    """
    known, key = graph._index.named, f"weights but {sorted(free)}"
    if key not in known:
        known[key] = _weights(graph, free)
    found: frozenset[Ref] = known[key]
    return found


def _weights(graph: Graph, free: Collection[str]) -> frozenset[Ref]:
    found: set[Ref] = set()
    for block in graph.blocks:
        trained = [p for p in graph.block_parameters(block) if p.spec.requires_grad]
        least = SMALL * sum(p.spec.numel for p in trained)
        found.update(
            Ref(p.name) for p in trained if len(p.spec.shape) > 1 and p.spec.numel >= least and p.name not in free
        )
        for op in graph.block_ops(block):
            if op.operands and all(ref in found for ref in op.operands):
                found.update(Ref(op.name, i) for i in range(len(op.outputs)))
    return frozenset(found)


def sources(split: Split) -> Iterator[Split]:
    """The splits whose solution is taken, in this order, the first that holds."""
    least = next(d for d in range(2, split.tp + 1) if split.tp % d == 0)
    for tp in dict.fromkeys((least, split.tp)):
        yield replace(split, micro_batch_size=tp + 1, tp=tp)
    yield split


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Taken:
    """What is asked of a typing for each split, the same for graphs of equal names, wiring and parameters.

    Attributes:
        blocks: for each block the names of its operators, their strategies, and the first block that equals it in both.
        rests: types at rest, of which shape and of which parameters.
    """

    blocks: tuple[tuple[tuple[str, ...], tuple[Strategy, ...], int], ...]
    rests: tuple[tuple[TensorSpec, Type | None, tuple[str, ...]], ...]


def _taken(typing: Typing, graph: Graph) -> _Taken | None:
    blocks: list[tuple[tuple[str, ...], tuple[Strategy, ...], int]] = []
    rests: dict[tuple[TensorSpec, Type | None], dict[str, None]] = {}
    first: dict[tuple[object, ...], int] = {}
    for block in graph.blocks:
        ops = tuple([op.name for op in graph.block_ops(block)])
        wanted = [typing.strategies.get(name) for name in ops]
        same = tuple([strategy for strategy in wanted if strategy is not None])
        if len(same) < len(ops):
            return None
        key = (block.hash, *map(id, same))  # the typing keeps them, so that their ids stay their own
        blocks.append((ops, same, first.setdefault(key, block.index)))
        for p in graph.block_parameters(block):
            rests.setdefault((p.spec, typing.parameters.get(p.name)), {})[p.name] = None
    return _Taken(blocks=tuple(blocks), rests=tuple([(*key, tuple(names)) for key, names in rests.items()]))


class Ruled:
    """Typings by rule.

    Args:
        solve: the solution of a split and kind of attention under these weights, its weights split.
        base: the graph of a split before ``tp``, padded.
        allowed: those of an operator's strategies that pins allow at a split.
        rule: which strategies split weights, for a split and kind of attention.
        rests: types at rest that pins ask for at a split.
    """

    def __init__(
        self,
        *,
        solve: Callable[[Split, str, Weights], AxisSolution],
        base: Callable[[Split, str], Graph],
        allowed: Callable[[Split, Op, tuple[Strategy, ...]], tuple[Strategy, ...]],
        rule: Callable[[Split, str], SplitWeights],
        rests: Callable[[Graph, int], Mapping[str, Sequence[Type]]],
    ) -> None:
        self.solve, self.base, self.allowed, self.rule, self.rests = solve, base, allowed, rule, rests
        self._solved: dict[tuple[Split, str], AxisSolution | None] = {}
        self._found: dict[tuple[Split, str], AxisSolution] = {}
        self._taken: dict[tuple[int, int], tuple[Typing, Graph, _Taken | None]] = {}

    def solution(self, split: Split, kind: str) -> AxisSolution:
        """The typing of a split; its times are left open.

        Raises:
            InfeasibleError: the pins of parameters allow none.
        """
        key = (split, kind)
        if key not in self._found:
            self._found[key] = self._solution(split, kind)
        return self._found[key]

    def _solution(self, split: Split, kind: str) -> AxisSolution:
        graph = self.base(split, kind)
        pinned = self.rests(graph, split.tp)
        for source in sources(split):
            if source == split:
                break
            found = self._source(source, kind)
            typing = found and self._carried(found.typing, graph, split, self.rule(split, kind), pinned)
            if found and typing:
                return replace(found, typing=typing, value=0.0, time_s=0.0, blocks_s=())
        return replace(self.solve(split, kind, WEIGHTS), value=0.0, time_s=0.0, blocks_s=())

    def _source(self, source: Split, kind: str) -> AxisSolution | None:
        key = (source, kind)
        if key not in self._solved:
            try:
                self._solved[key] = self.solve(source, kind, WEIGHTS)
            except (InfeasibleError, RuleError):  # that it holds is asked of the split itself
                self._solved[key] = None
        return self._solved[key]

    def _carried(
        self, typing: Typing, graph: Graph, split: Split, rule: SplitWeights, pinned: Mapping[str, Sequence[Type]]
    ) -> Typing | None:
        """The same strategies at another micro-batch and degree; None where one of them is not offered there, or against the rule."""
        taken = self._taken_of(typing, graph)
        if taken is None:
            return None
        for spec, kind, names in taken.rests:
            free = rests_of(spec, split.tp)
            if any(kind not in types for types in ([pinned.get(n) or free for n in names] if pinned else [free])):
                return None
        size, strategies = Fraction(split.tp), dict[str, Strategy]()
        known: dict[int, Sequence[Strategy]] = {}
        for block, (ops, wanted, first) in zip(graph.blocks, taken.blocks, strict=True):
            found = known.get(first)  # equal blocks are offered the same
            if found is None:
                found = self._offered(graph, block, wanted, split, rule, size)
                if found is None:
                    return None
                known[first] = found
            strategies.update(zip(ops, found, strict=True))
        return replace(typing, size=size, strategies=strategies)

    def _taken_of(self, typing: Typing, graph: Graph) -> _Taken | None:
        """None where an operator has no strategy."""
        key = id(typing), id(graph._index.named)  # both are kept too, so that their ids stay their own
        if key not in self._taken:
            self._taken[key] = typing, graph, _taken(typing, graph)
        return self._taken[key][2]

    def _offered(
        self, graph: Graph, block: Block, wanted: Sequence[Strategy], split: Split, rule: SplitWeights, size: Fraction
    ) -> Sequence[Strategy] | None:
        """The same strategies as operators are offered them at another size; None where one is not."""
        ops, found = graph.block_ops(block), _same(graph, block, wanted, size)
        if not all(strategy is not None for strategy in found):
            return None
        same = [strategy for strategy in found if strategy is not None]
        holds = all(
            self.allowed(split, op, (s,)) and rule.has(graph, op, s, size) for op, s in zip(ops, same, strict=True)
        )
        return same if holds else None


def _same(graph: Graph, block: Block, wanted: Sequence[Strategy], size: Fraction) -> Sequence[Strategy | None]:
    """For each operator of a block the strategy that is called and typed like a wanted one; kept with the graph."""
    key = Ruled, block.start, size, rules.default_table().version, tuple([s.name for s in wanted])
    if key not in graph.passes:
        graph.passes[key] = [
            _named(graph, op, own.name, size) for op, own in zip(graph.block_ops(block), wanted, strict=True)
        ]
    found: Sequence[Strategy | None] = graph.passes[key]
    return [
        s if s is not None and s.inputs == own.inputs and s.outputs == own.outputs else None
        for s, own in zip(found, wanted, strict=True)
    ]


def _named(graph: Graph, op: Op, name: str, size: Fraction) -> Strategy | None:
    """An operator has one strategy of a name at the most."""
    operands = tuple([graph.spec(ref) for ref in op.operands])
    for strategy in rules.strategies(op, operands, axis="tp", size=size, fallback=True):
        if strategy.name == name:
            return strategy
    return None


Changes = tuple[tuple["str | tuple[Ref, Type, Type]", ...], ...]
"""For each block, in order, the operators whose strategies communicate, and changes of type: of what, from which to which."""


def changes_of(graph: Graph, typing: Typing) -> Changes:
    """What of a typing takes collectives; the same for all sizes at which strategies have the same types.

    Args:
        graph: before the axis.
    """
    found, strategies, parameters = [], typing.strategies, typing.parameters
    for block in graph.blocks:
        own: list[str | tuple[Ref, Type, Type]] = []
        seen = set[tuple[Ref, Type]]()
        for op in graph.block_ops(block):
            strategy = strategies[op.name]
            if strategy.communication:
                own.append(op.name)
            for ref, wanted in zip(op.operands, strategy.inputs, strict=True):
                producer = strategies.get(ref.name)
                made = producer.outputs[ref.index] if producer is not None else parameters.get(ref.name)
                if made is None or made == wanted or (ref, wanted) in seen:
                    continue
                seen.add((ref, wanted))
                if producer is not None or made.is_split:  # else summed once a step, or cut without a collective
                    own.append((ref, made, wanted))
        found.append(tuple(own))
    return tuple(found)


def moved_s(graph: Graph, typing: Typing, changes: Changes, time_s: Callable[[str, int], float]) -> tuple[float, ...]:
    """For each block seconds that its collectives take at least, forward and backward.

    Args:
        graph: of one micro-batch before the axis, padded.
        changes: of the typing, see :func:`changes_of`.
        time_s: of a collective by its kind and bytes, see :func:`autopar.rules.conversions.collective_bytes`.
    """
    found, size = [], int(typing.size)
    known: dict[tuple[int, bool, str, str], float] = {}
    for block in changes:
        total = 0.0
        for change in block:
            if isinstance(change, str):
                inside = typing.strategies[change].communication
                total += sum(time_s(one.kind, one.num_bytes) for one in inside)
                continue
            ref, made, wanted = change
            spec = graph.spec(ref)
            key = (spec.num_bytes, spec.requires_grad, made.kind, wanted.kind)
            if key not in known:
                emitted = conversion(made, wanted, requires_grad=spec.requires_grad)
                kinds = (emitted.forward, emitted.backward) if emitted is not None else ()
                known[key] = sum(
                    time_s(kind, collective_bytes(kind, full_num_bytes=spec.num_bytes, size=size))
                    for kind in kinds
                    if kind is not None
                )
            total += known[key]
        found.append(total)
    return tuple(found)
