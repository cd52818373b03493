"""The axes that split the input of a model: the typing on axis ``batch``, and the strategies that axis ``cp`` allows.

On ``batch`` the samples are independent up to the loss, which is a sum over them. No value changes its type, except that a value of the
prelude without gradient may be totalled before the step (a count of tokens). The typing is therefore nearly forced; what remains free
(an operator on constants) is chosen by least work. If there is no such typing, sums over samples may be totalled within the step.

On ``cp`` strategies split the sequence and nothing else. Parameters are whole (I at rest, R where they are read, with one gradient sum a
step), samples are not split (the data axes do that), and attention runs in one of these kinds:

| kind      | q       | k, v    | communication                                             |
|-----------|---------|---------|-----------------------------------------------------------|
| ``gather``  | S(rows) | R       | keys and values are gathered, their gradients scattered |
| ``ulysses`` | S(heads)| S(heads)| all-to-all between sequence and heads, and back         |
| ``ring``    | S(rows) | S(rows) | keys and values go round the ring, in zig-zag order     |

Attention that is written out (products and a softmax, as with alibi) has the first two kinds: its softmax splits rows or heads.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from operator import contains

from autopar.errors import RuleError
from autopar.graph.graph import Graph, Mutation, Op, Parameter, Ref
from autopar.graph.operator_kinds import is_attention, is_scores, why_opaque
from autopar.graph.rewrites import Compact, compact
from autopar.ops.kernels import region_of
from autopar.plan.mesh import I, P, R, S, Type, conversion
from autopar.planner.sharding.elimination import Entry
from autopar.planner.sharding.energy import FREE, Cost, Table, Weights
from autopar.planner.sharding.strategy_energy import TypingProblem
from autopar.rules import table as rules
from autopar.rules.strategy import ZIGZAG_SAFE, Strategy, Typing

BATCH = "batch"
TOTAL_ELEMENTS = 1e12
"""Price of a total over samples within the step, in elements produced.

It exceeds the work of any model, so that a typing without totals is preferred, and otherwise one with few and small totals."""
_MIXING = frozenset(("autopar.batch_norm", "autopar.batch_norm_running", "autopar.total"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _BatchCosts:
    """Costs of typings on axis ``batch``, where work is counted in elements produced.

    It implements :class:`autopar.planner.sharding.strategy_energy.Costs`.

    Attributes:
        graph: the compact graph with its prelude.
        strategies: the strategies offered to each operator, by name.
        gathers: if true, values change their types as on any other axis, at a price of twice the elements that they move.
            Otherwise only changes between P and a whole value are allowed, which are totals.
        tables: see ``Costs``.
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

    def operator_costs(self, op: Op, strategies: Sequence[Strategy], saved: Sequence[Ref]) -> list[Cost]:
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
            return Cost(time_s=float(spec.numel))  # totalled once, before the step
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

    def price_class(self, ref: Ref) -> Hashable:
        spec = self.graph.spec(ref)
        return spec.numel, spec.requires_grad, self.graph.is_prelude(ref), self.graph.is_parameter(ref)


def solve_batch(compact: Compact) -> Typing:
    """Return the typing that cuts the batch into single samples; its strategies hold for every micro-batch size.

    If samples are not independent up to the loss but meet in sums alone (an auxiliary loss of a router, a mean that is squared), these sums
    are totalled within the step: see :func:`mixes_samples`. If they meet otherwise (``Graph.mixing``), values change their types over the
    data ranks as on any other axis.

    Args:
        compact: the compact graph of the traced graph.

    Raises:
        RuleError: an operator, which the error names, mixes samples otherwise, or the loss is no sum over samples.
    """
    key = solve_batch, compact.alike, rules.default_table().version
    return compact.graph.once(key, lambda: _batch_typing(compact, Fraction(compact.graph.batch_size)))


