"""Rewrites of graphs: the compact graph, in which few blocks stand for many equal ones, and padded vocabularies, which split evenly.

**Compact graph.** A run of equal blocks (equal hash, each reads the one before) is cut down to its first, one inner and its last block. If
layers of several kinds alternate, the windows of one period each are cut down in the same way. The search works on the compact graph; a
plan then names the layout of every block.

**Vocabularies.** A vocabulary is a set of dims that must have one length: rows of embedding tables, output features of heads (weights and
biases), and classes of logits. Padding changes shapes alone: operators and their order stay. Added rows are zeros that no index selects.
Added logits are ignored by the loss, which gets the number of real classes, so their gradients are zero and the optimizer keeps the zeros.
A vocabulary is not padded if any other operator reads a padded dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile

from autopar.graph.graph import Argument, Block, Graph, Op, Padding, Ref, TensorSpec, map_refs
from autopar.ops.kernels import aten_targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """A compact graph and its relation to the original graph.

    Attributes:
        graph: the graph with fewer blocks and the fingerprint of the original.
        members: for each block of ``graph`` the indices of the original blocks that it stands for.
        alike: pairs of values of ``graph`` that must have the same type on every axis: an input of an inner window and the output in its
            place, as inner windows feed each other.
    """

    graph: Graph
    members: tuple[tuple[int, ...], ...]
    alike: tuple[tuple[Ref, Ref], ...]

    @property
    def class_of(self) -> tuple[int, ...]:
        """For each original block the index of the block of ``graph`` that stands for it."""
        class_by_block = {i: k for k, members in enumerate(self.members) for i in members}
        return tuple(class_by_block[i] for i in range(len(class_by_block)))


def compact(graph: Graph, *, keys: Sequence[object] = ()) -> Compact:
    """Return the compact graph of ``graph``.

    Args:
        keys: a key for each block, for example its pins; only blocks with equal keys are merged. Empty means equal keys.
    """
    return _compact(graph, keys) if keys else graph.once(compact, lambda: _compact(graph, ()))


def _compact(graph: Graph, keys: Sequence[object]) -> Compact:
    kept: list[tuple[Block, tuple[int, ...]]] = []  # blocks of the compact graph, each with its members
    replacement: dict[str, str] = {}  # for each dropped operator the one that stands for it
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
                replacement.update((op.name, other.name) for op, other in pairs)
    alike: dict[tuple[Ref, Ref], None] = {}
    for _, members in kept:
        # either may read a value of a dropped operator, as where a decoder's layers read those of an encoder in reverse order
        inputs, *others_inputs = (
            [Ref(replacement.get(ref.name, ref.name), ref.index) for ref in graph.block_inputs(graph.blocks[i])]
            for i in members
        )
        for other_inputs in others_inputs:
            alike |= dict.fromkeys((a, b) for a, b in zip(inputs, other_inputs, strict=True) if a != b)
    return Compact(
        graph=_cut(graph, [block for block, _ in kept], replacement),
        members=tuple(members for _, members in kept),
        alike=tuple(alike),
    )


def _kinds(graph: Graph, keys: Sequence[object]) -> list[object]:
    """Return a kind for each block; kinds are equal if hashes and keys are, unless a block shares a parameter with another one."""
    names = [[parameter.name for parameter in graph.block_parameters(block)] for block in graph.blocks]
    readers = Counter(chain.from_iterable(names))
    shares = [any(readers[name] > 1 for name in block_names) for block_names in names]
    return [i if shares[i] else (block.hash, keys[i]) for i, block in enumerate(graph.blocks)]


def _repeats(kinds: Sequence[object]) -> Iterator[tuple[int, int, int]]:
    """Iterate over runs of equal windows as (start, period, count), in order; they partition the blocks.

    At each start the run that covers the most blocks is taken. Only runs of more than three windows are merged, as a compact run has three.
    """
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


def _cut(graph: Graph, blocks: Sequence[Block], replacement: dict[str, str]) -> Graph:
    """Return ``graph`` with only ``blocks``; readers of a dropped operator read its replacement."""
    ops: list[Op] = []
    new_blocks: list[Block] = []
    for index, block in enumerate(blocks):
        start = len(ops)
        ops += [
            op.with_operands(tuple(Ref(replacement.get(r.name, r.name), r.index) for r in op.operands))
            for op in graph.block_ops(block)
        ]
        new_blocks.append(replace(block, index=index, start=start, stop=len(ops)))
    read = {ref.name for op in ops for ref in op.operands}
    dropped = {op.name for op in graph.ops} - {op.name for op in ops}
    return replace(
        graph,
        parameters=tuple(p for p in graph.parameters if p.name in read),
        mutations=tuple(m for m in graph.mutations if m.value.name not in dropped),
        ops=tuple(ops),
        blocks=tuple(new_blocks),
    )


def signature(ops: Sequence[Op], spec_of: Callable[[Ref], TensorSpec]) -> str:
    """Return a text that is equal for sequences of operators that differ only in names; such sequences have the same strategies."""
    operators: dict[str, str] = {}
    external: dict[Ref, str] = {}

    def numbered(ref: Ref) -> Argument:
        if ref.name in operators:
            return f"{operators[ref.name]}[{ref.index}]"
        if ref not in external:  # a tensor without gradient has other strategies than one with
            spec = spec_of(ref)
            external[ref] = f"${len(external)}:{spec.shape}:{spec.dtype}:{spec.requires_grad}"
        return external[ref]

    lines: list[str] = []
    for op in ops:
        args: Iterable[Argument] = (map_refs(arg, numbered) for arg in op.args)
        kwargs = ((key, map_refs(value, numbered)) for key, value in op.kwargs)
        without_salt = tuple(args)[:2] if op.target == "autopar.dropout" else tuple(args)
        outputs = [(s.shape, s.dtype, s.requires_grad) for s in op.outputs]
        lines.append(f"{op.target}{without_salt}{tuple(kwargs)}{outputs}{op.layouts}")
        operators[op.name] = f"%{len(operators)}"
    return "\n".join(lines)


CROSS_ENTROPY = "autopar.cross_entropy_sum"
CLASSES_ARGUMENT = 4
"""The position of the number of real classes among the arguments of the loss; a missing argument or 0 means all classes."""

_LINEARS = {"aten.linear.default": 0, "autopar.linear_t": 1}
"""The dim of output features of a linear's weight, by target."""

