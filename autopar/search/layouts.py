"""Layouts to choose from: for a micro-batch size and a tensor-parallel degree the typings worth having, with their costs.

Everything happens on the compact graph and is kept: many candidates of the outer search share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from autopar.cost.data_parallel import itemsize
from autopar.cost.model import BlockCost, CostModel
from autopar.errors import InfeasibleError
from autopar.graph.ir import Graph, Op, Parameter
from autopar.layout import I, Type
from autopar.mesh import Mesh
from autopar.plan import AxisTyping, BlockLayout
from autopar.rules import has_rule
from autopar.rules.apply import shard
from autopar.rules.sharded import EXPERT_TARGETS
from autopar.rules.types import Strategy, Typing
from autopar.search.batch import BATCH, solve_batch
from autopar.search.chain import AxisSolution, AxisSolver
from autopar.search.classes import Compact, compact
from autopar.search.pins import Pins
from autopar.search.prices import AxisPricing
from autopar.search.problem import Weights, rests_of
from autopar.search.space import Space

TP = "tp"
EXPERTS = "autopar.experts"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Option:
    """One layout of the whole model.

    Attributes:
        solution: the typing on ``tp``; None where that axis has one rank.
        costs: of each block of the compact graph.
        keys: for each of these blocks a number, equal where the costs are equal.
        prelude_s: of the operators that every stage repeats.
    """

    solution: AxisSolution | None
    costs: tuple[BlockCost, ...]
    keys: tuple[int, ...]
    prelude_s: float


class Layouts:
    """All layouts of one model on one cluster.

    Args:
        graph: as traced.
        model: the cost model.
        pins: of parameters.
        space: which prices of memory are tried.
    """

    def __init__(self, graph: Graph, model: CostModel, *, global_batch_size: int, pins: Pins, space: Space) -> None:
        self.graph, self.model, self.space, self.pins = graph, model, space, pins
        self.global_batch_size = global_batch_size
        self.pinned = {p.name: t for p in graph.parameters if (t := _pinned_type(p, pins)) is not None}
        keys = [
            tuple(self.pinned.get(p.name) for p in graph.block_parameters(block)) if self.pinned else None
            for block in graph.blocks
        ]
        self.compact = compact(graph, keys=keys)
        self.batch = solve_batch(self.compact)
        self._owners = Counter(
            p.name for block in self.compact.graph.blocks for p in self.compact.graph.block_parameters(block)
        )
        self._micro: dict[int, Compact] = {}
        self._solvers: dict[tuple[int, int], AxisSolver] = {}
        self._options: dict[tuple[int, int, object], Option] = {}
        self._solutions: dict[tuple[tuple[int, int, int, int], float], AxisSolution] = {}
        self._least: dict[tuple[int, int], float] = {}

    @property
    def prelude(self) -> tuple[str, ...]:
        """Strategy names of the prelude on axis ``batch``."""
        return tuple(self.batch.strategies[op.name].name for op in self.graph.prelude)

    def micro(self, micro_batch_size: int) -> Compact:
        """The compact graph of one micro-batch."""
        if micro_batch_size not in self._micro:
            typing = self._batch_typing(micro_batch_size)
            local = shard(
                self.compact.graph,
                typing,
                global_batch_size=self.global_batch_size,
                micro_batch_size=micro_batch_size,
            )
            self._micro[micro_batch_size] = replace(self.compact, graph=local)
        return self._micro[micro_batch_size]

    def _batch_typing(self, micro_batch_size: int) -> Typing:
        return replace(self.batch, size=Fraction(self.graph.batch_size, micro_batch_size))

    def front(self, micro_batch_size: int, tp: int, num_micro_batches: int, in_flight: int) -> Iterator[Option]:
        """The layouts that some price of memory makes best, from lean to fast, each made when it is asked for.

        Args:
            num_micro_batches: over which a gradient sum is spread; only its order of magnitude counts.
            in_flight: micro-batches that a stage holds; only its order of magnitude counts.

        Raises:
            InfeasibleError: the pins of parameters allow none.
        """
        if tp == 1:
            yield self.whole(micro_batch_size)
            return
        seen = set()
        for ratio in sorted(self.space.price_ratios, reverse=True):
            solution = self._solution((micro_batch_size, tp, _round(num_micro_batches), _round(in_flight)), ratio)
            if solution.signature not in seen:
                seen.add(solution.signature)
                yield self._option(micro_batch_size, tp, solution)

    def whole(self, micro_batch_size: int) -> Option:
        """The layout without a tensor-parallel axis."""
        return self._option(micro_batch_size, 1, None)

    def _solution(self, key: tuple[int, int, int, int], ratio: float) -> AxisSolution:
        if (key, ratio) not in self._solutions:
            micro_batch_size, tp, num_micro_batches, in_flight = key
            price = ratio * self.least_time_s(micro_batch_size, tp) / self.model.device.memory_bytes
            weights = Weights(per_step_s=1 / num_micro_batches, saved_byte=price * in_flight, state_byte=price)
            self._solutions[key, ratio] = self._solver(micro_batch_size, tp).solve(weights)
        return self._solutions[key, ratio]

    def least_time_s(self, micro_batch_size: int, tp: int) -> float:
        """Seconds of one micro-batch through the whole model, forward and backward, in the fastest of all layouts.

        Sums of gradients and everything outside of the blocks are left out: no plan is faster.
        """
        key = (micro_batch_size, tp)
        if key not in self._least:
            if tp == 1:
                option = self.whole(micro_batch_size)
                counts = [len(m) for m in self.compact.members]
                times = [c.forward_s + c.backward_s for c in option.costs]
                self._least[key] = sum(n * t for n, t in zip(counts, times, strict=True))
            else:
                self._least[key] = self._solver(micro_batch_size, tp).solve(Weights()).value
        return self._least[key]

    def _solver(self, micro_batch_size: int, tp: int) -> AxisSolver:
        key = (micro_batch_size, tp)
        if key not in self._solvers:
            micro = self.micro(micro_batch_size)
            self._solvers[key] = AxisSolver(
                micro,
                axis=TP,
                size=tp,
                pricing=self._pricing(tp),
                rests=self._rests(micro.graph, tp),
                allows=partial(self._allows, tp),
            )
        return self._solvers[key]

    def _allows(self, tp: int, op: Op, strategy: Strategy) -> bool:
        """Experts are split over ``tp`` (ep=tp) or not (ep=1): what the pins of ``ep`` say of it."""
        return op.target != EXPERTS or self.pins.allows("ep", tp if strategy.target in EXPERT_TARGETS else 1)

    def _rests(self, graph: Graph, tp: int) -> Mapping[str, Sequence[Type]]:
        rests = {}
        for parameter in graph.parameters:
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

    def _pricing(self, tp: int) -> AxisPricing:
        """A parameter's state as without ZeRO; the price of memory that is swept covers the rest."""
        precision = self.model.precision
        storage, compute, reduce = (itemsize(name) for name in (precision.storage, precision.compute, precision.reduce))
        copies = compute if compute != storage else 0
        return AxisPricing(
            device=self.model.device,
            collectives=self.model.collectives,
            mesh=self.mesh(tp),
            axis=TP,
            state_bytes_per_element=storage * (1 + self.model.optimizer.states) + reduce + copies,
            gradient_itemsize=storage,
        )

    def mesh(self, tp: int) -> Mesh:
        """A mesh of the whole cluster with this degree; groups of the innermost axis are the same in every other."""
        return Mesh(dp_replicate=max(self.model.cluster.world_size // tp, 1), tp=tp)

    def _option(self, micro_batch_size: int, tp: int, solution: AxisSolution | None) -> Option:
        key = (micro_batch_size, tp, solution and solution.signature)
        if key not in self._options:
            graph = self.micro(micro_batch_size).graph
            if solution is not None:
                graph = shard(graph, solution.typing)
            mesh = self.mesh(tp)
            made: dict[object, BlockCost] = {}
            costs, keys = [], []
            for i, block in enumerate(graph.blocks):
                alike = self._alike(graph, i)
                if alike not in made:
                    made[alike] = self.model.block_cost(graph, block, mesh)
                costs.append(made[alike])
                keys.append(list(made).index(alike))
            self._options[key] = Option(
                solution=solution,
                costs=tuple(costs),
                keys=tuple(keys),
                prelude_s=self.model.prelude_time_s(graph),
            )
        return self._options[key]

    def _alike(self, graph: Graph, index: int) -> object:
        """Equal for blocks of equal cost: equal operators at equal shapes, neither shared parameters nor other values sent."""
        block = graph.blocks[index]
        shared = tuple(p.name for p in graph.block_parameters(block) if self._owners[p.name] > 1)
        sent = tuple(graph.spec(ref) for ref in graph.block_outputs(block))
        return block.hash, shared, sent, graph.loss.name in {op.name for op in graph.block_ops(block)}

    def block_layouts(self, option: Option) -> tuple[tuple[BlockLayout, ...], tuple[int, ...]]:
        """The distinct layouts of the plan, and for each original block which of them it has."""
        graph, made = self.compact.graph, dict[BlockLayout, int]()
        mine = []
        for i, block in enumerate(graph.blocks):
            typings = [self._batch_layout(i)]
            if option.solution is not None:
                typings.append(self._named(i, option.solution))
            layout = BlockLayout(block_hash=block.hash, typings=tuple(typings))
            mine.append(made.setdefault(layout, len(made)))
        return tuple(made), tuple(mine[k] for k in self.compact.class_of)

    def _batch_layout(self, index: int) -> AxisTyping:
        graph = self.compact.graph
        block = graph.blocks[index]
        strategies = [self.batch.strategies[op.name] for op in graph.block_ops(block)]
        made = {op.name: s for op, s in zip(graph.block_ops(block), strategies, strict=True)}
        return AxisTyping(
            axis=BATCH,
            strategies=tuple(s.name for s in strategies),
            parameters=tuple(I for _ in graph.block_parameters(block)),
            parameter_names=self._names(index),
            boundary=tuple(made[ref.name].outputs[ref.index] for ref in graph.block_outputs(block)),
        )

    def _named(self, index: int, solution: AxisSolution) -> AxisTyping:
        graph = self.compact.graph
        outputs = graph.block_outputs(graph.blocks[index])
        boundary = tuple(solution.typing.strategies[ref.name].outputs[ref.index] for ref in outputs)
        return replace(solution.blocks[index], parameter_names=self._names(index), boundary=boundary)

    def _names(self, index: int) -> tuple[str, ...]:
        block = self.compact.graph.blocks[index]
        prefix = f"{block.label}."
        return tuple(p.key.removeprefix(prefix) for p in self.compact.graph.block_parameters(block))


def expert_degree(option: Option, tp: int) -> int:
    """Over how many ranks a layout splits experts: ``tp`` where any mixture does, else 1."""
    chosen = option.solution.typing.strategies.values() if option.solution is not None else ()
    return tp if any(strategy.target in EXPERT_TARGETS for strategy in chosen) else 1


def attention_heads(graph: Graph) -> tuple[int, ...]:
    """Head counts of the model's attentions: degrees of ``tp`` must divide them."""
    found = set()
    for op in graph.ops:
        if "scaled_dot_product_attention" in op.target or op.target == "autopar.attention":
            shape = graph.spec(op.operands[0]).shape
            if len(shape) == 4:
                found.add(shape[1])
    return tuple(sorted(found))


def operators_without_rule(graph: Graph) -> tuple[str, ...]:
    """A note for each kind of operator that runs whole on every rank of ``tp`` because no rule says how to split it."""
    targets: dict[str, int] = {}
    for op in graph.ops:
        if not has_rule(op.target):
            targets[op.target] = targets.get(op.target, 0) + 1
    return tuple(
        f"{target} has no rule: its {n} calls are repeated on every rank of tp" for target, n in targets.items()
    )


def _pinned_type(parameter: Parameter, pins: Pins) -> Type | None:
    """The last pin that matches wins."""
    found = None
    for pin in pins.parameters:
        if pin.matches((parameter.key, parameter.fqn, *parameter.aliases)):
            found = pin.type
    return found


def _round(n: int) -> int:
    """The power of 8 at or below: layouts change with the order of magnitude alone."""
    return int(8 ** ((n.bit_length() - 1) // 3))
