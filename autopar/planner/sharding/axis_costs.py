"""The cost model as the layout search asks it: operator by operator, on one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.network.collectives import CollectiveModel
from autopar.cost.operators.roofline import OperatorTimes, time_of_work
from autopar.cost.operators.work import is_elementwise, work
from autopar.device import Device
from autopar.graph.ir import Op, Ref, TensorSpec
from autopar.mesh import Mesh
from autopar.planner.sharding.tables import Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPricing:
    """Prices of one axis of a mesh; implements :class:`autopar.planner.sharding.block_table.Pricing`.

    ``state_bytes_per_element``: of a parameter with gradient and optimizer states, on one rank of the data axes.
    ``gradient_itemsize``: bytes of an element of a gradient sum.
    ``measured``: times of operators that go before the roofline.
    ``collective_weight``: what a second of a collective counts beside a second of work.
    """

    device: Device
    collectives: CollectiveModel
    mesh: Mesh
    axis: str
    state_bytes_per_element: float
    gradient_itemsize: int
    collective_weight: float = 1.0
    measured: OperatorTimes | None = None

    @property
    def changes_by_bytes(self) -> bool:
        """See :class:`autopar.planner.sharding.block_table.Pricing`; what was measured, was measured at a shape."""
        return self.measured is None

    def by_bytes(self, op: Op) -> bool:
        """See :class:`autopar.planner.sharding.block_table.Pricing`."""
        return self.measured is None and is_elementwise(op)

    def op_cost(self, op: Op, operands: Sequence[TensorSpec]) -> Cost:
        """See :class:`autopar.planner.sharding.block_table.Pricing`."""
        done = work(op, operands, self.device.kind)
        time = time_of_work(done, op, self.device)
        if self.measured is not None:
            time = self.measured.time(op, operands, time)
        return Cost(time_s=time.forward_s + time.backward_s, saved_bytes=done.saved_bytes, forward_s=time.forward_s)

    def collective_time_s(self, kind: str, num_bytes: int) -> float:
        """See :class:`autopar.planner.sharding.block_table.Pricing`."""
        return self.collective_weight * self.collectives.time_s(kind, num_bytes, self.mesh, (self.axis,))

    def saves(self, op: Op, operands: Sequence[TensorSpec]) -> Sequence[Ref]:
        """See :class:`autopar.planner.sharding.block_table.Pricing`."""
        done = work(op, operands, self.device.kind)
        kept = [op.operands[i] for i in done.saved]
        return (*kept, Ref(op.name)) if done.saves_output else tuple(kept)

    def gradient_bytes(self, spec: TensorSpec) -> int:
        """See :class:`autopar.planner.sharding.block_table.Pricing`."""
        return spec.numel * self.gradient_itemsize

    def state_bytes(self, spec: TensorSpec) -> float:
        """See :class:`autopar.planner.sharding.block_table.Pricing`."""
        return spec.numel * self.state_bytes_per_element
