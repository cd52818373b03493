"""Graphs made of graphs: few blocks that stand for many equal ones, and vocabularies made longer so that they split evenly.

A run of equal blocks (equal hash, each fed by the one before) is cut down to its first, one inner and its last block; where
layers of several kinds follow each other in turn, so is the run of windows that hold one turn each.
Everything that the search does, it does on this *compact* graph; a plan then names the layout for each block.

A vocabulary is a set of dims that must have one length: rows of embedding tables, features out of heads (weights and
biases), classes of logits. Padding is a change of shapes alone: the same operators in the same order. Rows that are
added are zeros that no index picks; logits that are added are left out of the loss, which is told how many classes
are real, so that their gradients are zero, and an optimizer leaves zeros zeros. Where any operator besides these sees
a padded dim, nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from autopar.graph.graph import Argument, Block, Graph, Op, Padding, Ref, TensorSpec, map_refs
from autopar.ops.kernels import aten_targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """A compact graph and what it stands for.

    Attributes:
        graph: with fewer blocks; its fingerprint is that of the original.
        members: for each block of ``graph`` the indices of the original blocks that it stands for.
        alike: pairs of values of ``graph`` that must have one type on every axis: what feeds an inner window and
            what it makes, because inner windows feed each other.
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
    kept: list[tuple[Block, tuple[int, ...]]] = []
    stands_for: dict[str, str] = {}
    for start, period, count in _repeats(_kinds(graph, keys or [None] * len(graph.blocks))):
        windows = [range(start + k * period, start + (k + 1) * period) for k in range(count)]
        if count <= 3:
            kept += [(graph.blocks[i], (i,)) for window in windows for i in window]
            continue
        first, inner, *others, last = windows
        kept += [(graph.blocks[i], (i,)) for i in first]
        kept += [(graph.blocks[i], tuple(range(i, last.start, period))) for i in inner]
        kept += [(graph.blocks[i], (i,)) for i in last]
        for window in others:
            for i, dropped in zip(inner, window, strict=True):
                pairs = zip(*(graph.block_ops(graph.blocks[k]) for k in (dropped, i)), strict=True)
                stands_for.update((op.name, instead.name) for op, instead in pairs)
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


def _kinds(graph: Graph, keys: Sequence[object]) -> list[object]:
    """Equal for blocks of equal hash and key that share no parameter with any other block."""
    owner: dict[str, int] = {}
    shares = set[int]()
    for block in graph.blocks:
        for parameter in graph.block_parameters(block):  # each once
            if parameter.name in owner:
                shares |= {owner[parameter.name], block.index}
            else:
                owner[parameter.name] = block.index
    return [i if i in shares else (block.hash, keys[i]) for i, block in enumerate(graph.blocks)]


def _repeats(kinds: Sequence[object]) -> Iterator[tuple[int, int, int]]:
    """Windows of equal kinds that follow each other, as (start, period, count): those that cover most, in order."""
    start = 0
    while start < len(kinds):
        period, count = 1, 1
        for longer in range(1, (len(kinds) - start) // 4 + 1):
            pairs = zip(kinds[start:], kinds[start + longer :], strict=False)
            windows = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) // longer + 1
            if windows > 3 and windows * longer > period * count:
                period, count = longer, windows
        yield start, period, count
        start += period * count


def _cut(graph: Graph, blocks: Sequence[Block], stands_for: dict[str, str]) -> Graph:
    """``graph`` with ``blocks`` alone; what reads a dropped block reads the one that stands for it."""
    ops: list[Op] = []
    made: list[Block] = []
    for index, block in enumerate(blocks):
        start = len(ops)
        ops += [
            op.with_operands(tuple(Ref(stands_for.get(r.name, r.name), r.index) for r in op.operands))
            for op in graph.block_ops(block)
        ]
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


CROSS_ENTROPY = "autopar.cross_entropy_sum"
CLASSES_ARGUMENT = 4
"""Position of the number of real classes among the arguments of the loss; 0, or left out: all."""

_LINEARS = {"aten.linear.default": 0, "autopar.linear_t": 1}
"""The dim of the weight that counts features out."""

