"""The axes that split a model's input: the typing on axis ``batch``, and what may be split on axis ``cp``.

On ``batch`` samples are independent up to the loss, which is a sum over them. Nothing may change its type, except that a value of the
prelude without gradient may be totalled before the step (a count of tokens). So the answer is nearly forced; what is left free (an operator
on constants) is chosen by least work.

Where that has no answer, sums over samples may be totalled inside of the step, at the price of one micro-batch.

On ``cp`` strategies split the sequence, and nothing else. Parameters are whole there (I at rest, R at their use, with one gradient sum a
step), samples are not split (that is what data axes are for), and attention runs in one of these kinds:

| kind      | q       | k, v    | what moves                                                |
|-----------|---------|---------|-----------------------------------------------------------|
| ``gather``  | S(rows) | R       | keys and values are gathered, their gradients scattered |
| ``ulysses`` | S(heads)| S(heads)| all-to-all between sequence and heads, there and back   |
| ``ring``    | S(rows) | S(rows) | keys and values go round; zig-zag order                 |

Attention written out (products and a softmax, as with alibi) has the first two: its softmax splits rows or heads, and the products follow.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from operator import contains

from autopar.errors import RuleError
from autopar.graph.graph import Graph, Mutation, Op, Parameter, Ref
from autopar.graph.operator_kinds import is_attention, is_scores
from autopar.graph.rewrites import Compact, compact
from autopar.ops.kernels import region_of
from autopar.plan.mesh import I, P, R, S, Type
from autopar.planner.sharding.elimination import Entry
from autopar.planner.sharding.energy import FREE, Cost, Table, Weights
from autopar.planner.sharding.strategy_energy import Problem
from autopar.rules import table as rules
from autopar.rules.local_calls import conversion
from autopar.rules.strategy import ZIGZAG_SAFE, Strategy, Typing

BATCH = "batch"
TOTAL_ELEMENTS = 1e12
"""What a total over samples inside of a step counts, in elements made: more than all work of a model, so that there are none where
there is a typing without, and else as few and as small ones as can be."""
_MIXING = frozenset(("autopar.batch_norm", "autopar.batch_norm_running", "autopar.total"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _BatchCosts:
    """Work in elements made; implements :class:`autopar.planner.sharding.strategy_energy.Costs`.

    Attributes:
        graph: compact, with its prelude.
        strategies: of each operator by name.
        gathers: values change their types as among the ranks of any other axis, at twice the elements that they move; else only
            between P and whole values, which is a total.
    """

    graph: Graph
    strategies: Mapping[str, Sequence[Strategy]]
    gathers: bool
    tables: dict[Hashable, tuple[Table, ...]] = field(default_factory=dict)

    def offered(self, op: Op) -> Sequence[Strategy]:
        return self.strategies[op.name]

    def rest_types(self, parameter: Parameter) -> Sequence[Type]:
        return (I,)

    def saves(self, op: Op) -> Sequence[Ref]:
        return ()

    def operators(self, op: Op, strategies: Sequence[Strategy], saved: Sequence[Ref]) -> list[Cost]:
        elements = sum(spec.numel for spec in op.outputs)
        return [
            Cost(time_s=float(s.work) * elements + 0.5 * [kind.kind for kind in s.inputs].count("P"))
            for s in strategies
        ]

    def change(self, ref: Ref, source: Type, target: Type) -> Cost | None:
        spec = self.graph.spec(ref)
        if source == target or (not spec.requires_grad and {source.kind, target.kind} <= {"I", "R"}):
            return FREE
        if source == P and target in (I, R) and self.graph.is_prelude(ref) and not spec.requires_grad:
            return Cost(time_s=float(spec.numel))  # totalled before the step
        change = conversion(source, target, requires_grad=spec.requires_grad)
        if change is None or (source.is_split and target.is_split):
            return None
        moves = sum(name is not None for name in (change.forward, change.backward))
        if self.gathers:
            return Cost(time_s=0.1 + 2.0 * moves * spec.numel)
        if source.is_split or target.is_split or P not in (source, target):
            return None
        return Cost(time_s=TOTAL_ELEMENTS + max(1.0, 1e3 * moves) * spec.numel)

    def use(self, parameter: Parameter, rest: Type, wanted: Type) -> Cost | None:
        same = wanted == R or (wanted == I and not parameter.spec.requires_grad)
        return FREE if same else None

    def at_rest(self, parameter: Parameter, rest: Type) -> Cost:
        return FREE

    def price_class(self, ref: Ref) -> None:
        """Changes depend on whether the prelude makes a value, and on its spec; each problem is solved once."""


def solve_batch(compact: Compact) -> Typing:
    """The typing that cuts the batch into single samples; its strategies hold for every micro-batch size.

    Args:
        compact: of the traced graph.

    Where samples are not independent up to the loss, but meet in sums alone (an auxiliary loss of a router, a mean
    that is squared), these are totalled inside of the step: see :func:`mixes_samples`. Where they meet otherwise
    (``Graph.mixing``), values change their type over the data ranks as on any other axis.

    Raises:
        RuleError: an operator mixes samples otherwise, or the loss is no sum over them; names it.
    """
    key = solve_batch, compact.alike, rules.default_table().version
    if key not in compact.graph.passes:
        compact.graph.passes[key] = _solved(compact, Fraction(compact.graph.batch_size))
    found: Typing = compact.graph.passes[key]
    return found


def samples_apart(graph: Graph) -> None:
    """Nothing, where no sample of a batch has to do with another up to the loss.

    Raises:
        RuleError: two meet; its place says where.
    """
    solve_batch(compact(graph))


def _solved(compact: Compact, size: Fraction) -> Typing:
    graph = compact.graph
    offered = {op.name: _summing_up(graph, op, size) for op in (*graph.prelude, *graph.ops)}
    for op in (*graph.prelude, *graph.ops):
        if not offered[op.name] and op.target == "autopar.opaque":
            raise _opaque(graph, op)
    if graph.mixing:
        return _solve(compact, size, offered, gathers=True)
    try:
        return _solve(compact, size, _reachable(graph, offered, totals=True), gathers=False)
    except RuleError as error:
        _reachable(graph, offered, totals=False)  # what mixes samples without any totals says more of the model
        raise error from None


def _solve(compact: Compact, size: Fraction, offered: Mapping[str, Sequence[Strategy]], *, gathers: bool) -> Typing:
    graph = compact.graph
    inputs = {leaf.name: S(leaf.batch_dim) for leaf in graph.inputs if leaf.batch_dim is not None}
    problem = Problem(graph, _BatchCosts(graph=graph, strategies=offered, gathers=gathers))
    for leaf in graph.inputs:
        problem.arrival(Ref(leaf.name), (R,) if leaf.batch_dim is None else (S(leaf.batch_dim),))
    for buffer in graph.buffers:
        problem.arrival(Ref(buffer.name), (R,))
    for op in (*graph.prelude, *graph.ops):
        problem.operator(op)
    problem.close()
    for a, b in compact.alike:
        problem.same_type(a, b)
    problem.end(graph.loss, lambda kind: problem.costs.change(graph.loss, kind, P))
    for mutation in graph.mutations:
        if mutation.value.name in problem.ops:
            ends = (R, I, P) if graph.is_prelude(mutation.value) else (R, I)
            problem.end(mutation.value, dict.fromkeys(ends, FREE).get)
    best = problem.solve_all((), [Weights()])
    if best.tables[0] == float("inf"):
        raise _mixes(graph, graph.producer(graph.loss), "no choice of strategies fits together")
    found = problem.choice(best.decode([Entry(0, ())])[0])
    return Typing(axis=BATCH, size=size, strategies=found.strategies, parameters=found.parameters, inputs=inputs)


def _summing_up(graph: Graph, op: Op, size: Fraction) -> tuple[Strategy, ...]:
    """Strategies that read no trained parameter as I: data ranks sum its gradient, which would be whole on each of them."""
    operands = tuple([graph.spec(ref) for ref in op.operands])
    offered = rules.default_table().strategies(op, operands, axis=BATCH, size=size, fallback=True)
    trained = [i for i, ref in enumerate(op.operands) if graph.is_parameter(ref) and operands[i].requires_grad]
    return tuple([s for s in offered if I not in [s.inputs[i] for i in trained]]) if trained else offered


def mixes_samples(graph: Graph, typing: Typing) -> tuple[Op, ...]:
    """Operators that look at the samples of all data ranks: then none may be left for a later micro-batch.

    Args:
        graph: as traced, or compact.
        typing: of it, on axis ``batch``.
    """
    types = {Ref(name, i): t for name, s in typing.strategies.items() for i, t in enumerate(s.outputs)}
    types |= {Ref(name): kind for name, kind in typing.inputs.items()}

    def changes(ref: Ref, wanted: Type) -> bool:
        found = types.get(ref, R)
        if found == wanted:
            return False
        total = found == P and not wanted.is_split and graph.is_prelude(ref)
        return not total and ((found == P) != (wanted == P) or found.is_split != wanted.is_split)

    found = [
        op
        for op in (*graph.prelude, *graph.ops)
        if op.target in _MIXING or any(map(changes, op.operands, typing.strategies[op.name].inputs))
    ]
    if graph.loss.name in typing.strategies and types[graph.loss] != P:
        found += [op for op in graph.ops if op.name == graph.loss.name]
    return tuple(found)


def _reachable(
    graph: Graph, offered: Mapping[str, tuple[Strategy, ...]], *, totals: bool
) -> dict[str, tuple[Strategy, ...]]:
    """Keep the strategies whose operands can arrive as they want them; the first operator without any is named."""
    types: dict[str, list[set[Type]]] = {b.name: [{R, I, P} if totals else {R, I}] for b in graph.buffers}
    types |= {i.name: [{R, I} if i.batch_dim is None else {S(i.batch_dim)}] for i in graph.inputs}
    types |= {p.name: [{R} if p.spec.requires_grad else {R, I}] for p in graph.parameters}
    kept: dict[str, tuple[Strategy, ...]] = {}
    for op in (*graph.prelude, *graph.ops):
        arriving = [types[ref.name][ref.index] for ref in op.operands]
        kept[op.name] = tuple([s for s in offered[op.name] if all(map(contains, arriving, s.inputs))])
        if not kept[op.name]:
            raise _mixes(graph, op, f"operands of types {[sorted(map(str, a)) for a in arriving]}")
        found = types[op.name] = []
        for i, spec in enumerate(op.outputs):
            made = {s.outputs[i] for s in kept[op.name]}
            if not spec.requires_grad and made & {I, R}:
                made |= {I, R}
            if P in made and not spec.requires_grad and graph.is_prelude(Ref(op.name, i)):
                made |= {I, R}
            if totals and made & {I, R, P}:
                made |= {P} if graph.is_prelude(Ref(op.name, i)) else {I, R, P}
            found.append(made)
    for mutation in graph.mutations:
        ends = types[mutation.value.name][mutation.value.index]
        if not ends & {R, I}:
            raise _changes(graph, mutation, ends)
    loss = types[graph.loss.name][graph.loss.index]
    if P not in loss:
        raise _mixes(graph, graph.producer(graph.loss), f"a loss of type {sorted(map(str, loss))}")
    return kept


def _changes(graph: Graph, mutation: Mutation, found: set[Type]) -> RuleError:
    op = graph.producer(mutation.value)
    fqn = next(b.fqn for b in graph.buffers if b.name == mutation.buffer)
    where = f"{op.name} ({op.target}){f', {op.source}' if op.source else ''}" if op else str(mutation.value)
    return RuleError(
        f"The new value of this buffer is not the same for all samples (type {', '.join(sorted(map(str, found)))}), "
        "so the batch cannot be split",
        where=f"{fqn}: {where}",
        fix="Keep sums or means over the batch in buffers, not values of single samples",
    )


def _opaque(graph: Graph, op: Op) -> RuleError:
    """An operator that nothing is offered for: a region of unknown code whose backward is not linear, or not known to be."""
    region = region_of(str(op.args[0]))
    from autopar.tracing.opaque_regions import reason_of  # the tracer is slow to import

    reason = reason_of(graph.notes, region.name)
    return RuleError(
        "The samples of this opaque module may depend on each other, and its gradients may not add up",
        where=f"{op.module or op.name}, {op.source}" if op.source else op.module or op.name,
        got=(region.why or "its backward is not linear") + (f"; it is opaque as {reason}" if reason else ""),
        fix=("Change the line that makes it opaque" if reason else "Write it so that it can be traced")
        + ", or name a smaller module around it with opaque=",
    )


def _mixes(graph: Graph, op: Op | None, value: str) -> RuleError:
    where = f"{op.name} ({op.target}), {op.module or 'no module'}" if op else str(graph.loss)
    if op is not None and not rules.has_rule(op.target):
        return RuleError(
            f"No sharding rule for {op.target}, so it may mix samples",
            where=f"{where}, {op.source}" if op.source else where,
            fix=f'Add one: autopar.register_rule("{op.target}", "b... -> b..."), or write it with other operators',
        )
    return RuleError(
        f"Samples of the batch depend on each other ({value}), so it cannot be split",
        where=f"{where}, {op.source}" if op and op.source else where,
        fix="Keep operators that mix samples (losses over all pairs of a batch, say) out of the model",
    )


CP = "cp"

_ATTENTION = {"gather": ("split s", "gather"), "ulysses": ("split h",), "ring": ("ring",)}
_SCORES = {"gather": ("split d2",), "ulysses": ("split d1",), "ring": ()}
"""Of a softmax over scores [samples, heads, rows, columns]."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSplit:
    """Keeps the strategies that an operator of a micro-batch graph may take on ``cp`` under one kind of attention.

    What is made of samples is split wherever it can be: work is repeated only where nothing else is left.
    """

    graph: Graph
    kind: str
    size: int

    def __call__(self, op: Op, offered: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        allowed = tuple(s for s in offered if self._allows(op, s))
        split = tuple(s for s in allowed if any(t.is_split for t in (*s.inputs, *s.outputs)))
        values = (*op.operands, *(Ref(op.name, i) for i in range(len(op.outputs))))
        has_samples = any((kind := self._samples(ref)) is not None and kind.is_split for ref in values)
        return split if split and has_samples else allowed

    def _allows(self, op: Op, strategy: Strategy) -> bool:
        if is_attention(op) and strategy.name not in _ATTENTION[self.kind]:
            return False
        if is_scores(op) and strategy.name not in _SCORES[self.kind]:
            return False
        if self.kind == "ring" and strategy.target not in ZIGZAG_SAFE:
            return False
        operands = zip(op.operands, strategy.inputs, strict=True)
        outputs = ((Ref(op.name, i), kind) for i, kind in enumerate(strategy.outputs))
        return all(self._holds(ref, kind) for ref, kind in (*operands, *outputs))

    def _holds(self, ref: Ref, kind: Type) -> bool:
        if not kind.is_split:
            return True
        if self.graph.is_parameter(ref) or (self.graph.batch_size > 1 and kind == self._samples(ref)):
            return False
        return self.kind != "ring" or self.graph.spec(ref).shape[kind.dim] % (2 * self.size) == 0

    def _samples(self, ref: Ref) -> Type | None:
        """The type of a value on the axis of samples."""
        producer = self.graph.producer(ref)
        if producer is not None:
            return dict(producer.layouts[ref.index]).get(BATCH) if producer.layouts else None
        leaf = next((leaf for leaf in self.graph.inputs if leaf.name == ref.name), None)
        return None if leaf is None or leaf.batch_dim is None else Type("S", leaf.batch_dim)
