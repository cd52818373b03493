"""Layouts to choose from: for a layout key the typings worth having, then the same with the costs of their blocks.

Everything happens on the compact graph and is kept: many candidates of a search share it. Typings on ``tp`` are the exact optimum for each
of several prices of memory, solved for when they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.cost.blocks.block_work import BlockWork
from autopar.cost.model import CostModel
from autopar.errors import InfeasibleError
from autopar.graph.graph import Graph, Op
from autopar.graph.rewrites import compact
from autopar.plan.mesh import Type
from autopar.planner.layouts.layout import LayoutKey, PricedLayout, TypedLayout
from autopar.planner.layouts.rank_graphs import RankGraphs, padding_of
from autopar.planner.sharding.block_chain import AxisSolver, every_typing
from autopar.planner.sharding.block_table import AxisCosts, Narrow
from autopar.planner.sharding.energy import Weights
from autopar.planner.sharding.strategy_energy import rests_of
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space
from autopar.rules.apply import shard
from autopar.rules.local_graphs import EXPERTS
from autopar.rules.other_kernels import EXPERT_TARGETS
from autopar.rules.strategy import Strategy

TP = "tp"
SPREAD_EXPERTS = "autopar.experts_dispatch"
MIXTURES = (EXPERTS, SPREAD_EXPERTS)

Order = tuple[int, int]
"""Orders of magnitude of the micro-batches over which a gradient sum is spread, and of those that a stage holds."""


def pinned_types(graph: Graph, pins: Pins) -> dict[str, Type]:
    """Types at rest of the parameters that are pinned, by name; the last pin that matches wins."""
    types: dict[str, Type] = {}
    for pin in pins.parameters:
        types |= {p.name: pin.type for p in graph.parameters if pin.matches((p.key, p.fqn, *p.aliases))}
    return types


@dataclass(slots=True, kw_only=True)
class LayoutMemo:
    """What is known of the layouts of one key; another process can take it over.

    Attributes:
        typed: by the orders of magnitude of their micro-batches.
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
        graphs: of one rank before axis ``tp``, what the layouts are made from.
        pinned: types at rest of the parameters that are pinned, by name.
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
        self.graph, self.model, self.space, self.pins, self.narrow = graph, model, space, pins, narrow
        is_selective = "selective" in {*space.recompute, *pins.recompute(graph).values()}
        self.pinned = pinned_types(graph, pins)
        parameters = [graph.block_parameters(block) for block in graph.blocks] if self.pinned else []
        self.compact = compact(graph, keys=[tuple(self.pinned.get(p.name) for p in own) for own in parameters])
        self.graphs = RankGraphs(
            graph, self.compact, model, global_batch_size=global_batch_size, pins=pins, is_selective=is_selective
        )
        self.batch = self.graphs.batch
        self._solvers: dict[tuple[LayoutKey, str], AxisSolver] = {}
        self._memos: dict[LayoutKey, LayoutMemo] = {}
        self._every: dict[LayoutKey, tuple[TypedLayout, ...]] = {}
        self._on_device: dict[str, PricedLayout] = {}
        self._local: dict[str, tuple[Graph, tuple[BlockWork, ...]]] = {}  # of layouts that several devices run

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

    def typed(self, key: LayoutKey, *, num_micro_batches: int, in_flight: int) -> tuple[TypedLayout, ...]:
        """The layouts that some price of memory makes best, from lean to fast, before anything is priced.

        Args:
            num_micro_batches: over which a gradient sum is spread; the order of magnitude alone counts.
            in_flight: micro-batches that a stage holds, likewise.

        Raises:
            InfeasibleError: the pins of parameters allow none.
        """
        typed = self.memo(key).typed
        order = (_round(num_micro_batches), _round(in_flight)) if key.tp > 1 else (1, 1)
        if order not in typed:
            typed[order] = self._every_typed(key) or self._front(key, order)
        return typed[order]

    def _front(self, key: LayoutKey, order: Order) -> tuple[TypedLayout, ...]:
        """The best typing at each price of memory, from the leanest to the quickest."""
        kinds = self.graphs.kinds(key)
        if key.tp == 1:
            return tuple(TypedLayout(key=key, kind=kind, solution=None) for kind in kinds)
        num_micro_batches, in_flight = order
        solvers = [self.solver(key, kind) for kind in kinds]
        byte_s = min(solver.quickest.value for solver in solvers) / self.model.device.memory_bytes
        weights = [
            Weights(per_step_s=1 / num_micro_batches, saved_byte=price * in_flight, state_byte=price)
            for price in (ratio * byte_s for ratio in sorted(self.space.price_ratios, reverse=True))
        ]
        front: dict[str, TypedLayout] = {}
        for at_price in zip(*(solver.solve_all(weights) for solver in solvers), strict=True):
            for kind, solution in zip(kinds, at_price, strict=True):
                typed = TypedLayout(key=key, kind=kind, solution=solution)
                front.setdefault(typed.identity, typed)
        return tuple(front.values())

    def _every_typed(self, key: LayoutKey) -> tuple[TypedLayout, ...]:
        """All of them where the space asks for it and they are few; else none."""
        if not self.space.every or key.tp == 1:
            return ()
        if key not in self._every:
            every = [(kind, every_typing(self.solver(key, kind), self.space.every)) for kind in self.graphs.kinds(key)]
            few = all(some is not None for _, some in every)
            self._every[key] = tuple(
                TypedLayout(key=key, kind=kind, solution=one) for kind, some in every if few for one in some or ()
            )
        return self._every[key]

    def solver(self, key: LayoutKey, kind: str) -> AxisSolver:
        """The solver of all typings of a key and kind of attention.

        Raises:
            InfeasibleError: a pinned parameter does not divide, or pins leave an operator no strategy.
        """
        if (key, kind) not in self._solvers:
            compact = self.graphs.before_tp(key, kind)
            costs = AxisCosts(
                graph=compact.graph,
                axis=TP,
                size=key.tp,
                pricing=self.graphs.axis_pricing(TP, key),
                owners=self.graphs.owners,
                rests=self._rests(compact.graph, key.tp),
                narrow=partial(self._kept, key),
            )
            self._solvers[key, kind] = AxisSolver(compact, costs, self.graphs.structures)
        return self._solvers[key, kind]

    def _kept(self, key: LayoutKey, op: Op, offered: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """Those of an operator's strategies that it may take; the pins of ``ep`` say whether experts are split over ``tp`` as well."""
        if self.narrow is not None:
            offered = self.narrow(op, offered)
        if op.target not in MIXTURES:
            return offered
        outside = key.ep_data if op.target == SPREAD_EXPERTS else 1
        return tuple(
            s for s in offered if self.pins.allows("ep", outside * (key.tp if s.target in EXPERT_TARGETS else 1))
        )

    def _rests(self, graph: Graph, tp: int) -> Mapping[str, Sequence[Type]]:
        rests: dict[str, Sequence[Type]] = {}
        for parameter in graph.parameters:
            pinned = self.pinned.get(parameter.name)
            if pinned is not None:
                if pinned not in rests_of(parameter.spec, tp):
                    raise InfeasibleError(
                        f"The parameter {parameter.key} of shape {parameter.spec.shape} cannot be split as {pinned} with tp={tp}",
                        fix="Pin another dim or another tp",
                    )
                rests[parameter.name] = (pinned,)
        return rests

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
        layout = self.unsplit(key)
        _, works = self.graphs.works(self.local_graph(layout))
        prices = [self.model.price(work, self.graphs.mesh(key), at_best=True) for work in works]
        if all(prices[number] == cost for number, cost in zip(layout.keys, layout.costs, strict=True)):
            return layout
        costs = tuple(prices[number] for number in layout.keys)
        return replace(layout, identity=f"{layout.identity} at best", costs=costs, at_best=True)

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
        whole = self.graphs.before_tp(key, kind).graph
        graph = whole if solution is None else shard(whole, solution.typing)
        keys, works = self.graphs.works(graph)
        prices = [self.model.price(work, self.graphs.mesh(key)) for work in works]
        return PricedLayout(
            key=key,
            kind=kind,
            solution=solution,
            identity=typed.identity,
            sequence=self.graphs.sequence(key, kind) if key.cp > 1 else None,
            costs=tuple(prices[number] for number in keys),
            keys=keys,
            prelude_s=self.model.prelude_time_s(graph),
            padding=padding_of(whole),
            totals=tuple(whole.spec(ref).num_bytes for ref in whole.sums),
        )

    def on_device(self, layout: PricedLayout, part: CostModel) -> PricedLayout:
        """A layout of :meth:`price` as the devices of ``part`` run it."""
        if part is self.model:
            return layout
        identity = f"{layout.identity} on {sorted(part.places or ())}"
        if identity not in self._on_device:
            if layout.identity not in self._local:
                graph = self.local_graph(layout)
                self._local[layout.identity] = graph, self.graphs.works(graph)[1]
            graph, works = self._local[layout.identity]
            mesh = self.graphs.mesh(layout.key)
            prices = [part.price(work, mesh, at_best=layout.at_best) for work in works]
            self._on_device[identity] = replace(
                layout,
                identity=identity,
                costs=tuple(prices[number] for number in layout.keys),
                prelude_s=part.prelude_time_s(graph),
            )
        return self._on_device[identity]

    def local_graph(self, layout: PricedLayout) -> Graph:
        """One rank's graph of one micro-batch."""
        graph, solution = self.graphs.before_tp(layout.key, layout.kind).graph, layout.solution
        return graph if solution is None else shard(graph, solution.typing)


def _round(n: int) -> int:
    """The power of 8 at or below: layouts change with the order of magnitude alone."""
    return int(8 ** ((n.bit_length() - 1) // 3))
