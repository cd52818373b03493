"""The cost model: from blocks of one rank's graph to the step time and memory of a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.cluster import Cluster
from autopar.cost.block import BlockCost, BlockWork, block_work, price_block
from autopar.cost.collectives import CollectiveModel
from autopar.cost.compute import OperatorTimes, OpTime, op_time
from autopar.cost.data_parallel import DataParallel, Unit, itemsize, own_parameters
from autopar.cost.gradients import Bucket, beside_backward, buckets, late_sums
from autopar.cost.measured import Measured
from autopar.cost.memory import Known, StageCost, State, kept_bytes, least_state_bytes, rank_memory, state_bytes
from autopar.cost.optimizer import optimizer_cost
from autopar.cost.pipeline import PipelineTimes, simulate
from autopar.cost.places import check_kinds, peak_flops, places_of, slowest
from autopar.cost.stages import StageKey, StageSums, own_times, stage_key, stage_sums, stage_times
from autopar.cost.step import Step
from autopar.cost.traffic import Traffic, gathering_share, rank_traffic, scalars, tied
from autopar.errors import UsageError
from autopar.graph.ir import Block, Graph, Op, TensorSpec
from autopar.layout import Type
from autopar.mesh import Mesh
from autopar.plan import Breakdown, Memory, Precision, Prediction, Recompute
from autopar.rules.conversions import collective_bytes, conversion
from autopar.schedule import check_schedule

__all__ = ["BlockCost", "CostModel", "StageCost", "Step"]


class CostModel:
    """Prices of operators, changes of type, blocks and whole plans on one cluster.

    Where node groups differ, :meth:`parts` has a model for each pipeline rank, and whole plans take blocks that were priced
    by it (:meth:`price`). A model prices as if every rank were the slowest of its node groups.

    Args:
        cluster: with profiles of its devices, links and collective library.
        precision: dtypes.
        optimizer: name of one of ``autopar.cost.optimizer.OPTIMIZERS``.
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
        self.cluster, self.precision, self.places = cluster, precision, places
        self.optimizer, self._optimizer_name = optimizer_cost(optimizer), optimizer
        groups = [group for i, group in enumerate(cluster.groups) if places is None or i in places]
        self.devices = tuple(dict.fromkeys(group.device for group in groups))
        check_kinds(cluster)
        self.device = slowest(self.devices, precision.compute)
        self.collectives = collectives or CollectiveModel(cluster, places)
        self.quantized = self.device.rate(precision.products).dtype if precision.products else None
        self.is_mixed = places is None and not cluster.is_homogeneous
        self._parts: dict[frozenset[int], CostModel] = {}
        self._orders: dict[tuple[int, ...], CostModel] = {(): self, tuple(range(len(cluster.groups))): self}
        table = self.device.operators
        self.measured: OperatorTimes | None = Measured(table, self.device) if table is not None else None
        self._datas: dict[tuple[Mesh, int, bool], DataParallel] = {}
        self._last: tuple[Step, DataParallel] | None = None
        # blocks and data axes are kept too, so that their ids stay their own
        self._units: dict[tuple[int, int], tuple[BlockCost, DataParallel, Unit]] = {}
        self._placed_units: dict[tuple[object, ...], tuple[BlockCost, Unit]] = {}

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
        if order not in self._orders:
            self._orders[order] = CostModel(self.cluster.reordered(order), self.precision, self._optimizer_name)
        return self._orders[order]

    # --- parts

    def op_time_s(self, op: Op, operands: Sequence[TensorSpec]) -> OpTime:
        """Seconds of one operator, forward and backward, at the shapes of ``op.outputs`` and ``operands``.

        Raises:
            UsageError: the device's profile has no matmul rate for the dtype.
        """
        return op_time(op, operands, self.device, self.measured, quantized=self.quantized)

    def conversion_time_s(self, source: Type, target: Type, spec: TensorSpec, axis: str, mesh: Mesh) -> OpTime | None:
        """Seconds of a change of type on one axis, forward and backward; None where there is none.

        Args:
            source, target: types on ``axis``.
            spec: of the whole tensor on that axis.
            axis: of the mesh.
            mesh: whose groups communicate.
        """
        change = conversion(source, target, requires_grad=spec.requires_grad)
        if change is None:
            return None
        seconds = []
        for kind in (change.forward, change.backward):
            size = collective_bytes(kind or "", full_num_bytes=spec.num_bytes, size=mesh.size((axis,)))
            call_s = self.device.overheads.collective_s * (mesh.size((axis,)) > 1)
            seconds.append(self.collectives.time_s(kind, size, mesh, (axis,)) + call_s if kind else 0.0)
        dim = max(source.dim, target.dim)
        if dim > 0 and (change.forward in ("all_gather", "reduce_scatter") or change.backward == "all_gather"):
            # a gather or scatter along an inner dim copies the whole tensor into or out of rank order
            inner = 2 * spec.num_bytes / self.device.memory_bandwidth_bytes_per_s
            seconds = [
                s + inner if kind else s for s, kind in zip(seconds, (change.forward, change.backward), strict=True)
            ]
        return OpTime(*seconds)

    def block_work(self, graph: Graph, block: Block, *, selective: bool = True) -> BlockWork:
        """What a block of one rank's graph (``rules.apply.shard`` on all axes) does for one micro-batch, on any device.

        Args:
            selective: whether selective recompute is looked at too.
        """
        return block_work(graph, block, self.device.kind, selective=selective)

    def price(self, work: BlockWork, mesh: Mesh) -> BlockCost:
        """The cost of :meth:`block_work`."""
        return price_block(work, mesh, self.device, self.collectives, quantized=self.quantized, measured=self.measured)

    def block_cost(self, graph: Graph, block: Block, mesh: Mesh) -> BlockCost:
        """The cost of a block of one rank's graph for one micro-batch."""
        return self.price(self.block_work(graph, block), mesh)

    def prelude_time_s(self, graph: Graph) -> float:
        """Seconds of the operators that every stage repeats for each micro-batch."""
        times = (self.op_time_s(op, [graph.spec(ref) for ref in op.operands]) for op in graph.prelude)
        return sum(time.forward_s for time in times)

    def block_time_s(self, block: BlockCost, step: Step, *, recompute: Recompute) -> OpTime:
        """Seconds of a block for one micro-batch inside a long stage, what the data axes add to each one included."""
        data = self._data(step)
        unit = self._unit(block, data)
        forward_s, backward_s = own_times(block, recompute)
        units, interference = [unit, unit], self.device.interference
        extra_f = data.every_forward_s(units, [forward_s, forward_s], interference)
        extra_f -= data.every_forward_s([unit], [forward_s], interference)
        extra_f *= not data.is_pipelined  # a bound: the forward after a backward gathers nothing
        extra_b = data.backward_s(units, [backward_s] * 2, interference, is_last=False)
        extra_b -= data.backward_s([unit], [backward_s], interference, is_last=False)
        return OpTime(forward_s + extra_f, backward_s + extra_b)

    def block_adding_s(self, block: BlockCost, step: Step) -> float:
        """Adding a block's gradients of a micro-batch to those before, as each backward of the step takes it on average."""
        if not step.adds_gradients:
            return 0.0
        data = self._data(step)
        return data.adding_s([self._unit(block, data)], step.num_micro_batches, self.device)

    def block_state(self, block: BlockCost, step: Step) -> State:
        """Bytes of a block's parameters, gradients and optimizer states on one rank."""
        data = self._data(step)
        return state_bytes(self._unit(block, data), data, self.optimizer, step.num_micro_batches)

    def block_once_s(self, block: BlockCost, step: Step) -> float:
        """The least that a block adds to a step once: its optimizer step, and reductions that nothing can hide."""
        data = self._data(step)
        unit = self._unit(block, data)
        return self._moved_s([unit]) + data.tail_s([unit])

    def block_gather_s(self, block: BlockCost, step: Step) -> float:
        """Gathering a block's parameters in a step's first forward, where they stay gathered from then on."""
        data = self._data(step)
        return self._unit(block, data).gather_s if data.uses_fsdp and not data.gathers_always else 0.0

    def state_bytes_per_element(self, step: Step) -> float:
        """The least that a trained element (not of experts over data ranks) takes of each rank that holds its parameter."""
        data, storage = self._data(step), itemsize(self.precision.storage)
        return least_state_bytes(data, self.optimizer.bytes_per_element(storage), step.num_micro_batches)

    # --- whole plans

    @property
    def memory_limit_bytes(self) -> int:
        """What the smallest device has."""
        return min(device.memory_bytes for device in self.devices)

    @property
    def memory_spread(self) -> float:
        """Upper end of a predicted peak's interval over the prediction: the widest of the devices' profiles."""
        return 1 + max(device.memory_uncertainty for device in self.devices)

    @property
    def fitting_bytes(self) -> int:
        """The largest predicted peak that fits: the upper end of its interval is the limit."""
        return math.floor(self.memory_limit_bytes / self.memory_spread)

    def memory(self, stages: Sequence[StageCost], step: Step) -> tuple[Memory, ...]:
        """Peak memory of each pipeline rank.

        Raises:
            UsageError: the schedule cannot serve these stages and micro-batches.
        """
        data, pp, parts = self._data(step), step.mesh.pp, self.parts(step.mesh)
        virtual_stages = self._virtual_stages(stages, step)
        units = self._all_units(stages, data, parts)
        known = {id(part): Known({}, {}) for part in parts}
        return tuple(
            rank_memory(
                stages[rank::pp],
                units[rank::pp],
                data,
                optimizer=self.optimizer,
                device=parts[rank].device,
                schedule=(step.schedule, pp, virtual_stages, step.num_micro_batches),
                pp_rank=rank,
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
            )
            for rank in range(step.mesh.pp)
        )

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

    def _timed(self, stages: Sequence[StageCost], step: Step) -> tuple[Breakdown, list[StageSums]]:
        self._virtual_stages(stages, step)
        data, count, parts = self._data(step), step.num_micro_batches, self.parts(step.mesh)
        units = self._all_units(stages, data, parts)
        sums = self._all_sums(stages, units, data, step)
        times = stage_times(stages, sums, step, self.collectives, by_hop=self.is_mixed)
        pipeline = simulate(step.schedule, step.mesh.pp, step.num_micro_batches, times)
        once = self._once_s(data, step)
        best: tuple[float, Breakdown] | None = None
        ties = tied(stages, data)
        known: dict[tuple[int, tuple[StageKey, ...]], dict[str, float]] = {}
        for rank in range(step.mesh.pp):
            own = id(parts[rank]), tuple(stage_key(stage) for stage in stages[rank :: step.mesh.pp])
            if own not in known:
                known[own] = parts[rank]._gradients_s(stages[rank :: step.mesh.pp], data, step)
            sent = dict(known[own])
            sent["data"] += self._ties_s(ties, step, rank)
            sent["data"] += once
            sent["pipeline"] = 2 * count * sum(stage.waits_s for stage in times[rank :: step.mesh.pp])
            found = parts[rank]._rank_breakdown(rank, sums, units, pipeline, data, step, sent)
            if best is None or found.total_s > best[0]:
                best = (found.total_s, found)
        assert best is not None
        return _shared(best[1], pipeline, self.device.core_share), sums

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
            / (time_s * peak_flops(step.mesh, self.cluster, self.precision.compute)),
            tokens_per_s=step.global_batch_size * step.tokens_per_sample / time_s,
            breakdown=parts,
            memory=memory,
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
        return Breakdown(
            compute_s=count * sum(s.compute_s for s in own),
            recompute_s=count * sum(s.recompute_s for s in own),
            tensor_parallel_s=count * sum(s.tensor_parallel_s for s in own) + sent["tp"],
            context_parallel_s=count * sum(s.context_parallel_s for s in own) + sent["cp"],
            data_parallel_s=count * every + first + tail,
            pipeline_s=pipeline.exposed_send_s[rank] + sent["pipeline"],
            bubble_s=max(pipeline.finish_s[rank] - pipeline.busy_s[rank] - pipeline.exposed_send_s[rank], 0.0),
            optimizer_s=self._optimizer_s(flat, data),
        )

    # --- stages

    def _virtual_stages(self, stages: Sequence[StageCost], step: Step) -> int:
        pp = step.mesh.pp
        if not stages or len(stages) % pp:
            raise UsageError("the stages are a multiple of the pipeline ranks", value=f"{len(stages)} for pp={pp}")
        check_schedule(step.schedule, pp, len(stages) // pp, step.num_micro_batches)
        return len(stages) // pp

    def _data(self, step: Step) -> DataParallel:
        """Of a step; the same object for the same axes, as units are looked up by it again and again."""
        if self._last is not None and self._last[0] is step:
            return self._last[1]
        key = step.mesh, step.zero_stage, step.all_reduces
        if key not in self._datas:
            self._datas[key] = DataParallel(
                step.mesh, step.zero_stage, self.precision, step.mesh.pp > 1, step.all_reduces
            )
        self._last = step, self._datas[key]
        return self._last[1]

    def _unit(self, block: BlockCost, data: DataParallel) -> Unit:
        found = self._units.get((id(block), id(data)))
        if found is None:
            mesh = data.mesh  # neither ZeRO stage nor, where all nodes are equal, pipeline changes what a unit costs
            where = None if self.places is None else mesh
            degrees = (mesh.dp_replicate, mesh.dp_shard, mesh.cp * mesh.tp, mesh.world_size)
            place = (id(block), *degrees, data.precision, data.all_reduces, where)
            if place not in self._placed_units:
                self._placed_units[place] = (block, data.unit(block.parameters, self.collectives, self.device))
            found = self._units[id(block), id(data)] = (block, data, self._placed_units[place][1])
        return found[2]

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

    def _all_units(
        self, stages: Sequence[StageCost], data: DataParallel, parts: Sequence[CostModel]
    ) -> list[list[Unit]]:
        """Those of each stage; stages of the same blocks are equal."""
        known: dict[tuple[int, ...], list[Unit]] = {}
        found = []
        for s, stage in enumerate(stages):
            part = parts[s % len(parts)]
            key = (id(part), *map(id, stage.blocks))
            if key not in known:
                known[key] = part._stage_units(stage, data)
            found.append(known[key])
        return found

    def _all_sums(
        self, stages: Sequence[StageCost], units: Sequence[Sequence[Unit]], data: DataParallel, step: Step
    ) -> list[StageSums]:
        """What each stage spends on one micro-batch."""
        known: dict[tuple[int, StageKey, float], StageSums] = {}
        sums, parts = [], self.parts(step.mesh)
        for s, (stage, own) in enumerate(zip(stages, units, strict=True)):
            part = parts[s % step.mesh.pp]
            device = part.device
            share = gathering_share(data, step.schedule, len(stages), step.num_micro_batches, s)
            key = (id(part), stage_key(stage), share)
            if key not in known:
                known[key] = stage_sums(
                    stage,
                    own,
                    data,
                    share=share,
                    interference=device.interference,
                    prelude_s=step.preludes_s[s % step.mesh.pp] if step.preludes_s else step.prelude_s,
                    action_s=device.overheads.action_s if step.mesh.pp > 1 else 0.0,
                    adding_s=data.adding_s(own, step.num_micro_batches, device) if step.adds_gradients else 0.0,
                )
            sums.append(known[key])
        return sums

    # --- once a step

    def _gradients_s(self, own: Sequence[StageCost], data: DataParallel, step: Step) -> dict[str, float]:
        """Exposed sums of gradients that FSDP does not do, on a pipeline rank with the stages ``own``: by axis."""
        seconds = {"data": 0.0, "tp": 0.0, "cp": 0.0}
        size = itemsize(self.precision.storage)
        blocks = [stage.blocks for stage in own]
        leaving: dict[int, list[Bucket]] = {}
        for bucket in buckets(blocks, step.mesh, data.uses_fsdp, size):
            leaving.setdefault(bucket.stage, []).append(bucket)
        exposed = self.device.interference if step.overlapped_reductions else 1.0
        for turn, some in leaving.items():
            stage = own[turn]
            times = [own_times(b, mode)[1] for b, mode in zip(stage.blocks, stage.recompute, strict=True)]
            costs = [self._sum_s(bucket.axes, bucket.num_bytes, step.mesh) for bucket in some]
            total = sum(costs)
            after = beside_backward([(b.block, s) for b, s in zip(some, costs, strict=True)], times)
            rest = exposed * after + self.device.interference * (total - after)
            for bucket, cost in zip(some, costs, strict=True):
                seconds[_owner(bucket.axes)] += rest * cost / total if total else 0.0
        for axes, num_bytes in late_sums(blocks, step.mesh, data.uses_fsdp, step.mesh.dp_shard, size).items():
            seconds[_owner(axes)] += self._sum_s(axes, num_bytes, step.mesh)
        return seconds

    def _ties_s(self, ties: Mapping[tuple[int, ...], int], step: Step, rank: int) -> float:
        """Sums of the gradients of parameters that several pipeline ranks have (:func:`tied`)."""
        seconds = 0.0
        for ranks, num_bytes in ties.items():
            if rank in ranks:
                if len(ranks) == step.mesh.pp:
                    seconds += self.collectives.time_s("all_reduce", num_bytes, step.mesh, ("pp",))
                else:
                    seconds += self.collectives.pair_time_s("all_reduce", num_bytes, step.mesh)
        return seconds

    def _sum_s(self, axes: tuple[str, ...], num_bytes: int, mesh: Mesh) -> float:
        """One all-reduce of gradients, which are copied into its buffer and out of it."""
        copies = 2 * num_bytes / self.device.memory_bandwidth_bytes_per_s
        return self.collectives.time_s("all_reduce", num_bytes, mesh, axes) + copies

    def _once_s(self, data: DataParallel, step: Step) -> float:
        """The scalars that a step sums: counts of the batch, the loss, the norm."""
        return sum(
            count * self.collectives.time_s(c.kind, c.num_bytes, step.mesh, c.axes)
            for c, count in scalars(data, step.totals, step.clips).items()
        )

    def _optimizer_s(self, units: Sequence[Unit], data: DataParallel) -> float:
        groups = 1 if self.device.kind == "cuda" else sum(unit.num_trained for unit in units)
        launch_s = self.device.overheads.sharded_launch_s or self.device.launch_s
        return self._moved_s(units) + self.optimizer.kernels * groups * launch_s

    def _moved_s(self, units: Sequence[Unit]) -> float:
        """What the optimizer reads and writes."""
        numel = sum(unit.trained_shard_numel for unit in units)
        moved = self.optimizer.passes * numel * itemsize(self.precision.storage)
        return moved / self.device.memory_bandwidth_bytes_per_s


def _owner(axes: tuple[str, ...]) -> str:
    """Which part of the breakdown a sum of gradients belongs to."""
    if any(axis in ("dp_replicate", "dp_shard", "ep_outer") for axis in axes):
        return "data"
    return "cp" if "cp" in axes else "tp"


def _shared(parts: Breakdown, pipeline: PipelineTimes, core_share: float) -> Breakdown:
    """The parts of a step whose ranks share cores: who works while others wait has more than its share of them.

    Times are those at ``core_share`` of a core for each rank, as if all worked all the time. A pipeline takes as long as on
    cores of its own at least, and as long as its cores need for the work of all its ranks; the larger of the two is taken.
    """
    longest = max(pipeline.finish_s)
    factor = max(core_share, sum(pipeline.busy_s) / len(pipeline.busy_s) / longest) if longest else 1.0
    if core_share == 1.0 or factor >= 1.0:
        return parts
    return replace(
        parts,
        compute_s=parts.compute_s * factor,
        recompute_s=parts.recompute_s * factor,
        tensor_parallel_s=parts.tensor_parallel_s * factor,
        context_parallel_s=parts.context_parallel_s * factor,
        pipeline_s=parts.pipeline_s * factor,
        bubble_s=parts.bubble_s * factor,
    )