_ELEMENTWISE = aten_targets(
    "mul.Tensor div.Tensor add.Tensor sub.Tensor mul.Scalar div.Scalar tanh.default neg.default to.dtype"
)
"""Of one tensor: with a finite derivative at zero, so that a gradient of zero stays zero."""


@dataclass(slots=True, eq=False)
class Vocabulary:
    """Dims of one length.

    Attributes:
        size: their length.
        parameters: the dim of each, by name.
        values: whose last dim it is.
        losses: names of the operators in which it ends.
    """

    size: int
    parameters: dict[str, int] = field(default_factory=dict)
    values: dict[Ref, None] = field(default_factory=dict)
    losses: dict[str, None] = field(default_factory=dict)


def vocabularies(graph: Graph) -> tuple[Vocabulary, ...]:
    """Every vocabulary of the graph all of whose uses are understood."""
    if vocabularies not in graph.passes:
        graph.passes[vocabularies] = _vocabularies(graph)
    found: tuple[Vocabulary, ...] = graph.passes[vocabularies]
    return found


def _vocabularies(graph: Graph) -> tuple[Vocabulary, ...]:
    found: list[Vocabulary] = []
    done: set[str] = set()
    for op in graph.ops:
        dim = 0 if op.target == "aten.embedding.default" else _LINEARS.get(op.target)
        weight = None if dim is None else op.operands[0 if op.target == "aten.embedding.default" else 1]
        if dim is None or weight is None or weight.name in done or not graph.is_parameter(weight):
            continue
        vocabulary = _Walk(graph).run(weight.name, dim)
        if vocabulary is not None:
            found.append(vocabulary)
            done |= vocabulary.parameters.keys()
    return tuple(found)


def lengths(graph: Graph, ranks: int, multiple: int = 1) -> dict[str, int]:
    """The padded length of each parameter whose vocabulary is not as long as :func:`length` says, by its key.

    Args:
        ranks: over which vocabularies may be split.
        multiple: of the rows that a rank then holds, of vocabularies that are multiplied with (tables that are only looked up
            in, such as those of positions, gain nothing by it).
    """
    if ranks == multiple == 1:
        return {}
    found = {v: length(v.size, ranks, multiple if v.values else 1) for v in vocabularies(graph)}
    return {
        graph.parameter(name).key: size
        for vocabulary, size in found.items()
        if size > vocabulary.size
        for name in vocabulary.parameters
    }


