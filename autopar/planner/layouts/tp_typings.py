"""Typings on ``tp``: solved for when they are asked for, under prices of memory.

Everything happens on the compact graph and is kept: many layouts share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from autopar.cost.blocks.activation_lifetimes import wiring_of
from autopar.cost.blocks.block_work import fan_in_bytes
from autopar.cost.model import BlockCost, CostModel
from autopar.errors import InfeasibleError
from autopar.graph.compact import Compact
from autopar.graph.ir import Graph, Op
from autopar.layout import Type
from autopar.planner.layouts.rank_graphs import Bases
from autopar.planner.layouts.types import LayoutKey, Load
from autopar.planner.sharding.block_chain import AxisSolution, AxisSolver
from autopar.planner.sharding.block_table import Common, Narrow, Saved
from autopar.planner.sharding.resharding import Structures
from autopar.planner.sharding.strategy_energy import rests_of
from autopar.planner.sharding.tables import Cost, Weights
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space
from autopar.rules.sharded import EXPERT_TARGETS
from autopar.rules.spread import EXPERTS
from autopar.rules.types import Strategy

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
        space: which prices of memory are tried.
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
        costs: Callable[[LayoutKey, str], Sequence[BlockCost]],
    ) -> None:
        self.compact, self.bases, self.model, self.space = compact, bases, model, space
        self.pins, self.pinned, self.narrow, self.costs = pins, pinned, narrow, costs
        self._structures = Structures()
        self._solvers: dict[tuple[LayoutKey, str], AxisSolver] = {}
        self._costs: dict[tuple[int, int, int], dict[tuple[object, ...], Cost | None]] = {}
        """Of changes of type, by what of a split decides the groups that communicate."""
        self._saved: dict[int, Saved] = {}  # by the id of a graph, which is kept
        self._solutions: dict[tuple[LayoutKey, str, tuple[int, int], float], AxisSolution] = {}
        self._least: dict[LayoutKey, float] = {}
        self._sums: dict[tuple[LayoutKey, str], tuple[float, ...]] = {}

    def solution(self, split: LayoutKey, kind: str, order: tuple[int, int], ratio: float) -> AxisSolution | None:
        """The typing on ``tp``; None where there is no such axis."""
        if split.tp == 1:
            return None
        key = (split, kind, order, ratio)
        if key not in self._solutions:
            self._solve(split, kind, [order])
        return self._solutions[key]

    def solve_ahead(self, split: LayoutKey, loads: Iterable[Load]) -> None:
        """Solve for all of these at once, which is quicker than one after the other."""
        for kind in self.bases.kinds(split) if split.tp > 1 else ():
            self._solve(split, kind, dict.fromkeys(load.order for load in loads))

    def _solve(self, split: LayoutKey, kind: str, orders: Iterable[tuple[int, int]]) -> None:
        keys = [(split, kind, order, ratio) for order in orders for ratio in self.space.price_ratios]
        keys = [key for key in keys if key not in self._solutions]
        if not keys:
            return
        weights = []
        for _, _, (num_micro_batches, in_flight), ratio in keys:
            price = ratio * self._least_s(split) / self.model.device.memory_bytes
            weights.append(Weights(per_step_s=1 / num_micro_batches, saved_byte=price * in_flight, state_byte=price))
        self._solutions |= zip(keys, self.solver(split, kind).solve_all(weights), strict=True)

    def sums_s(self, split: LayoutKey, kind: str) -> tuple[float, ...]:
        """What no table of a solver counts; see :func:`sums_s`."""
        if (split, kind) not in self._sums:
            self._sums[split, kind] = sums_s(self.bases.base(split, kind).graph, self.model, split.tp)
        return self._sums[split, kind]

    def _least_s(self, split: LayoutKey) -> float:
        if split not in self._least:
            self._least[split] = min(self._least_of_kind_s(split, kind) for kind in self.bases.kinds(split))
        return self._least[split]

    def _least_of_kind_s(self, split: LayoutKey, kind: str) -> float:
        if split.tp > 1:
            return self.solver(split, kind).quickest().value
        costs = self.costs(split, kind)
        counts = [len(m) for m in self.compact.members]
        return sum(n * (c.forward_s + c.backward_s) for n, c in zip(counts, costs, strict=True))

    def solver(self, split: LayoutKey, kind: str) -> AxisSolver:
        key = (split, kind)
        if key not in self._solvers:
            base = self.bases.base(split, kind)
            self._solvers[key] = AxisSolver(
                base,
                axis=TP,
                size=split.tp,
                pricing=self.bases.pricing(TP, split),
                rests=self._rests(base.graph, split.tp),
                narrow=partial(self._narrow, split),
                common=Common(
                    structures=self._structures,
                    changes=self._costs.setdefault((split.cp, split.tp, split.ep_data), {}),
                    saved=self._saved.setdefault(id(base.graph), Saved()),
                ),
            )
        return self._solvers[key]

    def _narrow(self, split: LayoutKey, op: Op, offered: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
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


def sums_s(graph: Graph, model: CostModel, ranks: int) -> tuple[float, ...]:
    """For each block seconds of adding up the gradients of values that several operators read, in any layout on ``ranks``.

    A change of type between a value and its readers is one more value with readers of its own: there are as many sums as
    before, and each is of one part of ``ranks`` at the least. Where devices differ it is not known which of them adds: zeros.
    """
    device = model.device
    bandwidth = device.memory_bandwidth_bytes_per_s * device.kernel_fraction
    if model.is_mixed:
        return (0.0,) * len(graph.blocks)
    known: dict[str, float] = {}
    for block in graph.blocks:
        if block.hash not in known:
            wiring = wiring_of(graph, block)
            sums = fan_in_bytes(graph.block_ops(block), wiring, [graph.spec(ref) for ref in wiring.values])
            known[block.hash] = sum(size / ranks / bandwidth + device.launch_s for size in sums)
    return tuple(known[block.hash] for block in graph.blocks)
