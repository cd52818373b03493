"""The layouts to choose from: for each layout key the typings worth having, then the same with the costs of their blocks.

All work is done on the compact graph and is cached, as many candidates of a search share it. Typings on ``tp`` are exact optima for each of
several prices of memory. They are solved when they are first needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from autopar.cost.blocks.block_work import BlockWork
from autopar.cost.model import CostModel
from autopar.errors import InfeasibleError
from autopar.graph.graph import Graph, Op
from autopar.graph.rewrites import compact
from autopar.plan.mesh import Type
from autopar.planner.layouts.layout import LayoutKey, PricedLayout, TypedLayout, every_typing
from autopar.planner.layouts.rank_graphs import RankGraphs, padding_of
from autopar.planner.sharding.block_chain import AxisSolver
from autopar.planner.sharding.block_table import AxisCosts, Narrow
from autopar.planner.sharding.energy import Weights
from autopar.planner.sharding.strategy_energy import rests_of
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space
from autopar.rules.apply import shard
from autopar.rules.local_calls import EXPERTS
from autopar.rules.other_kernels import EXPERT_TARGETS
from autopar.rules.strategy import Strategy

TP = "tp"
SPREAD_EXPERTS = "autopar.experts_dispatch"
MIXTURES = (EXPERTS, SPREAD_EXPERTS)

Order = tuple[int, int]
"""The order of magnitude of the number of micro-batches in a step, and that of the micro-batches that a stage holds; see :func:`_magnitude`."""


def pinned_types(graph: Graph, pins: Pins) -> dict[str, Type]:
    """Return the types at rest of the parameters that are pinned, by name; the last pin that matches decides."""
    types: dict[str, Type] = {}
    for pin in pins.parameters:
        types |= {p.name: pin.type for p in graph.parameters if pin.matches((p.key, p.fqn, *p.aliases))}
    return types


class Layouts:
    """All layouts of one model on one cluster.

    Args:
        graph: the traced graph.
        model: the cost model.
        global_batch_size: samples of a step.
        pins: the pins of parameters, of ``ep`` and of attention on ``cp``.
        space: the search space, with the prices of memory and the number of layouts up to which all are tried.
        narrow: restricts the strategies of operators on ``tp``; None restricts nothing.

    Attributes:
        compact: the compact graph.
        batch: the typing on axis ``batch``.
        graphs: the graphs of one rank before axis ``tp``, from which layouts are made.
        pinned: the types at rest of the parameters that are pinned, by name.
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
        self.compact = compact(graph, keys=[tuple(self.pinned.get(p.name) for p in block) for block in parameters])
        self.graphs = RankGraphs(
            graph, self.compact, model, global_batch_size=global_batch_size, pins=pins, is_selective=is_selective
        )
        self.batch = self.graphs.batch
        self._solvers: dict[tuple[LayoutKey, str], AxisSolver] = {}
        self._typed: dict[tuple[LayoutKey, Order], tuple[TypedLayout, ...]] = {}
        self._prices: dict[str, PricedLayout] = {}  # by identity
        self._at_best: dict[LayoutKey, PricedLayout] = {}
        self._every: dict[LayoutKey, tuple[TypedLayout, ...]] = {}
        self._on_device: dict[str, PricedLayout] = {}
        self._local: dict[str, tuple[Graph, tuple[int, ...], tuple[BlockWork, ...]]] = {}  # by identity of the layout

    @property
    def prelude(self) -> tuple[str, ...]:
        """The names of the strategies of the prelude on axis ``batch``."""
        return tuple(self.batch.strategies[op.name].name for op in self.graph.prelude)

    # --- typed

    def typed(self, key: LayoutKey, *, num_micro_batches: int, in_flight: int) -> tuple[TypedLayout, ...]:
        """Return the layouts that are best at some price of memory, from lean to fast, before they are priced.

        All layouts of a small problem are returned, if the space asks for that.

        Args:
            key: the key of the layouts.
            num_micro_batches: micro-batches of a step, over which a gradient sum is spread; only the order of magnitude matters.
            in_flight: micro-batches that a stage holds; only the order of magnitude matters.

        Raises:
            InfeasibleError: the pins of parameters allow no layout.
        """
        order = (_magnitude(num_micro_batches), _magnitude(in_flight)) if key.tp > 1 else (1, 1)
        if (key, order) not in self._typed:
            self._typed[key, order] = self._every_typed(key) or self._front(key, order)
        return self._typed[key, order]

    def _front(self, key: LayoutKey, order: Order) -> tuple[TypedLayout, ...]:
        """Return the best typing at each price of memory, from the leanest to the quickest."""
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
        for solutions in zip(*(solver.solve_all(weights) for solver in solvers), strict=True):
            for kind, solution in zip(kinds, solutions, strict=True):
                typed = TypedLayout(key=key, kind=kind, solution=solution)
                front.setdefault(typed.identity, typed)
        return tuple(front.values())

    def _every_typed(self, key: LayoutKey) -> tuple[TypedLayout, ...]:
        """Return all typed layouts of a key if the space asks for that and they are few enough; else an empty tuple."""
        if not self.space.max_enumerated or key.tp == 1:
            return ()
        if key not in self._every:
            lists = [
                (kind, every_typing(self.solver(key, kind), self.space.max_enumerated))
                for kind in self.graphs.kinds(key)
            ]
            few = all(typings is not None for _, typings in lists)
            self._every[key] = tuple(
                TypedLayout(key=key, kind=kind, solution=t) for kind, typings in lists if few for t in typings or ()
            )
        return self._every[key]

    def solver(self, key: LayoutKey, kind: str) -> AxisSolver:
        """Return the solver of all typings of a key and kind of attention.

        Raises:
            InfeasibleError: the type of a pinned parameter does not divide it, or the pins leave an operator no strategy.
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
                narrow=partial(self._allowed_strategies, key),
            )
            self._solvers[key, kind] = AxisSolver(compact, costs, self.graphs.structures)
        return self._solvers[key, kind]

    def _allowed_strategies(self, key: LayoutKey, op: Op, offered: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """Return the strategies that an operator may take; the pins of ``ep`` say whether experts are also split over ``tp``."""
        if self.narrow is not None:
            offered = self.narrow(op, offered)
        if op.target not in MIXTURES:
            return offered
        degree = key.ep_data if op.target == SPREAD_EXPERTS else 1
        return tuple(
            s for s in offered if self.pins.allows("ep", degree * (key.tp if s.target in EXPERT_TARGETS else 1))
        )

    def _rests(self, graph: Graph, tp: int) -> Mapping[str, Sequence[Type]]:
        """Return the types at rest of the pinned parameters, by name.

        Raises:
            InfeasibleError: the pinned type does not divide the parameter.
        """
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
        """Return the layout without ``cp`` and ``tp`` from which floors for the layouts of a key are derived.

        If the key has one of these axes, its costs are those of devices at their best rates, which padding of vocabularies and alignment
        cannot improve (:meth:`autopar.hardware.device.Device.at_best`): the share of a rank in them is a floor. Otherwise it is the layout
        of the key.
        """
        if key.cp == key.tp == 1:
            return self.price(TypedLayout(key=key, kind="", solution=None))
        unsplit = LayoutKey(micro_batch_size=key.micro_batch_size, ep_data=key.ep_data)
        if unsplit not in self._at_best:
            layout = self.unsplit(unsplit)
            prices = [self.model.price(work, self.graphs.mesh(unsplit), at_best=True) for work in self._work(layout)[2]]
            costs = tuple(prices[number] for number in layout.keys)
            identity = f"{layout.identity} at best"
            self._at_best[unsplit] = replace(layout, identity=identity, costs=costs, at_best=True)
        return self._at_best[unsplit]

    def price(self, typed: TypedLayout) -> PricedLayout:
        """Return the layout with the costs of its blocks."""
        if typed.identity not in self._prices:
            self._prices[typed.identity] = self._priced(typed)
        return self._prices[typed.identity]

    def is_priced(self, typed: TypedLayout) -> bool:
        """Return whether :meth:`price` has been called for a layout."""
        return typed.identity in self._prices

    def _priced(self, typed: TypedLayout) -> PricedLayout:
        """Return the layout with the costs of its blocks, worked out anew."""
        key, kind, solution = typed.key, typed.kind, typed.solution
        graph, keys, works = self._work(typed)
        before_tp = self.graphs.before_tp(key, kind).graph
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
            padding=padding_of(before_tp),
            totals=tuple(before_tp.spec(ref).num_bytes for ref in before_tp.sums),
        )

    def on_device(self, layout: PricedLayout, part: CostModel) -> PricedLayout:
        """Return a layout at the prices of the devices of ``part``.

        Args:
            layout: a layout of :meth:`price`.
            part: the cost model of some of the node groups.
        """
        if part is self.model:
            return layout
        identity = f"{layout.identity} on {sorted(part.places or ())}"
        if identity not in self._on_device:
            graph, _, works = self._work(layout)
            mesh = self.graphs.mesh(layout.key)
            prices = [part.price(work, mesh, at_best=layout.at_best) for work in works]
            self._on_device[identity] = replace(
                layout,
                identity=identity,
                costs=tuple(prices[number] for number in layout.keys),
                prelude_s=part.prelude_time_s(graph),
            )
        return self._on_device[identity]

    def _work(self, layout: TypedLayout | PricedLayout) -> tuple[Graph, tuple[int, ...], tuple[BlockWork, ...]]:
        """Return the graph of a layout, for each block the number of its work, and the works, which devices of any kind price."""
        if layout.identity not in self._local:
            graph = self.local_graph(layout)
            self._local[layout.identity] = graph, *self.graphs.works(graph)
        return self._local[layout.identity]

    def local_graph(self, layout: TypedLayout | PricedLayout) -> Graph:
        """Return the graph of one micro-batch on one rank."""
        graph, solution = self.graphs.before_tp(layout.key, layout.kind).graph, layout.solution
        return graph if solution is None else shard(graph, solution.typing)


def _magnitude(n: int) -> int:
    """Return the largest power of 8 that is at most ``n``, as layouts hardly change within an order of magnitude."""
    return int(8 ** ((n.bit_length() - 1) // 3))
