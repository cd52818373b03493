"""Prices of operators and blocks on the devices of some node groups, and what a step does once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from autopar.cluster import Cluster
from autopar.cost.blocks.block_cost import BlockCost
from autopar.cost.blocks.block_price import price_block
from autopar.cost.blocks.block_work import BlockWork, block_work
from autopar.cost.network.collectives import CollectiveModel
from autopar.cost.network.placement import check_kinds, slowest
from autopar.cost.operators.measured import Measured
from autopar.cost.operators.roofline import OperatorTimes, OpTime, op_time
from autopar.cost.step.data_parallel import DataParallel, Unit, itemsize
from autopar.cost.step.gradient_buckets import Bucket, Summed, beside_backward, buckets, late_sums
from autopar.cost.step.known import OfStep
from autopar.cost.step.memory import (
    StageCost,
    State,
    gathered_bytes,
    least_state_bytes,
    state_bytes,
    unit_passing_bytes,
)
from autopar.cost.step.optimizer import optimizer_cost
from autopar.cost.step.stage_time import own_times
from autopar.cost.step.step import Step
from autopar.cost.step.traffic import scalars
from autopar.errors import UsageError
from autopar.graph.ir import Block, Graph, Op, TensorSpec
from autopar.host import HostLink
from autopar.mesh import Mesh
from autopar.plan import Precision, Recompute

Beside: TypeAlias = tuple[BlockCost | None, BlockCost | None]
"""The blocks before and after another one; None where there is none."""


class BlockModel:
    """Prices of operators and blocks on one cluster; all ranks are as the slowest of them.

    The arguments are those of :class:`autopar.cost.model.CostModel`.
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
        self.optimizer = optimizer_cost(optimizer)
        groups = [group for i, group in enumerate(cluster.groups) if places is None or i in places]
        self.devices = tuple(
            dict.fromkeys(group.device.multiplying(precision.compute, precision.rate) for group in groups)
        )
        check_kinds(cluster)
        self.device = slowest(self.devices, precision.compute)
        self.collectives = collectives or CollectiveModel(cluster, places)
        self.quantized = self.device.rate(precision.products).dtype if precision.needs_scales else None
        table = self.device.operators
        self.measured: OperatorTimes | None = Measured(table, self.device) if table is not None else None
        self._datas: dict[tuple[Mesh, int, tuple[bool, ...]], DataParallel] = {}
        self._last: OfStep | None = None
        self._summed: dict[int, Summed] = {}
        # blocks and data axes are kept too, so that their ids stay their own
        self._units: dict[tuple[int, int], tuple[BlockCost, DataParallel, Unit]] = {}
        self._placed_units: dict[tuple[object, ...], tuple[BlockCost, Unit]] = {}

    def op_time_s(self, op: Op, operands: Sequence[TensorSpec]) -> OpTime:
        """Seconds of one operator, forward and backward, at the shapes of ``op.outputs`` and ``operands``.

        Raises:
            UsageError: the device's profile has no matmul rate for the dtype.
        """
        return op_time(op, operands, self.device, self.measured, quantized=self.quantized)

    def block_work(self, graph: Graph, block: Block, *, selective: bool = True) -> BlockWork:
        """What a block of one rank's graph (``rules.apply.shard`` on all axes) does for one micro-batch, on any device.

        Args:
            selective: whether selective recompute is looked at too.
        """
        key = block_work, block.start, block.stop, self.device.kind, selective
        if key not in graph.passes:
            graph.passes[key] = block_work(graph, block, self.device.kind, selective=selective)
        found: BlockWork = graph.passes[key]
        return found

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

    def block_time_s(
        self, block: BlockCost, step: Step, *, recompute: Recompute, beside: Sequence[Beside] = ()
    ) -> OpTime:
        """Seconds of a block for one micro-batch inside a long stage, what the data axes add to each one included.

        Args:
            beside: blocks that may stand before and after it, of which the least of each counts; without any, blocks like itself.
        """
        data = self._data(step)
        unit, times, interference = self._unit(block, data), own_times(block, recompute), self.device.interference
        found = []
        for before, after in beside if beside and data.sends_always else ((block, block),):
            ahead = None if before is None else (self._unit(before, data), own_times(before, "none")[0])
            longest = "full" if beside else recompute
            behind = None if after is None else (self._unit(after, data), own_times(after, longest)[1])
            found.append(data.inside_s(unit, times[1], ahead, behind, interference))
        extra_f, extra_b = (min(each) for each in zip(*found, strict=True))
        extra_f *= not data.is_pipelined  # a bound: the forward after a backward gathers nothing
        return OpTime(times[0] + extra_f, times[1] + extra_b)

    def ends_s(self, first: BlockCost, last: BlockCost, step: Step) -> float:
        """What each micro-batch takes besides where one stage has all blocks: the last one's gather, the first one's reduction."""
        data = self._data(step)
        gather_s = self._unit(last, data).gather_s if data.gathers_always else 0.0
        return gather_s + (self._unit(first, data).reduce_s if data.reduces_always else 0.0)

    def sends_always(self, step: Step) -> bool:
        """Whether the data axes communicate in every micro-batch, so that it matters which blocks are beside each other."""
        return self._data(step).sends_always

    def block_adding_s(self, block: BlockCost, step: Step) -> float:
        """Adding a block's gradients of a micro-batch to those before, as each backward of the step takes it on average."""
        if not step.adds_gradients:
            return 0.0
        data = self._data(step)
        return data.adding_s([self._unit(block, data)], step.num_micro_batches, self.device, casts=step.casts_gradients)

    def block_state(self, block: BlockCost, step: Step) -> State:
        """Bytes of a block's parameters, gradients and optimizer states on one rank."""
        data = self._data(step)
        unit, on_host = self._unit(block, data), step.offloads_optimizer
        return state_bytes(unit, data, self.optimizer, step.num_micro_batches, on_host=on_host)

    def block_static_bytes(self, block: BlockCost, step: Step) -> int:
        """Bytes of a rank for a block whatever micro-batches it holds: :meth:`block_state`, and what stays gathered."""
        data = self._data(step)
        return self.block_state(block, step).total + gathered_bytes(self._unit(block, data), data)

    def block_passing_bytes(
        self, block: BlockCost, step: Step, *, recompute: Recompute, beside: Sequence[Beside] = ()
    ) -> int:
        """Bytes at a block's peak inside, over what it keeps, FSDP's among them; ``beside`` as for :meth:`block_time_s`."""
        data, own = self._data(step), block.passing_bytes(recompute)
        if not data.uses_fsdp or data.is_pipelined:
            return own
        unit, count = self._unit(block, data), step.num_micro_batches
        units = (
            [None if one is None else self._unit(one, data) for one in pair] for pair in beside or ((block, block),)
        )
        return own + min(unit_passing_bytes(unit, before, after, data, count) for before, after in units)

    def block_once_s(self, block: BlockCost, step: Step) -> float:
        """The least that a block adds to a step once: its optimizer step, and reductions that nothing can hide."""
        data = self._data(step)
        unit = self._unit(block, data)
        return sum(self._stepped_s([unit], step)) + data.tail_s([unit])

    def data_unit(self, block: BlockCost, step: Step) -> Unit:
        """What a block costs on the data axes."""
        return self._unit(block, self._data(step))

    def scalars_s(self, step: Step) -> float:
        """What every rank sums once a step, whatever its blocks."""
        return self._once_s(self._data(step), step)

    def block_gather_s(self, block: BlockCost, step: Step) -> float:
        """Gathering a block's parameters in a step's first forward, where they stay gathered from then on."""
        data = self._data(step)
        return self._unit(block, data).gather_s if data.uses_fsdp and not data.gathers_always else 0.0

    def state_bytes_per_element(self, step: Step) -> float:
        """The least that a trained element (not of experts over data ranks) takes of each rank that holds its parameter."""
        data, storage = self._data(step), itemsize(self.precision.storage)
        kept = 0.0 if step.offloads_optimizer else self.optimizer.bytes_per_element(storage)
        return least_state_bytes(data, kept, step.num_micro_batches)

    # --- devices

    @property
    def memory_limit_bytes(self) -> int:
        """What the smallest device has."""
        return min(device.memory_bytes for device in self.devices)

    @property
    def host(self) -> HostLink:
        """What offloading can use: the slowest device's.

        Raises:
            UsageError: a device's profile has no link to a host.
        """
        if self.device.host is None or any(device.host is None for device in self.devices):
            missing = next(device.name for device in self.devices if device.host is None)
            raise UsageError(
                "something is offloaded where the device's profile has the link to its host",
                value=f"none of {missing}",
                remedy="pin offload=none, or add [device.host] to the profile (profiles/README.md)",
            )
        return self.device.host

    @property
    def memory_spread(self) -> float:
        """Upper end of a predicted peak's interval over the prediction: the widest of the devices' profiles."""
        return 1 + max(device.memory_uncertainty for device in self.devices)

    @property
    def fitting_bytes(self) -> int:
        """The largest predicted peak that fits: the upper end of its interval is the limit."""
        return math.floor(self.memory_limit_bytes / self.memory_spread)

    # --- the data axes

    def data_parallel(self, step: Step) -> DataParallel:
        """How a step runs the data axes."""
        return self._data(step)

    def _data(self, step: Step) -> DataParallel:
        """Of a step; the same object for the same axes, as units are looked up by it again and again."""
        return self._of_step(step).data

    def _of_step(self, step: Step) -> OfStep:
        """What is known of a step that is asked for again and again."""
        if self._last is None or self._last.step is not step:
            how = step.all_reduces, step.late_reductions, step.quantized_gathers, step.broadcasts, step.reduces_last
            key = step.mesh, step.zero_stage, how
            if key not in self._datas:
                self._datas[key] = DataParallel(
                    step.mesh,
                    step.zero_stage,
                    self.precision,
                    step.mesh.pp > 1 or step.late_reductions,
                    step.all_reduces,
                    step.quantized_gathers,
                    step.broadcasts,
                    step.reduces_last,
                )
            self._last = OfStep(step=step, data=self._datas[key])
        return self._last

    def _unit(self, block: BlockCost, data: DataParallel) -> Unit:
        found = self._units.get((id(block), id(data)))
        if found is None:
            mesh = data.mesh  # neither ZeRO stage nor, where all nodes are equal, pipeline changes what a unit costs
            where = None if self.places is None else mesh
            degrees = (mesh.dp_replicate, mesh.dp_shard, mesh.cp * mesh.tp, mesh.world_size)
            how = data.precision, data.all_reduces, data.quantized_gathers, data.broadcasts
            place = (id(block.parameters), *degrees, how, where)
            if place not in self._placed_units:
                self._placed_units[place] = (block, data.unit(block.parameters, self.collectives, self.device))
            found = self._units[id(block), id(data)] = (block, data, self._placed_units[place][1])
        return found[2]

    def _summed_of(self, data: DataParallel) -> Summed:
        return self._summed.setdefault(id(data), Summed(data.mesh, data.uses_fsdp))

    # --- once a step

    def ties_s(self, ties: Mapping[tuple[int, ...], int], step: Step, rank: int) -> float:
        """Sums of the gradients of parameters that several pipeline ranks have (:func:`autopar.cost.step.traffic.tied`)."""
        seconds = 0.0
        for ranks, num_bytes in ties.items():
            if rank in ranks:
                if len(ranks) == step.mesh.pp:
                    seconds += self.collectives.time_s("all_reduce", num_bytes, step.mesh, ("pp",))
                else:
                    seconds += self.collectives.pair_time_s("all_reduce", num_bytes, step.mesh)
        return seconds

    def sum_s(self, axes: tuple[str, ...], num_bytes: int, mesh: Mesh, *, copied_bytes: int) -> float:
        """One all-reduce of gradients, of which some are read into its buffer and written there."""
        copies = 2 * copied_bytes / self.device.memory_bandwidth_bytes_per_s
        return self.collectives.time_s("all_reduce", num_bytes, mesh, axes) + copies

    def _gradients_s(self, own: Sequence[StageCost], data: DataParallel, step: Step) -> dict[str, float]:
        """Exposed sums of gradients that FSDP does not do, on a pipeline rank with the stages ``own``: by axis."""
        seconds = {"data": 0.0, "tp": 0.0, "cp": 0.0}
        size = itemsize(self.precision.storage)
        blocks = [stage.blocks for stage in own]
        leaving: dict[int, list[Bucket]] = {}
        for bucket in buckets(blocks, self._summed_of(data), size, step.bucket_bytes):
            leaving.setdefault(bucket.stage, []).append(bucket)
        exposed = self.device.interference if step.overlapped_reductions else 1.0
        for turn, some in leaving.items():
            stage = own[turn]
            times = [own_times(b, mode)[1] for b, mode in zip(stage.blocks, stage.recompute, strict=True)]
            costs = [self.sum_s(b.axes, b.num_bytes, step.mesh, copied_bytes=b.copied_bytes) for b in some]
            total = sum(costs)
            after = beside_backward([(b.block, s) for b, s in zip(some, costs, strict=True)], times)
            rest = exposed * after + self.device.interference * (total - after)
            for bucket, cost in zip(some, costs, strict=True):
                seconds[_owner(bucket.axes)] += rest * cost / total if total else 0.0
        for axes, num_bytes in late_sums(blocks, self._summed_of(data), size).items():
            seconds[_owner(axes)] += self.sum_s(axes, num_bytes, step.mesh, copied_bytes=num_bytes)
        return seconds

    def _once_s(self, data: DataParallel, step: Step) -> float:
        """The scalars that a step sums: counts of the batch, the loss, the norm."""
        return sum(
            count * self.collectives.time_s(c.kind, c.num_bytes, step.mesh, c.axes)
            for c, count in scalars(data, step.totals, step.clips).items()
        )

    def _launched_s(self, units: Sequence[Unit], step: Step) -> float:
        """The optimizer's operators; on a GPU torch groups those of all parameters."""
        parameters = sum(unit.num_trained for unit in units)
        if step.offloads_optimizer:
            return self.optimizer.kernels * parameters * self.host.launch_s
        launch_s = self.device.overheads.sharded_launch_s or self.device.launch_s
        return self.optimizer.kernels * (1 if self.device.kind == "cuda" else parameters) * launch_s

    def _stepped_s(self, units: Sequence[Unit], step: Step) -> tuple[float, float]:
        """What the optimizer reads and writes; and, where it does so on the host, of copies: both down, parameters up.

        Nothing runs beside any of them: a step begins when gradients are summed and clipped, and forward waits for it.
        """
        size = sum(unit.trained_shard_numel for unit in units) * itemsize(self.precision.storage)
        moved = self.optimizer.passes * size
        if not step.offloads_optimizer:
            return moved / self.device.memory_bandwidth_bytes_per_s, 0.0
        host, copies = self.host, 3 * sum(unit.num_trained for unit in units)
        copied_s = 2 * size / host.to_host_bytes_per_s + size / host.to_device_bytes_per_s + copies * host.latency_s
        return moved / host.memory_bandwidth_bytes_per_s, copied_s


def _owner(axes: tuple[str, ...]) -> str:
    """Which part of the breakdown a sum of gradients belongs to."""
    if any(axis in ("dp_replicate", "dp_shard", "ep_outer") for axis in axes):
        return "data"
    return "cp" if "cp" in axes else "tp"
