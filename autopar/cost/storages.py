"""Lifetimes of the storages of one block: what it keeps for backward, and the most that is alive at once."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace

from autopar.cost.work import VIEWS, Work
from autopar.graph.ir import Block, Graph, Op, Ref
from autopar.graph.storage import storage_roots


class Storages:
    """Lifetimes of the storages that a block makes, keeps and reads."""

    def __init__(self, graph: Graph, block: Block, works: list[Work], again: frozenset[int] = frozenset()) -> None:
        self.graph, self.block, self.works = graph, block, works
        self.ops = graph.block_ops(block)
        self._roots = roots = storage_roots(self.ops, graph._index.specs)
        self._reads = [[roots.get(ref, ref) for ref in op.operands] for op in self.ops]
        """Of each operator the storages that it reads."""
        self._makes = [[Ref(op.name, k) for k in range(len(op.outputs))] for op in self.ops]
        self._views = [
            op.target in VIEWS and roots[made[0]] != made[0] for op, made in zip(self.ops, self._makes, strict=True)
        ]
        self.saved: dict[Ref, int] = {}
        """Kept storages by the position of the first operator that keeps them."""
        parameters, free = graph._index.parameters, graph._index.free
        for i, done in enumerate(works):
            kept = [self._reads[i][k] for k in done.saved]
            if done.saves_output:
                kept.append(roots[self._makes[i][0]])
            for root in kept:
                if root.name not in parameters and root.name not in free:
                    self.saved.setdefault(root, i)
        self._inner = [done.saved_bytes for done in works]
        self.again_bytes = 0
        self.remade: frozenset[int] = frozenset()
        """Positions of the operators that backward runs once more for what is not kept."""
        self._sizes: dict[Ref, int] = {}
        self._lives, self._gradients = self._alive(), self._flowing()
        self._forget(again)

    @property
    def roots(self) -> dict[Ref, Ref]:
        """For every value that the block makes the one whose storage it lies in."""
        return self._roots

    def without(self, again: frozenset[int]) -> Storages:
        """The same block where the operators at these positions are made again and nothing that they make is kept."""
        found = copy(self)
        found.saved, found._inner = dict(self.saved), list(self._inner)
        found._forget(again)
        return found

    def kept_by(self, is_dear: Callable[[Op], bool]) -> int:
        """Bytes that are kept of what such operators make, and of what earlier blocks make."""
        other = {op.name for op in self.ops if not is_dear(op)}
        own = sum(size for size, op in zip(self._inner, self.ops, strict=True) if is_dear(op))
        return own + sum(self.size(root) for root in self.saved if root.name not in other)

    def _forget(self, again: frozenset[int]) -> None:
        self.again_bytes = self._drop(again)
        self.saved_bytes = sum(map(self.size, self.saved)) + sum(self._inner)

    def _drop(self, again: frozenset[int]) -> int:
        """Forget what the operators at these positions make; keep what they read. Bytes that are made once more."""
        makers = {self.ops[i].name: i for i in again}
        made = {root for root in self.saved if root.name in makers}
        dropped = sum(map(self.size, made)) + sum(self._inner[i] for i in again)
        needed = [makers[root.name] for root in made] + [i for i in again if self._inner[i]]
        for root in made:
            del self.saved[root]
        seen: set[int] = set()
        while needed:  # what the dropped values are made of, as far as it is dropped too
            i = needed.pop()
            if i in seen:
                continue
            seen.add(i)
            self._inner[i] = 0
            for root in self._reads[i]:
                if root.name in makers:
                    needed.append(makers[root.name])
                elif not self.graph.is_parameter(root) and not self.graph.is_prelude(root):
                    self.saved.setdefault(root, i)
        self.remade = frozenset(seen)
        return dropped

    def root(self, ref: Ref) -> Ref:
        """The value whose storage ``ref`` lies in, as far back as the block goes."""
        return self._roots.get(ref, ref)

    def copies(self, op: Op) -> bool:
        """Whether a view is none: strides do not allow it, so that it copies."""
        return op.target in VIEWS and self.root(Ref(op.name)) == Ref(op.name)

    def copied(self, op: Op, done: Work) -> Work:
        """The work of ``op`` when it is a view that copies, else ``done``."""
        return replace(done, launches=1, num_bytes=2 * op.spec.num_bytes) if self.copies(op) else done

    def size(self, ref: Ref) -> int:
        if ref not in self._sizes:
            self._sizes[ref] = self.graph.spec(ref).num_bytes
        return self._sizes[ref]

    def inputs(self) -> dict[Ref, int]:
        """Storages of earlier blocks that this one reads."""
        roots = dict.fromkeys(self.root(ref) for ref in self.graph.block_inputs(self.block))
        return {root: self.size(root) for root in roots if not self.graph.is_parameter(root)}

    def prelude(self) -> tuple[tuple[str, int], ...]:
        roots = dict.fromkeys(self.root(ref) for ref in self.graph.block_prelude(self.block))
        constants = {buffer.name for buffer in self.graph.buffers}
        return tuple((root.name, self.size(root)) for root in roots if root.name not in constants)

    def forward_peak(self) -> int:
        """Kept so far and still to be read, at the fullest moment of forward; inputs count where they are kept."""
        kept = peak = now = 0  # ``now``: bytes that are alive and not kept
        keeps: dict[int, int] = {}
        position = {op.name: i for i, op in enumerate(self.ops)}
        for ref, i in self.saved.items():
            made_at = position.get(ref.name, i)
            keeps[made_at] = keeps.get(made_at, 0) + self.size(ref)
        for i, (made, left) in enumerate(self._lives):
            now += sum(self.size(ref) for ref in made if ref not in self.saved)
            kept += keeps.get(i, 0) + self._inner[i]
            peak = max(peak, kept + now + self.works[i].workspace_bytes)
            now -= sum(self.size(ref) for ref in left if ref not in self.saved)
        return peak

    def _alive(self) -> list[tuple[list[Ref], list[Ref]]]:
        """Of each operator the storages that it makes, and those of this block that nothing reads after it."""
        last: dict[Ref, int] = {}
        for i, reads in enumerate(self._reads):
            for ref in reads:
                last[ref] = i
            for ref in self._makes[i]:
                last[self._roots[ref]] = i
        outputs = {self.root(ref) for ref in self.graph.block_outputs(self.block)}
        found: list[tuple[list[Ref], list[Ref]]] = [([], []) for _ in self.ops]
        for i, makes in enumerate(self._makes):
            if not self._views[i]:
                for ref in makes:
                    found[i][0].append(ref)
                    if ref not in outputs:
                        found[last[ref]][1].append(ref)
        return found

    def backward_peak(self) -> int:
        """Kept values not yet used up and gradients on their way, at the fullest moment of backward."""
        kept, peak = self.saved_bytes, 0
        frees: dict[int, int] = {}
        for ref, first in self.saved.items():
            frees[first] = frees.get(first, 0) + self.size(ref)
        for i in reversed(range(len(self.ops))):
            if (beside := self._gradients[i]) is not None:
                peak = max(peak, kept + beside)
            kept -= frees.get(i, 0) + self._inner[i]
        return peak

    def _flowing(self) -> list[int | None]:
        """Bytes of gradients and of workspace while the backward of each operator runs; None of views."""
        specs, parameters = self.graph._index.specs, self.graph._index.parameters
        outputs = (self.root(ref) for ref in self.graph.block_outputs(self.block))
        gradients = {root: self.size(root) for root in outputs if specs[root].requires_grad}
        now = sum(gradients.values())
        found: list[int | None] = [None] * len(self.ops)
        for i in reversed(range(len(self.ops))):
            if not self._views[i]:
                for root in self._reads[i]:
                    if root.name not in parameters and root not in gradients and specs[root].requires_grad:
                        gradients[root] = self.size(root)
                        now += gradients[root]
                found[i] = now + self.works[i].backward_workspace_bytes
                for ref in self._makes[i]:
                    now -= gradients.pop(ref, 0)
        return found
