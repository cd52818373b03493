"""What the collectives of repeated blocks take at least in a layout by rule, before any is solved.

A block that stands for several is fed by its equal and feeds the next: it hands a value on in the type in which it got one. On
the way from the one to the other lie products whose weights are split, each of which reads what comes along whole or split, and
makes what is split or a pending sum. Along one such way, of all ways one with the most products, the kinds of types of the values
are chosen as if nothing else counted. A layout by rule has a type for each of these values, hands on what it gets, and changes
types at the same prices, those beside the way too: its blocks take no less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np
from numpy.typing import NDArray

from autopar import rules
from autopar.graph.compact import Compact
from autopar.graph.ir import Block, Graph, Op, Ref, TensorSpec
from autopar.layout import I, P, R, S, Type
from autopar.planner.sharding.ruled import SplitWeights
from autopar.rules.conversions import collective_bytes, conversion

TimeOf = Callable[[str, int], float]
"""Of a collective by its kind and bytes, see :func:`autopar.rules.conversions.collective_bytes`."""

TYPES = (I, R, P, S(0))
"""One of each kind: which dim is split does not count, as if changing it took nothing."""

KINDS = tuple(kind.kind for kind in TYPES)

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
"""That changes between these send; one from a split dim to another takes more than nothing."""

START = np.where(np.eye(len(TYPES), dtype=bool), 0.0, np.inf)
"""Nothing has changed yet."""


@dataclass(frozen=True, slots=True)
class _Step:
    """An operator by its position in the graph, the places of what it reads and makes on the way, and whether it splits weights."""

    position: int
    operand: int
    output: int
    is_product: bool


@dataclass(frozen=True, slots=True)
class _Way:
    """From a value that a block reads to the one that it hands on instead."""

    start: Ref
    steps: tuple[_Step, ...]


def least_moved_s(compact: Compact, rule: SplitWeights, size: int, time_s: TimeOf) -> float:
    """Seconds that collectives take at least of a micro-batch through all blocks, forward and backward, in a layout by rule.

    Zero where no block stands for several.

    Args:
        compact: of one micro-batch before the axis; whether its vocabularies are padded does not matter.
        rule: keeps the strategies that split weights.
        size: ranks of the axis.
    """
    graph, total = compact.graph, 0.0
    prices = _Prices(size, time_s)
    for block, members in zip(graph.blocks, compact.members, strict=True):
        way = _way_of(compact, block, rule) if len(members) > 1 else None
        if way is not None:
            total += len(members) * _least_s(graph, way, rule, prices)
    return total


def _least_s(graph: Graph, way: _Way, rule: SplitWeights, prices: _Prices) -> float:
    """Of one block, by the least cost of each kind of type at the end for each kind at the start."""
    found, spec, kinds = START, graph.spec(way.start), frozenset[str]()
    for step in way.steps:
        pairs = _pairs(graph, step, rule, prices.parts)
        made = graph.ops[step.position].outputs[step.output]
        changes = [own for own in pairs if own[0] != own[1]]
        is_free = not changes and kinds and all((kind, kind) in pairs for kind in kinds)
        if not (is_free and made.num_bytes == spec.num_bytes and made.requires_grad == spec.requires_grad):
            found = _least_sums(found, prices.table(spec, pairs))
            kinds = frozenset([out for _, out in pairs])
        spec = made
    return float(found.diagonal().min())


def _pairs(graph: Graph, step: _Step, rule: SplitWeights, size: Fraction) -> frozenset[tuple[str, str]]:
    """The kinds of types in which an operator may read what comes along and make what goes on."""
    op = graph.ops[step.position]
    operands = tuple([graph.spec(ref) for ref in op.operands])
    offered = rules.strategies(op, operands, axis="tp", size=size, fallback=True)
    if step.is_product:
        offered = rule(op, offered)
    i, k = step.operand, step.output
    return frozenset([(s.inputs[i].kind, s.outputs[k].kind) for s in offered])


class _Prices:
    """Seconds of changes of type on an axis of ``size`` ranks."""

    def __init__(self, size: int, time_s: TimeOf) -> None:
        self.size, self.parts, self.time_s = size, Fraction(size), time_s
        self._changes: dict[tuple[int, bool], NDArray[np.float64]] = {}
        self._tables: dict[tuple[int, bool, frozenset[tuple[str, str]]], NDArray[np.float64]] = {}

    def table(self, spec: TensorSpec, pairs: frozenset[tuple[str, str]]) -> NDArray[np.float64]:
        """For each kind in which a value is made, the least seconds until an operator makes each kind of it."""
        key = spec.num_bytes, spec.requires_grad, pairs
        if key not in self._tables:
            self._tables[key] = _least_sums(self._changes_s(spec), _allowed(pairs))
        return self._tables[key]

    def _changes_s(self, spec: TensorSpec) -> NDArray[np.float64]:
        """From each kind to each other, by way of others where that takes less: operators that change nothing are left out."""
        key = spec.num_bytes, spec.requires_grad
        if key not in self._changes:
            seconds: dict[str | None, float] = {
                kind: self.time_s(kind, collective_bytes(kind, full_num_bytes=spec.num_bytes, size=self.size))
                for kind in COLLECTIVES
            }
            found = np.array([[_sent_s(a, b, spec, seconds) for b in TYPES] for a in TYPES])
            for _ in range(2):  # by way of at most three others: there are four kinds
                found = _least_sums(found, found)
            self._changes[key] = found
        return self._changes[key]


def _least_sums(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """From each kind to each other the least, by one in ``a`` and on in ``b``."""
    found: NDArray[np.float64] = np.minimum.reduce(a[:, :, None] + b, axis=1)
    return found


@cache
def _allowed(pairs: frozenset[tuple[str, str]]) -> NDArray[np.float64]:
    """Zero where an operator may read the one kind and make the other, else infinite."""
    return np.array([[0.0 if (a, b) in pairs else math.inf for b in KINDS] for a in KINDS])


def _sent_s(source: Type, target: Type, spec: TensorSpec, seconds: Mapping[str | None, float]) -> float:
    emitted = conversion(source, target, requires_grad=spec.requires_grad)
    return math.inf if emitted is None else seconds.get(emitted.forward, 0.0) + seconds.get(emitted.backward, 0.0)


def _way_of(compact: Compact, block: Block, rule: SplitWeights) -> _Way | None:
    """The way through a block with the most products; kept with the names of its graph, and the weights that are split."""
    known, key = compact.graph._index.named, f"way {block.start}:{block.stop}"
    if key not in known or known[key][0] is not rule.weights:
        known[key] = rule.weights, _way(compact, block, rule)
    found: _Way | None = known[key][1]
    return found


def _way(compact: Compact, block: Block, rule: SplitWeights) -> _Way | None:
    graph, ops = compact.graph, compact.graph.block_ops(block)
    inside = {op.name for op in ops} | {p.name for p in graph.block_parameters(block)}
    found: tuple[int, _Way] | None = None
    places = [_places(op, rule, inside) for op in ops]
    for start, end in compact.alike:
        if end.name not in inside or start.name in inside:
            continue
        count, steps = _most(ops, block.start, places, start, end)
        if count and (found is None or count > found[0]):
            found = count, _Way(start, steps)
    return None if found is None else found[1]


def _places(op: Op, rule: SplitWeights, inside: Collection[str]) -> tuple[int, ...]:
    """Of the weights that a product splits; none where one of them is another block's, of which a rule may say something else."""
    where = rule.places(op)
    return where if all(op.operands[i].name in inside for i in where) else ()


def _most(
    ops: Sequence[Op], first: int, places: Sequence[tuple[int, ...]], start: Ref, end: Ref
) -> tuple[int, tuple[_Step, ...]]:
    """The most products on a way between two values, and its steps; zero where there is no way."""
    most: dict[Ref, tuple[int, Ref, _Step | None]] = {start: (0, start, None)}
    for i, (op, where) in enumerate(zip(ops, places, strict=True)):
        reached = [(most[ref][0], -k, ref) for k, ref in enumerate(op.operands) if ref in most and k not in where]
        if reached:
            count, k, before = max(reached, key=lambda own: own[:2])
            for output in range(len(op.outputs)):
                step = _Step(first + i, -k, output, bool(where))
                most[Ref(op.name, output)] = count + bool(where), before, step
    if end not in most:
        return 0, ()
    (count, here, last), steps = most[end], list[_Step]()
    while last is not None:
        steps.append(last)
        _, here, last = most[here]
    return count, tuple(reversed(steps))
