"""Blocks: the repeated layers of a model, found in its operators without regard to names.

A layer that is applied L times appears in the list of operators as a tandem repeat: L equal consecutive windows, each of which
reads a value of the previous one. The distances between equal calls give candidates for the length of a window, and a canonical
hash verifies them. The operators before and after a repeat are searched again, so that the layers of an encoder and of a decoder
are both found. The running time is nearly linear in the number of operators.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, takewhile

import numpy as np
import numpy.typing as npt

from autopar.graph.graph import Block, Op, Ref, TensorSpec, digest
from autopar.graph.rewrites import signature

_SCALING = frozenset({"autopar.dropout", *(f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div"))})
"""Operators with a number that differs between equal layers, such as the survival rate of stochastic depth."""

_CANDIDATES = 48
"""Number of periods to try in each range of operators, of those between neighbouring equal calls; proportionally fewer of others."""

_LAYERS = 8
"""Largest number of equal calls in one period. Jamba's period has 8 layers. ADR 0023 describes the benefit."""

_NUMBERED = re.compile(r"^(.*?\b\d+)(\.|$)")
_NUMBER_AT_END = re.compile(r"^(.*?\d)(\.|$)")


@dataclass(frozen=True, slots=True)
class _Context:
    """The operators to search.

    Attributes:
        ops: The operators in order.
        specs: The spec of each tensor that they read or produce.
        parameters: The names that are parameters.
        last_use: The position of the last reader of each value; ``len(ops)`` for the loss.
    """

    ops: Sequence[Op]
    specs: Mapping[Ref, TensorSpec]
    parameters: frozenset[str]
    last_use: Mapping[Ref, int]


def find_blocks(
    ops: Sequence[Op], specs: Mapping[Ref, TensorSpec], parameters: frozenset[str], loss: Ref
) -> tuple[Block, ...]:
    """Partition operators into blocks, in order: each repetition of a layer and each range between layers is a block.

    Args:
        ops: The operators in order.
        specs: The spec of each tensor that the operators read or produce.
        parameters: The names that are parameters.
        loss: The value that is read after all operators.
    """
    last_use: dict[Ref, int] = {loss: len(ops)}
    for i, op in enumerate(ops):
        for ref in op.operands:
            last_use[ref] = max(i, last_use.get(ref, 0))
    context = _Context(ops, specs, parameters, last_use)
    spans = _partition(context)
    spans = spans if len(spans) > 1 else _by_name(context)
    labels = _labels(ops, spans)
    hashes = [_hash(context, start, stop) for start, stop in spans]
    exact = [_hash(context, start, stop, is_exact=True) for start, stop in spans]
    # Blocks that differ only in scaling factors are equal layers and share the hash that ignores these. All others have the exact hash.
    num_exact = Counter(block_hash for block_hash, _ in set(zip(hashes, exact, strict=True)))
    chosen = [a if num_exact[a] > 1 else b for a, b in zip(hashes, exact, strict=True)]
    return tuple(
        Block(index=i, start=start, stop=stop, hash=chosen[i], label=labels[i]) for i, (start, stop) in enumerate(spans)
    )


def _hash(context: _Context, start: int, stop: int, *, is_exact: bool = False) -> str:
    """Return a hash of the subgraph ``start:stop``.

    It depends on the operators, literals, wiring and specs, and on which values are read outside. It does not depend on names.

    Args:
        context: The operators.
        start, stop: The range of operators.
        is_exact: Whether the hash also depends on scaling factors, which do not affect layouts.
    """
    ops = context.ops[start:stop]
    names = {op.name for op in ops}
    read = dict.fromkeys(ref.name for op in ops for ref in op.operands if ref.name not in names)
    are_parameters = [name in context.parameters for name in read]
    are_read_later = [[context.last_use.get(ref, -1) >= stop for ref in op.refs] for op in ops]
    text = signature(ops if is_exact else [*map(_without_scale, ops)], context.specs.__getitem__)
    return digest(f"{text} {are_parameters} {are_read_later}")


def _without_scale(op: Op) -> Op:
    """Return an operator without its scaling factor."""
    if op.target not in _SCALING:
        return op
    args = ("number" if isinstance(arg, float) and math.isfinite(arg) and arg != 0 else arg for arg in op.args)
    return replace(op, args=tuple(args))


