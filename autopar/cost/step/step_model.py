"""One step on the devices of some ranks: prices of blocks on the data axes, of stages, and of work once a step, cached by value.

A *unit* is an FSDP unit, the parameters of a block, with what they cost on the data axes (:class:`~autopar.cost.step.data_parallel.Unit`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import TypeAlias

from autopar.cost.blocks.block_cost import BlockCost, ParameterCost
from autopar.cost.network.collectives import CollectiveModel
from autopar.cost.network.placement import host_of
from autopar.cost.operators.operator_times import OpTime
from autopar.cost.step.data_parallel import DataParallel, Unit, itemsize, new_parameters, shared_sums_s
from autopar.cost.step.gradient_buckets import RankSums, Summed, buckets, exposed_sums_s, late_sums, scalars
from autopar.cost.step.memory import (
    OptimizerCost,
    StageMemory,
    State,
    freed_bytes,
    gathered_bytes,
    launched_s,
    stage_memory,
    state_bytes,
    stepped_s,
    stepping_bytes,
    steps_at_once,
    unit_passing_bytes,
)
from autopar.cost.step.step import Runs, Runtime, StageCost, StageSums, Step, own_times, stage_sums, with_offload
from autopar.hardware.device import Device, HostLink
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Precision, Recompute

Neighbours: TypeAlias = tuple[BlockCost | None, BlockCost | None]
"""The blocks before and after another block; None where there is none."""

UnitKey: TypeAlias = tuple[tuple[ParameterCost, ...], tuple[int, ...], Mesh | None]
"""The parameters of a unit, degrees of the mesh, and the mesh itself where it matters which ranks a group has."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranks:
    """The devices of some ranks, and what they run.

    Attributes:
        devices: the devices of the ranks.
        device: the slowest device; all are priced as this one.
        collectives: the collectives of the cluster.
        precision: the dtypes of training.
        optimizer: what the optimizer keeps and moves.
        runtime: the training program.
        is_all: whether these are all ranks of the cluster; if not, prices depend on where a mesh lies on them.
        units: cached units, for all steps.
    """

    devices: tuple[Device, ...]
    device: Device
    collectives: CollectiveModel
    precision: Precision
    optimizer: OptimizerCost
    runtime: Runtime
    is_all: bool
    units: dict[UnitKey, Unit] = field(default_factory=dict)

    @property
    def host(self) -> HostLink:
        """The link for offloading, that of the slowest device.

        Raises:
            UsageError: a device's profile has no link to a host.
        """
        return host_of(self.device, self.devices)

    def unit(self, parameters: tuple[ParameterCost, ...], data: DataParallel) -> Unit:
        """Return the unit of some parameters.

        It does not depend on the ZeRO stage nor, where all nodes are equal, on the pipeline: many steps share it.
        """
        mesh = data.mesh
        degrees = (mesh.dp_replicate, mesh.dp_shard, mesh.cp * mesh.tp, mesh.world_size)
        key = parameters, degrees, None if self.is_all else mesh
        if key not in self.units:
            self.units[key] = self.runtime.unit(parameters, data, self.collectives, self.device)
        return self.units[key]


