"""Blocks: repeated layers found in the operators themselves, whatever their names.

A layer that is applied L times stands in the operator list as a tandem repeat: L equal windows, one
after the other, each reading what the one before made. Candidates come from the gaps between equal
calls; they are verified by a canonical hash. What stands before and after is searched again, so
that an encoder and a decoder are both found. Near-linear in the number of operators.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, takewhile

import numpy as np
import numpy.typing as npt

from autopar.graph.graph import Argument, Block, Op, Ref, TensorSpec, digest, map_refs

_SALTED, _SALT = "autopar.dropout", 2
"""The operator with an argument that tells it from others, and its position: no part of what it computes."""

_SCALING = frozenset({_SALTED, *(f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div"))})
"""Operators with a number that differs from layer to layer of stochastic depth: the share of samples that is kept."""

_CANDIDATES = 48
"""Periods tried in each stretch, of gaps between neighbours; fewer of wider ones."""

_LAYERS = 8
"""Layers that a turn may have where no call tells one turn from the next: as many as Jamba's (ADR 0023 says what it buys)."""

_NUMBERED = re.compile(r"^(.*?\b\d+)(\.|$)")


@dataclass(frozen=True, slots=True)
class _Context:
    """What blocks are found in; ``last_use``: position of the last reader of each value of ``ops``."""

    ops: Sequence[Op]
    specs: Mapping[Ref, TensorSpec]
    parameters: frozenset[str]
    last_use: Mapping[Ref, int]
    tokens: npt.NDArray[np.int64]


def find_blocks(
    ops: Sequence[Op], specs: Mapping[Ref, TensorSpec], parameters: frozenset[str], loss: Ref
) -> tuple[Block, ...]:
    """A partition of ``ops`` in order: each repeat of a layer is a block, and so is what lies between.

    Args:
        specs: of every tensor that ``ops`` read or make.
        parameters: names that are parameters.
    """
    last_use: dict[Ref, int] = {loss: len(ops)}
    for i, op in enumerate(ops):
        for ref in op.operands:
            last_use[ref] = max(i, last_use.get(ref, 0))
    ids: dict[object, int] = {}
    tokens = [ids.setdefault(_token(op, specs, parameters), len(ids)) for op in ops]
    context = _Context(ops, specs, parameters, last_use, np.asarray(tokens, dtype=np.int64))
    spans = _partition(context, 0, len(ops))
    labels = _labels(ops, spans)
    alike = [_hash(context, start, stop) for start, stop in spans]
    exact = [_hash(context, start, stop, is_exact=True) for start, stop in spans]
    differing = {
        one for one, count in Counter(one for one, _ in set(zip(alike, exact, strict=True))).items() if count > 1
    }
    return tuple(
        Block(index=i, start=start, stop=stop, hash=alike[i] if alike[i] in differing else exact[i], label=labels[i])
        for i, (start, stop) in enumerate(spans)
    )


def _hash(context: _Context, start: int, stop: int, *, is_exact: bool = False) -> str:
    """Of a subgraph: equal for equal operators, literals, wiring, specs and values that are read outside; names aside.

    Args:
        is_exact: numbers that make no difference to layouts count too.
    """
    local: dict[str, int] = {}
    outside: dict[Ref, int] = {}
    lines: list[str] = []

    def number(ref: Ref) -> Argument:
        if ref.name in local:
            return f"%{local[ref.name]}.{ref.index}"
        if ref not in outside:
            outside[ref] = len(outside)
            kind = "parameter" if ref.name in context.parameters else "value"
            lines.append(f"${outside[ref]} {kind} {_spec_text(context.specs[ref])}")
        return f"${outside[ref]}"

    for op in context.ops[start:stop]:
        args = tuple(map_refs(arg, number) for arg in _essential(op, is_exact=is_exact))
        kwargs = tuple((key, map_refs(value, number)) for key, value in op.kwargs)
        leaves = [i for i in range(len(op.outputs)) if context.last_use.get(Ref(op.name, i), -1) >= stop]
        lines.append(f"{op.target} {args} {kwargs} {[_spec_text(s) for s in op.outputs]} {leaves}")
        local[op.name] = len(local)
    return digest("\n".join(lines))