def samples_apart(graph: Graph) -> None:
    """Check that the samples of a batch do not depend on each other up to the loss.

    Raises:
        RuleError: two samples depend on each other; the error says where.
    """
    solve_batch(compact(graph))


def _batch_typing(compact: Compact, size: Fraction) -> Typing:
    """Return the typing on an axis of ``size`` ranks: without totals within the step if there is one, else with them."""
    graph = compact.graph
    offered = {op.name: _data_parallel_strategies(graph, op, size) for op in (*graph.prelude, *graph.ops)}
    for op in (*graph.prelude, *graph.ops):
        if not offered[op.name] and op.target == "autopar.opaque":
            raise _opaque_error(graph, op)
    if graph.mixing:
        return _solve(compact, size, offered, gathers=True)
    try:
        return _solve(compact, size, _reachable(graph, offered, totals=True), gathers=False)
    except RuleError as error:
        _reachable(graph, offered, totals=False)  # raises an error that names the operator which mixes samples
        raise error from None


def _solve(compact: Compact, size: Fraction, offered: Mapping[str, Sequence[Strategy]], *, gathers: bool) -> Typing:
    """Return the typing of least cost among the offered strategies.

    Raises:
        RuleError: no choice of strategies fits together.
    """
    graph = compact.graph
    inputs = {leaf.name: S(leaf.batch_dim) for leaf in graph.inputs if leaf.batch_dim is not None}
    problem = TypingProblem(graph, _BatchCosts(graph=graph, strategies=offered, gathers=gathers))
    for leaf in graph.inputs:
        problem.add_arrival(Ref(leaf.name), (R,) if leaf.batch_dim is None else (S(leaf.batch_dim),))
    for buffer in graph.buffers:
        problem.add_arrival(Ref(buffer.name), (R,))
    for op in (*graph.prelude, *graph.ops):
        problem.add_operator(op)
    problem.connect_readers()
    for a, b in compact.alike:
        problem.require_same_type(a, b)
    problem.add_end(graph.loss, lambda kind: problem.costs.change(graph.loss, kind, P))
    for mutation in graph.mutations:
        if mutation.value.name in problem.ops:
            ends = (R, I, P) if graph.is_prelude(mutation.value) else (R, I)
            problem.add_end(mutation.value, dict.fromkeys(ends, FREE).get)
    best = problem.solve_all((), [Weights()])
    if best.tables[0] == float("inf"):
        raise _mixing_error(graph, graph.producer(graph.loss), "no choice of strategies fits together")
    choice = problem.choice(best.decode([Entry(0, ())])[0])
    return Typing(axis=BATCH, size=size, strategies=choice.strategies, parameters=choice.parameters, inputs=inputs)


def _data_parallel_strategies(graph: Graph, op: Op, size: Fraction) -> tuple[Strategy, ...]:
    """Return the strategies of an operator that read no trained parameter as I.

    Data ranks sum the gradient of such a parameter; for a parameter of type I each rank would already have the whole gradient.
    """
    operands = tuple([graph.spec(ref) for ref in op.operands])
    offered = rules.default_table().strategies(op, operands, axis=BATCH, size=size, fallback=True)
    trained = [i for i, ref in enumerate(op.operands) if graph.is_parameter(ref) and operands[i].requires_grad]
    return tuple([s for s in offered if I not in [s.inputs[i] for i in trained]]) if trained else offered


def mixes_samples(graph: Graph, typing: Typing) -> tuple[Op, ...]:
    """Return the operators that read the samples of all data ranks at once; then no sample may be left for a later micro-batch.

    Args:
        graph: the traced graph or its compact graph.
        typing: its typing on axis ``batch``.
    """
    types = {Ref(name, i): t for name, s in typing.strategies.items() for i, t in enumerate(s.outputs)}
    types |= {Ref(name): kind for name, kind in typing.inputs.items()}

    def changes(ref: Ref, wanted: Type) -> bool:
        produced = types.get(ref, R)
        if produced == wanted:
            return False
        total = produced == P and not wanted.is_split and graph.is_prelude(ref)
        return not total and ((produced == P) != (wanted == P) or produced.is_split != wanted.is_split)

    mixing = [
        op
        for op in (*graph.prelude, *graph.ops)
        if op.target in _MIXING or any(map(changes, op.operands, typing.strategies[op.name].inputs))
    ]
    if graph.loss.name in typing.strategies and types[graph.loss] != P:
        mixing += [op for op in graph.ops if op.name == graph.loss.name]
    return tuple(mixing)


