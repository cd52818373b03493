"""The typing on axis ``batch``: samples are independent up to the loss, which is a sum over them.

Nothing may change its type, except that a value of the prelude without gradient may be totalled before the step (a
count of tokens). So the answer is nearly forced; what is left free (an operator on constants) is chosen by least work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from autopar import rules
from autopar.errors import RuleError
from autopar.graph.counts import CountError
from autopar.graph.ir import Graph, Op, Parameter, Ref, TensorSpec
from autopar.layout import I, P, R, S, Type
from autopar.rules.conversions import conversion
from autopar.rules.missing import complete
from autopar.rules.types import Strategy, Typing
from autopar.search.classes import Compact, compact
from autopar.search.problem import FREE, Cost, Problem, Weights

BATCH = "batch"


@dataclass(frozen=True, slots=True)
class _BatchCosts:
    """Work in elements made; every change is forbidden but a total of the prelude.

    Where the axis is a group of ranks, changes cost the elements that they move, twice.
    """

    size: Fraction
    is_group: bool = False

    def saves(self, op: Op) -> Sequence[Ref]:
        return ()

    def operator(self, op: Op, strategy: Strategy, saved: Sequence[Ref]) -> Cost:
        partial = sum(t == P for t in strategy.inputs)
        return Cost(time_s=float(strategy.work) * sum(spec.numel for spec in op.outputs) + 0.5 * partial)

    def change(self, spec: TensorSpec, source: Type, target: Type) -> Cost | None:
        if source == target or (not spec.requires_grad and {source.kind, target.kind} <= {"I", "R"}):
            return FREE
        change = conversion(source, target, requires_grad=spec.requires_grad) if self.is_group else None
        if change is None or (source.is_split and target.is_split):
            return None
        moves = sum(name is not None for name in (change.forward, change.backward))
        return Cost(time_s=0.1 + 2.0 * moves * spec.numel)

    def use(self, parameter: Parameter, rest: Type, wanted: Type) -> Cost | None:
        same = wanted == R or (wanted == I and not parameter.spec.requires_grad)
        return FREE if same else None

    def at_rest(self, parameter: Parameter, rest: Type) -> Cost:
        return FREE


class _BatchProblem(Problem):
    """A problem in which values of the prelude may be totalled."""

    def _change(self, ref: Ref, source: Type, target: Type) -> Cost | None:
        spec = self._specs[ref]
        if source == P and target in (I, R) and self.graph.is_prelude(ref) and not spec.requires_grad:
            return Cost(time_s=float(spec.numel))
        return super()._change(ref, source, target)


def solve_batch(compact: Compact, *, parts: int | None = None) -> Typing:
    """The typing that cuts the batch into single samples; its strategies hold for every micro-batch size.

    Args:
        compact: of the traced graph.
        parts: into how many parts the traced batch is cut; the traced batch size where None.

    Raises:
        RuleError: an operator mixes samples, or the loss is no sum over them; names it.
    """
    graph = compact.graph
    size = Fraction(parts or graph.batch_size)
    offered = {
        op.name: rules.strategies(op, tuple(graph.spec(r) for r in op.operands), axis=BATCH, size=size, fallback=True)
        for op in (*graph.prelude, *graph.ops)
    }
    is_group = bool(graph.mixing)
    if not is_group:
        offered = _reachable(graph, offered)
    problem = _BatchProblem(
        graph, _BatchCosts(size, is_group), offered=lambda op: offered[op.name], at_rest=lambda _: (I,)
    )
    for leaf in graph.inputs:
        problem.arrival(Ref(leaf.name), (R,) if leaf.batch_dim is None else (S(leaf.batch_dim),))
    for buffer in graph.buffers:
        problem.arrival(Ref(buffer.name), (R,))
    for op in (*graph.prelude, *graph.ops):
        problem.operator(op)
    problem.close()
    for a, b in compact.alike:
        problem.same_type(a, b)
    problem.end(graph.loss, lambda kind: FREE if kind == P or (is_group and not kind.is_split) else None)
    best = problem.solve((), Weights())
    value = float(best.table)
    if value == float("inf"):
        raise _mixes(graph, graph.producer(graph.loss), "no choice of strategies fits together")
    found = problem.choice(best.decode(()), value)
    inputs = {leaf.name: S(leaf.batch_dim) for leaf in graph.inputs if leaf.batch_dim is not None}
    return Typing(axis=BATCH, size=size, strategies=found.strategies, parameters=found.parameters, inputs=inputs)


def mixes_samples(graph: Graph) -> bool:
    """True when an operator looks at the samples of all data ranks: then none may be left for a later micro-batch."""
    return bool(graph.mixing) or any(op.target == "autopar.batch_norm" for op in graph.ops)


def for_batch(trace_at: Callable[[int | None], Graph], global_batch_size: int) -> Graph:
    """A traced model, whether its samples are apart or not.

    Args:
        trace_at: traces it: at the given number of samples, exactly, or at any (None).
        global_batch_size: at which it is traced again where samples meet, because shapes such as [B, B] and numbers
            such as B - 1 hold for one batch size alone.

    Raises:
        TraceError: of ``trace_at``.
    """
    try:
        graph = trace_at(None)
        complete(graph)
        solve_batch(compact(graph))
    except (CountError, RuleError):
        if global_batch_size == 1:
            raise
    else:
        return graph
    graph = trace_at(global_batch_size)
    complete(graph)
    try:
        solve_batch(compact(graph))
    except RuleError as error:
        note = (
            f"samples meet in {error.place}: each data rank takes all its samples in one micro-batch, and where they "
            "meet they are gathered from all data ranks"
        )
        return replace(graph, mixing=error.place, notes=(*graph.notes, note))
    return graph


def _reachable(graph: Graph, offered: dict[str, tuple[Strategy, ...]]) -> dict[str, tuple[Strategy, ...]]:
    """Keep the strategies whose operands can arrive as they want them; the first operator without any is named."""
    types: dict[Ref, set[Type]] = {Ref(b.name): {R, I} for b in graph.buffers}
    types |= {Ref(i.name): {R, I} if i.batch_dim is None else {S(i.batch_dim)} for i in graph.inputs}
    types |= {Ref(p.name): {R} if p.spec.requires_grad else {R, I} for p in graph.parameters}
    kept: dict[str, tuple[Strategy, ...]] = {}
    for op in (*graph.prelude, *graph.ops):
        arriving = [types[ref] for ref in op.operands]
        kept[op.name] = tuple(
            s for s in offered[op.name] if all(t in a for t, a in zip(s.inputs, arriving, strict=True))
        )
        if not kept[op.name]:
            raise _mixes(graph, op, f"operands of types {[sorted(map(str, a)) for a in arriving]}")
        for i, spec in enumerate(op.outputs):
            made = {s.outputs[i] for s in kept[op.name]}
            if not spec.requires_grad and made & {I, R}:
                made |= {I, R}
            if P in made and not spec.requires_grad and graph.is_prelude(Ref(op.name, i)):
                made |= {I, R}
            types[Ref(op.name, i)] = made
    if P not in types[graph.loss]:
        raise _mixes(graph, graph.producer(graph.loss), f"a loss of type {sorted(map(str, types[graph.loss]))}")
    return kept


def _mixes(graph: Graph, op: Op | None, value: str) -> RuleError:
    where = f"{op.name} ({op.target}), {op.module or 'no module'}" if op else str(graph.loss)
    if op is not None and not rules.has_rule(op.target):
        return RuleError(
            "every operator on samples has a sharding rule, or nobody knows whether it mixes them",
            value=f"{op.target} without one",
            place=f"{where}, {op.source}" if op.source else where,
            remedy=f'declare one: register_rule("{op.target}", "b... -> b..."), or write it with other operators',
        )
    return RuleError(
        "samples are independent up to the loss, so that a batch can be split",
        value=value,
        place=f"{where}, {op.source}" if op and op.source else where,
        remedy="keep operators that mix samples (losses over all pairs of a batch, say) out of the model",
    )
