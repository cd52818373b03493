"""What axis ``batch`` asks of a typing beyond other axes: samples meet in sums alone, or in one micro-batch a data rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.errors import InternalError, RuleError
from autopar.graph.graph import Graph, Op, Ref
from autopar.plan.mesh import I, P, R, Type


@dataclass(slots=True, kw_only=True)
class SampleSums:
    """Sums over all samples that prelude values make before the step, as they are found.

    Attributes:
        sums: the values that are summed, in order.
        read_as_partial: values of which some operator reads a part, with its place.
        behind_sums: names of prelude operators that depend on such a sum.
    """

    graph: Graph
    sums: dict[Ref, None] = field(default_factory=dict)
    read_as_partial: dict[Ref, str] = field(default_factory=dict)
    behind_sums: set[str] = field(default_factory=set)

    def crosses(self, ref: Ref, found: Type, wanted: Type, *, same: bool) -> bool:
        """A sum over samples that the model itself reads as a total, or a whole value that becomes a summand.

        Where samples meet, whatever becomes another type; totals of the prelude are made before the step.

        Args:
            same: the types are equal for this value.
        """
        if same or self.graph.is_parameter(ref):
            return False
        if ref in self.sums or (found == P and not wanted.is_split and self.graph.is_prelude(ref)):
            return False
        return bool(self.graph.mixing) or (P in (found, wanted) and not found.is_split and not wanted.is_split)

    def check(self, ref: Ref, found: Type, wanted: Type, op: Op, *, same: bool) -> None:
        """Whether ``op`` can read a value that does not cross samples.

        Raises:
            RuleError: it cannot, as samples meet.
            InternalError: it cannot, as the strategy is wrong.
        """
        place = f"{op.name} ({op.target})"
        if self.graph.is_parameter(ref):
            if wanted not in (R, I):
                raise InternalError(f"A parameter is {wanted} for the samples of a batch, not complete", where=place)
            return
        if wanted == P:
            self.read_as_partial[ref] = place
        if same:
            conflict = ref in self.sums and wanted == P
        elif found == P and wanted in (R, I) and self.graph.is_prelude(ref):
            if ref.name in self.behind_sums:
                raise InternalError(f"The sum {ref} over all samples depends on another such sum", where=place)
            self.sums[ref] = None
            conflict = ref in self.read_as_partial
        else:
            raise RuleError(
                f"Samples of the batch depend on each other ({ref} is {found} where {wanted} is needed), so it cannot be split",
                where=f"{place}, {op.module or 'no module'}{f', {op.source}' if op.source else ''}",
                fix="Statistics over the batch (batch normalisation) need one data rank and one micro-batch: pin them",
            )
        if conflict:
            raise InternalError(f"The sum {ref} over samples is read both as a total and as a part", where=place)

    def new_value(self, ref: Ref, found: Type, *, in_prelude: bool) -> None:
        """The new value of a buffer, which is not whole, becomes a sum over all samples.

        Raises:
            RuleError: it is none.
        """
        if found != P or not in_prelude or ref in self.read_as_partial or ref.name in self.behind_sums:
            producer = self.graph.producer(ref)
            raise RuleError(
                f"The new value of this buffer is not the same for all samples ({found}), so the batch cannot be split",
                where=f"{ref.name} ({producer.module if producer is not None else ''})",
                fix="Keep sums or means over the batch in buffers, not values of single samples",
            )
        self.sums[ref] = None

    def add_prelude(self, op: Op) -> None:
        """Notes an operator of the prelude."""
        if any(r in self.sums or r.name in self.behind_sums for r in op.operands):
            self.behind_sums.add(op.name)
