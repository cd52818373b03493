"""Graphs before axis ``tp`` is applied: of one micro-batch, with its share of the experts, on one rank of ``cp``.

Everything happens on the compact graph and is kept: many layouts share it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from autopar.cost.blocks.block_cost import BlockCost
from autopar.cost.model import CostModel
from autopar.cost.step.data_parallel import itemsize
from autopar.errors import InfeasibleError
from autopar.graph.compact import Compact
from autopar.graph.ir import Graph
from autopar.layout import I
from autopar.mesh import Mesh
from autopar.planner.layouts.padding import padded
from autopar.planner.layouts.types import LayoutKey
from autopar.planner.sharding.axis_costs import AxisPricing
from autopar.planner.sharding.batch_axis import solve_batch
from autopar.planner.sharding.block_chain import AxisSolution, AxisSolver
from autopar.planner.sharding.sequence_axis import CP, KINDS, SequenceSplit
from autopar.planner.sharding.tables import Weights
from autopar.planner.space.pins import Pins
from autopar.rules.apply import shard
from autopar.rules.resize import Resizer, can_resize
from autopar.rules.spread import spread
from autopar.rules.types import Typing

COLLECTIVE_WEIGHT = 1e-3
"""Of collectives in the typing on ``cp``: the axis is there to split work and what is kept for backward, and a typing
that repeats them rather than send must not win because a model is small. Plans are compared at full prices."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Sizes:
    """The graphs of one micro-batch that were made of a graph, by its size.

    ``batch``: the typing by which; ``first``: of those; ``others``: makes the others of it, where they follow.
    """

    batch: Typing
    graphs: dict[int, Graph] = field(default_factory=dict)
    first: Graph | None = None
    others: Resizer | None = None


def _sizes(graph: Graph, batch: Typing, global_batch_size: int) -> _Sizes:
    """Kept with the graph: searches of other spaces and clusters have the same ones."""
    key = _Sizes, global_batch_size
    found: _Sizes | None = graph.passes.get(key)
    if found is None or found.batch is not batch:
        found = graph.passes[key] = _Sizes(batch=batch)
    return found


