"""Vocabularies made longer, so that they split evenly and their rows are aligned: 50257 over 4 ranks become 50260 or 50432.

A vocabulary is a set of dims that must have one length: rows of embedding tables, features out of heads (weights and
biases), classes of logits. Padding is a change of shapes alone: the same operators in the same order. Rows that are
added are zeros that no index picks; logits that are added are left out of the loss, which is told how many classes
are real, so that their gradients are zero, and an optimizer leaves zeros zeros. Where any operator besides these sees
a padded dim, nothing is padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.graph.graph import Graph, Op, Padding, Ref, TensorSpec

CROSS_ENTROPY = "autopar.cross_entropy_sum"
CLASSES_ARGUMENT = 4
"""Position of the number of real classes among the arguments of the loss; 0, or left out: all."""

_LINEARS = {"aten.linear.default": 0, "autopar.linear_t": 1}
"""The dim of the weight that counts features out."""

_ELEMENTWISE = frozenset(
    f"aten.{name}"
    for name in [
        "mul.Tensor", "div.Tensor", "add.Tensor", "sub.Tensor", "mul.Scalar", "div.Scalar", "tanh.default",
        "neg.default", "to.dtype",
    ]
)  # fmt: skip
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
    known, key = graph._index.named, "vocabularies"
    if key not in known:
        known[key] = _vocabularies(graph)
    found: tuple[Vocabulary, ...] = known[key]
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