_ELEMENTWISE = aten_targets(
    "mul.Tensor div.Tensor add.Tensor sub.Tensor mul.Scalar div.Scalar tanh.default neg.default to.dtype"
)
"""Elementwise operators through which logits may pass. Their derivatives are finite at zero, so that a gradient of zero stays zero."""


@dataclass(slots=True, eq=False)
class Vocabulary:
    """A set of dims that must have one length.

    Attributes:
        size: the length.
        parameters: the dim of each parameter, by name.
        values: the values whose last dim belongs to the set.
        losses: the names of the losses that read these values.
    """

    size: int
    parameters: dict[str, int] = field(default_factory=dict)
    values: dict[Ref, None] = field(default_factory=dict)
    losses: dict[str, None] = field(default_factory=dict)


def vocabularies(graph: Graph) -> tuple[Vocabulary, ...]:
    """Return the vocabularies of the graph that can be padded: all operators that read their dims are supported."""
    return graph.once(vocabularies, lambda: _vocabularies(graph))


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
    """Return the padded length (:func:`length`) of each parameter whose vocabulary has to be padded, by ``Parameter.key``.

    Args:
        ranks: the number of ranks over which vocabularies may be split.
        multiple: the rows of a rank are a multiple of this. It applies to vocabularies of products; tables that are only looked up, such
            as those of positions, gain nothing from it.
    """
    padded = {v: length(v.size, ranks, multiple if v.values else 1) for v in vocabularies(graph)}
    return {
        graph.parameter(name).key: size
        for vocabulary, size in padded.items()
        if size > vocabulary.size
        for name in vocabulary.parameters
    }


