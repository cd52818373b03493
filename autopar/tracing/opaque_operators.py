"""Operators of opaque regions in a graph, and the notes that say why regions are opaque.

See :mod:`autopar.tracing.opaque_regions` for the regions themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.graph.graph import Graph, Ref
from autopar.ops.kernels import region_of
from autopar.tracing.builder import Builder, Call, Value
from autopar.util.formatting import some

TARGET = "autopar.opaque"
"""The target of the operator that runs a region."""
_NOTE = "opaque, whole on every rank of tp and cp and of a cost that is known roughly: "
_MIXED = "; its samples are not known to be apart: "
"""The beginnings of the parts of a note. :func:`reason_of` finds the parts by them."""


def opaque_of(builder: Builder, call: Call) -> Value:
    """Add the operator of a region to the graph and return its results. Gradients flow to those of which the examined region gave them.

    Args:
        call: is one of ``torch.ops.autopar.opaque``.
    """
    args = tuple(call.bound().values())
    region = region_of(str(args[0]))
    result = builder.emit(call, TARGET, args)
    builder.stop_gradient(result, *(i for i, (_, _, flows) in enumerate(region.outputs) if not flows))
    return tuple(Ref(result.name, i) for i in range(len(region.outputs)))


def notes_of(graph: Graph, reasons: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note for all regions that are opaque for the same reason: their names, the reason, and why they mix samples.

    Args:
        reasons: says for modules, by path, why they are opaque. Regions without an entry are autograd functions.
    """
    regions = {
        r.name: r for op in (*graph.prelude, *graph.ops) if op.target == TARGET for r in (region_of(str(op.args[0])),)
    }
    groups: dict[tuple[str, str], list[str]] = {}
    for name, region in regions.items():
        why = reasons.get(
            name, "an export would drop its own backward, which is not what autograd makes of its forward"
        )
        groups.setdefault((why, region.why), []).append(name)
    return tuple(
        f"{_NOTE}{some(names)}; {why}" + (f"{_MIXED}{why_mixed}" if why_mixed else "")
        for (why, why_mixed), names in groups.items()
    )


def reason_of(notes: Sequence[str], name: str) -> str:
    """Return why the region ``name`` is opaque according to the notes of :func:`notes_of`; empty if none of them names it."""
    for note in notes:
        names, _, why = note.removeprefix(_NOTE).partition("; ")
        if note.startswith(_NOTE) and name in names.split(" and ")[0].split(", "):
            return why.partition(_MIXED)[0]
    return ""
