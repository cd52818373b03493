"""Graphs of one rank made from others: with a micro-batch of another size, or with experts spread over data ranks.

**Another micro-batch.** Samples change shapes and the literals that count elements, nothing else: operators, their order, names, wiring and types are
those of the other size. So what follows from these alone is not worked out again, and look-ups by name are shared.

**Experts over data ranks.** The axis ``ep_data`` is a factor of the data ranks, applied after ``batch``: every tensor with samples is split there
already, so the one operator that changes is the mixture itself, and the one layout that of its weights, S(0).

Gradients of these weights are whole for the tokens of the ranks of ``ep_data``, and a pending sum over those data
ranks that hold the same experts (``ep_outer``) alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from autopar.errors import RuleError
from autopar.graph.graph import Graph, Input, Op, Ref, TensorSpec, digest
from autopar.graph.rewrites import signature
from autopar.plan.mesh import S, Type
from autopar.rules.apply import BATCH, part_of
from autopar.rules.local_calls import localize, localizer
from autopar.rules.strategy import Local, Strategy, Typing

AXIS = "ep_data"
EXPERTS = "autopar.experts"
DISPATCH = "dispatch"
"""Name of the strategy of a mixture whose experts are spread."""
SAMPLES = "samples"
"""Name of that of every other operator: it works on its rank's samples."""


def expert_counts(graph: Graph) -> tuple[int, ...]:
    """Experts of each mixture that can be spread: its weights are parameters that nothing else reads."""
    return tuple(graph.spec(op.operands[-1]).shape[0] for op in graph.ops if op.target == EXPERTS and _owns(graph, op))


def _owns(graph: Graph, op: Op) -> bool:
    held = op.operands[3:]
    return all(graph.is_parameter(ref) and len(graph.users(ref)) == 1 for ref in held)


def is_spread(graph: Graph, op: Op) -> bool:
    """Whether :func:`spread` spreads the experts of ``op``, of a graph before or after it."""
    return op.target in (EXPERTS, "autopar.experts_dispatch") and _owns(graph, op)


def spread(graph: Graph, size: int, only: Collection[str] | None = None) -> Graph:
    """One data rank's graph with the experts of its mixtures split over ``size`` data ranks.

    Args:
        graph: of one micro-batch on one data rank (axis ``batch`` applied, no other).
        only: names of the mixtures that are spread; all that can be when None.

    Raises:
        RuleError: a mixture of ``only`` cannot be spread, or its experts do not divide.
    """
    chosen = [
        op for op in graph.ops if op.target == EXPERTS and (op.name in only if only is not None else _owns(graph, op))
    ]
    split: set[str] = set()
    for op in chosen:
        count = graph.spec(op.operands[-1]).shape[0]
        if count % size or not _owns(graph, op):
            raise RuleError(
                f"{count} experts cannot be spread over {size} data ranks",
                where=f"{op.name}, {op.module or 'no module'}",
                fix="Pin an ep that divides the experts (which share no weights), or ep=1",
            )
        split |= {ref.name for ref in op.operands[3:]}
    names = {op.name for op in chosen}

    def local(op: Op) -> Op:
        if op.name not in names:
            return op
        args = (*op.args, AXIS, graph.spec(op.operands[-1]).shape[0])
        return replace(op, target="autopar.experts_dispatch", args=args)

    parameters = tuple(
        replace(p, spec=_share(p.spec, size), layout=(*p.layout, (AXIS, S(0)))) if p.name in split else p
        for p in graph.parameters
    )
    made = replace(graph, parameters=parameters, ops=tuple(map(local, graph.ops)))
    blocks = tuple(
        replace(b, hash=digest(f"{b.hash}|{AXIS}|{signature(made.block_ops(b), made.spec)}"))
        if any(op.name in names for op in graph.block_ops(b))
        else b
        for b in graph.blocks
    )
    return replace(made, blocks=blocks)


def strategy_names(graph: Graph, ops: Collection[Op]) -> Iterator[str]:
    """The typing on ``ep_data`` of operators of a graph in which all mixtures that can be are spread."""
    return (DISPATCH if op.target == EXPERTS and _owns(graph, op) else SAMPLES for op in ops)


def spread_parameters(graph: Graph, ops: Collection[Op]) -> frozenset[str]:
    """Names of the parameters that are split over ``ep_data`` there."""
    owned: list[Ref] = [ref for op in ops if op.target == EXPERTS and _owns(graph, op) for ref in op.operands[3:]]
    return frozenset(ref.name for ref in owned)