def _essential(op: Op, *, is_exact: bool) -> tuple[Argument, ...]:
    """The arguments without the salt of a dropout, and without the numbers by which something is scaled."""
    args = op.args[:_SALT] if op.target == _SALTED else op.args
    if is_exact or op.target not in _SCALING:
        return args
    return tuple("number" if isinstance(arg, float) and math.isfinite(arg) and arg != 0 else arg for arg in args)


def _spec_text(spec: TensorSpec) -> str:
    return f"{spec.shape} {spec.dtype} {spec.requires_grad}"


def _token(op: Op, specs: Mapping[Ref, TensorSpec], parameters: frozenset[str]) -> tuple[object, ...]:
    """What an operator is, its place and wiring aside."""

    def kind(ref: Ref) -> Argument:
        place = "parameter" if ref.name in parameters else "value"
        return f"{place} {_spec_text(specs[ref])}"

    args = tuple(map_refs(arg, kind) for arg in _essential(op, is_exact=False))
    kwargs = tuple((key, map_refs(value, kind)) for key, value in op.kwargs)
    return (op.target, args, kwargs, tuple(_spec_text(s) for s in op.outputs))


# --- the search -----------------------------------------------------------------------------------


def _partition(context: _Context, start: int, stop: int) -> list[tuple[int, int]]:
    """Spans that cover ``start:stop`` in order; explicit stack, stretches can be many."""
    spans: list[tuple[int, int]] = []
    stack = [(start, stop)]
    while stack:
        low, high = stack.pop()
        if low >= high:
            continue
        repeat = _best_repeat(context, low, high)
        if repeat is None:
            spans.extend(_by_module(context, low, high))
            continue
        first, period, count = repeat
        edges = (0, *_layers(context, first, period), period)
        spans.extend((first + k * period + a, first + k * period + b) for k in range(count) for a, b in pairwise(edges))
        stack.append((low, first))
        stack.append((first + count * period, high))
    return sorted(spans)


