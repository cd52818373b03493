"""The gradients of one step: apart from those of earlier steps until they are summed over all ranks that have a part."""

from __future__ import annotations

from autopar.plan.plan import Plan
from autopar.plan.run_log import COMPUTE, DATA
from autopar.runtime.assemble import Assembly
from autopar.runtime.monitor import Monitor
from autopar.runtime.step.gradients import BucketedSums, SetAside, sum_in_place


class StepGradients:
    """Begins before the first backward of a step, and ends after the last, or when one has failed."""

    def __init__(self, assembly: Assembly, plan: Plan, monitor: Monitor) -> None:
        self._assembly, self._monitor = assembly, monitor
        leaves = [h for h in assembly.held if h.leaf is not None]
        self._leaf_sums = BucketedSums(leaves, bucket_bytes=plan.bucket_bytes) if leaves else None
        self._late = [h for h in assembly.held if h.leaf is None and h.group is not None]
        self._set_aside = SetAside(dict.fromkeys((*self._late, *assembly.tied)))
        self._part = DATA if plan.mesh.data > 1 else COMPUTE
        self.is_open = False

    def begin(self, num_backwards: int) -> None:
        """Before the first of ``num_backwards``: gradients of this step are kept apart until they are summed."""
        if self.is_open:
            return
        self.is_open = True
        if self._leaf_sums is not None:
            self._leaf_sums.begin(num_backwards)
        self._set_aside.begin()

    def finish(self) -> None:
        """Gradient sums after the last backward."""
        if not self.is_open:
            return
        self.is_open = False
        if self._leaf_sums is not None:
            with self._monitor.part(self._part):
                self._leaf_sums.finish()
        sum_in_place(self._late, lambda held: held.group)
        if self._assembly.tied:
            self._assembly.sum_copies_here()
            sum_in_place(self._assembly.first_copies, lambda held: held.tie_group)
            self._assembly.spread_copies_here()
        self._set_aside.finish()

    def abandon(self) -> None:
        """Leaves the gradients of a step that failed, some of whose micro-batches may have added theirs."""
        if self.is_open:
            self.is_open = False
            self._set_aside.restore()
