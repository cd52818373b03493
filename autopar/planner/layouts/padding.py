"""Which vocabularies a typing has padded, and what a plan says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.graph.compact import Compact
from autopar.graph.ir import Graph, Ref
from autopar.graph.padding import lengths, pad, vocabularies
from autopar.plan import PaddedParameter
from autopar.rules.types import Typing


def padded(base: Compact, tp: int) -> Compact:
    """With every vocabulary as long as ``tp`` wants it; what a typing does not split stays as it was in the plan."""
    wanted = lengths(base.graph, tp)
    return replace(base, graph=pad(base.graph, wanted)) if wanted else base


def used_padding(graph: Graph, wanted: Mapping[str, int], typing: Typing) -> dict[str, int]:
    """Of the padded lengths ``wanted`` by key those whose vocabulary the typing splits anywhere; others stay unpadded.

    Args:
        graph: before it is padded.
    """
    used: dict[str, int] = {}
    if not wanted:
        return used
    split = {
        (ref, kind.dim)
        for op in graph.ops
        for refs, kinds in (
            (op.operands, typing.strategies[op.name].inputs),
            (tuple(Ref(op.name, i) for i in range(len(op.outputs))), typing.strategies[op.name].outputs),
        )
        for ref, kind in zip(refs, kinds, strict=True)
        if kind.is_split
    }
    split |= {(Ref(name), kind.dim) for name, kind in typing.parameters.items() if kind.is_split}
    for vocabulary in vocabularies(graph):
        keys = [graph.parameter(name).key for name in vocabulary.parameters]
        dims = [(Ref(name), dim) for name, dim in vocabulary.parameters.items()]
        dims += [(ref, len(graph.spec(ref).shape) - 1) for ref in vocabulary.values]
        if any(place in split for place in dims):
            used |= {key: wanted[key] for key in keys if key in wanted}
    return used


def padding_notes(graph: Graph, padding: Sequence[PaddedParameter], tp: int) -> tuple[str, ...]:
    """One line for each length."""
    lengths = {p.key: p.spec.shape for p in graph.parameters} if padding else {}
    notes = []
    for length in sorted({entry.length for entry in padding}):
        names = [entry.parameter for entry in padding if entry.length == length]
        before = max(n for n in lengths[names[0]] if n <= length)
        notes.append(f"{', '.join(names)}: {before} padded to {length} with zeros, to split over tp={tp}")
    return tuple(notes)