def _reachable(
    graph: Graph, offered: Mapping[str, tuple[Strategy, ...]], *, totals: bool
) -> dict[str, tuple[Strategy, ...]]:
    """Return the strategies of each operator whose operands can arrive in the types that they read.

    Args:
        graph: the graph.
        offered: the strategies of each operator, by name.
        totals: whether sums over samples may be totalled within the step.

    Raises:
        RuleError: an operator has no such strategy, a buffer takes a value of single samples, or the loss is no sum over samples.
    """
    types: dict[str, list[set[Type]]] = {b.name: [{R, I, P} if totals else {R, I}] for b in graph.buffers}
    types |= {i.name: [{R, I} if i.batch_dim is None else {S(i.batch_dim)}] for i in graph.inputs}
    types |= {p.name: [{R} if p.spec.requires_grad else {R, I}] for p in graph.parameters}
    kept: dict[str, tuple[Strategy, ...]] = {}
    for op in (*graph.prelude, *graph.ops):
        arriving = [types[ref.name][ref.index] for ref in op.operands]
        kept[op.name] = tuple([s for s in offered[op.name] if all(map(contains, arriving, s.inputs))])
        if not kept[op.name]:
            raise _mixing_error(graph, op, f"operands of types {[sorted(map(str, a)) for a in arriving]}")
        output_types = types[op.name] = []
        for i, spec in enumerate(op.outputs):
            produced = {s.outputs[i] for s in kept[op.name]}
            if not spec.requires_grad and produced & {I, R}:
                produced |= {I, R}
            if P in produced and not spec.requires_grad and graph.is_prelude(Ref(op.name, i)):
                produced |= {I, R}
            if totals and produced & {I, R, P}:
                produced |= {P} if graph.is_prelude(Ref(op.name, i)) else {I, R, P}
            output_types.append(produced)
    for mutation in graph.mutations:
        value_types = types[mutation.value.name][mutation.value.index]
        if not value_types & {R, I}:
            raise _buffer_error(graph, mutation, value_types)
    loss_types = types[graph.loss.name][graph.loss.index]
    if P not in loss_types:
        raise _mixing_error(graph, graph.producer(graph.loss), f"a loss of type {sorted(map(str, loss_types))}")
    return kept


def _buffer_error(graph: Graph, mutation: Mutation, types: set[Type]) -> RuleError:
    """Return the error for a buffer whose new value depends on the sample."""
    op = graph.producer(mutation.value)
    fqn = next(b.fqn for b in graph.buffers if b.name == mutation.buffer)
    where = f"{op.name} ({op.target}){f', {op.source}' if op.source else ''}" if op else str(mutation.value)
    return RuleError(
        f"The new value of this buffer is not the same for all samples (type {', '.join(sorted(map(str, types)))}), "
        "so the batch cannot be split",
        where=f"{fqn}: {where}",
        fix="Keep sums or means over the batch in buffers, not values of single samples",
    )


def _opaque_error(graph: Graph, op: Op) -> RuleError:
    """Return the error for an opaque operator without strategies: a region whose backward is not linear, or not known to be."""
    region = region_of(str(op.args[0]))
    reason = why_opaque(graph.notes, region.name)
    return RuleError(
        "The samples of this opaque module may depend on each other, and its gradients may not add up",
        where=f"{op.module or op.name}, {op.source}" if op.source else op.module or op.name,
        got=(region.why or "its backward is not linear") + (f"; it is opaque as {reason}" if reason else ""),
        fix=("Change the line that makes it opaque" if reason else "Write it so that it can be traced")
        + ", or name a smaller module around it with opaque=",
    )