def vocabulary_sizes(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Of each vocabulary that is multiplied with its length, and the elements that its parameters have for one of it."""
    return tuple(
        (v.size, sum(graph.parameter(name).spec.numel // v.size for name in v.parameters))
        for v in vocabularies(graph)
        if v.values
    )


def length(size: int, ranks: int, multiple: int = 1) -> int:
    """A vocabulary of ``size`` so long that each of ``ranks`` has a multiple of ``multiple`` rows.

    Where some rank would hold more padding than anything else, rows are not aligned; where that is so even then, nothing is
    padded.

    >>> length(50257, 1, 64), length(50257, 8, 64), length(50257, 8), length(50257, 1)
    (50304, 50688, 50264, 50257)
    >>> length(200, 4, 64), length(21, 5)
    (200, 21)
    """
    for parts in (ranks * multiple, ranks):
        if size >= parts * ranks:
            return -(-size // parts) * parts
    return size


def pad(graph: Graph, wanted: Mapping[str, int]) -> Graph:
    """The graph with parameters lengthened.

    Args:
        wanted: padded lengths by ``Parameter.key``; those of one vocabulary are equal.

    Raises:
        ValueError: a vocabulary is padded in part, or one of them is none.
    """
    known = {graph.parameter(name).key: v for v in vocabularies(graph) for name in v.parameters}
    if unknown := sorted(wanted.keys() - known.keys()):
        raise ValueError(f"{unknown[0]} has no dim that can be padded")
    vocabs = {id(known[key]): (known[key], size) for key, size in wanted.items()}
    for vocabulary, size in vocabs.values():
        if any(wanted.get(graph.parameter(n).key) != size for n in vocabulary.parameters) or size < vocabulary.size:
            raise ValueError(
                f"{', '.join(vocabulary.parameters)} are padded together, to one length of at least {size}"
            )
        graph = _padded(graph, vocabulary, size)
    return graph


class _Walk:
    """The state of one search for what shares a dim with a parameter."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.queue: list[Ref] = []
        self.found = Vocabulary(0)

    def run(self, name: str, dim: int) -> Vocabulary | None:
        self.found.size = self.graph.parameter(name).spec.shape[dim]
        if not self._parameter(name, dim):
            return None
        while self.queue:
            ref = self.queue.pop()
            users = self.graph.users(ref)
            if not all(self._use(self.graph.ops[position], ref) for position in users):
                return None
            is_value = ref in self.found.values
            if is_value and (not users or any(ref == m.value for m in self.graph.mutations)):
                return None
        return self.found

    def _parameter(self, name: str, dim: int) -> bool:
        """Takes a parameter in; False where it cannot be padded."""
        if name in self.found.parameters:
            return self.found.parameters[name] == dim
        parameter = self.graph.parameter(name)
        if parameter.part is not None or parameter.spec.shape[dim] != self.found.size:
            return False
        self.found.parameters[name] = dim
        self.queue.append(Ref(name))
        return True

    def _value(self, op: Op) -> bool:
        if op.spec.shape[-1:] != (self.found.size,) or len(op.outputs) != 1:
            return False
        ref = Ref(op.name)
        if ref not in self.found.values:
            self.found.values[ref] = None
            self.queue.append(ref)
        return True

    def _use(self, op: Op, ref: Ref) -> bool:
        """Whether a use of a padded tensor is understood; takes in what it makes."""
        places = [i for i, operand in enumerate(op.operands) if operand == ref]
        is_parameter = self.graph.is_parameter(ref)
        if op.target == "aten.embedding.default":
            return is_parameter and places == [0] and self.found.parameters[ref.name] == 0
        if op.target in _LINEARS:
            if not is_parameter or 0 in places:
                return False
            weight, *bias = op.operands[1:]
            return (
                self.graph.is_parameter(weight)
                and self._parameter(weight.name, _LINEARS[op.target])
                and all(self.graph.is_parameter(b) and self._parameter(b.name, 0) for b in bias)
                and self._value(op)
            )
        if is_parameter or places != [0] or op.args[0] != ref:
            return False
        if op.target == CROSS_ENTROPY:
            self.found.losses[op.name] = None
            return len(op.args) <= CLASSES_ARGUMENT
        if len(op.operands) == 1 and (op.target in _ELEMENTWISE or op.target == "aten.view.default"):
            return self._value(op)
        if op.target == "aten.slice.Tensor":
            rank = len(op.spec.shape)
            dim = op.args[1] if len(op.args) > 1 else 0
            return isinstance(dim, int) and dim % rank != rank - 1 and self._value(op)
        return False


def _padded(graph: Graph, vocabulary: Vocabulary, size: int) -> Graph:
    def longer(spec: TensorSpec, dim: int) -> TensorSpec:
        dim %= len(spec.shape)
        return replace(spec, shape=(*spec.shape[:dim], size, *spec.shape[dim + 1 :]))

    def changed(op: Op) -> Op:
        if op.name in vocabulary.losses:
            given = (*op.args, *(-100, 0.0)[len(op.args) - 2 :])
            return replace(op, args=(*given, vocabulary.size))
        if Ref(op.name) not in vocabulary.values:
            return op
        new = replace(op, outputs=(longer(op.spec, -1),))
        return replace(new, args=(op.args[0], new.spec.shape)) if op.target == "aten.view.default" else new

    parameters = []
    for parameter in graph.parameters:
        dim = vocabulary.parameters.get(parameter.name)
        if dim is not None:
            padding = Padding(dim=dim, length=vocabulary.size)
            parameter = replace(parameter, spec=longer(parameter.spec, dim), padding=padding)
        parameters.append(parameter)
    return replace(graph, parameters=tuple(parameters), ops=tuple(changed(op) for op in graph.ops))
