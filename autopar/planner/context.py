"""What every part of one search shares: the model's graph, its cost model and layouts, and what pins and the space say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost.model import CostModel, Step
from autopar.cost.operators.work import work
from autopar.errors import InfeasibleError
from autopar.graph.graph import Graph
from autopar.graph.rewrites import Compact
from autopar.hardware.device import KernelKind
from autopar.plan.plan import Recompute
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.layouts.layout import Load, PricedLayout, TypedLayout, layout_key_of
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchContext:
    """One model, cluster, batch and space; made by :meth:`of`.

    Attributes:
        graph: as traced.
        model: the cost model of the whole cluster.
        space, pins: what may be chosen.
        global_batch_size: samples of a step.
        layouts: all layouts of the model.
        modes: of recompute that the space allows.
        recompute, stages: pinned mode and pinned stage of blocks of ``graph``, by position.
        moved: its blocks whose activations are pinned to the host.
        buckets: sizes of what is summed together, of which a plan takes the quickest.
        flops_per_sample, tokens_per_sample: of the model.
    """

    graph: Graph
    model: CostModel
    space: Space
    pins: Pins
    global_batch_size: int
    layouts: Layouts
    modes: tuple[Recompute, ...]
    recompute: Mapping[int, Recompute]
    stages: Mapping[int, int]
    moved: frozenset[int]
    buckets: tuple[int, ...]
    flops_per_sample: float
    tokens_per_sample: int

    @classmethod
    def of(cls, graph: Graph, model: CostModel, *, global_batch_size: int, pins: Pins, space: Space) -> SearchContext:
        """The context of a search."""
        layouts = Layouts(graph, model, global_batch_size=global_batch_size, pins=pins, space=space)
        moved = pins.moved(graph)
        return cls(
            graph=graph,
            model=model,
            space=space,
            pins=pins,
            global_batch_size=global_batch_size,
            layouts=layouts,
            modes=space.recompute if not moved else tuple(m for m in space.recompute if m != "selective"),
            recompute=pins.recompute(graph),
            stages=pins.stages(graph),
            moved=moved,
            buckets=pins.buckets(space.bucket_bytes),
            flops_per_sample=flops_per_sample(layouts.compact, model),
            tokens_per_sample=tokens_per_sample(graph),
        )

    def step(self, candidate: Candidate, layout: PricedLayout) -> Step:
        """How the cost model sees a candidate in a layout."""
        return Step(
            mesh=candidate.mesh,
            schedule=candidate.schedule,
            num_micro_batches=candidate.num_micro_batches,
            zero_stage=candidate.zero_stage,
            global_batch_size=self.global_batch_size,
            flops_per_sample=self.flops_per_sample,
            tokens_per_sample=self.tokens_per_sample,
            prelude_s=layout.prelude_s,
            adds_gradients=True,
            totals=layout.totals,
            bucket_bytes=self.buckets[0],
            offload=candidate.offload,
        )

    def unsplit(self, candidate: Candidate) -> PricedLayout:
        """What the parts of a candidate's layouts are taken of; see :meth:`Layouts.whole`."""
        return self.layouts.unsplit(layout_key_of(candidate))

    def typed_layouts(self, candidate: Candidate) -> tuple[TypedLayout, ...]:
        """The layouts of a candidate before they are priced.

        Raises:
            InfeasibleError: the pins of parameters allow none.
        """
        return self.layouts.typed(layout_key_of(candidate), load_of(candidate))

    def known_layouts(self, candidate: Candidate) -> tuple[TypedLayout, ...]:
        """As :meth:`typed_layouts`; none where there is none, which the candidate's evaluation explains."""
        try:
            return self.typed_layouts(candidate)
        except InfeasibleError:
            return ()


def load_of(candidate: Candidate) -> Load:
    """How many micro-batches a rank runs and holds at once, on which the price of memory depends."""
    in_flight = min(candidate.num_micro_batches, candidate.mesh.pp)
    return Load(num_micro_batches=candidate.num_micro_batches, in_flight=in_flight)


def readable(num_bytes: float) -> str:
    """Bytes for people.

    >>> readable(3 * 2**29)
    '1.5 GiB'
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes:.0f} bytes"


def flops_per_sample(compact: Compact, model: CostModel) -> float:
    """Products of matrices, forward and backward."""
    known: dict[str, float] = {}
    for index, block in enumerate(compact.graph.blocks):
        if block.hash not in known:
            known[block.hash] = flops_of_block(compact, index, model.device.kernel_kind)
    blocks = zip(compact.graph.blocks, compact.members, strict=True)
    return sum(known[block.hash] * len(members) for block, members in blocks)


def flops_of_block(compact: Compact, index: int, kind: KernelKind) -> float:
    """Products of matrices of one block and one sample, forward and backward."""
    graph, total = compact.graph, 0.0
    for op in graph.block_ops(graph.blocks[index]):
        done = work(op, [graph.spec(ref) for ref in op.operands], kind)
        total += done.flops + done.backward_flops
    return total / graph.batch_size


def tokens_per_sample(graph: Graph) -> int:
    """Elements of one sample of the first batch input where it is a sequence of ids, else 1."""
    for leaf in graph.inputs:
        if leaf.batch_dim is not None:
            return leaf.spec.numel // graph.batch_size if not leaf.spec.dtype.is_floating_point else 1
    return 1
