"""Graphs with padded vocabularies, and what a plan says of them."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.graph.ir import Graph
from autopar.graph.padding import lengths, pad
from autopar.plan import PaddedParameter


def padded(graph: Graph, ranks: int, multiple: int) -> Graph:
    """With every vocabulary as long as ``ranks`` and ``multiple`` want it; the same graph where they are."""
    wanted = lengths(graph, ranks, multiple)
    return pad(graph, wanted) if wanted else graph


def padding_of(graph: Graph) -> tuple[PaddedParameter, ...]:
    """What is padded in a graph that no axis has split yet."""
    return tuple(
        PaddedParameter(parameter=p.key, length=p.spec.shape[p.padding.dim])
        for p in graph.parameters
        if p.padding is not None
    )


def padding_notes(graph: Graph, padding: Sequence[PaddedParameter], tp: int, multiple: int) -> tuple[str, ...]:
    """One line for each length.

    Args:
        graph: as traced.
    """
    lengths = {p.key: p.spec.shape for p in graph.parameters} if padding else {}
    why = [f"split over tp={tp}"] * (tp > 1) + [f"aligned to {multiple}"] * (multiple > 1)
    notes = []
    for length in sorted({entry.length for entry in padding}):
        names = [entry.parameter for entry in padding if entry.length == length]
        before = max(n for n in lengths[names[0]] if n <= length)
        notes.append(f"{', '.join(names)}: {before} padded to {length} with zeros, {' and '.join(why)}")
    return tuple(notes)