def _mixing_error(graph: Graph, op: Op | None, reason: str) -> RuleError:
    """Return the error for an operator, or the loss, that makes samples depend on each other."""
    where = f"{op.name} ({op.target}), {op.module or 'no module'}" if op else str(graph.loss)
    if op is not None and not rules.has_rule(op.target):
        return RuleError(
            f"No sharding rule for {op.target}, so it may mix samples",
            where=f"{where}, {op.source}" if op.source else where,
            fix=f'Add one: autopar.register_rule("{op.target}", "b... -> b..."), or write it with other operators',
        )
    return RuleError(
        f"Samples of the batch depend on each other ({reason}), so it cannot be split",
        where=f"{where}, {op.source}" if op and op.source else where,
        fix="Keep operators that mix samples (losses over all pairs of a batch, say) out of the model",
    )


CP = "cp"

_ATTENTION = {"gather": ("split s", "gather"), "ulysses": ("split h",), "ring": ("ring",)}
_SCORES = {"gather": ("split d2",), "ulysses": ("split d1",), "ring": ()}
"""Allowed strategies by kind of attention: of attention operators, above, and of a softmax over scores [samples, heads, rows, columns]."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSplit:
    """Keeps the strategies that an operator of a micro-batch graph may take on ``cp`` under one kind of attention.

    A value that depends on samples is split wherever possible: work is repeated on all ranks only where no strategy splits it.

    Attributes:
        graph: the compact graph of one micro-batch.
        kind: the kind of attention.
        size: the number of ranks of ``cp``.
    """

    graph: Graph
    kind: str
    size: int

    def __call__(self, op: Op, offered: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        allowed = tuple(s for s in offered if self._allows(op, s))
        split = tuple(s for s in allowed if any(t.is_split for t in (*s.inputs, *s.outputs)))
        values = (*op.operands, *op.refs)
        has_samples = any((type_ := self._batch_type(ref)) is not None and type_.is_split for ref in values)
        return split if split and has_samples else allowed

    def _allows(self, op: Op, strategy: Strategy) -> bool:
        """Return whether an operator may take a strategy under this kind of attention."""
        if is_attention(op) and strategy.name not in _ATTENTION[self.kind]:
            return False
        if is_scores(op) and strategy.name not in _SCORES[self.kind]:
            return False
        if self.kind == "ring" and strategy.target not in ZIGZAG_SAFE:
            return False
        operands = zip(op.operands, strategy.inputs, strict=True)
        outputs = ((Ref(op.name, i), type_) for i, type_ in enumerate(strategy.outputs))
        return all(self._allows_type(ref, type_) for ref, type_ in (*operands, *outputs))

    def _allows_type(self, ref: Ref, type_: Type) -> bool:
        """Return whether a value may have a type; ring attention needs dims that ``2 * size`` divides, for its zig-zag order."""
        if not type_.is_split:
            return True
        if self.graph.is_parameter(ref) or (self.graph.batch_size > 1 and type_ == self._batch_type(ref)):
            return False
        return self.kind != "ring" or self.graph.spec(ref).shape[type_.dim] % (2 * self.size) == 0

    def _batch_type(self, ref: Ref) -> Type | None:
        """Return the type of a value on axis ``batch``; None where it is not known."""
        producer = self.graph.producer(ref)
        if producer is not None:
            return dict(producer.layouts[ref.index]).get(BATCH) if producer.layouts else None
        leaf = next((leaf for leaf in self.graph.inputs if leaf.name == ref.name), None)
        return None if leaf is None or leaf.batch_dim is None else Type("S", leaf.batch_dim)