class Bases:
    """The graphs of one model on one cluster, and prices of operators on an axis.

    Args:
        graph: as traced.
        compact: its compact graph.
        model: the cost model.
        costs: of the blocks of a layout with neither a context- nor a tensor-parallel axis.
    """

    def __init__(
        self,
        graph: Graph,
        compact: Compact,
        model: CostModel,
        *,
        global_batch_size: int,
        pins: Pins,
        costs: Callable[[LayoutKey], Sequence[BlockCost]],
    ) -> None:
        self.graph, self.compact, self.model = graph, compact, model
        self.global_batch_size, self._whole_costs = global_batch_size, costs
        self.batch = solve_batch(compact)
        self._kinds = tuple(kind for kind in KINDS if pins.allows("cp_attention", kind))
        self._sizes = _sizes(compact.graph, self.batch, global_batch_size)
        self._micro: dict[int, Compact] = {}
        self._sequences: dict[tuple[LayoutKey, str], AxisSolution | InfeasibleError] = {}
        self._bases: dict[tuple[LayoutKey, str], Compact] = {}

    def micro(self, micro_batch_size: int) -> Compact:
        """The compact graph of one micro-batch."""
        graphs = self._sizes.graphs
        if micro_batch_size not in graphs:
            graphs[micro_batch_size] = self._local(micro_batch_size)
        if micro_batch_size not in self._micro:
            self._micro[micro_batch_size] = replace(self.compact, graph=graphs[micro_batch_size])
        return self._micro[micro_batch_size]

    def _local(self, micro_batch_size: int) -> Graph:
        graph, typing = self.compact.graph, self._batch_typing(micro_batch_size)
        sizes = self._sizes
        if sizes.others is not None:
            return sizes.others.run(typing, micro_batch_size)
        local = shard(graph, typing, global_batch_size=self.global_batch_size, micro_batch_size=micro_batch_size)
        if sizes.first is None:
            sizes.first = local
            if can_resize(graph, local, typing):
                sizes.others = Resizer(graph, local, typing, self.global_batch_size)
        return local

    def _batch_typing(self, micro_batch_size: int) -> Typing:
        return replace(self.batch, size=Fraction(self.graph.batch_size, micro_batch_size))

    def base(self, split: LayoutKey, kind: str) -> Compact:
        """The compact graph of one micro-batch and one rank of ``cp``; ``kind``: of attention there."""
        micro = self._spread(split)
        if split.cp == 1:
            return micro
        key = (split, kind)
        if key not in self._bases:
            graph = shard(micro.graph, self.sequence(split, kind).typing)
            self._bases[key] = replace(micro, graph=graph)
        return self._bases[key]

    def _spread(self, split: LayoutKey) -> Compact:
        """The compact graph of one micro-batch on one data rank, with its share of the experts and vocabularies padded."""
        micro = self.micro(split.micro_batch_size)
        key = (replace(split, cp=1), "")  # no kind of attention
        if key not in self._bases:
            shared = spread(micro.graph, split.ep_data) if split.ep_data > 1 else micro.graph
            graph = padded(shared, split.tp, split.vocab_multiple)
            self._bases[key] = micro if graph is micro.graph else replace(micro, graph=graph)
        return self._bases[key]

    # --- context parallelism

    def kinds(self, split: LayoutKey) -> tuple[str, ...]:
        """The kinds of attention that can split the sequence; one without a name where it is not split.

        Raises:
            InfeasibleError: there are none; says why the last is none.
        """
        if split.cp == 1:
            return ("",)
        found, failure = [], None
        for kind in self._kinds:
            try:
                self.sequence(split, kind)
                found.append(kind)
            except InfeasibleError as error:
                failure = error
        if not found:
            raise failure or InfeasibleError("some kind of attention is allowed on cp", value="none")
        return tuple(found)

    def sequence(self, split: LayoutKey, kind: str) -> AxisSolution:
        """The typing on ``cp``: work and what is kept for backward are split wherever they can be.

        Raises:
            InfeasibleError: there is none.
        """
        key = (split, kind)
        if key not in self._sequences:
            self._sequences[key] = self._split_sequence(split, kind)
        found = self._sequences[key]
        if isinstance(found, InfeasibleError):
            raise found
        return found

    def _split_sequence(self, split: LayoutKey, kind: str) -> AxisSolution | InfeasibleError:
        micro = self._spread(split)
        costs = self._whole_costs(split.whole)
        saved = sum(n.saved_bytes for n in costs)
        counts = [len(members) for members in self.compact.members]
        least_s = sum(n * (c.forward_s + c.backward_s) for n, c in zip(counts, costs, strict=True))
        try:
            solver = AxisSolver(
                micro,
                axis=CP,
                size=split.cp,
                pricing=self.pricing(CP, split),
                rests={p.name: (I,) for p in micro.graph.parameters},
                narrow=SequenceSplit(micro.graph, kind, split.cp),
            )
            return solver.solve(Weights(per_step_s=1.0, saved_byte=least_s / max(saved, 1)))
        except InfeasibleError as error:
            return error

    # --- prices

    def pricing(self, axis: str, split: LayoutKey) -> AxisPricing:
        """A parameter's state as without ZeRO; the price of memory that is swept covers the rest."""
        precision = self.model.precision
        storage, compute, reduce = (itemsize(name) for name in (precision.storage, precision.compute, precision.reduce))
        copies = compute if compute != storage else 0
        return AxisPricing(
            device=self.model.device,
            collectives=self.model.collectives,
            mesh=self.mesh(split),
            axis=axis,
            collective_weight=COLLECTIVE_WEIGHT if axis == CP else 1.0,
            state_bytes_per_element=storage + self.model.ranks.optimizer.bytes_per_element(storage) + reduce + copies,
            gradient_itemsize=storage,
            measured=self.model.measured,
        )

    def mesh(self, split: LayoutKey) -> Mesh:
        """A mesh of the whole cluster with these degrees; groups of the inner axes are the same in every other."""
        outside = max(self.model.cluster.world_size // (split.cp * split.tp), 1)
        return Mesh(dp_replicate=outside, cp=split.cp, tp=split.tp, ep=split.ep_data, ep_data=split.ep_data)