# --- the search -----------------------------------------------------------------------------------


def _partition(context: _Context) -> list[tuple[int, int]]:
    """Partition the operators into ranges, in order."""
    # A number for each operator. Equal numbers mean equal calls up to the wiring.
    _, tokens = np.unique([_hash(context, i, i + 1) for i in range(len(context.ops))], return_inverse=True)
    spans: list[tuple[int, int]] = []
    stack = [(0, len(tokens))]  # not recursive, because a graph can have more ranges than Python's recursion limit
    while stack:
        low, high = stack.pop()
        if low >= high:
            continue
        repeat = _best_repeat(context, tokens, low, high)
        if repeat is None:
            spans.extend(_by_module(context, low, high))
            continue
        first, period, count = repeat
        edges = (0, *_layers(context, first, period), period)
        spans.extend((first + k * period + a, first + k * period + b) for k in range(count) for a, b in pairwise(edges))
        stack.append((low, first))
        stack.append((first + count * period, high))
    return sorted(spans)


def _best_repeat(context: _Context, tokens: npt.NDArray[np.int64], low: int, high: int) -> tuple[int, int, int] | None:
    """Return (first, period, count) of the verified repeat that covers most of ``low:high``, with the shortest such period.

    ``first`` is the position of its first operator. None if there is no repeat.
    """
    candidates = [
        (-(length // period) * period, period, low + begin, length)
        for period in _periods(tokens[low:high])
        for begin, length in _runs(tokens[low:high], period)
    ]
    for _, period, begin, length in sorted(candidates)[: 4 * _CANDIDATES]:
        verified = _verified(context, begin, period, length)
        if verified is not None:
            return verified
    return None


def _periods(tokens: npt.NDArray[np.int64]) -> list[int]:
    """Candidate periods: the distances between equal calls, those between neighbours first, then those to the second next, and so on.

    Of each kind, the distances that together cover most operators come first.
    """
    order = np.argsort(tokens, kind="stable")
    periods: dict[int, None] = {}
    for apart in range(1, _LAYERS + 1):
        same = tokens[order][apart:] == tokens[order][:-apart]
        values, counts = np.unique((order[apart:] - order[:-apart])[same], return_counts=True)
        rank = np.argsort(-(values * counts), kind="stable")
        periods |= dict.fromkeys(values[rank[: _CANDIDATES // apart]].tolist())
    return list(periods)


def _runs(tokens: npt.NDArray[np.int64], period: int) -> list[tuple[int, int]]:
    """Ranges (begin, length) of at least two periods in which each token equals the one a period later."""
    equal = np.concatenate(([False], tokens[:-period] == tokens[period:], [False]))
    edges = np.flatnonzero(np.diff(equal.astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    return [(int(s), int(e - s) + period) for s, e in zip(starts, ends, strict=True) if e - s >= period]


def _verified(context: _Context, begin: int, period: int, length: int) -> tuple[int, int, int] | None:
    """Return (first, period, count) of the repeat in a range of equal tokens, at the best of its possible phases.

    Its windows have equal hashes, each reads the previous one, and they have parameters. None if there are fewer than two.
    """
    count, slack = divmod(length, period)
    phases = sorted(range(begin, begin + slack + 1), key=lambda first: _cut_cost(context, first, period))
    for phase in phases[:3]:
        hashes = [_hash(context, phase + k * period, phase + (k + 1) * period) for k in range(count)]
        skipped, num_equal = _longest_equal(hashes)
        first = phase + skipped * period
        if num_equal >= 2 and _is_chain(context, first, period):
            return first, period, num_equal
    return None


def _longest_equal(hashes: Sequence[str]) -> tuple[int, int]:
    """Return the index and the length of the longest run of equal hashes, the first one of several."""
    lengths = [len(list(run)) for _, run in groupby(hashes)]
    longest = max(lengths)
    return sum(lengths[: lengths.index(longest)]), longest


def _cut_cost(context: _Context, first: int, period: int) -> tuple[int, bool, int]:
    """Return a sort key of the phases of a repeat, the best first.

    Its items are the bytes that cross the cut between the first two windows, whether the cut is inside a layer, and the position.
    """
    cut = first + period
    crossing = sum(
        spec.num_bytes
        for op in context.ops[first:cut]
        for k, spec in enumerate(op.outputs)
        if context.last_use.get(Ref(op.name, k), -1) >= cut
    )
    return crossing, _is_inside(context, first, period), first


def _is_inside(context: _Context, first: int, period: int) -> bool:
    """Return whether windows from ``first`` on begin inside of a layer."""
    return first > 0 and bool(owner := _owner(context, first, period)) and owner == _owner(context, first - 1, period)


def _is_chain(context: _Context, first: int, period: int) -> bool:
    """Return whether the second window reads a value of the first, and windows have parameters. All windows have the same hash."""
    window, successor = (context.ops[start : start + period] for start in (first, first + period))
    names = {op.name for op in window}
    reads = any(ref.name in names for op in successor for ref in op.operands)
    return reads and any(ref.name in context.parameters for op in window for ref in op.operands)


# --- names: labels for people, and boundaries of layers -----------------------------------------------


def _owner(context: _Context, position: int, period: int) -> str:
    """Return the layer of an operator of a repeat: its module up to the number that differs in the next window; empty if none differs."""
    path, successor = (context.ops[i].module.split(".") for i in (position, position + period))
    differing = next((depth for depth, (a, b) in enumerate(zip(path, successor, strict=False)) if a != b), None)
    return "" if differing is None else ".".join(path[: differing + 1])


def _layers(context: _Context, first: int, period: int) -> list[int]:
    """Return the positions in a window at which its layers begin, without the first one.

    Empty if operators of two layers are interleaved or the window begins inside of a layer.
    """
    spans = _spans_of(_owner(context, place, period) for place in range(first, first + period))
    if _is_inside(context, first, period) or spans is None:
        return []
    return [begin for begin, _ in spans][1:]


def _spans_of(owners: Iterable[str]) -> list[tuple[int, int]] | None:
    """Return the range of the operators of each owner, in order; None if the ranges overlap. An operator with an empty owner has none."""
    begins, ends = dict[str, int](), dict[str, int]()
    for position, owner in enumerate(owners):
        if owner:
            begins.setdefault(owner, position)
            ends[owner] = position + 1
    if any(ends[a] > begins[b] for a, b in pairwise(begins)):
        return None
    return [(begin, ends[owner]) for owner, begin in begins.items()]


def _layer(op: Op, numbered: re.Pattern[str] = _NUMBERED) -> str:
    """Return the outermost numbered module of an operator, such as ``model.layers.3``; empty if no module of its path is numbered."""
    match = numbered.match(op.module)
    return match[1] if match else ""


def _by_module(context: _Context, low: int, high: int) -> list[tuple[int, int]]:
    """Partition a range without repeats where its numbered modules begin and end, such as the single layer of a small model."""
    spans = _spans_of(map(_layer, context.ops[low:high])) or []
    return list(pairwise(sorted({low, high, *(low + edge for span in spans for edge in span)})))


def _by_name(context: _Context) -> list[tuple[int, int]]:
    """Partition all operators where modules begin whose name ends in a number (``conv1``, ``denseblock2``), the outermost ones.

    This is for models that neither repeat layers nor have modules whose whole name is a number.
    """
    spans = _spans_of(_layer(op, _NUMBER_AT_END) for op in context.ops) or []
    return list(pairwise(dict.fromkeys((0, *(begin for begin, _ in spans[1:]), len(context.ops)))))


def _innermost(modules: Sequence[str]) -> str:
    """Return the innermost module with a numeric name that contains all of ``modules``; empty if there is none."""
    paths = zip(*(module.split(".") for module in modules), strict=False)
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, paths)]
    depth = max((i for i, part in enumerate(shared) if part.isdecimal()), default=-1)
    return ".".join(shared[: depth + 1])


def _labels(ops: Sequence[Op], spans: Sequence[tuple[int, int]]) -> list[str]:
    """Return a unique label for each block: the layer of most of its operators, or else the names of its first modules."""
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
