"""Test help: well-typed typings of any graph, at random or with a preference; no cost is looked at."""

import random
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from autopar.graph.graph import Graph, Op, Ref
from autopar.graph.rewrites import compact
from autopar.plan.mesh import I, P, R, Type
from autopar.planner.sharding.input_axes import solve_batch
from autopar.rules import table as rules
from autopar.rules.local_calls import conversion
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


def axis_typing(graph: Graph, axis: str, size: int, seed: int, *, splits: float = 2.0) -> Typing:
    """For every operator a strategy at random, splits ``splits`` times as likely; every change of type exists."""
    rng = random.Random(seed)
    types: dict[Ref, Type] = {Ref(leaf.name): R for leaf in (*graph.inputs, *graph.buffers)}
    types |= {Ref(op.name, i): R for op in graph.prelude for i in range(len(op.outputs))}
    parameters: dict[str, Type] = {}
    chosen: dict[str, Strategy] = {}
    for op in graph.ops:
        specs = tuple(graph.spec(r) for r in op.operands)
        offered = rules.default_table().strategies(op, specs, axis=axis, size=Fraction(size))
        fitting = [s for s in offered if _fits(graph, op, s, types, parameters, size)]
        if op.name == graph.loss.name:
            fitting = [s for s in fitting if s.outputs[0] in (I, P)]
        assert fitting, f"{op}: {[types.get(r) for r in op.operands]} in {[s.inputs for s in offered]}"
        weights = [splits if any(t.is_split for t in (*s.inputs, *s.outputs)) else _calm(s, op, graph) for s in fitting]
        strategy = rng.choices(fitting, weights)[0]
        chosen[op.name] = strategy
        for ref, wanted in zip(op.operands, strategy.inputs, strict=True):
            if graph.is_parameter(ref) and ref.name not in parameters:
                parameters[ref.name] = wanted if wanted.is_split else I
                types[ref] = parameters[ref.name]
        types |= {Ref(op.name, i): t for i, t in enumerate(strategy.outputs)}
    return Typing(axis=axis, size=Fraction(size), strategies=chosen, parameters=parameters)


def _calm(strategy: Strategy, op: Op, graph: Graph) -> float:
    """R has no way back to I, which the loss must be: keep such strategies rare where a gradient flows."""
    return 0.05 if R in strategy.outputs and op.spec.requires_grad else 1.0


def _fits(graph: Graph, op: Op, s: Strategy, types: dict[Ref, Type], parameters: dict[str, Type], size: int) -> bool:
    if R in s.outputs and op.spec.requires_grad and op.spec.numel == 1:
        return False
    for ref, wanted in zip(op.operands, s.inputs, strict=True):
        spec = graph.spec(ref)
        if wanted.is_split and spec.shape[wanted.dim] % size:
            return False
        if graph.is_parameter(ref) and ref.name not in parameters:
            continue
        if conversion(types[ref], wanted, requires_grad=spec.requires_grad) is None:
            return False
    return True