def vocabulary_sizes(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Return for each vocabulary of products its length, and the number of elements of its parameters for one entry."""
    return tuple(
        (v.size, sum(graph.parameter(name).spec.numel // v.size for name in v.parameters))
        for v in vocabularies(graph)
        if v.values
    )


def length(size: int, ranks: int, multiple: int = 1) -> int:
    """Return the padded length of a vocabulary of ``size`` with which each of ``ranks`` has a multiple of ``multiple`` rows.

    The padding, which is on the last rank, is less than ``ranks * multiple`` rows. If that could be more than the real rows of a rank, the
    length is only made a multiple of ``ranks``. If it could be more even then, the vocabulary is not padded.

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
    """Return the graph with padded vocabularies.

    Args:
        wanted: padded lengths by ``Parameter.key``; those of one vocabulary must be equal.

    Raises:
        ValueError: a parameter has no vocabulary, or a vocabulary is padded only in part.
    """
    by_key = {graph.parameter(name).key: v for v in vocabularies(graph) for name in v.parameters}
    if unknown := sorted(wanted.keys() - by_key.keys()):
        raise ValueError(f"{unknown[0]} has no dim that can be padded")
    sizes = {id(by_key[key]): (by_key[key], size) for key, size in wanted.items()}
    for vocabulary, size in sizes.values():
        if any(wanted.get(graph.parameter(n).key) != size for n in vocabulary.parameters) or size < vocabulary.size:
            raise ValueError(
                f"{', '.join(vocabulary.parameters)} are padded together, to one length of at least {size}"
            )
        graph = _padded(graph, vocabulary, size)
    return graph


class _Walk:
    """The state of one search for the parameters and values that share a dim with a parameter.

    Attributes:
        queue: tensors whose readers are not examined yet.
        found: the vocabulary so far.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.queue: list[Ref] = []
        self.found = Vocabulary(0)

    def run(self, name: str, dim: int) -> Vocabulary | None:
        """Return the vocabulary of dim ``dim`` of a parameter; None if it cannot be padded."""
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
        """Add a parameter to the vocabulary; return False if it cannot be padded."""
        if name in self.found.parameters:
            return self.found.parameters[name] == dim
        parameter = self.graph.parameter(name)
        if parameter.part is not None or parameter.spec.shape[dim] != self.found.size:
            return False
        self.found.parameters[name] = dim
        self.queue.append(Ref(name))
        return True

    def _value(self, op: Op) -> bool:
        """Add the output of an operator to the vocabulary; return False if its last dim is not that of the vocabulary."""
        if op.spec.shape[-1:] != (self.found.size,) or len(op.outputs) != 1:
            return False
        ref = Ref(op.name)
        if ref not in self.found.values:
            self.found.values[ref] = None
            self.queue.append(ref)
        return True

    def _use(self, op: Op, ref: Ref) -> bool:
        """Return whether an operator may read the padded tensor ``ref``; its output is added to the vocabulary."""
        positions = [i for i, operand in enumerate(op.operands) if operand == ref]
        is_parameter = self.graph.is_parameter(ref)
        if op.target == "aten.embedding.default":
            return is_parameter and positions == [0] and self.found.parameters[ref.name] == 0
        if op.target in _LINEARS:
            if not is_parameter or 0 in positions:
                return False
            weight, *bias = op.operands[1:]
            return (
                self.graph.is_parameter(weight)
                and self._parameter(weight.name, _LINEARS[op.target])
                and all(self.graph.is_parameter(b) and self._parameter(b.name, 0) for b in bias)
                and self._value(op)
            )
        if is_parameter or positions != [0] or op.args[0] != ref:
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
    """Return the graph with one vocabulary padded to ``size``."""

    def longer(spec: TensorSpec, dim: int) -> TensorSpec:
        dim %= len(spec.shape)
        return replace(spec, shape=(*spec.shape[:dim], size, *spec.shape[dim + 1 :]))

    def changed(op: Op) -> Op:
        if op.name in vocabulary.losses:
            args = (*op.args, *(-100, 0.0)[len(op.args) - 2 :])  # the defaults of ignore_index and label_smoothing
            return replace(op, args=(*args, vocabulary.size))
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
