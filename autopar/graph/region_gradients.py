"""Which gradients depend on the code of opaque regions, which may give none to a parameter or an input in a step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TypeAlias

from autopar.graph.elements import collect_refs
from autopar.graph.graph import Graph, Op, Ref
from autopar.graph.operator_kinds import OPAQUE

Passed: TypeAlias = tuple[str, int]
"""A tensor that an operator passes to its region: the operator's name, and the tensor's place among inputs and parameters."""
Sources: TypeAlias = set[Passed | None]
"""What gradients come from: tensors passed to regions, by whose code, and None, for the loss without a region between."""


@dataclass(frozen=True, slots=True)
class RegionGradients:
    """Where gradients come from in a model with opaque regions.

    Attributes:
        parameters: the sources of each parameter's gradient, by its name; of those alone that regions stand before on all ways.
        regions: the sources of the gradient of each region's outputs, by its operator's name, from the loss on.
    """

    parameters: dict[str, Sources]
    regions: dict[str, Sources]

    @property
    def passed(self) -> list[Passed]:
        """All sources but the loss, in an order that all ranks have."""
        found = Sources().union(*self.parameters.values(), *self.regions.values())
        return sorted(source for source in found if source is not None)

    def unreached(self, noted: set[Passed]) -> set[str]:
        """Return the parameters to which no gradient has come from the loss, if backward has come to ``noted``.

        What a region was passed has also been noted where zeros alone came to the region's outputs, as later code left them out.
        """
        true: Sources = {None}
        for region, sources in self.regions.items():
            if not true.isdisjoint(sources):
                true.update(passed for passed in noted if passed[0] == region)
        return {name for name, sources in self.parameters.items() if true.isdisjoint(sources)}


def region_gradients(graph: Graph) -> RegionGradients:
    """Return where gradients come from."""
    sources_of: defaultdict[Ref, Sources] = defaultdict(set)
    sources_of[graph.loss] = {None}
    regions: dict[str, Sources] = {}
    for op in reversed(graph.ops):
        sources = Sources().union(*(sources_of[Ref(op.name, i)] for i in range(len(op.outputs))))
        if not sources:
            continue
        if None in sources:  # which is there in every step
            sources = {None}
        if op.target == OPAQUE:
            regions[op.name] = sources
        for place, ref in enumerate(_passed(op) if op.target == OPAQUE else op.operands):
            if graph.spec(ref).requires_grad:
                sources_of[ref] |= {(op.name, place)} if op.target == OPAQUE else sources
    of_parameter: defaultdict[str, Sources] = defaultdict(set)
    for p in graph.parameters:  # a part of a parameter has zeros where another part has a gradient
        of_parameter[p.fqn] |= sources_of[Ref(p.name)]
    parameters = {p.name: of_parameter[p.fqn] for p in graph.parameters}
    return RegionGradients({name: s for name, s in parameters.items() if s and None not in s}, regions)


def _passed(op: Op) -> list[Ref]:
    """Return the inputs and the parameters of a call of a region, in order."""
    refs: list[Ref] = []
    collect_refs(op.args[1:3], refs)
    return refs
