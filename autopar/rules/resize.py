"""The graph of a micro-batch of another size, from one that was made by :func:`autopar.rules.apply.shard`.

Samples change shapes and the literals that count elements, nothing else: operators, their order, names, wiring and types are
those of the other size. So what follows from these alone is not worked out again, and look-ups by name are shared.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from autopar.graph.ir import Block, Graph, Input, Op, Ref, TensorSpec, digest
from autopar.layout import Type
from autopar.rules.apply import BATCH, part_of
from autopar.rules.localize import LOCALIZERS, localize
from autopar.rules.types import Local, Typing


def can_resize(graph: Graph, local: Graph, typing: Typing) -> bool:
    """Whether :func:`resized` gives other sizes of ``local``: nothing changes its type on axis ``batch``.

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


def resized(graph: Graph, local: Graph, typing: Typing, *, global_batch_size: int, micro_batch_size: int) -> Graph:
    """As ``shard(graph, typing, ...)``, hashes of blocks aside: these are equal for equal blocks of the result alone.

    Args:
        graph: as traced, or compact.
        local: the same for another size; see :func:`can_resize`.
        typing: on axis ``batch``, its size that of the result.

    Raises:
        RuleError: a dim does not divide.
    """
    return _Resizing(graph, local, typing, Fraction(global_batch_size, graph.batch_size)).run(micro_batch_size)


class _Resizing:
    """The state of one :func:`resized`."""

    def __init__(self, graph: Graph, local: Graph, typing: Typing, count_scale: Fraction) -> None:
        self.graph, self.local, self.typing, self.count_scale = graph, local, typing, count_scale
        self.specs: dict[Ref, TensorSpec] = dict(local._index.specs)
        self._parts: dict[tuple[TensorSpec, int], TensorSpec] = {}

    def run(self, micro_batch_size: int) -> Graph:
        graph, local = self.graph, self.local
        inputs = tuple(self._input(a, b) for a, b in zip(graph.inputs, local.inputs, strict=True))
        prelude = tuple(self._op(a, b) for a, b in zip(graph.prelude, local.prelude, strict=True))
        ops = tuple(self._op(a, b) for a, b in zip(graph.ops, local.ops, strict=True))
        found = replace(
            local,
            batch_size=micro_batch_size,
            inputs=inputs,
            prelude=prelude,
            ops=ops,
            blocks=tuple(self._block(block, micro_batch_size) for block in local.blocks),
        )
        local._index.crossing(local.ops)  # asked for of every size
        found.share_names(local, self.specs)
        return found

    def _input(self, leaf: Input, local: Input) -> Input:
        kind = self.typing.inputs.get(leaf.name)
        if kind is None or not kind.is_split:
            return local
        self.specs[Ref(leaf.name)] = self._part(leaf.spec, kind, leaf.name)
        return replace(local, spec=self.specs[Ref(leaf.name)])

    def _op(self, op: Op, local: Op) -> Op:
        strategy = self.typing.strategies[op.name]
        outputs = tuple(
            [self._part(spec, kind, op.name) for spec, kind in zip(op.outputs, strategy.outputs, strict=True)]
        )
        for i, spec in enumerate(outputs):
            self.specs[Ref(op.name, i)] = spec
        called = local
        if (strategy.target or op.target) in LOCALIZERS:
            operands = tuple([self.specs[ref] for ref in local.operands])
            called = localize(
                op.with_operands(local.operands),
                strategy,
                Local(
                    axis=self.typing.axis,
                    size=self.typing.size,
                    operands=operands,
                    outputs=outputs,
                    count_scale=self.count_scale,
                ),
            )
        return Op(
            name=local.name, target=called.target, args=called.args, kwargs=called.kwargs, outputs=outputs,
            module=local.module, source=local.source, layouts=local.layouts,
        )  # fmt: skip

    def _part(self, spec: TensorSpec, kind: Type, place: str) -> TensorSpec:
        if not kind.is_split:
            return spec
        key = (spec, kind.dim)
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = part_of(spec, kind, self.typing, place)
        return found

    def _block(self, block: Block, micro_batch_size: int) -> Block:
        return replace(block, hash=digest(f"{block.hash}|{micro_batch_size}"))
