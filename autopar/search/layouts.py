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
from autopar.graph.padding import lengths, pad
from autopar.layout import I, S, Type
from autopar.mesh import Mesh
from autopar.plan import AxisTyping, BlockLayout, PaddedParameter
from autopar.rules.apply import shard
from autopar.rules.missing import Found, key_of
from autopar.rules.sharded import EXPERT_TARGETS
from autopar.rules.spread import AXIS as SPREAD
from autopar.rules.spread import DISPATCH, EXPERTS, spread, spread_parameters, strategy_names
from autopar.rules.types import Strategy, Typing
from autopar.search.batch import BATCH, solve_batch
from autopar.search.chain import AxisSolution, AxisSolver
from autopar.search.classes import Compact, compact
from autopar.search.intra import Narrow
from autopar.search.padding import padded, used_padding
from autopar.search.pins import Pins
from autopar.search.prices import AxisPricing
from autopar.search.problem import Weights, rests_of
from autopar.search.sequence import CP, KINDS, SequenceSplit
from autopar.search.space import Space

TP = "tp"
SPREAD_EXPERTS = "autopar.experts_dispatch"
MIXTURE_NOTE = "mixtures of experts ("
"""Begins the notes that say which strategy the solver chose for them."""
MIXTURES = (EXPERTS, SPREAD_EXPERTS)
COLLECTIVE_WEIGHT = 1e-3
"""Of collectives in the typing on ``cp``: the axis is there to split work and what is kept for backward, and a typing
that repeats them rather than send must not win because a model is small. Plans are compared at full prices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What a layout depends on: samples of a micro-batch and the degrees of the axes inside of the model.

    ``ep_data``: data ranks over which experts are split.
    """

    micro_batch_size: int
    ep_data: int = 1
    cp: int = 1
    tp: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Option:
    """One layout of the whole model.

    Attributes:
        sequence: the typing on ``cp``; None where that axis has one rank.
        kind: of attention on ``cp``; empty likewise.
        solution: the typing on ``tp``; None where that axis has one rank.
        ep_data: data ranks over which experts are split.
        costs: of each block of the compact graph.
        keys: for each of these blocks a number, equal where the costs are equal.
        prelude_s: of the operators that every stage repeats.
        padding: of vocabularies, where the typing on ``tp`` splits them.
        totals: bytes of each count of the global batch that the loss divides by.
    """

    sequence: AxisSolution | None
    kind: str
    solution: AxisSolution | None
    ep_data: int
    costs: tuple[BlockCost, ...]
    keys: tuple[int, ...]
    prelude_s: float
    padding: tuple[PaddedParameter, ...] = ()
    totals: tuple[int, ...] = ()


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
        self.narrow = narrow
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
        self.kinds = tuple(kind for kind in KINDS if pins.allows("cp_attention", kind))
        self._solvers: dict[tuple[Split, str], AxisSolver] = {}
        self._sequences: dict[tuple[Split, str], AxisSolution | InfeasibleError] = {}
        self._bases: dict[tuple[Split, str], Compact] = {}
        self._options: dict[tuple[Split, str, object], Option] = {}
        self._solutions: dict[tuple[Split, str, tuple[int, int], float], AxisSolution] = {}
        self._least: dict[Split, float] = {}
        self._least_blocks: dict[Split, tuple[float, ...]] = {}

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

    def front(self, micro_batch_size: int, mesh: Mesh, num_micro_batches: int, in_flight: int) -> Iterator[Option]:
        """The layouts that some price of memory makes best, from lean to fast, each made when it is asked for.

        Args:
            mesh: its degrees of ``cp`` and ``tp`` count.
            num_micro_batches: over which a gradient sum is spread; only its order of magnitude counts.
            in_flight: micro-batches that a stage holds; only its order of magnitude counts.

        Raises:
            InfeasibleError: the pins of parameters allow none.
        """
        split = split_of(micro_batch_size, mesh)
        seen = set()
        for ratio in sorted(self.space.price_ratios, reverse=True) if mesh.tp > 1 else (0.0,):
            for kind in self._kinds(split):
                solution = self._solution(split, kind, (_round(num_micro_batches), _round(in_flight)), ratio)
                signature = (kind, solution and solution.signature)
                if signature not in seen:
                    seen.add(signature)
                    yield self._option(split, kind, solution)

    def whole(self, micro_batch_size: int, ep_data: int = 1) -> Option:
        """The layout with neither a context- nor a tensor-parallel axis."""
        return self._option(Split(micro_batch_size=micro_batch_size, ep_data=ep_data), "", None)

    def _solution(self, split: Split, kind: str, orders: tuple[int, int], ratio: float) -> AxisSolution | None:
        """The typing on ``tp``; None where there is no such axis."""
        if split.tp == 1:
            return None
        key = (split, kind, orders, ratio)
        if key not in self._solutions:
            num_micro_batches, in_flight = orders
            price = ratio * self._least_s(split) / self.model.device.memory_bytes
            weights = Weights(per_step_s=1 / num_micro_batches, saved_byte=price * in_flight, state_byte=price)
            self._solutions[key] = self._solver(split, kind).solve(weights)
        return self._solutions[key]

    def least_times_s(self, micro_batch_size: int, mesh: Mesh) -> tuple[float, ...]:
        """For each block of the compact graph the seconds of one micro-batch, forward and backward, in its quickest layout.

        Sums of gradients are left out, and blocks need not fit together: no plan is faster. Zeros where no kind of
        attention fits the axis ``cp``.
        """
        split = split_of(micro_batch_size, mesh)
        if split not in self._least_blocks:
            try:
                kinds = [self._least_of_kind(split, kind) for kind in self._kinds(split)]
            except InfeasibleError:
                kinds = [(0.0,) * len(self.compact.members)]
            self._least_blocks[split] = tuple(min(times) for times in zip(*kinds, strict=True))
        return self._least_blocks[split]

    def _least_of_kind(self, split: Split, kind: str) -> tuple[float, ...]:
        if split.tp > 1:
            return self._solver(split, kind).least_s()
        costs = self._option(split, kind, None).costs
        return tuple(c.forward_s + c.communication_forward_s + c.backward_s + c.communication_backward_s for c in costs)

    def _least_s(self, split: Split) -> float:
        if split not in self._least:
            self._least[split] = min(self._least_of_kind_s(split, kind) for kind in self._kinds(split))
        return self._least[split]

    def _least_of_kind_s(self, split: Split, kind: str) -> float:
        if split.tp > 1:
            return self._solver(split, kind).solve(Weights()).value
        costs = self._option(split, kind, None).costs
        counts = [len(m) for m in self.compact.members]
        return sum(n * (c.forward_s + c.backward_s) for n, c in zip(counts, costs, strict=True))

    def _solver(self, split: Split, kind: str) -> AxisSolver:
        key = (split, kind)
        if key not in self._solvers:
            base = padded(self._base(split, kind), split.tp)
            self._solvers[key] = AxisSolver(
                base,
                axis=TP,
                size=split.tp,
                pricing=self._pricing(TP, split),
                rests=self._rests(base.graph, split.tp),
                narrow=partial(self._narrow, split),
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

    # --- context parallelism

    def _kinds(self, split: Split) -> tuple[str, ...]:
        """The kinds of attention that can split the sequence; one without a name where it is not split.

        Raises:
            InfeasibleError: there are none; says why the last is none.
        """
        if split.cp == 1:
            return ("",)
        found, failure = [], None
        for kind in self.kinds:
            try:
                self._sequence(split, kind)
                found.append(kind)
            except InfeasibleError as error:
                failure = error
        if not found:
            raise failure or InfeasibleError("some kind of attention is allowed on cp", value="none")
        return tuple(found)

    def _sequence(self, split: Split, kind: str) -> AxisSolution:
        """The typing on ``cp``: work and what is kept for backward are split wherever they can be."""
        key = (split, kind)
        if key not in self._sequences:
            self._sequences[key] = self._split_sequence(split, kind)
        found = self._sequences[key]
        if isinstance(found, InfeasibleError):
            raise found
        return found

    def _split_sequence(self, split: Split, kind: str) -> AxisSolution | InfeasibleError:
        micro = self._spread(split)
        whole = Split(micro_batch_size=split.micro_batch_size, ep_data=split.ep_data)
        saved = sum(n.saved_bytes for n in self.whole(split.micro_batch_size, split.ep_data).costs)
        try:
            solver = AxisSolver(
                micro,
                axis=CP,
                size=split.cp,
                pricing=self._pricing(CP, split),
                rests={p.name: (I,) for p in micro.graph.parameters},
                narrow=SequenceSplit(micro.graph, kind, split.cp),
            )
            return solver.solve(Weights(per_step_s=1.0, saved_byte=self._least_s(whole) / max(saved, 1)))
        except InfeasibleError as error:
            return error

    def _base(self, split: Split, kind: str) -> Compact:
        """The compact graph of one micro-batch and one rank of ``cp``."""
        micro = self._spread(split)
        if split.cp == 1:
            return micro
        key = (split, kind)
        if key not in self._bases:
            graph = shard(micro.graph, self._sequence(split, kind).typing)
            self._bases[key] = replace(micro, graph=graph)
        return self._bases[key]

    def _spread(self, split: Split) -> Compact:
        """The compact graph of one micro-batch on one data rank, with its share of the experts."""
        micro = self.micro(split.micro_batch_size)
        if split.ep_data == 1:
            return micro
        key = (Split(micro_batch_size=split.micro_batch_size, ep_data=split.ep_data), "")  # cp=1: no kind of attention
        if key not in self._bases:
            self._bases[key] = replace(micro, graph=spread(micro.graph, split.ep_data))
        return self._bases[key]

    # --- prices

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

    def _pricing(self, axis: str, split: Split) -> AxisPricing:
        """A parameter's state as without ZeRO; the price of memory that is swept covers the rest."""
        precision = self.model.precision
        storage, compute, reduce = (itemsize(name) for name in (precision.storage, precision.compute, precision.reduce))
        copies = compute if compute != storage else 0
        return AxisPricing(
            device=self.model.device,
            collectives=self.model.collectives,
            mesh=self.mesh(split),
            axis=axis,
            collective_weight=COLLECTIVE_WEIGHT if axis == CP else 1.0,
            state_bytes_per_element=storage + self.model.optimizer.bytes_per_element(storage) + reduce + copies,
            gradient_itemsize=storage,
            measured=self.model.measured,
        )

    def mesh(self, split: Split) -> Mesh:
        """A mesh of the whole cluster with these degrees; groups of the inner axes are the same in every other."""
        outside = max(self.model.cluster.world_size // (split.cp * split.tp), 1)
        return Mesh(dp_replicate=outside, cp=split.cp, tp=split.tp, ep=split.ep_data, ep_data=split.ep_data)

    def local_graph(self, split: Split, kind: str, solution: AxisSolution | None) -> Graph:
        """One rank's graph of one micro-batch."""
        graph = self._base(split, kind).graph
        if solution is None:
            return graph
        return shard(pad(graph, used_padding(graph, lengths(graph, split.tp), solution.typing)), solution.typing)

    def _option(self, split: Split, kind: str, solution: AxisSolution | None) -> Option:
        key = (split, kind, solution and solution.signature)
        if key not in self._options:
            graph = self._base(split, kind).graph
            padding: dict[str, int] = {}
            if solution is not None:
                padding = used_padding(graph, lengths(graph, split.tp), solution.typing)
                graph = shard(pad(graph, padding), solution.typing)
            mesh = self.mesh(split)
            made: dict[object, BlockCost] = {}
            costs, keys = [], []
            for i, block in enumerate(graph.blocks):
                alike = self._alike(graph, i)
                if alike not in made:
                    made[alike] = self.model.block_cost(graph, block, mesh)
                costs.append(made[alike])
                keys.append(list(made).index(alike))
            self._options[key] = Option(
                sequence=self._sequence(split, kind) if split.cp > 1 else None,
                kind=kind,
                solution=solution,
                ep_data=split.ep_data,
                costs=tuple(costs),
                keys=tuple(keys),
                prelude_s=self.model.prelude_time_s(graph),
                padding=tuple(PaddedParameter(parameter=k, length=n) for k, n in padding.items()),
                totals=tuple(graph.spec(ref).num_bytes for ref in graph.sums),
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
            if option.ep_data > 1:
                typings.append(self._spread_layout(i))
            typings += [self._named(i, found) for found in (option.sequence, option.solution) if found is not None]
            layout = BlockLayout(block_hash=block.hash, typings=tuple(typings))
            mine.append(made.setdefault(layout, len(made)))
        return tuple(made), tuple(mine[k] for k in self.compact.class_of)

    def mixtures(self, option: Option) -> tuple[str, ...]:
        """A note for each way in which mixtures of experts are run, beginning with :data:`MIXTURE_NOTE`."""
        graph, ways = self.compact.graph, Counter[str]()
        for block, members in zip(graph.blocks, self.compact.members, strict=True):
            for op in graph.block_ops(block):
                if op.target != EXPERTS:
                    continue
                spread_here = option.ep_data > 1 and DISPATCH in strategy_names(graph, (op,))
                parts = [f"experts spread and tokens sent over {option.ep_data} data ranks"] if spread_here else []
                for axis, found in ((CP, option.sequence), (TP, option.solution)):
                    if found is not None:
                        parts.append(f"{axis}={found.typing.size} '{found.typing.strategies[op.name].name}'")
                ways[", ".join(parts) or "whole, on each rank's samples"] += len(members)
        return tuple(f"{MIXTURE_NOTE}{count}): {way}" for way, count in ways.items())

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

    def _spread_layout(self, index: int) -> AxisTyping:
        """On ``ep_data`` experts are split, everything else goes on with its rank's samples."""
        graph = self.compact.graph
        block = graph.blocks[index]
        ops, split = graph.block_ops(block), spread_parameters(graph, graph.block_ops(block))
        return AxisTyping(
            axis=SPREAD,
            strategies=tuple(strategy_names(graph, ops)),
            parameters=tuple(S(0) if p.name in split else I for p in graph.block_parameters(block)),
            parameter_names=self._names(index),
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


def split_of(micro_batch_size: int, mesh: Mesh) -> Split:
    """What of a mesh a layout depends on."""
    return Split(micro_batch_size=micro_batch_size, ep_data=mesh.ep_data, cp=mesh.cp, tp=mesh.tp)


def expert_degree(option: Option, tp: int) -> int:
    """Over how many ranks a layout splits experts: those of ``ep_data``, times ``tp`` where any mixture does."""
    chosen = option.solution.typing.strategies.values() if option.solution is not None else ()
    return option.ep_data * (tp if any(strategy.target in EXPERT_TARGETS for strategy in chosen) else 1)


def operators_without_rule(graph: Graph, found: Sequence[Found], model: CostModel) -> tuple[str, ...]:
    """A note for each kind of call without a declared rule: what was found by execution, or what repeating it costs."""
    notes = []
    for one in found:
        calls = [op for op in (*graph.prelude, *graph.ops) if op.target == one.target]
        calls = [op for op in calls if key_of(op, tuple(graph.spec(r) for r in op.operands)) == one.key]
        if one.line:
            notes.append(f"{one.target} has no declared rule: found by execution '{one.line}' ({len(calls)} calls)")
            continue
        times = [model.op_time_s(op, [graph.spec(ref) for ref in op.operands]) for op in calls]
        cost_s = sum(time.forward_s + time.backward_s for time in times)
        notes.append(
            f"{one.target} has no rule and none was found ({one.why}): its {len(calls)} calls are repeated on every "
            f"rank of an axis that splits the work inside a sample, {1e3 * cost_s:.3g} ms for {graph.batch_size} samples"
        )
    return tuple(notes)


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
