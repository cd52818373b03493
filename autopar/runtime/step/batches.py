"""How one rank takes batches: which samples, in which micro-batches, and the sums over all samples that a step begins with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import spmd_types
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.lower.program import MICRO_BATCH_WEIGHT, SHARE, Program
from autopar.plan.mesh import DATA_AXES
from autopar.runtime.guard.collective_calls import Calls
from autopar.runtime.guard.failure_watch import Alarm
from autopar.runtime.guard.shared_samples import SharedSamples
from autopar.runtime.step.local_batch import local_batch, num_samples
from autopar.runtime.step.partial_batch import BatchSizes, PartialBatch, partial_of
from autopar.runtime.step.runner import Batch, micro_batches
from autopar.runtime.world import World
from autopar.tracing.batch import named_inputs


class Batches:
    """Of one parallel model; every rank of the job makes one and calls the same methods."""

    def __init__(self, program: Program, world: World, shared: SharedSamples, alarm: Alarm, calls: Calls) -> None:
        self._program, self._world, self._plan = program, world, program.plan
        self._shared, self._alarm, self._calls = shared, alarm, calls
        self._samples = self._plan.samples_of(world.data_index)
        self._group = world.axis_group(DATA_AXES)
        self._sizes = BatchSizes(
            self._plan, world.data_index, lambda batch: shared.are_equal(named_inputs(batch), alarm)
        )

    def partial(self, batch: Batch, purpose: str) -> PartialBatch | None:
        """How this rank computes a batch that is smaller than the plan's; all ranks meet for one that is."""
        size = num_samples(batch, self._program.graph.inputs)
        if size is None or not self._sizes.is_partial(batch, size, purpose):
            return None
        trains = purpose not in ("evaluate", "predict")
        partial = partial_of(self._program, size, self._world.data_index, trains=trains)
        self._calls.meet(f"{purpose} of {size} samples")
        return partial

    def local(self, batch: Batch, partial: PartialBatch | None) -> dict[str, Tensor]:
        """This rank's samples of a batch, on its device."""
        rank, device = self._world.data_index, self._world.device
        local = local_batch(batch, self._program.graph.inputs, self._plan, rank, device, partial)
        if partial is None:
            self._shared.check(named_inputs(batch), local, self._samples, self._alarm)
        return local

    def count(self, partial: PartialBatch | None) -> int:
        """Micro-batches of a step."""
        return self._plan.num_micro_batches if partial is None else len(partial.micro_batches)

    def totals(self, local: Batch, partial: PartialBatch | None, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The program's sums over the global batch, by name.

        Args:
            state: buffers that steps change, by the graph's names.
        """
        sums = self._program.sums
        if sums is None:
            return {}
        totals: list[Tensor] = []
        with torch.no_grad(), spmd_types.set_current_mesh(self._world.device_mesh):
            for number, part in enumerate(micro_batches(local, self._program.graph.inputs, self.count(partial))):
                given: dict[str, Any] = {**state, **part, SHARE: 1.0, MICRO_BATCH_WEIGHT: 1.0}
                if partial is not None:
                    given |= {SHARE: partial.share, MICRO_BATCH_WEIGHT: partial.weights[number]}
                made = sums.module(*[given[name] for name in sums.inputs])
                if partial is not None:
                    made = [partial.weighed(value, number) for value in made]
                totals = list(made) if not totals else [a + b for a, b in zip(totals, made, strict=True)]
        for i, total in enumerate(totals):
            if self._group is not None:
                totals[i] = total.contiguous().clone()
                dist.all_reduce(totals[i], group=self._group)
        return dict(zip(sums.outputs, totals, strict=True))
