"""Graphs of one rank before axis ``tp`` is applied, with the prices of their operators and blocks.

Such a graph holds one micro-batch on one rank of ``cp``, with its share of the experts and with padded vocabularies. It is a compact graph
and is cached, as many layouts share it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from autopar.cost.blocks.block_work import BlockWork
from autopar.cost.model import CostModel
from autopar.cost.step.data_parallel import itemsize
from autopar.errors import InfeasibleError
from autopar.graph.graph import Block, Graph
from autopar.graph.rewrites import Compact, lengths, pad
from autopar.plan.mesh import I, Mesh
from autopar.plan.plan import PaddedParameter
from autopar.planner.layouts.layout import LayoutKey
from autopar.planner.sharding.block_chain import AxisSolution, AxisSolver, owners_of
from autopar.planner.sharding.block_table import AxisCosts, AxisPricing
from autopar.planner.sharding.energy import Weights
from autopar.planner.sharding.input_axes import CP, SequenceSplit, solve_batch
from autopar.planner.sharding.resharding import Structures
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import ATTENTION_KINDS
from autopar.rules.apply import shard
from autopar.rules.local_calls import spread
from autopar.rules.table import default_table

COLLECTIVE_WEIGHT = 1e-3
"""Factor on the seconds of collectives in the typing on ``cp``.

