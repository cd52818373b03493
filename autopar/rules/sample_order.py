"""Orders joined batches by sample, so that a batch can be split where a model joins several of them or flattens time before samples.

``torch.cat((a, b))`` of two views of a batch has all samples of ``a`` before those of ``b``: no part of its rows holds whole samples. Most
operators treat rows alike, whatever their order, so the graph keeps such rows sample by sample: first those of sample 0, then those of
sample 1. Joins become joins along an inner dim, and slices that take one batch of several (``chunk``) become selections along it. The same
holds for views that join a dim before the samples with them, as ``[time, samples, c]`` to ``[time * samples, c]``.

Whether an operator treats rows alike follows from its rule: a label that may be split means that each element along it is computed by
itself, and a contracted one that the order of the elements does not matter. Where neither holds, an operator reads the rows as traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import cast

from autopar.errors import RuleError
from autopar.graph.aliasing import dim_groups
from autopar.graph.elements import ancestors, unused
from autopar.graph.graph import Argument, Evaluation, Graph, Op, Ref, TensorSpec
from autopar.ops.kernels import aten_targets
from autopar.rules.grammar import Pattern
from autopar.rules.table import default_table
from autopar.tracing.blocks import find_blocks
from autopar.tracing.finish import split_prelude
from autopar.tracing.outputs import rows_restored

_SYMMETRIC = aten_targets(
    "mean.default mean.dim amax.default amin.default max.default min.default any.default any.dim any.dims all.default all.dim all.dims"
    " prod.default prod.dim_int logsumexp.default var.correction var.dim std.correction std.dim var_mean.correction median.default"
    " norm.ScalarOpt_dim linalg_vector_norm.default"
) | {"autopar.batch_norm", "autopar.batch_norm_running"}
"""Operators that take statistics over dims which their rules do not split; the order of the elements does not matter to them."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the samples of a value lie: dim ``dim``, whose elements are traced as (outer, samples, inner).

    The rewritten graph has them as (samples, outer, inner), which is the same if ``outer`` is 1.
    """

    dim: int
    outer: int = 1
    inner: int = 1


def by_sample(graph: Graph) -> tuple[Graph, tuple[object, ...]]:
    """Return the graph with the rows of joined batches ordered by sample, and the changes, which must not depend on the batch size.

    The loss, the new values of buffers and the outputs are the same. The changes are empty if the graph is returned as it is.
    """
    if graph.batch_size < 2 or all(leaf.batch_dim is None for leaf in graph.inputs):
        return graph, ()
    ordering = _Ordering(graph)
    ordering.walk()
    if all(change[0] != "join" for change in ordering.changes):
        return graph, ()
    return ordering.result(), tuple(ordering.changes)


@dataclass(slots=True, eq=False)
class _Ordering:
    """The state of one :func:`by_sample`.

    Attributes:
        samples: the number of samples.
        rows: where the samples of each value lie that depends on samples in a known way. A value keeps its name and its shape.
        specs, producers: the specs and producers of the values so far.
        ops: the new operators.
        done: conversions that operators share, by value and order.
        read: the values that an operator has read so far.
        changes: what was changed, and what was found out about each view and slice of joined rows.
    """

    graph: Graph
    samples: int = field(init=False)
    rows: dict[Ref, Rows] = field(default_factory=dict)
    specs: dict[Ref, TensorSpec] = field(default_factory=dict)
    producers: dict[str, Op] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    done: dict[object, Ref] = field(default_factory=dict)
    read: set[Ref] = field(default_factory=set)
    changes: list[tuple[object, ...]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    readers: dict[Ref, list[Op]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.graph
        self.samples = graph.batch_size
        self.specs = {ref: graph.spec(ref) for ref in graph._index.refs}
        self.names = set(graph._index.made)
        for op in (*graph.prelude, *graph.ops):
            for ref in dict.fromkeys(op.operands):
                self.readers.setdefault(ref, []).append(op)
        self.rows = {Ref(leaf.name): Rows(leaf.batch_dim) for leaf in graph.inputs if leaf.batch_dim is not None}

    def walk(self) -> None:
        """Rewrite the operators in order."""
        for op in (*self.graph.prelude, *self.graph.ops):
            handler = _HANDLERS.get(op.target, _Ordering._along)
            if not handler(self, op):
                self._put(op.with_operands(tuple(self._as_traced(op, ref) for ref in op.operands)))
            self.read.update(op.operands)

    def result(self) -> Graph:
        """Return the graph of the rewritten operators."""
        graph = self.graph
        mutations = tuple(replace(m, value=self._as_traced(None, m.value)) for m in graph.mutations)
        taps = [ref for ref, _ in graph.outputs.taps] if graph.outputs is not None else []
        rows = {ref: self.rows[ref] for ref in taps if ref in self.rows}
        moved = {ref: (r.dim, r.outer, r.inner) for ref, r in rows.items() if r.outer > 1}
        roots = (graph.loss, *(m.value for m in mutations), *taps)
        free = {leaf.name for leaf in graph.inputs} | {leaf.name for leaf in graph.buffers}
        evaluation = graph.evaluation
        if evaluation is not None and any(self.rows.get(a) != self.rows.get(b) for a, b in evaluation.replaced):
            evaluation = Evaluation(unknown="in eval() the samples of joined batches lie in another order")
        prelude, live = split_prelude(ancestors(self.ops, roots), free)
        return replace(
            graph,
            prelude=tuple(prelude),
            ops=tuple(live),
            blocks=find_blocks(live, self.specs, frozenset(p.name for p in graph.parameters), graph.loss),
            mutations=mutations,
            outputs=None if graph.outputs is None else rows_restored(graph.outputs, moved, is_exact=graph.exact),
            evaluation=evaluation,
        )

    # --- new operators

    def _put(self, op: Op) -> None:
        """Append an operator and register its outputs."""
        self.ops.append(op)
        self.producers[op.name] = op
        self.specs |= {Ref(op.name, i): spec for i, spec in enumerate(op.outputs)}

    def _emit(self, like: Op, target: str, args: tuple[Argument, ...], shape: Sequence[int], name: str = "") -> Ref:
        """Append an operator that moves the elements of ``args[0]``, on behalf of ``like``, and return its value."""
        source = self.specs[cast("Ref", args[0])]
        new = name or unused(f"{like.name}_by_sample", self.names)
        outputs = (replace(source, shape=tuple(shape)),)
        self._put(Op(name=new, target=target, args=args, outputs=outputs, module=like.module, source=like.source))
        return Ref(new)

    def _view(self, like: Op, source: Ref, shape: Sequence[int], name: str = "") -> Ref:
        """Return ``source`` in another shape; a view of a view reads the source of the first one."""
        producer = self.producers.get(source.name)
        if producer is not None and producer.target == "aten.view.default":
            source = producer.operands[0]
        if self.specs[source].shape == tuple(shape) and not name:
            return source
        return self._emit(like, "aten.view.default", (source, tuple(shape)), shape, name)

    def _swapped(self, like: Op, source: Ref, dim: int) -> Ref:
        """Return ``source`` with dims ``dim`` and ``dim + 1`` in each other's place."""
        shape = list(self.specs[source].shape)
        shape[dim], shape[dim + 1] = shape[dim + 1], shape[dim]
        return self._emit(like, "aten.transpose.int", (source, dim, dim + 1), shape)

    def _reordered(self, like: Op, source: Ref, dim: int, sizes: tuple[int, int, int]) -> Ref:
        """Return ``source``, whose dim ``dim`` has elements by the three ``sizes``, with the first two of these in each other's place."""
        shape = self.specs[source].shape
        split = self._view(like, source, (*shape[:dim], *sizes, *shape[dim + 1 :]))
        return self._view(like, self._swapped(like, split, dim), shape)

    # --- orders

    def _as_traced(self, like: Op | None, ref: Ref) -> Ref:
        """Return a value with its rows as the model has them, on behalf of the operator ``like`` that reads it."""
        rows = self.rows.get(ref)
        if rows is None or rows.outer == 1:
            return ref
        if ref not in self.done:
            self.done[ref] = self._reordered(
                like or self.producers[ref.name], ref, rows.dim, (self.samples, rows.outer, rows.inner)
            )
        return self.done[ref]

    def _ordered(self, like: Op, ref: Ref, rows: Rows) -> Ref:
        """Return a value with its rows in the order of ``rows``."""
        if rows.outer == 1:
            return self._as_traced(like, ref)
        if self.rows.get(ref) == rows:
            return ref
        if self._takes_any_order(ref, rows.dim):
            if self.producers[ref.name].target in _RANDOM_FACTORIES:
                self.rows[ref] = rows
            return ref
        if (ref, rows) not in self.done:
            constant = self._constant(like, ref, rows)
            sizes = (rows.outer, self.samples, rows.inner)
            self.done[ref, rows] = constant or self._reordered(like, self._as_traced(like, ref), rows.dim, sizes)
        return self.done[ref, rows]

    def _takes_any_order(self, ref: Ref, dim: int) -> bool:
        """Return whether any order of the elements along a dim will do.

        They are equal, as an expansion or a factory has made them, or drawn independently and not read by an operator yet. The dim then
        has a label that may be split and that no operand of the producer has.
        """
        producer = self.producers.get(ref.name)
        if producer is None or (producer.target in _RANDOM_FACTORIES and ref in self.read):
            return False
        pattern = self._pattern(producer)
        label = "" if pattern is None else pattern.outputs[ref.index][dim]
        return bool(label) and pattern is not None and label not in {*pattern.frozen, *sum(pattern.inputs, ())}

    def _constant(self, like: Op, ref: Ref, rows: Rows) -> Ref | None:
        """Return a constant whose values are the same for all samples (labels of real and generated ones) as an expansion over these."""
        buffer = next((b for b in self.graph.buffers if b.name == ref.name and b.value is not None), None)
        if buffer is None or buffer.value is None:
            return None
        shape, dim = buffer.spec.shape, rows.dim
        split = buffer.value.reshape(*shape[:dim], rows.outer, self.samples, rows.inner, *shape[dim + 1 :])
        if not bool((split == split.narrow(dim + 1, 0, 1)).all()):
            return None
        sizes = (*shape[:dim], rows.outer, self.samples, rows.inner, *shape[dim + 1 :])
        one = [*sizes[: dim + 1], 1, *sizes[dim + 2 :]]
        first = self._emit(like, "aten.slice.Tensor", (self._view(like, ref, sizes), dim + 1, 0, 1), one)
        swapped = self._swapped(like, first, dim)
        full = [*shape[:dim], self.samples, rows.outer, rows.inner, *shape[dim + 1 :]]
        return self._view(like, self._emit(like, "aten.expand.default", (swapped, tuple(full)), full), shape)

    # --- operators

    def _pattern(self, op: Op) -> Pattern | None:
        """Return the labels of a call; None if no rule describes it."""
        try:
            return default_table().pattern(op, tuple(self.specs[ref] for ref in op.operands))
        except RuleError:
            return None

    def _along(self, op: Op) -> bool:
        """Keep an operator that treats rows alike, on operands in one order; return False if it does not."""
        known = [(i, self.rows[ref]) for i, ref in enumerate(op.operands) if ref in self.rows]
        if op.target in _RANDOM_FACTORIES and op.spec.shape[:1] == (self.samples,):
            # A draw for each sample; if by chance, its rows are still put in one order.
            self.rows[Ref(op.name)] = Rows(0)
        if not known:
            return False
        lead, rows = next((entry for entry in known if entry[1].outer > 1), known[0])
        pattern = self._pattern(op)
        label = "" if pattern is None else pattern.inputs[lead][rows.dim]
        if pattern is None or not label or not self._is_alike(op, pattern, label):
            return False
        size = self.specs[op.operands[lead]].shape[rows.dim]
        places = [labels.index(label) if label in labels else None for labels in pattern.inputs]
        found = [labels.index(label) if label in labels else None for labels in pattern.outputs]
        lengths = [spec.shape[p] for spec, p in zip(op.outputs, found, strict=True) if p is not None]
        if any(rows.inner * length % size for length in lengths):
            return False
        operands = op.operands
        if rows.outer > 1:
            pairs = [(ref, p) for ref, p in zip(operands, places, strict=True) if p is not None]
            if any(self.specs[ref].shape[p] != size for ref, p in pairs):
                return False
            operands = tuple(
                self._as_traced(op, ref) if p is None else self._ordered(op, ref, replace(rows, dim=p))
                for ref, p in zip(operands, places, strict=True)
            )
        self._put(op.with_operands(operands))
        for i, (spec, place) in enumerate(zip(op.outputs, found, strict=True)):
            if place is not None:
                inner = rows.inner * spec.shape[place] // size
                self._note(op, Ref(op.name, i), Rows(place, rows.outer, inner))
        return True

    def _note(self, op: Op, ref: Ref, rows: Rows, *what: object) -> None:
        """Record where the samples of a value lie."""
        self.rows[ref] = rows
        if rows.outer > 1 or what:
            self.changes.append((*(what or ("along",)), op.name, rows))

    def _is_alike(self, op: Op, pattern: Pattern, label: str) -> bool:
        """Return whether an operator computes each element along a label by itself, or something of all that their order does not change."""
        if any(labels.count(label) > 1 for labels in (*pattern.inputs, *pattern.outputs)):
            return False
        return label not in pattern.frozen or (
            op.target in _SYMMETRIC
            and (op.target.startswith("autopar.") or not any(label in labels for labels in pattern.outputs))
        )

    def _join(self, op: Op) -> bool:
        """Join batches along an inner dim."""
        dim = cast("int", op.args[1]) if len(op.args) > 1 else 0
        known = [rows for ref in op.operands if (rows := self.rows.get(ref)) is not None]
        inner = known[0].inner if known else 1
        sizes = [self.specs[ref].shape[dim : dim + 1] for ref in op.operands]
        if not known or any((rows.dim, rows.inner) != (dim, inner) for rows in known):
            return self._along(op)
        if any(not size or size[0] % (self.samples * inner) for size in sizes):
            return False
        outers = [size // (self.samples * inner) for (size,) in sizes]
        rows = Rows(dim, sum(outers), inner)
        if not self._helps(Ref(op.name), rows):
            return False
        shape, pieces = op.spec.shape, []
        for ref, outer in zip(op.operands, outers, strict=True):
            piece = self._ordered(op, ref, Rows(dim, outer, inner))
            pieces.append(self._view(op, piece, (*shape[:dim], self.samples, outer, inner, *shape[dim + 1 :])))
        full = (*shape[:dim], self.samples, rows.outer, inner, *shape[dim + 1 :])
        new = replace(op, name=unused(f"{op.name}_by_sample", self.names), args=(tuple(pieces), dim + 1),
                      outputs=(replace(op.spec, shape=full),))  # fmt: skip
        self._put(new)
        self._view(op, Ref(new.name), shape, op.name)
        self._note(op, Ref(op.name), rows, "join")
        return True

    def _helps(self, ref: Ref, rows: Rows) -> bool:
        """Return whether an operator can read a value whose rows are ordered by sample."""
        return any(
            self._follows(op, i, rows)
            for op in self.readers.get(ref, ())
            for i, r in enumerate(op.operands)
            if r == ref
        )

    def _follows(self, op: Op, operand: int, rows: Rows) -> bool:
        if op.target == "aten.slice.Tensor" and op.args[1] == rows.dim:
            return len(op.args) == 4 and all(cast("int", n) % (self.samples * rows.inner) == 0 for n in op.args[2:])
        if op.target == "aten.view.default":
            return self._seen(op, rows) is not None
        pattern = self._pattern(op)
        label = "" if pattern is None else pattern.inputs[operand][rows.dim]
        return pattern is not None and bool(label) and self._is_alike(op, pattern, label)

    def _part(self, op: Op) -> bool:
        """Take some of the joined batches, or each ``step``-th row of each sample, by a selection along the inner dim."""
        source, dim, start, stop, step = (*op.args, 1)[:5]
        rows = self.rows.get(cast("Ref", source))
        assert isinstance(source, Ref) and isinstance(dim, int) and isinstance(step, int)
        assert isinstance(start, int) and isinstance(stop, int)
        if rows is None or rows.dim != dim or (rows.outer == 1 and step == 1):
            return self._along(op)
        if step > 1:
            return self._stride(op, source, rows, start, step)
        unit, shape = self.samples * rows.inner, self.specs[source].shape
        if start % unit or stop % unit:
            return False
        first, last = start // unit, stop // unit
        split = (*shape[:dim], self.samples, rows.outer, rows.inner, *shape[dim + 1 :])
        rest = (*split[: dim + 1], last - first, *split[dim + 2 :])
        taken = self._emit(op, "aten.slice.Tensor", (self._view(op, source, split), dim + 1, first, last), rest)
        self._view(op, taken, op.spec.shape, op.name)
        self._note(op, Ref(op.name), Rows(dim, last - first, rows.inner), "part", first, last)
        return True

    def _stride(self, op: Op, source: Ref, rows: Rows, start: int, step: int) -> bool:
        """Take each ``step``-th row of each sample (``rows[0::2]`` of two views in turn) by a slice along the rows of a sample."""
        shape, dim, count = self.specs[source].shape, rows.dim, rows.inner // step
        if rows.inner % step or start >= step or op.spec.shape[dim] * step != shape[dim]:
            return False
        units, rest = shape[dim] // rows.inner, shape[dim + 1 :]
        split = self._view(op, source, (*shape[:dim], units, rows.inner, *rest))
        args = (split, dim + 1, start, rows.inner, step)
        taken = self._emit(op, "aten.slice.Tensor", args, (*shape[:dim], units, count, *rest))
        self._view(op, taken, op.spec.shape, op.name)
        self._note(op, Ref(op.name), Rows(dim, rows.outer, count), "join", start, step)
        return True

    def _roll(self, op: Op) -> bool:
        """Roll whole batches by a roll along the inner dim, which pairs each view with the next one of the same sample."""
        (source, shifts, dims), shape = (*op.args, ())[:3], op.spec.shape
        rows = self.rows.get(cast("Ref", source))
        if rows is None or rows.outer == 1 or dims != (rows.dim,):
            return self._along(op)
        (shift,), unit = cast("tuple[int]", shifts), self.samples * rows.inner
        if shift % unit:
            return False
        split = (*shape[: rows.dim], self.samples, rows.outer, rows.inner, *shape[rows.dim + 1 :])
        args = (self._view(op, op.operands[0], split), (shift // unit,), (rows.dim + 1,))
        self._view(op, self._emit(op, "aten.roll.default", args, split), shape, op.name)
        self._note(op, Ref(op.name), rows, "roll", shift // unit)
        return True

    def _reshape(self, op: Op) -> bool:
        """Follow the samples through a view that joins or splits the dim where they lie."""
        source, after = op.operands[0], op.spec.shape
        rows = self.rows.get(source)
        if rows is None:
            return False
        found = self._seen(op, rows)
        if found is None:
            return False
        new, output_dims, leading = found
        outer = leading * rows.outer
        inner = new.inner * prod(after[new.dim + 1 : output_dims.stop])
        ahead = outer // new.outer  # elements before the dim in which the samples lie now
        lead, trail = after[: output_dims.start], after[output_dims.stop :]
        if (leading == 1 and ahead == 1) or (rows.outer == 1 and new.outer == 1):
            self._view(op, source, after, op.name)
        elif leading == 1:
            split = self._view(op, source, (*lead, self.samples, ahead, new.outer * inner, *trail))
            self._view(op, self._swapped(op, split, len(lead)), after, op.name)
        elif not self._helps(Ref(op.name), new):
            return False
        else:
            base = self._as_traced(op, source)
            split = self._view(op, base, (*lead, ahead, new.outer, self.samples, inner, *trail))
            self._view(op, self._swapped(op, split, len(lead) + 1), after, op.name)
        self._note(op, Ref(op.name), new, "join" if leading > 1 and new.outer > 1 else "view")
        return True

    def _seen(self, op: Op, rows: Rows) -> tuple[Rows, range, int] | None:
        """Return where the samples lie after a view of a value with ``rows``; None if they lie across dims.

        The result also has the run of dims of the view that are made of the run with the samples, and the elements of that run before
        dim ``rows.dim``.
        """
        before, after = self.graph.spec(op.operands[0]).shape, op.spec.shape
        input_dims, dims = next((a, b) for a, b in dim_groups(before, after) if rows.dim in a)
        leading = prod(before[d] for d in input_dims if d < rows.dim)
        outer, inner = leading * rows.outer, rows.inner * prod(before[d] for d in input_dims if d > rows.dim)
        for dim in dims:
            ahead, behind = prod(after[dims.start : dim]), prod(after[dim + 1 : dims.stop])
            if outer % ahead == 0 and inner % behind == 0:
                new = Rows(dim, outer // ahead, inner // behind)
                if new.outer * self.samples * new.inner == after[dim]:
                    return new, dims, leading
        return None


_RANDOM_FACTORIES = aten_targets("rand.default randn.default randint.default randint.low normal.float_float")

_HANDLERS: dict[str, Callable[[_Ordering, Op], bool]] = {
    "aten.cat.default": _Ordering._join,
    "aten.slice.Tensor": _Ordering._part,
    "aten.roll.default": _Ordering._roll,
    "aten.view.default": _Ordering._reshape,
}
"""Handlers of operators that join or take rows. All others follow their rules."""
