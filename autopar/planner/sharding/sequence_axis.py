"""The axis ``cp``: which strategies split the sequence, and nothing else.

Parameters are whole there (I at rest, R at their use, with one gradient sum a step), samples are not split (that is
what data axes are for), and attention runs in one of these kinds:

| kind      | q       | k, v    | what moves                                                |
|-----------|---------|---------|-----------------------------------------------------------|
| ``gather``  | S(rows) | R       | keys and values are gathered, their gradients scattered |
| ``ulysses`` | S(heads)| S(heads)| all-to-all between sequence and heads, there and back   |
| ``ring``    | S(rows) | S(rows) | keys and values go round; zig-zag order                 |

Attention written out (products and a softmax, as with alibi) has the first two: its softmax splits rows or heads, and
the products follow.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.graph.graph import Graph, Op, Ref
from autopar.graph.operator_kinds import is_attention, is_scores
from autopar.plan.mesh import Type
from autopar.rules.apply import BATCH
from autopar.rules.strategy import ZIGZAG_SAFE, Strategy

CP = "cp"

_ATTENTION = {"gather": ("split s", "gather"), "ulysses": ("split h",), "ring": ("ring",)}
_SCORES = {"gather": ("split d2",), "ulysses": ("split d1",), "ring": ()}
"""Of a softmax over scores [samples, heads, rows, columns]."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSplit:
    """Keeps the strategies that an operator of a micro-batch graph may take on ``cp`` under one kind of attention.

    What is made of samples is split wherever it can be: work is repeated only where nothing else is left.
    """

    graph: Graph
    kind: str
    size: int

    def __call__(self, op: Op, offered: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        allowed = tuple(s for s in offered if self._allows(op, s))
        split = tuple(s for s in allowed if any(t.is_split for t in (*s.inputs, *s.outputs)))
        values = (*op.operands, *(Ref(op.name, i) for i in range(len(op.outputs))))
        has_samples = any((kind := self._samples(ref)) is not None and kind.is_split for ref in values)
        return split if split and has_samples else allowed

    def _allows(self, op: Op, strategy: Strategy) -> bool:
        if is_attention(op) and strategy.name not in _ATTENTION[self.kind]:
            return False
        if is_scores(op) and strategy.name not in _SCORES[self.kind]:
            return False
        if self.kind == "ring" and strategy.target not in ZIGZAG_SAFE:
            return False
        operands = zip(op.operands, strategy.inputs, strict=True)
        outputs = ((Ref(op.name, i), kind) for i, kind in enumerate(strategy.outputs))
        return all(self._holds(ref, kind) for ref, kind in (*operands, *outputs))

    def _holds(self, ref: Ref, kind: Type) -> bool:
        if not kind.is_split:
            return True
        if self.graph.is_parameter(ref) or (self.graph.batch_size > 1 and kind == self._samples(ref)):
            return False
        return self.kind != "ring" or self.graph.spec(ref).shape[kind.dim] % (2 * self.size) == 0

    def _samples(self, ref: Ref) -> Type | None:
        """The type of a value on the axis of samples."""
        producer = self.graph.producer(ref)
        if producer is not None:
            return dict(producer.layouts[ref.index]).get(BATCH) if producer.layouts else None
        leaf = next((leaf for leaf in self.graph.inputs if leaf.name == ref.name), None)
        return None if leaf is None or leaf.batch_dim is None else Type("S", leaf.batch_dim)
