"""Layouts to choose from: for a micro-batch size and a tensor-parallel degree the typings worth having, with their costs.

Everything happens on the compact graph and is kept: many candidates of the outer search share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.cost.blocks.block_cost import ParameterCost
from autopar.cost.model import BlockCost, CostModel
from autopar.cost.step.stage_time import own_times
from autopar.errors import InfeasibleError
from autopar.graph.compact import compact
from autopar.graph.ir import Graph
from autopar.mesh import Mesh
from autopar.planner.layouts.block_pricing import BlockPrices, PricedBlocks
from autopar.planner.layouts.padding import padding_of
from autopar.planner.layouts.rank_graphs import Bases
from autopar.planner.layouts.tp_typings import Solving, pinned_types
from autopar.planner.layouts.types import LayoutKey, Load, Made, PricedLayout, TypedLayout
from autopar.planner.sharding.block_chain import AxisSolution
from autopar.planner.sharding.block_table import Narrow
from autopar.planner.sharding.every import every_typing
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space
from autopar.rules.apply import shard
from autopar.rules.spread import AXIS as SPREAD


class Layouts:
    """All layouts of one model on one cluster.

    Args:
        graph: as traced.
        model: the cost model.
        pins: of parameters.
        space: which prices of memory are tried.
        narrow: keeps those of an operator's strategies on ``tp`` that it may take; None: all.
    """

    def __init__(
        self,
        graph: Graph,
        model: CostModel,
        *,
        global_batch_size: int,
        pins: Pins,
        space: Space,
        narrow: Narrow | None = None,
    ) -> None:
        self.graph, self.model, self.space, self.pins = graph, model, space, pins
        self.is_selective = "selective" in {*space.recompute, *pins.recompute(graph).values()}
        self.pinned = pinned_types(graph, pins)
        keys = [
            tuple(self.pinned.get(p.name) for p in graph.block_parameters(block)) if self.pinned else None
            for block in graph.blocks
        ]
        self.compact = compact(graph, keys=keys)
        self.bases = Bases(
            graph, self.compact, model, global_batch_size=global_batch_size, pins=pins,
            costs=self._plain_costs,
        )  # fmt: skip
        self.batch = self.bases.batch
        self._owners = Counter(
            p.name for block in self.compact.graph.blocks for p in self.compact.graph.block_parameters(block)
        )
        self.solving = Solving(
            self.compact, self.bases, model,
            pins=pins, pinned=self.pinned, space=space, narrow=narrow, costs=self._whole_costs,
        )  # fmt: skip
        self._parameters: dict[tuple[ParameterCost, ...], tuple[ParameterCost, ...]] = {}
        self._options: dict[tuple[LayoutKey, str, object], PricedLayout] = {}
        self._of_drafts: dict[int, tuple[TypedLayout, PricedLayout]] = {}
        self._wholes: dict[tuple[LayoutKey, bool], PricedLayout] = {}
        self._drafts: dict[tuple[LayoutKey, tuple[int, int]], tuple[TypedLayout, ...]] = {}
        self._every: dict[LayoutKey, tuple[TypedLayout, ...]] = {}
        self._works: dict[int, tuple[PricedBlocks, Mesh, bool]] = {}  # of options by id, where groups differ
        self._priced_blocks: dict[tuple[LayoutKey, str], BlockPrices] = {}
        self._priced: dict[tuple[int, frozenset[int] | None], PricedLayout] = {}
        self._elements: dict[int, tuple[Graph, list[tuple[str, float]]]] = {}
        self._quickest: dict[LayoutKey, float] = {}
        self._least_each: dict[LayoutKey, tuple[float, ...]] = {}

    @property
    def prelude(self) -> tuple[str, ...]:
        """Strategy names of the prelude on axis ``batch``."""
        return tuple(self.batch.strategies[op.name].name for op in self.graph.prelude)

    def front(self, micro_batch_size: int, mesh: Mesh, load: Load) -> Iterator[PricedLayout]:
        """The layouts that some price of memory makes best, from lean to fast, each made when it is asked for.

        Args:
            mesh: its degrees of ``cp`` and ``tp`` count.
            load: what a plan does with them.

        Raises:
            InfeasibleError: the pins of parameters allow none.
        """
        split = LayoutKey(micro_batch_size=micro_batch_size, ep_data=mesh.ep_data, cp=mesh.cp, tp=mesh.tp)
        return (self.option(draft) for draft in self.drafts(split, load))

    def drafts(self, split: LayoutKey, load: Load) -> tuple[TypedLayout, ...]:
        """As :meth:`front`, before anything is priced."""
        key = (split, load.order if split.tp > 1 else (1, 1))
        if key not in self._drafts:
            self._drafts[key] = self._every_draft(split) or self._front(split, load)
        return self._drafts[key]

    def _front(self, split: LayoutKey, load: Load) -> tuple[TypedLayout, ...]:
        """Those that some price of memory makes best."""
        found: dict[object, TypedLayout] = {}
        has_prices = split.tp > 1
        for ratio in sorted(self.space.price_ratios, reverse=True) if has_prices else (0.0,):
            for kind in self.bases.kinds(split):
                draft = self._draft(split, kind, self.solving.solution(split, kind, load.order, ratio))
                found.setdefault((kind, draft.solution and draft.solution.signature), draft)
        return tuple(found.values())

    def _every_draft(self, split: LayoutKey) -> tuple[TypedLayout, ...]:
        """All of them where the space asks for it and they are few; else none."""
        if not self.space.every or split.tp == 1:
            return ()
        if split not in self._every:
            found: list[TypedLayout] = []
            for kind in self.bases.kinds(split):
                made = every_typing(self.solving.solver(split, kind), self.space.every)
                if made is None:
                    found = []
                    break
                found += [self._draft(split, kind, solution) for solution in made]
            self._every[split] = tuple(found)
        return self._every[split]

    def _draft(self, split: LayoutKey, kind: str, solution: AxisSolution | None) -> TypedLayout:
        if solution is None:
            return TypedLayout(split=split, kind=kind, solution=None)
        graph, rests, numel = self.bases.base(split, kind).graph, solution.typing.parameters, 0.0
        for name, owned in self._owned(graph):
            numel += owned / split.tp if rests[name].is_split else owned
        blocks_s = tuple(map(sum, zip(solution.blocks_s, self.solving.sums_s(split, kind), strict=True)))
        return TypedLayout(
            split=split, kind=kind, solution=solution, numel=numel,
            time_s=sum(len(own) * own_s for own, own_s in zip(self.compact.members, blocks_s, strict=True)),
        )  # fmt: skip

    def _owned(self, graph: Graph) -> list[tuple[str, float]]:
        """Trained parameters of each block that are not of experts over data ranks, and their elements in all its members."""
        key = id(graph.parameters)  # of any micro-batch the same ones, which are kept
        if key not in self._elements:
            found = [
                (p.name, p.spec.numel * len(members) / self._owners[p.name])
                for block, members in zip(graph.blocks, self.compact.members, strict=True)
                for p in graph.block_parameters(block)
                if p.spec.requires_grad and not any(axis == SPREAD for axis, _ in p.layout)
            ]
            self._elements[key] = graph, found
        return self._elements[key][1]

    def option(self, draft: TypedLayout) -> PricedLayout:
        """The layout with the costs of its blocks."""
        if id(draft) not in self._of_drafts:  # the draft is kept too, so that its id stays its own
            self._of_drafts[id(draft)] = draft, self._option(draft.split, draft.kind, draft.solution)
        return self._of_drafts[id(draft)][1]

    def whole(self, split: LayoutKey) -> PricedLayout:
        """What a split's parts are taken of: the layout with neither a context- nor a tensor-parallel axis.

        Where the split has one of these axes, as no padding of vocabularies and no alignment takes it below
        (:meth:`autopar.device.Device.at_best`): a part of it is then a floor. Where it has none, this is its layout.
        """
        is_layout = split.cp == split.tp == 1
        own = split if is_layout else LayoutKey(micro_batch_size=split.micro_batch_size, ep_data=split.ep_data)
        if (own, is_layout) not in self._wholes:
            option = self._option(own, "", None)
            self._wholes[own, is_layout] = option if is_layout else self._at_best(own, option)
        return self._wholes[own, is_layout]

    def _at_best(self, split: LayoutKey, option: PricedLayout) -> PricedLayout:
        """A layout without axes at the least that any padding and alignment makes of it; itself where it is that."""
        mesh, found = self.bases.mesh(split), self._prices(split, "").of(None)
        priced = [self.model.price(work, mesh, at_best=True) for work in found.works]
        if all(priced[number] == cost for number, cost in zip(option.keys, option.costs, strict=True)):
            return option
        best = replace(option, costs=self._alike(tuple(priced[number] for number in option.keys)))
        if self.model.is_mixed:
            self._works[id(best)] = found, mesh, True  # the layout is kept, so that its id stays its own
        return best

    def _plain_costs(self, split: LayoutKey) -> Sequence[BlockCost]:
        return self._option(split, "", None).costs

    def _whole_costs(self, split: LayoutKey, kind: str) -> Sequence[BlockCost]:
        """Of the blocks with no tensor-parallel axis."""
        if split.cp == 1:
            return self.whole(split.whole).costs
        return self._option(split, kind, None).costs

    @property
    def wholes(self) -> dict[tuple[LayoutKey, bool], PricedLayout]:
        """Those that :meth:`whole` has made, for another process; none where groups differ, whose prices are not in them."""
        return {} if self.model.is_mixed else self._wholes

    def know(self, wholes: Mapping[tuple[LayoutKey, bool], PricedLayout]) -> None:
        """What another process has made."""
        self._wholes = {**wholes, **self._wholes}

    def made(self, split: LayoutKey) -> Made:
        """What is known of the layouts of a split, for another process; nothing where groups differ, as :attr:`wholes`."""
        if self.model.is_mixed:
            return Made()

        return Made(
            drafts=tuple(
                (order, tuple((draft, self._of_drafts.get(id(draft), (draft, None))[1]) for draft in drafts))
                for (own, order), drafts in self._drafts.items()
                if own == split
            ),
            quickest_s=self._quickest.get(split),
            least_s=self._least_each.get(split),
        )

    def know_made(self, split: LayoutKey, made: Made) -> None:
        """What another process has worked out."""
        for order, drafts in made.drafts:
            if (split, order) not in self._drafts:
                self._drafts[split, order] = tuple(draft for draft, _ in drafts)
                self._of_drafts |= {id(draft): (draft, option) for draft, option in drafts if option is not None}
        if made.quickest_s is not None:
            self._quickest.setdefault(split, made.quickest_s)
        if made.least_s is not None:
            self._least_each.setdefault(split, made.least_s)

    def quickest_s(self, split: LayoutKey) -> float:
        """Seconds of one micro-batch, forward and backward through all blocks, in the quickest layout.

        Sums of gradients and memory are left out: no plan is faster. Zero where no kind of attention fits the axis ``cp``.
        """
        if split not in self._quickest:
            try:
                self._quickest[split] = min(self._quickest_of_kind_s(split, kind) for kind in self.bases.kinds(split))
            except InfeasibleError:
                self._quickest[split] = 0.0
        return self._quickest[split]

    def least_s(self, split: LayoutKey) -> tuple[float, ...]:
        """As :meth:`quickest_s`, for each block of the compact graph alone; zeros where no kind of attention fits."""
        if split not in self._least_each:
            try:
                found = [self._least_of_kind_each(split, kind) for kind in self.bases.kinds(split)]
            except InfeasibleError:
                found = [(0.0,) * len(self.compact.members)]
            self._least_each[split] = tuple(map(min, zip(*found, strict=True)))
        return self._least_each[split]

    def _least_of_kind_each(self, split: LayoutKey, kind: str) -> tuple[float, ...]:
        if split.tp > 1:
            return tuple(
                map(sum, zip(self.solving.solver(split, kind).least_s(), self.solving.sums_s(split, kind), strict=True))
            )
        costs = self._option(split, kind, self.solving.solution(split, kind, (1, 1), 0.0)).costs
        return tuple(sum(own_times(cost, recompute="none")) for cost in costs)

    def _quickest_of_kind_s(self, split: LayoutKey, kind: str) -> float:
        if split.tp > 1:
            sums_s = zip(self.compact.members, self.solving.sums_s(split, kind), strict=True)
            return self.solving.solver(split, kind).quickest().value + sum(len(own) * own_s for own, own_s in sums_s)
        times, counts = self._least_of_kind_each(split, kind), (len(m) for m in self.compact.members)
        return sum(n * time_s for n, time_s in zip(counts, times, strict=True))

    # --- prices

    def local_graph(self, split: LayoutKey, kind: str, solution: AxisSolution | None) -> Graph:
        """One rank's graph of one micro-batch."""
        graph = self.bases.base(split, kind).graph
        if solution is None:
            return graph
        return shard(graph, solution.typing)

    def _option(self, split: LayoutKey, kind: str, solution: AxisSolution | None) -> PricedLayout:
        key = (split, kind, solution and solution.signature)
        if key not in self._options:
            graph = self.bases.base(split, kind).graph
            found = self._prices(split, kind).of(solution)
            self._options[key] = PricedLayout(
                sequence=self.bases.sequence(split, kind) if split.cp > 1 else None,
                kind=kind,
                solution=solution,
                ep_data=split.ep_data,
                costs=self._alike(found.costs),
                keys=found.keys,
                prelude_s=found.prelude_s,
                padding=padding_of(graph),
                totals=tuple(graph.spec(ref).num_bytes for ref in graph.sums),
            )
            if self.model.is_mixed:
                self._works[id(self._options[key])] = found, self.bases.mesh(split), False
        return self._options[key]

    def _alike(self, costs: tuple[BlockCost, ...]) -> tuple[BlockCost, ...]:
        """Blocks with equal parameters have the same ones: what data axes add to them is worked out once."""
        known: dict[int, BlockCost] = {}
        for cost in costs:
            if id(cost) not in known:
                own = self._parameters.setdefault(cost.parameters, cost.parameters)
                known[id(cost)] = cost if own is cost.parameters else replace(cost, parameters=own)
        return tuple(known[id(cost)] for cost in costs)

    def _prices(self, split: LayoutKey, kind: str) -> BlockPrices:
        if (split, kind) not in self._priced_blocks:
            graph, mesh = self.bases.base(split, kind).graph, self.bases.mesh(split)
            self._priced_blocks[split, kind] = BlockPrices(
                graph, self.model, mesh, self._owners, is_selective=self.is_selective
            )
        return self._priced_blocks[split, kind]

    def priced(self, option: PricedLayout, part: CostModel) -> PricedLayout:
        """A layout of :meth:`option` as the devices of ``part`` run it."""
        if part is self.model:
            return option
        key = (id(option), part.places)
        if key not in self._priced:
            found, mesh, at_best = self._works[id(option)]
            parameters = {number: cost.parameters for number, cost in zip(option.keys, option.costs, strict=True)}
            priced = [part.price(work, mesh, at_best=at_best) for work in found.works]
            made = [replace(cost, parameters=parameters[k]) for k, cost in enumerate(priced)]  # as in :meth:`_alike`
            prelude_s = part.prelude_time_s(found.prelude)
            self._priced[key] = replace(option, costs=tuple(made[k] for k in option.keys), prelude_s=prelude_s)
        return self._priced[key]
