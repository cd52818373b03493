"""Typings on ``tp``: the exact optimum for each of several prices of memory, solved for when they are asked for."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError
from autopar.graph.graph import Graph, Op, Ref
from autopar.plan.mesh import Type
from autopar.planner.layouts.rank_graphs import RankGraphs
from autopar.planner.layouts.types import LayoutKey
from autopar.planner.sharding.block_chain import AxisSolution, AxisSolver
from autopar.planner.sharding.block_table import AxisCosts, Narrow
from autopar.planner.sharding.energy import Cost, Weights
from autopar.planner.sharding.strategy_energy import rests_of
from autopar.planner.space.pins import Pins
from autopar.rules.local_graphs import EXPERTS
from autopar.rules.other_kernels import EXPERT_TARGETS
from autopar.rules.strategy import Strategy

TP = "tp"
SPREAD_EXPERTS = "autopar.experts_dispatch"
MIXTURES = (EXPERTS, SPREAD_EXPERTS)

Order = tuple[int, int]
"""Orders of magnitude of a load; see :attr:`autopar.planner.layouts.types.Load.order`."""


@dataclass(frozen=True, slots=True)
class _ExpertsAsPinned:
    """Keeps the strategies that split experts over ``tp`` as well, or do not: what the pins of ``ep`` say of it.

    Attributes:
        ep_data: data ranks over which experts are split.
        narrow: keeps those of an operator's strategies that it may take otherwise; None: all.
    """

    pins: Pins
    ep_data: int
    tp: int
    narrow: Narrow | None

    def __call__(self, op: Op, offered: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        if self.narrow is not None:
            offered = self.narrow(op, offered)
        if op.target not in MIXTURES:
            return offered
        outside = self.ep_data if op.target == SPREAD_EXPERTS else 1
        return tuple(
            s for s in offered if self.pins.allows("ep", outside * (self.tp if s.target in EXPERT_TARGETS else 1))
        )


class TpTypings:
    """All typings on ``tp`` of one model on one cluster.

    Args:
        graphs: before the axis is applied.
        pins: of parameters and of ``ep``.
        price_ratios: prices of memory that are tried, as the seconds that a rank's whole memory is worth over those of a
            micro-batch in its quickest typing.
        narrow: keeps those of an operator's strategies that it may take; None: all.
    """

    def __init__(self, graphs: RankGraphs, *, pins: Pins, price_ratios: Sequence[float], narrow: Narrow | None) -> None:
        self.graphs, self.pins, self.narrow = graphs, pins, narrow
        self.price_ratios = sorted(price_ratios, reverse=True)
        self.pinned = pinned_types(graphs.graph, pins)
        self._solvers: dict[tuple[LayoutKey, str], AxisSolver] = {}
        self._solutions: dict[tuple[LayoutKey, str, Order], list[AxisSolution]] = {}
        self._changes: dict[LayoutKey, dict[Hashable, Cost | None]] = {}
        """Of changes of type, by what of a key decides the groups that communicate."""
        self._saved: dict[tuple[LayoutKey, str], dict[str, Sequence[Ref]]] = {}
        """What operators keep for backward, by the graph before ``tp``."""

    def solutions(self, key: LayoutKey, kind: str, order: Order) -> list[AxisSolution]:
        """The best typing at each price of memory, from the leanest to the quickest; ``key`` has ``tp`` > 1.

        Raises:
            InfeasibleError: the pins allow none.
        """
        if (key, kind, order) not in self._solutions:
            least_s = min(self.solver(key, own).quickest.value for own in self.graphs.kinds(key))
            num_micro_batches, in_flight = order
            prices = [ratio * least_s / self.graphs.model.device.memory_bytes for ratio in self.price_ratios]
            self._solutions[key, kind, order] = self.solver(key, kind).solve_all(
                [
                    Weights(per_step_s=1 / num_micro_batches, saved_byte=price * in_flight, state_byte=price)
                    for price in prices
                ]
            )
        return self._solutions[key, kind, order]

    def solver(self, key: LayoutKey, kind: str) -> AxisSolver:
        """The solver of all typings of a key and kind of attention.

        Raises:
            InfeasibleError: a pinned parameter does not divide, or pins leave an operator no strategy.
        """
        if (key, kind) not in self._solvers:
            compact = self.graphs.before_tp(key, kind)
            communicating = replace(key, micro_batch_size=1, vocab_multiple=1)
            costs = AxisCosts(
                graph=compact.graph,
                axis=TP,
                size=key.tp,
                pricing=self.graphs.axis_pricing(TP, key),
                owners=self.graphs.owners,
                rests=self._rests(compact.graph, key.tp),
                narrow=_ExpertsAsPinned(self.pins, key.ep_data, key.tp, self.narrow),
                changes=self._changes.setdefault(communicating, {}),
                saved=self._saved.setdefault((self.graphs.key_before_tp(key), kind), {}),
            )
            self._solvers[key, kind] = AxisSolver(compact, costs, self.graphs.structures)
        return self._solvers[key, kind]

    def _rests(self, graph: Graph, tp: int) -> Mapping[str, Sequence[Type]]:
        rests: dict[str, Sequence[Type]] = {}
        for parameter in graph.parameters if self.pinned else ():
            pinned = self.pinned.get(parameter.name)
            if pinned is not None:
                if pinned not in rests_of(parameter.spec, tp):
                    raise InfeasibleError(
                        f"The parameter {parameter.key} of shape {parameter.spec.shape} cannot be split as {pinned} with tp={tp}",
                        fix="Pin another dim or another tp",
                    )
                rests[parameter.name] = (pinned,)
        return rests


def pinned_types(graph: Graph, pins: Pins) -> dict[str, Type]:
    """Types at rest of the parameters that are pinned, by name; the last pin that matches wins."""
    types: dict[str, Type] = {}
    for pin in pins.parameters:
        types |= {p.name: pin.type for p in graph.parameters if pin.matches((p.key, p.fqn, *p.aliases))}
    return types