class StepModel:
    """Prices blocks and stages in one step.

    Args:
        ranks: the ranks that run it.
        step: how it is run.

    Attributes:
        data: how the step uses the data axes.
        summed: which gradients all-reduces sum, and over which axes.
    """

    def __init__(self, ranks: Ranks, step: Step) -> None:
        self.ranks, self.step = ranks, step
        self.data: DataParallel = ranks.runtime.data_parallel(step, ranks.precision)
        self.summed = Summed(step.mesh, self.data.uses_fsdp)
        self._blocks: dict[BlockCost, Unit] = {}
        self._stages: dict[Runs, list[Unit]] = {}
        self._sums: dict[tuple[Runs, float, float], StageSums] = {}
        self._memory: dict[Runs, StageMemory] = {}
        self._rank_sums: dict[tuple[tuple[BlockCost, ...], ...], RankSums] = {}
        self._gradients: dict[tuple[Runs, ...], Mapping[str, float]] = {}

    # --- a block

    def unit(self, block: BlockCost) -> Unit:
        """Return the unit of a block's parameters."""
        unit = self._blocks.get(block)
        if unit is None:
            unit = self._blocks[block] = self.ranks.unit(block.parameters, self.data)
        return unit

    def block_time_s(self, block: BlockCost, *, recompute: Recompute, neighbours: Sequence[Neighbours] = ()) -> OpTime:
        """Return the seconds of a block for one micro-batch inside a long stage, including what the data axes add to each micro-batch.

        Args:
            block: the block.
            recompute: its mode of recompute.
            neighbours: pairs of blocks that may be before and after it; the least over them counts. If empty, these are blocks like itself.
        """
        data, interference = self.data, self.ranks.device.interference
        unit, (forward_s, backward_s) = self.unit(block), own_times(block, recompute)
        added_s = []
        for before, after in neighbours if neighbours and data.sends_always else ((block, block),):
            unit_before = None if before is None else (self.unit(before), own_times(before, "none")[0])
            mode_after = "full" if neighbours else recompute  # the most that the backward of another block can hide
            unit_after = None if after is None else (self.unit(after), own_times(after, mode_after)[1])
            added_s.append(data.inside_s(unit, backward_s, unit_before, unit_after, interference))
        more_forward_s, more_backward_s = (min(each) for each in zip(*added_s, strict=True))
        more_forward_s *= not data.is_pipelined  # a lower bound: a forward right after a backward gathers nothing
        return OpTime(forward_s + more_forward_s, backward_s + more_backward_s)

    def ends_s(self, first: BlockCost, last: BlockCost) -> float:
        """Return what each micro-batch adds where one stage has all blocks: the last block's gather and the first block's reduction."""
        gather_s = self.unit(last).gather_s if self.data.gathers_always else 0.0
        return gather_s + (self.unit(first).reduce_s if self.data.reduces_always else 0.0)

    def block_adding_s(self, block: BlockCost) -> float:
        """Return the seconds to add a block's gradients of a micro-batch to earlier ones, averaged over the backwards of a step."""
        return self._adding_s([self.unit(block)]) if self.step.adds_gradients else 0.0

    def _adding_s(self, units: Sequence[Unit]) -> float:
        """Return the seconds to add the gradients of some units to earlier ones, averaged over the backwards of a step."""
        return self.ranks.runtime.adding_s(units, self.data, self.step.num_micro_batches, self.ranks.device)

    def _state(self, unit: Unit) -> State:
        """Return the bytes of parameters, gradients and optimizer states of a unit on one rank."""
        count, on_host = self.step.num_micro_batches, self.step.offloads_optimizer
        return state_bytes(unit, self.data, self.ranks.optimizer, count, on_host=on_host)

    def block_bytes(self, block: BlockCost) -> tuple[int, int]:
        """Return a rank's bytes for a block without activations, and the least that it adds to its rank during the optimizer step.

        The first are its state, and what stays gathered; the second its state, and temporaries.
        """
        unit, count = self.unit(block), self.step.num_micro_batches
        state_bytes = self._state(unit).total
        passing_bytes = stepping_bytes(self.ranks.optimizer, self.data, self.step) * steps_at_once(self.ranks.device)
        stepped_bytes = unit.trained_shard_numel * passing_bytes - max(freed_bytes(unit, self.data, count), 0)
        return state_bytes + gathered_bytes(unit, self.data), state_bytes + stepped_bytes

    def block_passing_bytes(
        self, block: BlockCost, *, recompute: Recompute, neighbours: Sequence[Neighbours] = ()
    ) -> int:
        """Return a block's peak beyond what it keeps, FSDP's buffers included; ``neighbours`` as for :meth:`block_time_s`."""
        data, inner_bytes = self.data, block.passing_bytes(recompute)
        if not data.uses_fsdp or data.is_pipelined:
            return inner_bytes
        unit, count = self.unit(block), self.step.num_micro_batches
        units = ([None if b is None else self.unit(b) for b in pair] for pair in neighbours or ((block, block),))
        return inner_bytes + min(unit_passing_bytes(unit, before, after, data, count) for before, after in units)

    def block_once_s(self, block: BlockCost) -> float:
        """Return the least seconds that a block adds to a step once: its optimizer step, and reductions that nothing can hide."""
        unit = self.unit(block)
        return sum(self.stepped_s([unit])) + self.launched_s([unit]) - self.launched_s([]) + self.data.tail_s([unit])

    @cached_property
    def rank_once_s(self) -> float:
        """The least seconds that a rank adds to a step once, whatever its blocks are: sums of scalars, and launches of grouped operators."""
        return self.scalars_s + self.launched_s([])

    def block_gather_s(self, block: BlockCost) -> float:
        """Return the seconds to gather a block's parameters in a step's first forward, where they stay gathered from then on."""
        return self.unit(block).gather_s if self.data.uses_fsdp and not self.data.gathers_always else 0.0

    # --- a stage

    def units(self, stage: StageCost) -> list[Unit]:
        """Return the unit of each block of a stage; a parameter that several of its blocks read counts with the first one."""
        if stage.runs not in self._stages:
            self._stages[stage.runs] = [
                self.unit(block) if len(unread) == len(block.parameters) else self.ranks.unit(unread, self.data)
                for block, unread in zip(stage.blocks, new_parameters(stage.blocks), strict=True)
            ]
        return self._stages[stage.runs]

    def stage_sums(self, stage: StageCost, *, share: float, prelude_s: float) -> StageSums:
        """Return what a stage spends on one micro-batch.

        Args:
            stage: the stage.
            share: the fraction of its forwards that gather parameters.
            prelude_s: the seconds of the operators that every stage repeats.
        """
        key = stage.runs, share, prelude_s
        if key not in self._sums:
            units, device, adding_s = self.units(stage), self.ranks.device, 0.0
            if self.step.adds_gradients:
                adding_s = self._adding_s(units)
                adding_s += shared_sums_s(stage.blocks, itemsize(self.ranks.precision.compute), device)
            sums = stage_sums(
                stage, units, self.data, share=share, interference=device.interference, prelude_s=prelude_s,
                adding_s=adding_s,
            )  # fmt: skip
            offloads = any(block.offloads for block in stage.blocks)
            self._sums[key] = with_offload(sums, stage, self.ranks.host) if offloads else sums
        return self._sums[key]

    def stage_memory(self, stage: StageCost) -> StageMemory:
        """Return the bytes of a stage."""
        if stage.runs not in self._memory:
            units = self.units(stage)
            states = [self._state(unit) for unit, run in groupby(units) for _ in run]
            self._memory[stage.runs] = stage_memory(stage, units, states, self.data, self.step.num_micro_batches)
        return self._memory[stage.runs]

    def copied_bytes(self, stages: Sequence[StageCost]) -> int:
        """Return the bytes of gradients that a pipeline rank with these stages copies into buckets."""
        if self.data.uses_fsdp and self.data.mesh.ep_outer == 1:  # FSDP holds all parameters but scalars
            return 0
        return self._sums_of_rank(stages).copied_bytes

    def _sums_of_rank(self, stages: Sequence[StageCost]) -> RankSums:
        """Return the sums of gradients that all-reduces do on a pipeline rank with these stages."""
        key = tuple(stage.blocks for stage in stages)
        if key not in self._rank_sums:
            size = itemsize(self.ranks.precision.storage)
            self._rank_sums[key] = RankSums(
                buckets=buckets(key, self.summed, size, self.step.bucket_bytes),
                late=late_sums(key, self.summed, size),
            )
        return self._rank_sums[key]

    # --- once a step

    @cached_property
    def scalars_s(self) -> float:
        """The seconds in which every rank sums scalars once a step, whatever its blocks: counts of the batch, and the loss."""
        mesh, time_s = self.step.mesh, self.ranks.collectives.time_s
        sums = scalars(self.data, self.step.totals)
        return sum([time_s("all_reduce", num_bytes, mesh, axes) for axes, num_bytes in sums])

    def sum_s(self, axes: tuple[str, ...], num_bytes: int, copied_bytes: int) -> float:
        """Return the seconds of one all-reduce of gradients, of which ``copied_bytes`` are copied into its buffer and back."""
        copies = 2 * copied_bytes / self.ranks.device.memory_bandwidth_bytes_per_s
        return self.ranks.collectives.time_s("all_reduce", num_bytes, self.step.mesh, axes) + copies

    def stepped_s(self, units: Sequence[Unit]) -> tuple[float, float]:
        """Return the seconds of the optimizer's reads and writes, and of its copies; see :func:`autopar.cost.step.memory.stepped_s`."""
        host = self.ranks.host if self.step.offloads_optimizer else None
        size = itemsize(self.ranks.precision.storage)
        return stepped_s(self.ranks.optimizer, units, size, self.ranks.device, host)

    def launched_s(self, units: Sequence[Unit]) -> float:
        """Return the seconds to launch the optimizer's operators; see :func:`autopar.cost.step.memory.launched_s`."""
        host = self.ranks.host if self.step.offloads_optimizer else None
        return launched_s(self.ranks.optimizer, units, self.ranks.device, host)

    def gradients_s(self, stages: Sequence[StageCost]) -> Mapping[str, float]:
        """Return by axis the exposed seconds of sums that FSDP does not do, on a pipeline rank with these stages."""
        runs = tuple([stage.runs for stage in stages])
        if runs not in self._gradients:
            device = self.ranks.device
            self._gradients[runs] = exposed_sums_s(
                stages, self._sums_of_rank(stages), sum_s=self.sum_s,
                late_share=self.ranks.runtime.late_share(device), interference=device.interference,
            )  # fmt: skip
        return self._gradients[runs]
