"""Layouts to choose from: for a layout key the typings worth having, then the same with the costs of their blocks.

Everything happens on the compact graph and is kept: many candidates of a search share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.cost.blocks.block_cost import ParameterCost
from autopar.cost.model import BlockCost, CostModel
from autopar.graph.graph import Graph
from autopar.graph.rewrites import compact
from autopar.planner.layouts.rank_graphs import RankGraphs, padding_of
from autopar.planner.layouts.tp_typings import Order, TpTypings, pinned_types
from autopar.planner.layouts.types import LayoutKey, Load, PricedLayout, TypedLayout
from autopar.planner.sharding.block_chain import every_typing
from autopar.planner.sharding.block_table import Narrow
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space
from autopar.rules.apply import shard


@dataclass(slots=True, kw_only=True)
class LayoutMemo:
    """What is known of the layouts of one key; another process can take it over.

    Attributes:
        typed: by the orders of magnitude of their loads.
        priced: by their identities.
        at_best: see :meth:`Layouts.unsplit`; None: nobody asked.
    """

    typed: dict[Order, tuple[TypedLayout, ...]] = field(default_factory=dict)
    priced: dict[str, PricedLayout] = field(default_factory=dict)
    at_best: PricedLayout | None = None

    def learn(self, other: LayoutMemo) -> None:
        """What another process has worked out; what is known already stays."""
        self.typed = other.typed | self.typed
        self.priced = other.priced | self.priced
        self.at_best = other.at_best if self.at_best is None else self.at_best


class Layouts:
    """All layouts of one model on one cluster.

    Args:
        graph: as traced.
        model: the cost model.
        pins: of parameters, of ``ep`` and of attention on ``cp``.
        space: which prices of memory are tried, and up to how many layouts all.
        narrow: keeps those of an operator's strategies on ``tp`` that it may take; None: all.

    Attributes:
        compact: the compact graph.
        batch: the typing on axis ``batch``.
        graphs, typings: what the layouts are made from.
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
        self.graph, self.model, self.space = graph, model, space
        is_selective = "selective" in {*space.recompute, *pins.recompute(graph).values()}
        pinned = pinned_types(graph, pins)
        keys = [
            tuple(pinned.get(p.name) for p in graph.block_parameters(block)) if pinned else None
            for block in graph.blocks
        ]
        self.compact = compact(graph, keys=keys)
        self.graphs = RankGraphs(
            graph, self.compact, model, global_batch_size=global_batch_size, pins=pins, is_selective=is_selective
        )
        self.batch = self.graphs.batch
        self.typings = TpTypings(self.graphs, pins=pins, price_ratios=space.price_ratios, narrow=narrow)
        self._memos: dict[LayoutKey, LayoutMemo] = {}
        self._every: dict[LayoutKey, tuple[TypedLayout, ...]] = {}
        self._on_device: dict[str, PricedLayout] = {}
        self._parameters: dict[tuple[ParameterCost, ...], tuple[ParameterCost, ...]] = {}

    @property
    def prelude(self) -> tuple[str, ...]:
        """Strategy names of the prelude on axis ``batch``."""
        return tuple(self.batch.strategies[op.name].name for op in self.graph.prelude)

    # --- what processes exchange

    def memo(self, key: LayoutKey) -> LayoutMemo:
        """What is known of the layouts of a key."""
        return self._memos.setdefault(key, LayoutMemo())

    def memos(self) -> dict[LayoutKey, LayoutMemo]:
        """What is known of the layouts of all keys, for another process."""
        return dict(self._memos)

    def learn(self, memos: Mapping[LayoutKey, LayoutMemo]) -> None:
        """What another process has worked out."""
        for key, memo in memos.items():
            self.memo(key).learn(memo)

    # --- typed

    def typed(self, key: LayoutKey, load: Load) -> tuple[TypedLayout, ...]:
        """The layouts that some price of memory makes best, from lean to fast, before anything is priced.

        Args:
            load: what a plan does with them.

        Raises:
            InfeasibleError: the pins of parameters allow none.
        """
        typed, order = self.memo(key).typed, load.order if key.tp > 1 else (1, 1)
        if order not in typed:
            typed[order] = self._every_typed(key) or self._front(key, order)
        return typed[order]

    def _front(self, key: LayoutKey, order: Order) -> tuple[TypedLayout, ...]:
        """Those that some price of memory makes best."""
        kinds = self.graphs.kinds(key)
        if key.tp == 1:
            return tuple(TypedLayout(key=key, kind=kind, solution=None) for kind in kinds)
        solutions = [[(kind, one) for one in self.typings.solutions(key, kind, order)] for kind in kinds]
        front: dict[str, TypedLayout] = {}
        for kind, solution in (one for at_price in zip(*solutions, strict=True) for one in at_price):
            typed = TypedLayout(key=key, kind=kind, solution=solution)
            front.setdefault(typed.identity, typed)
        return tuple(front.values())

    def _every_typed(self, key: LayoutKey) -> tuple[TypedLayout, ...]:
        """All of them where the space asks for it and they are few; else none."""
        if not self.space.every or key.tp == 1:
            return ()
        if key not in self._every:
            every: list[TypedLayout] = []
            for kind in self.graphs.kinds(key):
                solutions = every_typing(self.typings.solver(key, kind), self.space.every)
                if solutions is None:
                    every = []
                    break
                every += [TypedLayout(key=key, kind=kind, solution=one) for one in solutions]
            self._every[key] = tuple(every)
        return self._every[key]

    # --- priced

    def unsplit(self, key: LayoutKey) -> PricedLayout:
        """What the parts of a key's layouts are taken of: the layout with neither a context- nor a tensor-parallel axis.

        Where the key has one of these axes, as no padding of vocabularies and no alignment takes it below
        (:meth:`autopar.hardware.device.Device.at_best`): a part of it is then a floor. Where it has none, this is its layout.
        """
        if key.cp == key.tp == 1:
            return self.price(TypedLayout(key=key, kind="", solution=None))
        memo = self.memo(replace(key.unsplit, vocab_multiple=1))
        if memo.at_best is None:
            memo.at_best = self._at_best(replace(key.unsplit, vocab_multiple=1))
        return memo.at_best

    def _at_best(self, key: LayoutKey) -> PricedLayout:
        """A layout without axes at the least that any padding and alignment makes of it; itself where it is that."""
        layout, works = self.unsplit(key), self.graphs.block_pricing(key, "").unsplit().works
        costs = [self.model.price(work, self.graphs.mesh(key), at_best=True) for work in works]
        if all(costs[number] == cost for number, cost in zip(layout.keys, layout.costs, strict=True)):
            return layout
        made = self._of_equal_parameters([costs[number] for number in layout.keys], layout.keys)
        return replace(layout, identity=f"{layout.identity} at best", costs=made, at_best=True)

    def price(self, typed: TypedLayout) -> PricedLayout:
        """The layout with the costs of its blocks."""
        priced = self.memo(typed.key).priced
        if typed.identity not in priced:
            priced[typed.identity] = self._priced(typed)
        return priced[typed.identity]

    def is_priced(self, typed: TypedLayout) -> bool:
        """Whether :meth:`price` was asked for a layout."""
        return typed.identity in self.memo(typed.key).priced

    def _priced(self, typed: TypedLayout) -> PricedLayout:
        key, kind, solution = typed.key, typed.kind, typed.solution
        pricing = self.graphs.block_pricing(key, kind)
        blocks = pricing.unsplit() if solution is None else pricing.of(solution)
        return PricedLayout(
            key=key,
            kind=kind,
            solution=solution,
            identity=typed.identity,
            sequence=self.graphs.sequence(key, kind) if key.cp > 1 else None,
            costs=self._of_equal_parameters(blocks.costs, blocks.keys),
            keys=blocks.keys,
            prelude_s=blocks.prelude_s,
            padding=padding_of(pricing.graph),
            totals=tuple(pricing.graph.spec(ref).num_bytes for ref in pricing.graph.sums),
        )

    def _of_equal_parameters(self, costs: Sequence[BlockCost], keys: Sequence[int]) -> tuple[BlockCost, ...]:
        """Blocks with equal parameters have the same ones: what data axes add to them is worked out once."""
        made: dict[int, BlockCost] = {}
        for key, cost in zip(keys, costs, strict=True):
            if key not in made:
                parameters = self._parameters.setdefault(cost.parameters, cost.parameters)
                made[key] = cost if parameters is cost.parameters else replace(cost, parameters=parameters)
        return tuple([made[key] for key in keys])

    def on_device(self, layout: PricedLayout, part: CostModel) -> PricedLayout:
        """A layout of :meth:`price` as the devices of ``part`` run it."""
        if part is self.model:
            return layout
        identity = f"{layout.identity} on {sorted(part.places or ())}"
        if identity not in self._on_device:
            pricing, mesh = self.graphs.block_pricing(layout.key, layout.kind), self.graphs.mesh(layout.key)
            blocks = pricing.unsplit() if layout.solution is None else pricing.of(layout.solution)
            parameters = {number: cost.parameters for number, cost in zip(layout.keys, layout.costs, strict=True)}
            costs = [
                replace(part.price(work, mesh, at_best=layout.at_best), parameters=parameters[k])
                for k, work in enumerate(blocks.works)
            ]
            self._on_device[identity] = replace(
                layout,
                identity=identity,
                costs=tuple(costs[k] for k in layout.keys),
                prelude_s=part.prelude_time_s(blocks.prelude),
            )
        return self._on_device[identity]

    def local_graph(self, layout: PricedLayout) -> Graph:
        """One rank's graph of one micro-batch."""
        graph, solution = self.graphs.before_tp(layout.key, layout.kind).graph, layout.solution
        if solution is None:
            return graph
        return shard(graph, solution.typing)
