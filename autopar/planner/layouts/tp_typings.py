"""Typings on ``tp``: solved for when they are asked for, under prices of memory or by the rule of a space.

Everything happens on the compact graph and is kept: many layouts share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from autopar.cost.model import BlockCost, CostModel
from autopar.errors import InfeasibleError
from autopar.graph.compact import Compact
from autopar.graph.ir import Graph, Op
from autopar.layout import Type
from autopar.planner.layouts.padding import padded
from autopar.planner.layouts.rank_graphs import Bases
from autopar.planner.layouts.types import Load, Split
from autopar.planner.layouts.uncounted import sums_s
from autopar.planner.sharding.block_chain import AxisSolution, AxisSolver
from autopar.planner.sharding.block_table import Common, Narrow, Saved
from autopar.planner.sharding.loops import least_moved_s
from autopar.planner.sharding.resharding import Structures
from autopar.planner.sharding.ruled import Changes, Ruled, SplitWeights, changes_of, moved_s
from autopar.planner.sharding.strategy_energy import rests_of
from autopar.planner.sharding.tables import Cost, Weights
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space
from autopar.rules.sharded import EXPERT_TARGETS
from autopar.rules.spread import EXPERTS
from autopar.rules.types import Strategy
from autopar.weak import weakly

TP = "tp"
SPREAD_EXPERTS = "autopar.experts_dispatch"
MIXTURES = (EXPERTS, SPREAD_EXPERTS)


class Solving:
    """All typings on ``tp`` of one model on one cluster.

    Args:
        compact: the compact graph.
        bases: graphs before the axis is applied.
        model: the cost model.
        pins: of parameters, by which ``pinned`` are, by name.
        space: which prices of memory are tried, or that layouts follow the rule.
        narrow: keeps those of an operator's strategies that it may take; None: all.
        costs: of the blocks of a layout without this axis, for a kind of attention.
    """

    def __init__(
        self,
        compact: Compact,
        bases: Bases,
        model: CostModel,
        *,
        pins: Pins,
        pinned: Mapping[str, Type],
        space: Space,
        narrow: Narrow | None,
        costs: Callable[[Split, str], Sequence[BlockCost]],
    ) -> None:
        self.compact, self.bases, self.model, self.space = compact, bases, model, space
        self.pins, self.pinned, self.narrow, self.costs = pins, pinned, narrow, costs
        self.by_rule = space.layouts == "rule"
        self._ruled = Ruled(
            solve=weakly(self._solved), base=weakly(self._base), allowed=weakly(self._narrow),
            rule=weakly(self._rule), rests=weakly(self._rests),
        )  # fmt: skip
        # those of searched layouts are many
        self._structures: Structures = (
            compact.graph.passes.setdefault(Structures, Structures()) if self.by_rule else Structures()
        )
        self._solvers: dict[tuple[Split, str], AxisSolver] = {}
        self._costs: dict[tuple[int, int, int], dict[tuple[object, ...], Cost | None]] = {}
        """Of changes of type, by what of a split decides the groups that communicate."""
        self._wide: dict[tuple[Split, str], Compact] = {}
        self._saved: dict[int, Saved] = {}  # by the id of a graph, which is kept
        self._rules: dict[tuple[Split, str], SplitWeights] = {}
        self._solutions: dict[tuple[Split, str, tuple[int, int], float], AxisSolution] = {}
        self._least: dict[Split, float] = {}
        self._sums: dict[tuple[Split, str], tuple[float, ...]] = {}
        self._changes: dict[tuple[int, int], tuple[AxisSolution, Graph, Changes]] = {}
        self._moved: dict[Split, float] = {}

    def solution(self, split: Split, kind: str, order: tuple[int, int], ratio: float) -> AxisSolution | None:
        """The typing on ``tp``; None where there is no such axis."""
        if split.tp == 1:
            return None
        if self.by_rule:
            return self._by_rule(split, kind)
        key = (split, kind, order, ratio)
        if key not in self._solutions:
            self._solve(split, kind, [order])
        return self._solutions[key]

    def solve_ahead(self, split: Split, loads: Iterable[Load]) -> None:
        """Solve for all of these at once, which is quicker than one after the other."""
        for kind in self.bases.kinds(split) if split.tp > 1 and not self.by_rule else ():
            self._solve(split, kind, dict.fromkeys(load.order for load in loads))

    def _solve(self, split: Split, kind: str, orders: Iterable[tuple[int, int]]) -> None:
        keys = [(split, kind, order, ratio) for order in orders for ratio in self.space.price_ratios]
        keys = [key for key in keys if key not in self._solutions]
        if not keys:
            return
        weights = []
        for _, _, (num_micro_batches, in_flight), ratio in keys:
            price = ratio * self._least_s(split) / self.model.device.memory_bytes
            weights.append(Weights(per_step_s=1 / num_micro_batches, saved_byte=price * in_flight, state_byte=price))
        self._solutions |= zip(keys, self.solver(split, kind).solve_all(weights), strict=True)

    def sums_s(self, split: Split, kind: str) -> tuple[float, ...]:
        """What no table of a solver counts; see :func:`autopar.planner.layouts.uncounted.sums_s`."""
        if (split, kind) not in self._sums:
            self._sums[split, kind] = sums_s(self.bases.base(split, kind).graph, self.model, split.tp)
        return self._sums[split, kind]

    def _least_s(self, split: Split) -> float:
        if split not in self._least:
            self._least[split] = min(self._least_of_kind_s(split, kind) for kind in self.bases.kinds(split))
        return self._least[split]

    def _least_of_kind_s(self, split: Split, kind: str) -> float:
        if split.tp > 1:
            return self.solver(split, kind).quickest().value
        costs = self.costs(split, kind)
        counts = [len(m) for m in self.compact.members]
        return sum(n * (c.forward_s + c.backward_s) for n, c in zip(counts, costs, strict=True))

    def _by_rule(self, split: Split, kind: str) -> AxisSolution:
        """The typing by rule, with times that its blocks do not go below: a part of the whole, and its collectives."""
        key = (split, kind, (1, 1), 0.0)
        if key not in self._solutions:
            found = self._ruled.solution(split, kind)
            whole = self.costs(Split(micro_batch_size=split.micro_batch_size, ep_data=split.ep_data), "")
            graph, pricing = self._padded(split, kind).graph, self.bases.pricing(TP, split)
            share = 0.0 if self.model.measured is not None else 1.0 / (split.cp * split.tp)
            own = (share * (cost.forward_s + cost.backward_s) for cost in whole)
            changes = self._changes_of(found, graph)
            sent = moved_s(graph, found.typing, changes, pricing.collective_time_s)
            each = tuple(map(sum, zip(own, sent, strict=True)))
            time_s = sum(len(members) * s for members, s in zip(self.compact.members, each, strict=True))
            self._solutions[key] = replace(found, time_s=time_s, blocks_s=each)
        return self._solutions[key]

    def _changes_of(self, solution: AxisSolution, graph: Graph) -> Changes:
        """What of a typing by rule takes collectives: once for graphs of equal wiring and what follows from one solution."""
        key = id(solution.blocks), id(graph._index.named)  # both are kept too, so that their ids stay their own
        if key not in self._changes:
            self._changes[key] = solution, graph, changes_of(graph, solution.typing)
        return self._changes[key][2]

    def least_moved_s(self, split: Split) -> float:
        """Seconds that collectives on ``tp`` take at least of a micro-batch in its layout by rule, before that is solved.

        Zero where that is not known: there is another axis inside of the model.
        """
        if split.tp == 1 or split.cp > 1 or split.ep_data > 1:
            return 0.0
        if split not in self._moved:
            time_s = self.bases.pricing(TP, split).collective_time_s
            base = self.bases.base(split, "")
            rule = SplitWeights(base.graph, self.pinned, partial(weakly(self._narrow), split))
            self._moved[split] = least_moved_s(base, rule, split.tp, time_s)
        return self._moved[split]

    def _rule(self, split: Split, kind: str) -> SplitWeights:
        key = (split, kind)
        if key not in self._rules:
            graph, narrow = self._padded(split, kind).graph, partial(weakly(self._narrow), split)
            self._rules[key] = SplitWeights(graph, self.pinned, narrow)
        return self._rules[key]

    def _padded(self, split: Split, kind: str) -> Compact:
        """The graph before ``tp``, its vocabularies as long as that wants them."""
        key = (split, kind)
        if key not in self._wide:
            self._wide[key] = padded(self.bases.base(split, kind), split.tp)
        return self._wide[key]

    def _base(self, split: Split, kind: str) -> Graph:
        return self._padded(split, kind).graph

    def _solved(self, split: Split, kind: str, weights: Weights) -> AxisSolution:
        return self.solver(split, kind).solve(weights)

    def solver(self, split: Split, kind: str) -> AxisSolver:
        key = (split, kind)
        if key not in self._solvers:
            base = self._padded(split, kind)
            self._solvers[key] = AxisSolver(
                base,
                axis=TP,
                size=split.tp,
                pricing=self.bases.pricing(TP, split),
                rests=self._rests(base.graph, split.tp),
                narrow=self._rule(split, kind) if self.by_rule else partial(weakly(self._narrow), split),
                common=Common(
                    structures=self._structures,
                    changes=self._costs.setdefault((split.cp, split.tp, split.ep_data), {}),
                    saved=self._saved.setdefault(id(base.graph), Saved()),
                ),
            )
        return self._solvers[key]

    def _narrow(self, split: Split, op: Op, offered: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """Experts are split over ``tp`` as well or not: what the pins of ``ep`` say of it."""
        if self.narrow is not None:
            offered = self.narrow(op, offered)
        if op.target not in MIXTURES:
            return offered
        outside = split.ep_data if op.target == SPREAD_EXPERTS else 1
        return tuple(
            s for s in offered if self.pins.allows("ep", outside * (split.tp if s.target in EXPERT_TARGETS else 1))
        )

    def _rests(self, graph: Graph, tp: int) -> Mapping[str, Sequence[Type]]:
        rests: dict[str, Sequence[Type]] = {}
        for parameter in graph.parameters if self.pinned else ():
            pinned = self.pinned.get(parameter.name)
            if pinned is not None:
                if pinned not in rests_of(parameter.spec, tp):
                    raise InfeasibleError(
                        "a pinned parameter divides by the axis",
                        value=f"{parameter.key} of shape {parameter.spec.shape} as {pinned} with tp={tp}",
                        remedy="pin another dim or another tp",
                    )
                rests[parameter.name] = (pinned,)
        return rests


def pinned_types(graph: Graph, pins: Pins) -> dict[str, Type]:
    """Types at rest of the parameters that are pinned, by name; the last pin that matches wins."""
    found: dict[str, Type] = {}
    for pin in pins.parameters:
        found |= {p.name: pin.type for p in graph.parameters if pin.matches((p.key, p.fqn, *p.aliases))}
    return found