def _best_repeat(context: _Context, low: int, high: int) -> tuple[int, int, int] | None:
    """(first, period, count) of the verified repeat that covers most of ``low:high``; shortest period first."""
    tokens = context.tokens[low:high]
    found = [
        (-(length // period) * period, period, low + begin, length)
        for period in _periods(tokens)
        for begin, length in _runs(tokens, period)
    ]
    for _, period, begin, length in sorted(found)[: 4 * _CANDIDATES]:
        verified = _verified(context, begin, period, length)
        if verified is not None:
            return verified
    return None


def _periods(tokens: npt.NDArray[np.int64]) -> list[int]:
    """Gaps between calls of one kind, neighbours first and then those with others of the kind between them; those that span most first."""
    order = np.argsort(tokens, kind="stable")
    found: dict[int, None] = {}
    for apart in range(1, _LAYERS + 1):
        same = tokens[order][apart:] == tokens[order][:-apart]
        values, counts = np.unique((order[apart:] - order[:-apart])[same], return_counts=True)
        rank = np.argsort(-(values * counts), kind="stable")
        found |= dict.fromkeys(values[rank[: _CANDIDATES // apart]].tolist())
    return list(found)


def _runs(tokens: npt.NDArray[np.int64], period: int) -> list[tuple[int, int]]:
    """Stretches (begin, length) in which each token equals the one a period later, two periods or longer."""
    equal = np.concatenate(([False], tokens[:-period] == tokens[period:], [False]))
    edges = np.flatnonzero(np.diff(equal.astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    return [(int(s), int(e - s) + period) for s, e in zip(starts, ends, strict=True) if e - s >= period]


def _verified(context: _Context, begin: int, period: int, length: int) -> tuple[int, int, int] | None:
    """The repeat at its best phase: windows of equal hash, each reading the one before, with parameters."""
    count, slack = divmod(length, period)
    phases = sorted(range(begin, begin + slack + 1), key=lambda first: _cut_cost(context, first, period))
    for first in phases[:3]:
        hashes = [_hash(context, first + k * period, first + (k + 1) * period) for k in range(count)]
        at, equal = _longest_equal(hashes)
        first += at * period
        if equal >= 2 and _is_chain(context, first, period):
            return first, period, equal
    return None


def _longest_equal(hashes: Sequence[str]) -> tuple[int, int]:
    """Where the longest run of equal ones begins, the first of several, and how long it is."""
    lengths = [len(list(run)) for _, run in groupby(hashes)]
    longest = max(lengths)
    return sum(lengths[: lengths.index(longest)]), longest


def _cut_cost(context: _Context, first: int, period: int) -> tuple[int, bool, int]:
    """Bytes that cross the cut between the first two windows; then cuts between modules; then the earliest."""
    cut = first + period
    crossing = sum(
        spec.num_bytes
        for op in context.ops[first:cut]
        for k, spec in enumerate(op.outputs)
        if context.last_use.get(Ref(op.name, k), -1) >= cut
    )
    return crossing, _is_inside(context, first, period), first


def _is_inside(context: _Context, first: int, period: int) -> bool:
    """Whether windows would begin in the midst of a layer."""
    return first > 0 and bool(owner := _owner(context, first, period)) and owner == _owner(context, first - 1, period)


def _is_chain(context: _Context, first: int, period: int) -> bool:
    """Every window but the first reads the one before, and windows hold parameters."""
    one, two = (context.ops[start : start + period] for start in (first, first + period))
    made = {op.name for op in one}
    reads = any(ref.name in made for op in two for ref in op.operands)
    return reads and any(ref.name in context.parameters for op in one for ref in op.operands)


# --- names, for people and for what does not repeat ---------------------------------------------------


def _owner(context: _Context, place: int, period: int) -> str:
    """The module of an operator whose number tells a window from the next: a layer; empty where none does."""
    if place + period >= len(context.ops):
        return ""
    one, two = (context.ops[i].module.split(".") for i in (place, place + period))
    differing = next((depth for depth, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
    return "" if differing is None else ".".join(one[: differing + 1])


def _layers(context: _Context, first: int, period: int) -> list[int]:
    """Where in a window every layer but the first begins; none where operators of two layers lie mixed, or layers are cut."""
    spans = _spans_of(_owner(context, place, period) for place in range(first, first + period))
    if _is_inside(context, first, period) or spans is None:
        return []
    return [begin for begin, _ in spans][1:]


def _spans_of(owners: Iterable[str]) -> list[tuple[int, int]] | None:
    """``start:stop`` of the operators of each owner, in order; None where those of two lie mixed. An empty text owns nothing."""
    begins, ends = dict[str, int](), dict[str, int]()
    for place, owner in enumerate(owners):
        if owner:
            begins.setdefault(owner, place)
            ends[owner] = place + 1
    if any(ends[a] > begins[b] for a, b in pairwise(begins)):
        return None
    return [(begin, ends[owner]) for owner, begin in begins.items()]


def _layer(op: Op) -> str:
    """``model.layers.3`` of a module path; empty where nothing is numbered."""
    match = _NUMBERED.match(op.module)
    return match[1] if match else ""


def _by_module(context: _Context, low: int, high: int) -> list[tuple[int, int]]:
    """What does not repeat, cut where numbered modules begin and end (a model of one layer has an embedding too)."""
    spans = _spans_of(map(_layer, context.ops[low:high])) or []
    return list(pairwise(sorted({low, high, *(low + edge for span in spans for edge in span)})))


def _innermost(modules: Sequence[str]) -> str:
    """The innermost module with a number of its own that has all of them."""
    paths = zip(*(module.split(".") for module in modules), strict=False)
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, paths)]
    depth = max((i for i, part in enumerate(shared) if part.isdecimal()), default=-1)
    return ".".join(shared[: depth + 1])


def _labels(ops: Sequence[Op], spans: Sequence[tuple[int, int]]) -> list[str]:
    labels = []
    for start, stop in spans:
        layers = Counter(layer for op in ops[start:stop] if (layer := _layer(op)))
        layer, count = max(layers.items(), key=lambda item: item[1], default=("", 0))
        if 2 * count > stop - start:
            labels.append(_innermost([op.module for op in ops[start:stop] if _layer(op) == layer]) or layer)
            continue
        modules = dict.fromkeys(op.module.rsplit(".", 1)[-1] for op in ops[start:stop] if op.module)
        labels.append("+".join(list(modules)[:4]) or "all")
    seen: Counter[str] = Counter()
    for i, label in enumerate(labels):
        seen[label] += 1
        if seen[label] > 1:
            labels[i] = f"{label}#{seen[label]}"
    return labels
