"""Test help: typings of any graph, of its samples or by names of strategies."""

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from autopar.graph.graph import Graph
from autopar.graph.rewrites import compact
from autopar.planner.sharding.input_axes import solve_batch
from autopar.rules import table as rules
from autopar.rules.strategy import Strategy, Typing


def batch_typing(graph: Graph, micro_batch_size: int) -> Typing:
    found = solve_batch(compact(graph, keys=range(len(graph.blocks))))
    return replace(found, size=Fraction(graph.batch_size, micro_batch_size), parameters={})


def named_typing(graph: Graph, axis: str, names: Mapping[str, str]) -> Typing:
    """On two ranks, strategies by operator; invariant where none is named."""
    chosen: dict[str, Strategy] = {}
    for op in graph.ops:
        specs = tuple(graph.spec(ref) for ref in op.operands)
        offered = {
            s.name: s for s in rules.default_table().strategies(op, specs, axis=axis, size=Fraction(2), fallback=True)
        }
        chosen[op.name] = offered[names.get(op.name, "invariant")]
    return Typing(axis=axis, size=Fraction(2), strategies=chosen, parameters={})
