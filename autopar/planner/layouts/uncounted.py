"""What blocks take that the tables of a layout do not say, at the least: known of a layout before it is priced."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.blocks.activation_lifetimes import wiring_of
from autopar.cost.blocks.block_work import fan_in_bytes
from autopar.cost.model import CostModel
from autopar.cost.operators.work import VIEWS
from autopar.graph.ir import Block, Graph, Op, Parameter, Ref
from autopar.layout import Type
from autopar.planner.layouts.remade import Freed, Remaking, points_of
from autopar.planner.sharding.block_chain import AxisSolution, AxisSolver
from autopar.planner.sharding.block_table import BlockProblem
from autopar.planner.sharding.tables import FREE, Cost
from autopar.rules.types import Strategy, Typing


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


@dataclass(frozen=True, slots=True)
class Needs:
    """Of a block in a layout at the least: seconds of its forward that full recompute repeats, and bytes kept for backward.

    ``remade``: seconds and freed bytes of selective recompute; see :func:`points_of`.
    """

    again_s: float
    saved_bytes: float
    remade: tuple[Freed, ...] = ()


@dataclass(frozen=True, slots=True)
class _Place:
    """An operator of a block.

    Attributes:
        works: of each strategy that it was offered, by id.
        saved: values that it keeps, with their bytes and the operands (else outputs) that may have them.
        reads: positions of operands that other operators make.
        weights: likewise of parameters, and whether backward needs them: gathered ones are kept as any other value.
    """

    works: Mapping[int, Cost]
    saved: tuple[tuple[Ref, int, bool, tuple[int, ...]], ...]
    reads: tuple[int, ...]
    weights: tuple[tuple[int, Parameter, bool], ...]


class LayoutNeeds:
    """Needs of the layouts of one solver.

    Of each value that backward needs a part and the whole are different storages. Each counts once, as small as the smallest
    view on the way to the first operator that keeps it, because a change of type may have copied that. A forward that is run
    again ends with the last operator that keeps anything; what changes its type before does so again.
    """

    def __init__(self, solver: AxisSolver, *, is_selective: bool = False) -> None:
        self.solver, self.costs, self.is_selective = solver, solver.costs, is_selective
        # problems are kept too, so that their ids stay their own
        self._places: dict[int, tuple[BlockProblem, tuple[_Place, ...], int]] = {}
        self._known: dict[tuple[object, ...], Needs] = {}

    def of(self, solution: AxisSolution) -> tuple[Needs, ...]:
        """Of each block of the compact graph."""
        graph, chosen, found = self.costs.graph, solution.typing.strategies, []
        for key, block, own in zip(self.solver.keys, graph.blocks, solution.blocks, strict=True):
            arrivals = tuple(chosen[ref.name].outputs[ref.index] for ref in graph.block_inputs(block))
            alike = key, own.strategies, own.parameters, arrivals
            if alike not in self._known:
                self._known[alike] = self._of_block(self.solver.problems[key], block, solution.typing)
            found.append(self._known[alike])
        return tuple(found)

    def _of_block(self, solved: BlockProblem, block: Block, typing: Typing) -> Needs:
        """Of the block for which a problem was made, or one equal to it."""
        graph, costs, chosen, rests = self.costs.graph, self.costs, typing.strategies, typing.parameters
        again_s = saved_bytes = 0.0
        changed: set[tuple[Ref, Type]] = set()
        kept: set[tuple[Ref, bool]] = set()
        ops, (places, last) = graph.block_ops(block), self._placed(solved)
        if last >= 0 and chosen[ops[last].name].target:  # another operator, which may keep nothing
            last = -1
        for k, (op, place) in enumerate(zip(ops, places, strict=True)):
            strategy = chosen[op.name]
            work = place.works.get(id(strategy), FREE)
            again_s += work.forward_s
            saved_bytes += work.saved_bytes
            for ref, size, is_read, roles in () if strategy.target else place.saved:
                kinds = strategy.inputs if is_read else strategy.outputs
                is_split = any(kinds[i].is_split for i in roles)
                if (ref, is_split) not in kept:
                    kept.add((ref, is_split))
                    saved_bytes += size / costs.size if is_split else size
            for i in place.reads if k <= last else ():
                ref, wanted = op.operands[i], strategy.inputs[i]
                made = chosen[ref.name].outputs[ref.index]
                if made != wanted and (ref, wanted) not in changed:
                    changed.add((ref, wanted))
                    again_s += (costs.change(graph.spec(ref), made, wanted) or FREE).forward_s
            for i, parameter, is_kept in place.weights:
                ref, rest, wanted = op.operands[i], rests[op.operands[i].name], strategy.inputs[i]
                if not rest.is_split or wanted.is_split or (ref, wanted) in changed:
                    continue
                changed.add((ref, wanted))
                again_s += (costs.use(parameter, rest, wanted) or FREE).forward_s * (k <= last)
                if is_kept and not strategy.target and (ref, False) not in kept:
                    kept.add((ref, False))
                    saved_bytes += parameter.spec.num_bytes
        return Needs(again_s, saved_bytes, self._remade(ops, places, chosen) if self.is_selective else ())

    def _remade(self, ops: Sequence[Op], places: Sequence[_Place], chosen: Mapping[str, Strategy]) -> tuple[Freed, ...]:
        """See :attr:`Needs.remade`; the places may be those of an equal block."""
        costs = self.costs
        held: set[tuple[Ref, bool]] = set()
        remaking = Remaking(graph=costs.graph, chosen=chosen, root_of=costs.root, size=costs.size, held=held)
        for op, place in zip(ops, places, strict=True):
            strategy = chosen[op.name]
            work = place.works.get(id(strategy), FREE)
            remaking.add(op, work.forward_s)
            remaking.keeps(op.name, work.saved_bytes)
            for _, size, is_read, roles in () if strategy.target else place.saved:
                kinds = strategy.inputs if is_read else strategy.outputs
                is_split = any(kinds[i].is_split for i in roles)
                ref = costs.root(op.operands[roles[0]]) if is_read else Ref(op.name, roles[0])
                if (ref, is_split) in held:
                    continue
                held.add((ref, is_split))
                if not is_read or any(remaking.root(op, i) == ref for i in roles):
                    remaking.keeps(ref.name, size / costs.size if is_split else size)
        return points_of(remaking.groups())

    def _placed(self, solved: BlockProblem) -> tuple[tuple[_Place, ...], int]:
        """The operators of a block, and the position of the last one that keeps anything."""
        if id(solved) not in self._places:
            ops = self.costs.graph.block_ops(solved.block)
            last = max((i for i, op in enumerate(ops) if solved.problem.saves[op.name]), default=-1)
            inside = {op.name for op in ops}
            self._places[id(solved)] = solved, tuple(self._place(solved, op, inside) for op in ops), last
        return self._places[id(solved)][1:]

    def _place(self, solved: BlockProblem, op: Op, inside: Collection[str]) -> _Place:
        problem, graph, costs = solved.problem, self.costs.graph, self.costs
        saved = []
        roots = [costs.root(own) for own in op.operands] if problem.saves[op.name] else []
        for ref in problem.saves[op.name]:
            reads = tuple(i for i, root in enumerate(roots) if root == ref)
            roles = reads or tuple(i for i in range(len(op.outputs)) if Ref(op.name, i) == ref)
            sizes = [self._least_bytes(inside, op.operands[i]) for i in reads] or [graph.spec(ref).num_bytes]
            saved.append((ref, min(sizes), bool(reads), roles))
        live = (i for i, ref in enumerate(op.operands) if not graph.is_parameter(ref) and not graph.is_prelude(ref))
        read = ((i, ref) for i, ref in enumerate(op.operands) if graph.is_parameter(ref))
        weights = ((i, graph.parameter(ref.name), ref in costs.saved.kept[op.name]) for i, ref in read)
        states: Sequence[Strategy] = problem.states[problem.ops[op.name]]  # type: ignore[assignment]
        works = dict(zip(map(id, states), costs.operators(op, states, ()), strict=True))
        return _Place(works, tuple(saved), tuple(live), tuple(weights))

    def _least_bytes(self, inside: Collection[str], ref: Ref) -> int:
        """Of a value and those of the block, of these operators, that it is a view of."""
        graph, least = self.costs.graph, self.costs.graph.spec(ref).num_bytes
        while ref.name in inside and (op := graph.producer(ref)) is not None and op.target in VIEWS:
            ref = op.operands[0]
            least = min(least, graph.spec(ref).num_bytes)
        return least
