"""The cost model: from blocks of one rank's graph to the step time and memory of a plan.

Where data ranks take different numbers of samples (``Plan.data_shares``), each node group is priced alone. All ranks run the same number of
micro-batches and take part in the same collectives. Between them a group takes its own devices' times for its own micro-batch; gathers,
sums of gradients and scalars take the times of all ranks. A step ends with the slowest group. The time that others wait for it is not part
of the breakdown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial

from autopar.cost.blocks.block_cost import BlockCost
from autopar.cost.blocks.block_work import BlockWork, block_work, price_block
from autopar.cost.network.collectives import CollectiveModel
from autopar.cost.network.placement import check_kinds, peak_flops, places_of, slowest
from autopar.cost.operators.operator_times import Measured, OperatorTimes, OpTime, op_time
from autopar.cost.operators.work import operand_specs, work
from autopar.cost.step.memory import optimizer_cost
from autopar.cost.step.pipeline_step import PipelineStep
from autopar.cost.step.simulation import Chain, with_chains
from autopar.cost.step.step import Runtime, StageCost, Step
from autopar.cost.step.step_model import Ranks, StepModel
from autopar.graph.graph import Block, Graph, Op, TensorSpec
from autopar.graph.rewrites import Compact
from autopar.hardware.cluster import Cluster
from autopar.hardware.device import HostLink, KernelKind
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Precision
from autopar.plan.prediction import Breakdown, Memory, Prediction

__all__ = ["BlockCost", "CostModel", "StageCost", "Step"]

KNOWN_STEPS = 256
"""The limit on steps whose prices are cached; it covers the candidates that a search evaluates side by side."""


class CostModel:
    """Prices operators, blocks and whole plans on one cluster.

    Where node groups differ, :meth:`parts` returns a model for each pipeline rank, and whole plans take blocks priced by that model
    (:meth:`price`). A model prices as if every rank were the slowest of its node groups.

    Args:
        cluster: the cluster, with profiles of its devices, links and collective library.
        precision: the dtypes of training.
        optimizer: a name of ``autopar.cost.step.memory.OPTIMIZERS``.
        collectives: the times of the cluster's collectives, if they exist already.
        places: the positions of the node groups that are priced; None: all.
        runtime: the training program.

    Attributes:
        devices, device: the devices of the node groups, and the slowest of them.
        memory_limit_bytes: the memory of the smallest device.
        memory_spread: the upper end of a predicted peak's interval over the prediction, by the least certain device profile.
        unaligned_fraction: the fraction of the product rate that is left if rows are not a multiple of 16 bytes, on the most affected
            device.
        fitting_bytes: the largest predicted peak that fits: the upper end of its interval is the limit.

    Raises:
        UsageError: the optimizer is unknown, a device's profile does not have the compute dtype, or CPUs and GPUs are mixed.
    """

    def __init__(
        self,
        cluster: Cluster,
        precision: Precision,
        optimizer: str,
        collectives: CollectiveModel | None = None,
        places: frozenset[int] | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self.cluster, self.precision, self.places = cluster, precision, places
        groups = [group for i, group in enumerate(cluster.groups) if places is None or i in places]
        self.devices = tuple(
            dict.fromkeys(group.device.multiplying(precision.compute, precision.rate) for group in groups)
        )
        check_kinds(cluster)
        self.device = slowest(self.devices, precision.compute)
        self._at_best = self.device.at_best()
        self.collectives = collectives or CollectiveModel(cluster, places)
        self.quantized = self.device.rate(precision.products).dtype if precision.needs_scales else None
        table = self.device.operators
        self.measured: OperatorTimes | None = Measured(table, self.device) if table is not None else None
        self.memory_limit_bytes = min(device.memory_bytes for device in self.devices)
        self.memory_spread = 1 + max(device.memory_uncertainty for device in self.devices)
        self.fitting_bytes = math.floor(self.memory_limit_bytes / self.memory_spread)
        rates = [device.rate(precision.compute) for device in self.devices]
        self.unaligned_fraction = min(rate.unaligned_fraction if rate.num_units else 1.0 for rate in rates)
        self.is_mixed = places is None and not cluster.is_homogeneous
        self.ranks = Ranks(
            devices=self.devices,
            device=self.device,
            collectives=self.collectives,
            precision=precision,
            optimizer=optimizer_cost(optimizer),
            runtime=runtime or Runtime(),
            is_all=places is None,
        )
        self._optimizer_name = optimizer
        self._costs: dict[BlockCost, BlockCost] = {}
        self._parts: dict[frozenset[int], CostModel] = {}
        self._orders: dict[tuple[int, ...], CostModel] = {}
        self._step_model = lru_cache(maxsize=KNOWN_STEPS)(partial(StepModel, self.ranks))

    # --- operators and blocks

    def op_time_s(self, op: Op, operands: Sequence[TensorSpec]) -> OpTime:
        """Return the seconds of one operator, forward and backward, at the shapes of ``op.outputs`` and ``operands``.

        Raises:
            UsageError: the device's profile has no matmul rate for the dtype.
        """
        return op_time(op, operands, self.device, self.measured, quantized=self.quantized)

    def block_work(self, graph: Graph, block: Block, *, selective: bool = True) -> BlockWork:
        """Return what a block of one rank's graph (``rules.apply.shard`` on all axes) does for one micro-batch, on any device.

        Args:
            graph: the rank's graph, which caches the result.
            block: the block of it.
            selective: whether selective recompute is counted too.
        """
        key = block_work, block.start, block.stop, self.device.kernel_kind, selective
        return graph.once(key, lambda: block_work(graph, block, self.device.kernel_kind, selective=selective))

    def price(self, work: BlockWork, mesh: Mesh, *, at_best: bool = False) -> BlockCost:
        """Return the cost of a block's work; equal costs are one object, as they are compared in many tables.

        Args:
            work: the result of :meth:`block_work`.
            mesh: the mesh whose axes the block's collectives use.
            at_best: price a lower bound of what the parts of the work take together, however they are padded and aligned
                (:meth:`autopar.hardware.device.Device.at_best`).
        """
        device = self._at_best if at_best else self.device
        cost = price_block(work, mesh, device, self.collectives, quantized=self.quantized, measured=self.measured)
        return self._costs.setdefault(cost, cost)

    def prelude_time_s(self, graph: Graph) -> float:
        """Return the seconds of the operators that every stage repeats for each micro-batch."""
        times = (self.op_time_s(op, [graph.spec(ref) for ref in op.operands]) for op in graph.prelude)
        return sum(time.forward_s for time in times)

    # --- devices

    @property
    def host(self) -> HostLink:
        """The host link for offloading; see :attr:`autopar.cost.step.step_model.Ranks.host`."""
        return self.ranks.host

    def parts(self, mesh: Mesh) -> tuple[CostModel, ...]:
        """Return for each pipeline rank the model of the node groups that its ranks lie on; this model where all nodes are equal."""
        if not self.is_mixed:
            return (self,) * mesh.pp
        return tuple(self.part(places) for places in places_of(mesh, self.cluster))

    def part(self, places: frozenset[int]) -> CostModel:
        """Return the model of some node groups, by position; this model where they are all."""
        if not self.is_mixed or len(places) == len(self.cluster.groups):
            return self
        if places not in self._parts:
            self._parts[places] = self._like(self.cluster, places=places)
        return self._parts[places]

    def in_order(self, order: tuple[int, ...]) -> CostModel:
        """Return the model of the same nodes with ranks in one of ``Cluster.orders``; empty: the present order."""
        if order in ((), tuple(range(len(self.cluster.groups)))):
            return self
        if order not in self._orders:
            self._orders[order] = self._like(self.cluster.reordered(order))
        return self._orders[order]

    @cached_property
    def alone(self) -> tuple[CostModel, ...]:
        """For each node group a model of its devices with the collectives of all ranks; see :mod:`autopar.cost.model`."""
        groups = range(len(self.cluster.groups))
        return tuple(self._like(self.cluster, self.collectives, frozenset({place})) for place in groups)

    def _like(
        self, cluster: Cluster, collectives: CollectiveModel | None = None, places: frozenset[int] | None = None
    ) -> CostModel:
        return CostModel(cluster, self.precision, self._optimizer_name, collectives, places, self.ranks.runtime)

    # --- steps and whole plans

    def of(self, step: Step) -> StepModel:
        """Return the prices of blocks and stages in a step."""
        return self._step_model(step)

    def _pipeline(self, stages: Sequence[StageCost], step: Step) -> PipelineStep:
        parts = [part.of(step) for part in self.parts(step.mesh)]
        return PipelineStep(stages, parts, self.collectives, by_hop=self.is_mixed)

    def memory(self, stages: Sequence[StageCost], step: Step, ranks: Sequence[int] | None = None) -> tuple[Memory, ...]:
        """Return the peak memory of each pipeline rank, or of the given ranks.

        Raises:
            UsageError: the schedule cannot serve these stages and micro-batches.
        """
        return self._pipeline(stages, step).memory(ranks)

    def sums_in_buckets(self, stages: Sequence[StageCost], step: Step) -> bool:
        """Return whether some gradients are summed in buckets, so that the bucket size matters."""
        summed = self.of(step).summed
        return any(summed.of(block.parameters, late=False) for stage in stages for (block, _), _ in stage.runs)

    def predict(
        self, stages: Sequence[StageCost], step: Step, *, memory: tuple[Memory, ...] | None = None
    ) -> Prediction:
        """Return the step time and memory of a plan.

        Args:
            stages: the stages in the order of the model; stage ``s`` runs on pipeline rank ``s % pp``.
            step: how they are run.
            memory: the result of :meth:`memory`, if it exists already.

        Raises:
            UsageError: the schedule cannot serve these stages and micro-batches.
        """
        pipeline = self._pipeline(stages, step)
        memory = memory or pipeline.memory()
        parts = pipeline.breakdown()
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
            stage_times=tuple((s.forward_s, s.backward_s) for s in pipeline.sums),
        )

    def breakdown(self, stages: Sequence[StageCost], step: Step) -> Breakdown:
        """Return the step time of :meth:`predict` and its parts, without memory."""
        return self._pipeline(stages, step).breakdown()

    def longest_chains(self, stages: Sequence[StageCost], step: Step) -> tuple[float, list[Chain]]:
        """Return the step time, and the longest chain of actions up to the end of each rank, the longest of all first."""
        pipeline = self._pipeline(stages, step)
        simulated, chains = with_chains(step.schedule, step.mesh.pp, step.num_micro_batches, pipeline.times)
        return pipeline.breakdown(simulated).total_s, chains


def shared_step_s(models: Sequence[CostModel], stages: Sequence[StageCost], steps: Sequence[Step]) -> float:
    """Return the seconds of the step; arguments as in :func:`predict_shares`."""
    groups = zip(models, stages, steps, strict=True)
    return max(model.breakdown([stage], step).total_s for model, stage, step in groups)


def shared_memory(models: Sequence[CostModel], stages: Sequence[StageCost], steps: Sequence[Step]) -> list[Memory]:
    """Return the peak memory of a rank of each node group; arguments as in :func:`predict_shares`."""
    groups = zip(models, stages, steps, strict=True)
    return [model.memory([stage], step)[0] for model, stage, step in groups]


def predict_shares(models: Sequence[CostModel], stages: Sequence[StageCost], steps: Sequence[Step]) -> Prediction:
    """Return the step time and memory of a plan without a pipeline whose node groups take different numbers of samples.

    Args:
        models: a model of each node group (:meth:`CostModel.alone`).
        stages: for each group all blocks at its own micro-batch, priced on its devices.
        steps: how they are run; they differ only in the prelude.

    Returns:
        The time of the slowest group with its parts, the memory of each group, and the largest peak with the limit of its group.
    """
    predictions = [model.predict([stage], step) for model, stage, step in zip(models, stages, steps, strict=True)]
    slowest = max(predictions, key=lambda p: p.step_time_s)
    fullest = max(predictions, key=lambda p: p.peak_memory_bytes)
    time_s, peak = slowest.step_time_s, fullest.peak_memory_bytes
    width = max(p.step_time_interval_s[1] / p.step_time_s for p in predictions)
    spread = max(model.memory_spread for model in models)
    return replace(
        slowest,
        step_time_interval_s=(time_s / width, time_s * width),
        peak_memory_bytes=peak,
        peak_memory_interval_bytes=(round(peak / spread), round(peak * spread)),
        memory_limit_bytes=fullest.memory_limit_bytes,
        memory=tuple(replace(p.memory[0], group=i) for i, p in enumerate(predictions)),
        memory_limits_bytes=tuple(p.memory_limit_bytes for p in predictions),
        host_memory_limit_bytes=max(p.host_memory_limit_bytes for p in predictions),
    )


def flops_per_sample(compact: Compact, kind: KernelKind) -> float:
    """Return the FLOPs of matrix products of one sample, forward and backward."""
    blocks = zip(compact.graph.blocks, compact.members, strict=True)
    return sum(flops_of_block(compact.graph, block, kind) * len(members) for block, members in blocks)


def flops_of_block(graph: Graph, block: Block, kind: KernelKind = "cuda") -> float:
    """Return the FLOPs of matrix products of one block for one sample, forward and backward."""
    works = [work(op, operand_specs(op, graph.spec), kind) for op in graph.block_ops(block)]
    return sum(op_work.flops + op_work.backward_flops for op_work in works) / graph.batch_size


def tokens_per_sample(graph: Graph) -> int:
    """Return the elements of one sample of the first batch input if it holds ids, else 1."""
    for leaf in graph.inputs:
        if leaf.batch_dim is not None:
            return leaf.spec.numel // graph.batch_size if not leaf.spec.dtype.is_floating_point else 1
    return 1