The axis is there to split work and what is kept for backward. A typing that repeats work rather than communicate must not win because a
model is small. Plans are compared at full prices."""


class RankGraphs:
    """The graphs of one model on one cluster, with the prices of their operators and blocks.

    Args:
        graph: the traced graph.
        compact: its compact graph.
        model: the cost model.
        global_batch_size: samples of a step.
        pins: the pins, which say which kinds of attention may run on ``cp``.
        is_selective: whether blocks may recompute selectively.

    Attributes:
        batch: the typing on axis ``batch``.
        owners: how many blocks read each parameter, by its name.
        structures: cache of what the problems of all axes and sizes share.
    """

    def __init__(
        self,
        graph: Graph,
        compact: Compact,
        model: CostModel,
        *,
        global_batch_size: int,
        pins: Pins,
        is_selective: bool,
    ) -> None:
        self.graph, self.compact, self.model = graph, compact, model
        self.global_batch_size, self.is_selective = global_batch_size, is_selective
        self.batch = solve_batch(compact)
        self.owners: Mapping[str, int] = owners_of(compact)
        self.structures = Structures()
        self._attention = tuple(kind for kind in ATTENTION_KINDS if pins.allows("cp_attention", kind))
        # by micro-batch size; cached on the graph, as searches in other spaces and on other clusters need the same graphs
        key = RankGraphs.micro, global_batch_size, compact.alike, default_table().version
        self._micro: dict[int, Graph] = compact.graph.passes.setdefault(key, {})
        self._before_tp: dict[tuple[LayoutKey, str], Compact] = {}
        self._sequences: dict[tuple[LayoutKey, str], AxisSolution | InfeasibleError] = {}

    # --- graphs

    def micro(self, micro_batch_size: int) -> Graph:
        """Return the compact graph of one micro-batch."""
        if micro_batch_size not in self._micro:
            typing = replace(self.batch, size=Fraction(self.graph.batch_size, micro_batch_size))
            self._micro[micro_batch_size] = shard(
                self.compact.graph, typing, global_batch_size=self.global_batch_size, micro_batch_size=micro_batch_size
            )
        return self._micro[micro_batch_size]

    def before_tp(self, key: LayoutKey, kind: str) -> Compact:
        """Return the compact graph of one micro-batch on one rank of ``cp``, with its share of the experts and with padded vocabularies.

        Args:
            key: the key of the layout.
            kind: the kind of attention on ``cp``; empty where that axis has one rank.
        """
        key = self.key_before_tp(key)
        if (key, kind) not in self._before_tp:
            if key.cp > 1:
                graph = shard(self.before_tp(replace(key, cp=1), "").graph, self.sequence(key, kind).typing)
            else:
                graph = self.micro(key.micro_batch_size)
                graph = spread(graph, key.ep_data) if key.ep_data > 1 else graph
                padded_lengths = lengths(graph, key.tp, key.vocab_multiple)
                graph = pad(graph, padded_lengths) if padded_lengths else graph
            self._before_tp[key, kind] = replace(self.compact, graph=graph)
        return self._before_tp[key, kind]

    def key_before_tp(self, key: LayoutKey) -> LayoutKey:
        """Return a key that is equal for layouts with the same graph before ``tp``; ``tp`` matters only where it pads vocabularies."""
        is_padded = lengths(self.compact.graph, key.tp, key.vocab_multiple)
        return key if is_padded else replace(key, tp=1, vocab_multiple=1)

    # --- context parallelism

    def kinds(self, key: LayoutKey) -> tuple[str, ...]:
        """Return the kinds of attention that can split the sequence; a single empty name where ``cp`` has one rank.

        Raises:
            InfeasibleError: there is no such kind; the error gives the reason of the last one that was tried.
        """
        if key.cp == 1:
            return ("",)
        feasible, failure = [], None
        for kind in self._attention:
            try:
                self.sequence(key, kind)
                feasible.append(kind)
            except InfeasibleError as error:
                failure = error
        if not feasible:
            raise failure or InfeasibleError(
                "The pins allow no kind of attention on cp", fix="Drop the pin of cp_attention, or pin cp=1"
            )
        return tuple(feasible)

    def sequence(self, key: LayoutKey, kind: str) -> AxisSolution:
        """Return the typing on ``cp``, which splits work and what is kept for backward wherever possible.

        Raises:
            InfeasibleError: there is no such typing.
        """
        key = self.key_before_tp(key)
        if (key, kind) not in self._sequences:
            self._sequences[key, kind] = self._split_sequence(key, kind)
        solution = self._sequences[key, kind]
        if isinstance(solution, InfeasibleError):
            raise solution
        return solution

    def _split_sequence(self, key: LayoutKey, kind: str) -> AxisSolution | InfeasibleError:
        """Return the typing on ``cp``, or the reason why there is none; saving all activations is priced like the time of all blocks."""
        compact, unsplit = self.before_tp(replace(key, cp=1), ""), key.unsplit
        cost_numbers, works = self.works(self.before_tp(unsplit, "").graph)
        prices = [self.model.price(work, self.mesh(unsplit)) for work in works]
        costs = [prices[number] for number in cost_numbers]
        saved_bytes = sum(cost.saved_bytes for cost in costs)
        counts = [len(members) for members in self.compact.members]
        time_s = sum(n * (c.forward_s + c.backward_s) for n, c in zip(counts, costs, strict=True))
        try:
            axis_costs = AxisCosts(
                graph=compact.graph,
                axis=CP,
                size=key.cp,
                pricing=self.axis_pricing(CP, key),
                owners=self.owners,
                rests={p.name: (I,) for p in compact.graph.parameters},
                narrow=SequenceSplit(compact.graph, kind, key.cp),
            )
            solver = AxisSolver(compact, axis_costs, self.structures)
            return solver.solve(Weights(per_step_s=1.0, saved_byte=time_s / max(saved_bytes, 1)))
        except InfeasibleError as error:
            return error

    # --- prices

    def works(self, graph: Graph) -> tuple[tuple[int, ...], tuple[BlockWork, ...]]:
        """Return for each block of a graph of one rank a number that is equal for blocks of equal cost, and the work of each number."""
        representatives: dict[Hashable, Block] = {}
        classes = [self._cost_class(graph, block) for block in graph.blocks]
        for cost_class, block in zip(classes, graph.blocks, strict=True):
            representatives.setdefault(cost_class, block)
        number = {cost_class: i for i, cost_class in enumerate(representatives)}
        works = [self.model.block_work(graph, block, selective=self.is_selective) for block in representatives.values()]
        return tuple(number[cost_class] for cost_class in classes), tuple(works)

    def _cost_class(self, graph: Graph, block: Block) -> Hashable:
        """Return a key that is equal for blocks of equal cost.

        Such blocks have equal operators at equal shapes, the same shared parameters, and send the same values.
        """
        shared = tuple([p.name for p in graph.block_parameters(block) if self.owners[p.name] > 1])
        sent = tuple([graph.spec(ref) for ref in graph.block_outputs(block)])
        return block.hash, shared, sent, graph._index.block_of.get(graph.loss.name) == block.index

    def axis_pricing(self, axis: str, key: LayoutKey) -> AxisPricing:
        """Return the prices on an axis, with the state of a parameter as without ZeRO; the sweep over prices of memory covers ZeRO."""
        precision = self.model.precision
        storage, compute, reduce = (itemsize(name) for name in (precision.storage, precision.compute, precision.reduce))
        copies = compute if compute != storage else 0
        return AxisPricing(
            device=self.model.device,
            collectives=self.model.collectives,
            mesh=self.mesh(key),
            axis=axis,
            collective_weight=COLLECTIVE_WEIGHT if axis == CP else 1.0,
            state_bytes_per_element=storage + self.model.ranks.optimizer.bytes_per_element(storage) + reduce + copies,
            gradient_itemsize=storage,
            measured=self.model.measured,
        )

    def mesh(self, key: LayoutKey) -> Mesh:
        """Return a mesh of the whole cluster with the degrees of a key."""
        return key.mesh(self.model.cluster.world_size)


def padding_of(graph: Graph) -> tuple[PaddedParameter, ...]:
    """Return the vocabularies that are padded in a graph that no axis has split yet."""
    return tuple(
        PaddedParameter(parameter=p.key, length=p.spec.shape[p.padding.dim])
        for p in graph.parameters
        if p.padding is not None
    )


def padding_notes(graph: Graph, padding: Sequence[PaddedParameter], tp: int, multiple: int) -> tuple[str, ...]:
    """Return a note for each padded length.

    Args:
        graph: the traced graph.
        padding: the padded vocabularies.
        tp: ranks of the axis.
        multiple: the number that divides the rows of each rank.
    """
    shapes = {p.key: p.spec.shape for p in graph.parameters} if padding else {}
    reasons = [f"split over tp={tp}"] * (tp > 1) + [f"aligned to {multiple}"] * (multiple > 1)
    notes = []
    for length in sorted({entry.length for entry in padding}):
        names = [entry.parameter for entry in padding if entry.length == length]
        before = max(n for n in shapes[names[0]] if n <= length)
        notes.append(f"{', '.join(names)}: {before} padded to {length} with zeros, {' and '.join(reasons)}")
    return tuple(notes)
