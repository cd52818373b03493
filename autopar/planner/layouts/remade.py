"""What selective recompute may free of a block in a layout that is not priced yet, and the least that it takes.

Which operators backward makes again is a rule of one rank's graph (:mod:`autopar.graph.again`), which is only known when a layout is
priced. But of operators that are made again whatever they read, those that read each other's values with no change of type
between are one group there, of which all are made again or none. A change of type is an operator of its own, which is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost.operators.work import VIEWS
from autopar.graph.again import follows, is_cheap, is_dear
from autopar.graph.ir import Graph, Op, Ref
from autopar.rules.conversions import conversion
from autopar.rules.types import Strategy

Freed = tuple[float, float]
"""Seconds that a group takes at least where it is made again, and bytes that this frees at most."""


@dataclass(slots=True, kw_only=True, eq=False)
class Remaking:
    """Operators of one block in one layout, added in their order.

    Attributes:
        chosen: strategies by operator.
        root_of: the value whose storage another lies in, whatever block makes it.
        size: ranks of the axis.
        held: storages that backward needs without recompute, and whether they are parts.
    """

    graph: Graph
    chosen: Mapping[str, Strategy]
    root_of: Callable[[Ref], Ref]
    size: int
    held: set[tuple[Ref, bool]]
    _group: dict[str, str] = field(default_factory=dict)
    _roots: dict[Ref, Ref | None] = field(default_factory=dict)
    _reads: dict[str, list[Ref]] = field(default_factory=dict)
    _seconds: dict[str, float] = field(default_factory=dict)
    _freed: dict[str, float] = field(default_factory=dict)
    _droppable: dict[str, bool] = field(default_factory=dict)

    def add(self, op: Op, forward_s: float) -> None:
        """The next operator, which takes no less than ``forward_s`` forward."""
        is_own = not self.chosen[op.name].target
        if op.target in VIEWS:  # a copy where strides allow no view; then it is of the group of what it reads
            is_value = not self._is_free(op.operands[0])
            root = self.root(op, 0) if is_own and is_value and is_cheap(op) else None
            self._roots |= {Ref(op.name, k): root for k in range(len(op.outputs))}
            return
        values = (i for i, ref in enumerate(op.operands) if not self._is_free(ref))
        self._reads[op.name] = reads = [root for i in values if (root := self.root(op, i)) is not None]
        self._seconds[op.name] = forward_s
        self._droppable[op.name] = not is_dear(op)
        again = [root.name for root in reads if root.name in self._group]
        if is_own and (is_cheap(op) or (follows(op) and again)):
            self._group[op.name] = op.name
            for name in again:
                self._group[self._find(name)] = self._find(op.name)

    def _is_free(self, ref: Ref) -> bool:
        """Whether a value is there anyway."""
        return self.graph.is_parameter(ref) or self.graph.is_prelude(ref)

    def root(self, op: Op, operand: int) -> Ref | None:
        """Whose storage an operand lies in, or is a copy of; None where that is no value of a block, or a change of type is between."""
        ref = op.operands[operand]
        made, wanted = self.chosen[ref.name].outputs[ref.index], self.chosen[op.name].inputs[operand]
        if made == wanted:  # as most are
            return self._roots.get(ref, ref)
        change = conversion(made, wanted, requires_grad=self.graph.spec(ref).requires_grad)
        return None if change is None or change.target else self._roots.get(ref, ref)

    def keeps(self, maker: str, num_bytes: float) -> None:
        """Bytes that backward needs of what an operator makes."""
        if num_bytes and self._droppable.get(maker, False):
            self._freed[maker] = self._freed.get(maker, 0.0) + num_bytes

    def groups(self) -> tuple[Freed, ...]:
        """Those by which bytes may be freed: whatever is made again is some of them, and takes and keeps as much as these at least."""
        members: dict[str, list[str]] = {}
        for name in self._freed:
            members.setdefault(self._find(name), []).append(name)
        found, kept = [], set(self.held)
        for own in members.values():
            needed = self._needed(own)
            read = {root for name in needed for root in self._reads[name] if root.name not in self._group}
            more = {(root, self._is_part(root)) for root in read if self._is_kept(root)} - kept
            kept.update(more)
            freed = sum(self._freed[name] for name in own) - sum(self._num_bytes(*value) for value in more)
            if freed > 0:
                found.append((sum(self._seconds[name] for name in needed), freed))
        return tuple(found)

    def _needed(self, makers: Sequence[str]) -> set[str]:
        """Operators that run again to make what these make."""
        found, left = set[str](), [*makers]
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                if name in self._group:
                    left += [root.name for root in self._reads[name] if root.name in self._group]
        return found

    def _is_kept(self, root: Ref) -> bool:
        """Whether a value is kept wherever what reads it is made again; of an earlier block's only where it is no view there."""
        return not self._droppable.get(root.name, False) and self.root_of(root) == root

    def _num_bytes(self, root: Ref, is_part: bool) -> float:
        return self.graph.spec(root).num_bytes / (self.size if is_part else 1)

    def _is_part(self, root: Ref) -> bool:
        return self.chosen[root.name].outputs[root.index].is_split

    def _find(self, name: str) -> str:
        while self._group.get(name, name) != name:
            name = self._group[name]
        return name


def points_of(groups: Sequence[Freed]) -> tuple[Freed, ...]:
    """Seconds and freed bytes of some choices of these groups, such that no choice lies below a line that is below all of these.

    The one that takes the least, and the corners of the lower hull: groups in order of what they take for a byte.
    """
    if not groups:
        return ()
    found, seconds, freed = [min(groups)], 0.0, 0.0
    for own_s, own in sorted(groups, key=lambda group: group[0] / group[1]):
        seconds, freed = seconds + own_s, freed + own
        found.append((seconds, freed))
    return tuple(found)
