"""The cost model: from blocks of one rank's graph to the step time and memory of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster
from autopar.cost.blocks.block_cost import BlockCost
from autopar.cost.blocks.block_model import BlockModel
from autopar.cost.network.collectives import CollectiveModel
from autopar.cost.network.placement import peak_flops, places_of
from autopar.cost.step.critical_path import Chain, longest_chains
from autopar.cost.step.data_parallel import DataParallel, Unit, itemsize, own_parameters, shared_sums_s
from autopar.cost.step.memory import Known, StageCost, kept_bytes, rank_memory
from autopar.cost.step.simulation import PipelineTimes, StageTimes, finishes_s, simulate
from autopar.cost.step.stage_time import StageSums, moving, stage_key, stage_sums, stage_times
from autopar.cost.step.step import Step
from autopar.cost.step.traffic import Traffic, gathering_share, rank_traffic, tied
from autopar.device import Device
from autopar.errors import UsageError
from autopar.mesh import Mesh
from autopar.plan import Breakdown, Memory, Precision, Prediction
from autopar.schedule import check_schedule

__all__ = ["BlockCost", "CostModel", "StageCost", "Step"]


class CostModel(BlockModel):
    """Prices of operators, blocks and whole plans on one cluster.

    Where node groups differ, :meth:`parts` has a model for each pipeline rank, and whole plans take blocks that were priced
    by it (:meth:`price`). A model prices as if every rank were the slowest of its node groups.

    Args:
        cluster: with profiles of its devices, links and collective library.
        precision: dtypes.
        optimizer: name of one of ``autopar.cost.step.optimizer.OPTIMIZERS``.
        collectives: of the cluster, where their times are known already.
        places: the node groups that are priced, by position; None: all.

    Raises:
        UsageError: the optimizer is unknown, a device's profile does not know the compute dtype, or CPUs and GPUs are mixed.
    """

    def __init__(
        self,
        cluster: Cluster,
        precision: Precision,
        optimizer: str,
        collectives: CollectiveModel | None = None,
        places: frozenset[int] | None = None,
    ) -> None:
        super().__init__(cluster, precision, optimizer, collectives, places)
        self._optimizer_name = optimizer
        self.is_mixed = places is None and not cluster.is_homogeneous
        self._parts: dict[frozenset[int], CostModel] = {}
        self._orders: dict[tuple[int, ...], CostModel] = {}

    # --- devices that differ

    def parts(self, mesh: Mesh) -> tuple[CostModel, ...]:
        """For each pipeline rank the model of the node groups that its ranks lie on; this one where all nodes are equal."""
        if not self.is_mixed:
            return (self,) * mesh.pp
        return tuple(self.part(places) for places in places_of(mesh, self.cluster))

    def part(self, places: frozenset[int]) -> CostModel:
        """The model of some node groups, by position; this one where they are all."""
        if not self.is_mixed or len(places) == len(self.cluster.groups):
            return self
        if places not in self._parts:
            self._parts[places] = CostModel(self.cluster, self.precision, self._optimizer_name, places=places)
        return self._parts[places]

    def in_order(self, order: tuple[int, ...]) -> CostModel:
        """The model of the same nodes with ranks counted in one of ``Cluster.orders``; empty: as they are."""
        if order in ((), tuple(range(len(self.cluster.groups)))):
            return self
        if order not in self._orders:
            self._orders[order] = CostModel(self.cluster.reordered(order), self.precision, self._optimizer_name)
        return self._orders[order]

    def alone(self) -> tuple[CostModel, ...]:
        """For each node group a model of its devices, with the collectives of all ranks: see :mod:`autopar.cost.step.unequal_shares`."""
        return tuple(
            CostModel(self.cluster, self.precision, self._optimizer_name, self.collectives, places=frozenset({place}))
            for place in range(len(self.cluster.groups))
        )

    # --- whole plans

    def memory(self, stages: Sequence[StageCost], step: Step) -> tuple[Memory, ...]:
        """Peak memory of each pipeline rank.

        Raises:
            UsageError: the schedule cannot serve these stages and micro-batches.
        """
        data, pp, parts = self._data(step), step.mesh.pp, self.parts(step.mesh)
        self._virtual_stages(stages, step)
        units = self._all_units(stages, step, parts)
        known = self._of_step(step).memory
        for part in parts:
            known.setdefault(id(part), Known({}, {}))
        return tuple(
            rank_memory(
                stages[rank::pp],
                units[rank::pp],
                data,
                optimizer=self.optimizer,
                device=parts[rank].device,
                pp_rank=rank,
                step=step,
                known=known[id(parts[rank])],
            )
            for rank in range(pp)
        )

    def traffic(self, stages: Sequence[StageCost], step: Step) -> tuple[Traffic, ...]:
        """The collectives of a step, by pipeline rank: what :meth:`predict` prices."""
        self._virtual_stages(stages, step)
        return tuple(
            rank_traffic(
                stages,
                self._data(step),
                schedule=step.schedule,
                num_micro_batches=step.num_micro_batches,
                pp_rank=rank,
                totals=step.totals,
                clips=step.clips,
                bucket_bytes=step.bucket_bytes,
            )
            for rank in range(step.mesh.pp)
        )

    def sums_in_buckets(self, stages: Sequence[StageCost], step: Step) -> bool:
        """Whether the size of buckets can matter: some gradients are summed in them."""
        summed = self._summed_of(self._data(step))
        distinct = {id(b.parameters): b.parameters for stage in stages for b in stage.blocks}
        return any(summed.in_buckets(parameters) for parameters in distinct.values())

    def stage_kept_bytes(self, stage: StageCost, *, receives: bool, sends: bool) -> int:
        """Bytes that one micro-batch keeps on a stage from forward to backward."""
        return kept_bytes(stage, receives=receives, sends=sends)

    def predict(
        self, stages: Sequence[StageCost], step: Step, *, memory: tuple[Memory, ...] | None = None
    ) -> Prediction:
        """Step time and memory of a plan.

        Args:
            stages: in order of the model; stage ``s`` runs on pipeline rank ``s % pp``.
            step: how they are run.
            memory: what :meth:`memory` gives for them, where it is known already.

        Raises:
            UsageError: the schedule cannot serve these stages and micro-batches.
        """
        parts, sums = self._timed(stages, step)
        return self._prediction(parts, sums, memory or self.memory(stages, step), step)

    def breakdown(self, stages: Sequence[StageCost], step: Step) -> Breakdown:
        """The step time of :meth:`predict` and what it is made of, without memory."""
        return self._timed(stages, step)[0]

    def longest_chains(self, stages: Sequence[StageCost], step: Step, most: int = 1) -> list[Chain]:
        """The longest chains of actions of a step; see :func:`autopar.cost.step.critical_path.longest_chains`."""
        times, after_s = self.times_of(stages, step), [0.0] * step.mesh.pp
        return longest_chains(step.schedule, step.mesh.pp, step.num_micro_batches, times, after_s, most)

    def finishes_s(
        self, every: Sequence[Sequence[StageCost]], step: Step, num_micro_batches: int
    ) -> NDArray[np.float64]:
        """When ranks are done with the first so many micro-batches, if they were all, in each of several cuts into as many stages.

        Returns:
            Seconds [cuts, ranks], without what follows once a step.
        """
        times = [self.times_of(stages, step) for stages in every]
        return finishes_s(step.schedule, step.mesh.pp, num_micro_batches, times)

    def times_of(self, stages: Sequence[StageCost], step: Step) -> list[StageTimes]:
        """What the pipeline simulates of each stage: of the stage, its place and the block before it alone."""
        parts = self.parts(step.mesh)
        sums = self._all_sums(stages, self._all_units(stages, step, parts), self._data(step), step)
        devices = [part.device for part in parts]
        return stage_times(stages, sums, step, self.collectives, devices, by_hop=self.is_mixed)

    def _timed(self, stages: Sequence[StageCost], step: Step) -> tuple[Breakdown, list[StageSums]]:
        self._virtual_stages(stages, step)
        parts = self.parts(step.mesh)
        units = self._all_units(stages, step, parts)
        sums = self._all_sums(stages, units, self._data(step), step)
        devices = [part.device for part in parts]
        times = stage_times(stages, sums, step, self.collectives, devices, by_hop=self.is_mixed)
        pipeline = simulate(step.schedule, step.mesh.pp, step.num_micro_batches, times)
        every = self._by_rank(stages, step, units, sums, times, pipeline)
        return max(every, key=lambda found: found.total_s), sums

    def _by_rank(
        self, stages: Sequence[StageCost], step: Step, units: Sequence[Sequence[Unit]], sums: Sequence[StageSums],
        times: Sequence[StageTimes], pipeline: PipelineTimes,
    ) -> list[Breakdown]:  # fmt: skip
        """Where the step goes if a rank is the last one to finish, for each rank."""
        data, count, parts, of_step = (
            self._data(step),
            step.num_micro_batches,
            self.parts(step.mesh),
            self._of_step(step),
        )
        if of_step.once_s is None:
            of_step.once_s = self._once_s(data, step)
        once = of_step.once_s
        every: list[Breakdown] = []
        ties = tied(stages, data)
        keys = [stage_key(stage) for stage in stages]
        for rank in range(step.mesh.pp):
            own = id(parts[rank]), tuple(keys[rank :: step.mesh.pp])
            if own not in of_step.gradients_s:
                of_step.gradients_s[own] = parts[rank]._gradients_s(stages[rank :: step.mesh.pp], data, step)
            sent = dict(of_step.gradients_s[own])
            sent["data"] += self.ties_s(ties, step, rank)
            sent["data"] += once
            sent["pipeline"] = count * sum(stage.schedule_s for stage in times[rank :: step.mesh.pp])
            every.append(parts[rank]._rank_breakdown(rank, sums, units, pipeline, data, step, sent))
        return every

    def _prediction(
        self, parts: Breakdown, sums: Sequence[StageSums], memory: tuple[Memory, ...], step: Step
    ) -> Prediction:
        time_s = parts.total_s
        width, peak = max(device.uncertainty for device in self.devices), max(m.total for m in memory)
        limits = [part.memory_limit_bytes for part in self.parts(step.mesh)]
        fullest = max(range(step.mesh.pp), key=lambda rank: memory[rank].total)
        return Prediction(
            step_time_s=time_s,
            step_time_interval_s=(time_s / (1 + width), time_s * (1 + width)),
            peak_memory_bytes=peak,
            peak_memory_interval_bytes=(round(peak / self.memory_spread), round(peak * self.memory_spread)),
            memory_limit_bytes=limits[fullest],
            memory_limits_bytes=tuple(limits) if self.is_mixed else (),
            mfu=step.flops_per_sample
            * step.global_batch_size
            / (time_s * peak_flops(step.mesh, self.cluster, self.precision.rate)),
            tokens_per_s=step.global_batch_size * step.tokens_per_sample / time_s,
            breakdown=parts,
            memory=memory,
            host_memory_limit_bytes=(self.host.memory_bytes or 0) if any(m.host for m in memory) else 0,
            stage_times=tuple((s.forward_s, s.backward_s) for s in sums),
        )

    def _rank_breakdown(
        self,
        rank: int,
        sums: Sequence[StageSums],
        units: Sequence[Sequence[Unit]],
        pipeline: PipelineTimes,
        data: DataParallel,
        step: Step,
        sent: Mapping[str, float],
    ) -> Breakdown:
        """Where the step goes if this rank is the last one to finish; all its parts, idle time included.

        ``sent``: seconds of sums of gradients by the part that they belong to, and of messages that hold up the rank.
        """
        pp, count = step.mesh.pp, step.num_micro_batches
        own = sums[rank::pp]
        flat = [unit for stage in units[rank::pp] for unit in stage]
        tail = sum(data.tail_s(stage) for stage in units[rank::pp]) + sum(s.data_last_s for s in own)
        if step.overlapped_reductions:
            tail *= self.device.interference
        first = sum(s.data_first_s for s in own)
        if step.gathers_after_step:
            first = data.after_step_s(flat) * (self.device.interference if step.overlapped_reductions else 1.0)
        tail += sent["data"]
        every = sum(s.data_forward_s + s.data_backward_s for s in own)
        optimizer_s, offload_s = self._stepped_s(flat, step)
        return Breakdown(
            compute_s=count * sum(s.compute_s for s in own),
            recompute_s=count * sum(s.recompute_s for s in own),
            tensor_parallel_s=count * sum(s.tensor_parallel_s for s in own) + sent["tp"],
            context_parallel_s=count * sum(s.context_parallel_s for s in own) + sent["cp"],
            data_parallel_s=count * every + first + tail,
            pipeline_s=pipeline.exposed_send_s[rank] + sent["pipeline"],
            bubble_s=max(pipeline.finish_s[rank] - pipeline.busy_s[rank] - pipeline.exposed_send_s[rank], 0.0),
            optimizer_s=optimizer_s + self._launched_s(flat, step),
            offload_s=offload_s + count * sum(s.offload_s for s in own),
        )

    # --- stages

    def _virtual_stages(self, stages: Sequence[StageCost], step: Step) -> int:
        pp = step.mesh.pp
        if not stages or len(stages) % pp:
            raise UsageError("the stages are a multiple of the pipeline ranks", value=f"{len(stages)} for pp={pp}")
        check_schedule(step.schedule, pp, len(stages) // pp, step.num_micro_batches)
        return len(stages) // pp

    def _stage_units(self, stage: StageCost, data: DataParallel) -> list[Unit]:
        units, known = [], {}
        for block, own in zip(stage.blocks, own_parameters(stage.blocks), strict=True):
            if len(own) < len(block.parameters):
                units.append(data.unit(own, self.collectives, self.device))
                continue
            if id(block) not in known:
                known[id(block)] = self._unit(block, data)
            units.append(known[id(block)])
        return units

    def _all_units(self, stages: Sequence[StageCost], step: Step, parts: Sequence[CostModel]) -> list[list[Unit]]:
        """Those of each stage; stages of the same blocks are equal."""
        of_step = self._of_step(step)
        found = []
        for s, stage in enumerate(stages):
            part = parts[s % len(parts)]
            key = (id(part), *map(id, stage.blocks))
            if key not in of_step.units:
                of_step.units[key] = part._stage_units(stage, of_step.data)
                of_step.stages.append(stage)
            found.append(of_step.units[key])
        return found

    def _all_sums(
        self, stages: Sequence[StageCost], units: Sequence[Sequence[Unit]], data: DataParallel, step: Step
    ) -> list[StageSums]:
        """What each stage spends on one micro-batch."""
        known = self._of_step(step).sums
        sums, parts = [], self.parts(step.mesh)
        for s, (stage, own) in enumerate(zip(stages, units, strict=True)):
            part = parts[s % step.mesh.pp]
            device = part.device
            share = gathering_share(data, step.schedule, len(stages), step.num_micro_batches, s)
            prelude_s = step.preludes_s[s % step.mesh.pp] if step.preludes_s else step.prelude_s
            key = (id(part), stage_key(stage), share, prelude_s)
            if key not in known:
                known[key] = stage_sums(
                    stage,
                    own,
                    data,
                    share=share,
                    interference=device.interference,
                    prelude_s=prelude_s,
                    adding_s=self._adding_s(stage, own, data, step, device) if step.adds_gradients else 0.0,
                )
                if any(block.offloads for block in stage.blocks):
                    known[key] = moving(known[key], stage, part.host)
            sums.append(known[key])
        return sums

    def _adding_s(
        self, stage: StageCost, units: Sequence[Unit], data: DataParallel, step: Step, device: Device
    ) -> float:
        """Sums of gradients in one backward: with those of earlier micro-batches, and of several uses of a parameter."""
        earlier = data.adding_s(units, step.num_micro_batches, device, casts=step.casts_gradients)
        return earlier + shared_sums_s(stage.blocks, itemsize(self.precision.compute), device)
