"""Equal blocks are solved once: a graph of few blocks that stands for one of many.

A run of equal blocks (equal hash, each fed by the one before) is cut down to its first, one inner and its last block.
Everything that the search does, it does on this *compact* graph; a plan then names the layout for each block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.graph.graph import Argument, Block, Graph, Op, Ref, TensorSpec, map_refs


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """A compact graph and what it stands for.

    Attributes:
        graph: with fewer blocks; its fingerprint is that of the original.
        members: for each block of ``graph`` the indices of the original blocks that it stands for.
        alike: pairs of values of ``graph`` that must have one type on every axis: what feeds an inner block and
            what it makes, because inner blocks feed each other.
    """

    graph: Graph
    members: tuple[tuple[int, ...], ...]
    alike: tuple[tuple[Ref, Ref], ...]

    @property
    def class_of(self) -> tuple[int, ...]:
        """For each original block the block of ``graph`` that stands for it."""
        standing_in = {i: k for k, members in enumerate(self.members) for i in members}
        return tuple(standing_in[i] for i in range(len(standing_in)))


def compact(graph: Graph, *, keys: Sequence[object] = ()) -> Compact:
    """The compact graph of ``graph``.

    Args:
        keys: one for each block; blocks of a run are merged only where theirs are equal (pins differ, say).
    """
    if any(key is not None for key in keys):
        return _compact(graph, keys)
    if compact not in graph.passes:
        graph.passes[compact] = _compact(graph, ())
    small: Compact = graph.passes[compact]
    return small


def _compact(graph: Graph, keys: Sequence[object]) -> Compact:
    runs = _runs(graph, keys or [None] * len(graph.blocks))
    kept: list[tuple[Block, tuple[int, ...]]] = []
    stands_for: dict[str, str] = {}
    for run in runs:
        if len(run) <= 3:
            kept += [(graph.blocks[i], (i,)) for i in run]
            continue
        first, inner, last = run[0], run[1], run[-1]
        kept += [(graph.blocks[first], (first,)), (graph.blocks[inner], run[1:-1]), (graph.blocks[last], (last,))]
        names = [op.name for op in graph.block_ops(graph.blocks[inner])]
        for dropped in run[2:-1]:
            theirs = (op.name for op in graph.block_ops(graph.blocks[dropped]))
            stands_for.update(zip(theirs, names, strict=True))
    alike: dict[tuple[Ref, Ref], None] = {}
    for block, members in kept:
        if len(members) > 1:
            mine = graph.block_inputs(block)
            for other in members[1:]:
                for a, b in zip(mine, graph.block_inputs(graph.blocks[other]), strict=True):
                    b = Ref(stands_for.get(b.name, b.name), b.index)
                    if a != b:
                        alike[a, b] = None
    return Compact(
        graph=_cut(graph, [block for block, _ in kept], stands_for),
        members=tuple(members for _, members in kept),
        alike=tuple(alike),
    )


def _runs(graph: Graph, keys: Sequence[object]) -> list[tuple[int, ...]]:
    """Consecutive blocks of equal hash and key that share no parameter with any other block."""
    owner: dict[str, int] = {}
    shares = set[int]()
    for block in graph.blocks:
        for parameter in graph.block_parameters(block):  # each once
            if parameter.name in owner:
                shares |= {owner[parameter.name], block.index}
            else:
                owner[parameter.name] = block.index
    runs: list[list[int]] = []
    for block in graph.blocks:
        i = block.index
        before = runs[-1][-1] if runs else None
        if (
            before is not None
            and graph.blocks[before].hash == block.hash
            and keys[before] == keys[i]
            and not shares & {before, i}
            and before not in shares
        ):
            runs[-1].append(i)
        else:
            runs.append([i])
    return [tuple(run) for run in runs]


def _cut(graph: Graph, blocks: Sequence[Block], stands_for: dict[str, str]) -> Graph:
    """``graph`` with ``blocks`` alone; what reads a dropped block reads the one that stands for it."""
    ops: list[Op] = []
    made: list[Block] = []
    for index, block in enumerate(blocks):
        start = len(ops)
        for op in graph.block_ops(block):
            if stands_for.keys().isdisjoint([r.name for r in op.operands]):
                ops.append(op)
                continue
            ops.append(op.with_operands(tuple(Ref(stands_for.get(r.name, r.name), r.index) for r in op.operands)))
        made.append(replace(block, index=index, start=start, stop=len(ops)))
    read = {ref.name for op in ops for ref in op.operands}
    dropped = {op.name for op in graph.ops} - {op.name for op in ops}
    return replace(
        graph,
        parameters=tuple(p for p in graph.parameters if p.name in read),
        mutations=tuple(m for m in graph.mutations if m.value.name not in dropped),
        ops=tuple(ops),
        blocks=tuple(made),
    )


# --- Sequences of operators as text, by which blocks with equal operators are known.


def signature(ops: Sequence[Op], spec_of: Callable[[Ref], TensorSpec]) -> str:
    """Text that is equal for equal sequences of operators, names aside; equal ones have equal strategies."""
    known: dict[str, str] = {}
    outside: dict[Ref, str] = {}

    def numbered(ref: Ref) -> Argument:
        if ref.name in known:
            return f"{known[ref.name]}[{ref.index}]"
        if ref not in outside:  # a tensor without gradient has other strategies than one with
            spec = spec_of(ref)
            outside[ref] = f"${len(outside)}:{spec.shape}:{spec.dtype}:{spec.requires_grad}"
        return outside[ref]

    lines: list[str] = []
    for op in ops:
        args: Iterable[Argument] = (map_refs(arg, numbered) for arg in op.args)
        kwargs = ((key, map_refs(value, numbered)) for key, value in op.kwargs)
        for_salt = tuple(args)[:2] if op.target == "autopar.dropout" else tuple(args)
        lines.append(
            f"{op.target}{for_salt}{tuple(kwargs)}{[(s.shape, s.dtype, s.requires_grad) for s in op.outputs]}{op.layouts}"
        )
        known[op.name] = f"%{len(known)}"
    return "\n".join(lines)
