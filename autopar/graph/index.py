"""Look-ups over a graph: what makes a tensor, who reads it, which blocks hold it."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any

from autopar.graph.elements import Block, Buffer, Input, Op, Parameter, Ref, TensorSpec

SAME = "same calls"
"""Under this name graphs of several sizes keep what says which operators of a block do the same in each of them."""


class Index:
    """Look-ups over one graph, made once."""

    __slots__ = ("_crossing", "block_of", "free", "made", "named", "of_block", "parameters", "producers", "users")

    def __init__(
        self,
        *,
        leaves: tuple[Input | Parameter | Buffer, ...],
        prelude: tuple[Op, ...],
        ops: tuple[Op, ...],
        blocks: tuple[Block, ...],
    ) -> None:
        self.producers = {op.name: op for op in (*prelude, *ops)}
        self.made: dict[str, tuple[TensorSpec, ...]] = {leaf.name: (leaf.spec,) for leaf in leaves}
        """By the name of what makes tensors their specs."""
        for name, op in self.producers.items():
            self.made[name] = op.outputs
        self.parameters = {leaf.name: leaf for leaf in leaves if isinstance(leaf, Parameter)}
        self.free = {leaf.name for leaf in leaves} - set(self.parameters) | {op.name for op in prelude}
        users: dict[Ref, list[int]] = {}
        for position, op in enumerate(ops):
            for ref in op.operands:
                known = users.get(ref)
                if known is None:
                    users[ref] = [position]
                elif known[-1] != position:
                    known.append(position)
        self.users = {ref: tuple(positions) for ref, positions in users.items()}
        self.block_of = {op.name: b.index for b in blocks for op in ops[b.start : b.stop]}
        self._crossing: list[tuple[int, int, Ref]] | None = None
        self.of_block: dict[tuple[str, int, int], Any] = {}
        """What was asked for of the operators between two positions."""
        self.named: dict[str, Any] = {}
        """What passes found that follows from names, wiring and parameters, whatever the other shapes."""

    def __getstate__(self) -> dict[str, Any]:
        """Without what passes found, as that of a graph."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "named"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.named = {}

    @property
    def refs(self) -> list[Ref]:
        """All tensors: leaves, then those of the prelude, then all others."""
        return [Ref(name, i) for name, specs in self.made.items() for i in range(len(specs))]

    def of_other_shapes(self, ops: Iterable[Op], made: dict[str, tuple[TensorSpec, ...]]) -> Index:
        """The index of a graph with the same names, wiring and parameters; ``ops``: with those of its prelude."""
        found = copy(self)
        found.made, found.named = made, self.named
        found.producers = {op.name: op for op in ops}
        return found

    def crossing(self, ops: tuple[Op, ...]) -> list[tuple[int, int, Ref]]:
        """Of the live values that some operator reads: where each is made, where it is read last; in order of making."""
        if self._crossing is None:
            self._crossing = [
                (position, last, ref)
                for position, op in enumerate(ops)
                for ref in (Ref(op.name, i) for i in range(len(op.outputs)))
                if (last := self.last_use(ref)) >= 0
            ]
        return self._crossing

    def last_use(self, ref: Ref) -> int:
        """Position of the last live operator that reads ``ref``; -1 for none."""
        users = self.users.get(ref)
        return users[-1] if users else -1