def _share(spec: TensorSpec, size: int) -> TensorSpec:
    return replace(spec, shape=(spec.shape[0] // size, *spec.shape[1:]))


def can_resize(graph: Graph, local: Graph, typing: Typing) -> bool:
    """Whether a :class:`Resizer` gives other sizes of ``local``: nothing changes its type on axis ``batch``.

    Args:
        graph: that ``local`` was made of.
        typing: by which.
    """
    before, after = (*graph.prelude, *graph.ops), (*local.prelude, *local.ops)
    return (
        typing.axis == BATCH
        and len(before) == len(after)
        and all(a.name == b.name for a, b in zip(before, after, strict=True))
        and not any(typing.inputs.get(buffer.name, None) for buffer in graph.buffers)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    """An operator as traced and in the micro-batch that there is.

    ``outputs``: the number of its outputs and their types among all of them; ``counts``: whether it has literals that count
    elements.
    """

    op: Op
    local: Op
    strategy: Strategy
    outputs: int
    counts: bool


class Resizer:
    """Micro-batches of other sizes. Equal outputs are worked out once for each size.

    Args:
        graph: as traced, or compact.
        local: one rank's part of it on axis ``batch``, of some size; see :func:`can_resize`.
        typing: by which ``local`` was made.
        global_batch_size: samples of a step.
    """

    def __init__(self, graph: Graph, local: Graph, typing: Typing, global_batch_size: int) -> None:
        self.graph, self.local, self.count_scale = graph, local, Fraction(global_batch_size, graph.batch_size)
        self._outputs: dict[tuple[tuple[TensorSpec, ...], tuple[Type, ...]], tuple[int, str]] = {}
        """The numbers of outputs and their types, each with the first operator that has them."""
        self._prelude = self._calls(typing, graph.prelude, local.prelude)
        self._ops = self._calls(typing, graph.ops, local.ops)
        local._index.crossing(local.ops)  # asked for of every size

    def _calls(self, typing: Typing, ops: tuple[Op, ...], local: tuple[Op, ...]) -> list[_Call]:
        found = []
        for op, own in zip(ops, local, strict=True):
            strategy = typing.strategies[op.name]
            number, _ = self._outputs.setdefault((op.outputs, strategy.outputs), (len(self._outputs), op.name))
            counts = localizer(op, strategy) is not None
            called = op.with_operands(own.operands) if counts else op
            found.append(_Call(op=called, local=own, strategy=strategy, outputs=number, counts=counts))
        return found

    def run(self, typing: Typing, micro_batch_size: int) -> Graph:
        """As ``shard(graph, typing, ...)``, hashes of blocks aside: these are equal for equal blocks of the result alone.

        Args:
            typing: that of ``local`` at this size.
            micro_batch_size: samples of the result.

        Raises:
            RuleError: a dim does not divide.
        """
        local, made = self.local, dict(self.local._index.made)
        inputs = tuple([self._input(a, b, typing) for a, b in zip(self.graph.inputs, local.inputs, strict=True)])
        made |= {leaf.name: (leaf.spec,) for leaf in inputs}
        parts: dict[tuple[TensorSpec, int], TensorSpec] = {}
        outputs = [
            tuple([_resized(spec, kind, typing, name, parts) for spec, kind in zip(specs, kinds, strict=True)])
            for (specs, kinds), (_, name) in self._outputs.items()
        ]
        prelude = tuple([self._op(call, typing, outputs[call.outputs], made) for call in self._prelude])
        ops = tuple([self._op(call, typing, outputs[call.outputs], made) for call in self._ops])
        hashes = {text: digest(f"{text}|{micro_batch_size}") for text in {block.hash for block in local.blocks}}
        found = replace(
            local,
            batch_size=micro_batch_size,
            inputs=inputs,
            prelude=prelude,
            ops=ops,
            blocks=tuple([replace(block, hash=hashes[block.hash]) for block in local.blocks]),
        )
        found.share_names(local, made)
        return found

    def _input(self, leaf: Input, local: Input, typing: Typing) -> Input:
        kind = typing.inputs.get(leaf.name)
        if kind is None or not kind.is_split:
            return local
        return replace(local, spec=part_of(leaf.spec, kind, typing, leaf.name))

    def _op(
        self, call: _Call, typing: Typing, outputs: tuple[TensorSpec, ...], made: dict[str, tuple[TensorSpec, ...]]
    ) -> Op:
        local = call.local
        made[local.name] = outputs
        if not call.counts:
            return local.reshaped(local.target, local.args, local.kwargs, outputs)
        operands = tuple([made[ref.name][ref.index] for ref in local.operands])
        own = Local(
            axis=typing.axis, size=typing.size, operands=operands, outputs=outputs, count_scale=self.count_scale
        )
        called = localize(call.op, call.strategy, own)
        return local.reshaped(called.target, called.args, called.kwargs, outputs)


def _resized(
    spec: TensorSpec, kind: Type, typing: Typing, place: str, known: dict[tuple[TensorSpec, int], TensorSpec]
) -> TensorSpec:
    if not kind.is_split:
        return spec
    found = known.get((spec, kind.dim))
    if found is None:
        found = known[spec, kind.dim] = part_of(spec, kind, typing, place)
    return found
