"""Lifetimes of the storages of one block: what it keeps for backward, and the most that is alive at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

from autopar.cost.operators.work import VIEWS, Work
from autopar.graph.aliasing import numbered_roots
from autopar.graph.graph import Block, Graph, Op, Ref, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wiring:
    """The values of a block by number: first those that it makes, then those that it reads.

    Attributes:
        values: the values by number.
        maker: the position of the operator that makes a value.
        reads, makes: the operands and outputs of each operator.
        is_counted: for each value whether it counts where it is kept; inputs of the batch and parameters exist anyway.
        is_parameter: for each value whether it is a parameter.
        inputs, outputs: the values of earlier blocks that it reads, and its values that other blocks read.
        prelude: the inputs and prelude values that it reads.
    """

    values: tuple[Ref, ...]
    maker: dict[int, int]
    reads: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    is_counted: tuple[bool, ...]
    is_parameter: tuple[bool, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    prelude: tuple[int, ...]


def wiring_of(graph: Graph, block: Block) -> Wiring:
    """Return the wiring of a block."""
    ops = graph.block_ops(block)
    number: dict[Ref, int] = {}
    for op in ops:
        for k in range(len(op.outputs)):
            number[Ref(op.name, k)] = len(number)
    num_made = len(number)
    reads = tuple([tuple([number.setdefault(ref, len(number)) for ref in op.operands]) for op in ops])
    values, parameters, free = tuple(number), graph._index.parameters, graph._index.free
    counts = iter(range(num_made))
    makes = tuple([tuple([next(counts) for _ in op.outputs]) for op in ops])
    buffers = {buffer.name for buffer in graph.buffers}
    return Wiring(
        values=values,
        maker={v: i for i, outputs in enumerate(makes) for v in outputs},
        reads=reads,
        makes=makes,
        is_counted=tuple([ref.name not in parameters and ref.name not in free for ref in values]),
        is_parameter=tuple([ref.name in parameters for ref in values]),
        inputs=tuple([number[ref] for ref in graph.block_inputs(block)]),
        outputs=tuple([number[ref] for ref in graph.block_outputs(block)]),
        prelude=tuple([number[ref] for ref in values[num_made:] if ref.name in free and ref.name not in buffers]),
    )


def _lives(
    wiring: Wiring, roots: Sequence[int], reads: Sequence[Sequence[int]], views: Sequence[bool]
) -> list[tuple[list[int], list[int]]]:
    """Return for each operator the storages that it makes, and the block's storages that nothing reads after it.

    Args:
        wiring: the wiring of the block.
        roots: for each value the one in whose storage it lies.
        reads: for each operator the storages that it reads.
        views: for each operator whether its output has no storage of its own.
    """
    last: dict[int, int] = {}
    for i, operands in enumerate(reads):
        for v in operands:
            last[v] = i
        for v in wiring.makes[i]:
            last[roots[v]] = i
    outputs = {roots[v] for v in wiring.outputs}
    lives: list[tuple[list[int], list[int]]] = [([], []) for _ in reads]
    for i, makes in enumerate(wiring.makes):
        if not views[i]:
            for v in makes:
                lives[i][0].append(v)
                if v not in outputs:
                    lives[last[v]][1].append(v)
    return lives


class Storages:
    """Lifetimes of the storages that a block makes, keeps and reads; values by their number in :class:`Wiring`.

    Args:
        ops, wiring, works: the block's operators, their wiring and their work.
        specs: the specs of the values.
        again: the positions of operators that backward recomputes, so that nothing that they make is kept.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        wiring: Wiring,
        works: Sequence[Work],
        specs: Sequence[TensorSpec],
        again: frozenset[int] = frozenset(),
    ) -> None:
        self.ops, self.wiring, self.works, self._specs = ops, wiring, works, specs
        self._roots = roots = numbered_roots(self.ops, wiring.reads, wiring.makes, specs)
        self.sizes = [spec.num_bytes for spec in specs]
        """The bytes of each value."""
        self._reads = [[roots[v] for v in operands] for operands in wiring.reads]
        self._views = [
            op.target in VIEWS and roots[out[0]] != out[0] for op, out in zip(self.ops, wiring.makes, strict=True)
        ]
        self._lives = _lives(wiring, roots, self._reads, self._views)
        self.saved: dict[int, int] = {}
        """The kept storages, with the position of the first operator that keeps each."""
        for i, op_work in enumerate(works):
            for k in op_work.saved:
                self._save(self._reads[i][k], i)
            if op_work.saves_output:
                self._save(roots[wiring.makes[i][0]], i)
        self._inner = [op_work.saved_bytes for op_work in works]
        self.again_bytes = 0
        self.remade: frozenset[int] = frozenset()
        """The positions of the operators that backward recomputes."""
        self._gradients = self._flowing()
        self._forget(again)

    def _save(self, root: int, position: int) -> None:
        if self.wiring.is_counted[root]:
            self.saved.setdefault(root, position)

    @property
    def roots(self) -> dict[Ref, Ref]:
        """For each value that the block makes, the value in whose storage it lies."""
        values = self.wiring.values
        return {values[v]: values[self._roots[v]] for out in self.wiring.makes for v in out}

    def without(self, again: frozenset[int]) -> Storages:
        """Return the same block with the operators at these positions recomputed in backward, so that nothing that they make is kept."""
        storages = copy(self)
        storages.saved, storages._inner = dict(self.saved), list(self._inner)
        storages._forget(again)
        return storages

    def kept_by(self, is_dear: Callable[[Op], bool]) -> int:
        """Return the kept bytes of what operators with ``is_dear`` make, and of what earlier blocks make."""
        cheap = {v for op, out in zip(self.ops, self.wiring.makes, strict=True) if not is_dear(op) for v in out}
        inner_bytes = sum(size for size, op in zip(self._inner, self.ops, strict=True) if is_dear(op))
        return inner_bytes + sum(self.sizes[root] for root in self.saved if root not in cheap)

    def _forget(self, again: frozenset[int]) -> None:
        self.again_bytes = self._drop(again) if again else 0
        self.saved_bytes = sum([self.sizes[root] for root in self.saved]) + sum(self._inner)

    def _drop(self, again: frozenset[int]) -> int:
        """Drop what the operators at these positions make and keep what they read; return the dropped bytes."""
        makers = {v: i for i in again for v in self.wiring.makes[i]}
        dropped_roots = {root for root in self.saved if root in makers}
        dropped_bytes = sum(self.sizes[root] for root in dropped_roots) + sum(self._inner[i] for i in again)
        needed = [makers[root] for root in dropped_roots] + [i for i in again if self._inner[i]]
        for root in dropped_roots:
            del self.saved[root]
        seen: set[int] = set()
        while needed:  # the operators that make dropped values, as far as their own operands are dropped too
            i = needed.pop()
            if i in seen:
                continue
            seen.add(i)
            self._inner[i] = 0
            for root in self._reads[i]:
                if root in makers:
                    needed.append(makers[root])
                else:
                    self._save(root, i)
        self.remade = frozenset(seen)
        return dropped_bytes

    def copied(self, i: int) -> Work:
        """Return the work of the operator at a position; a view that strides do not allow is a copy."""
        op_work = self.works[i]
        if self._views[i] or self.ops[i].target not in VIEWS:
            return op_work
        return replace(op_work, launches=1, num_bytes=2 * self.sizes[self.wiring.makes[i][0]])

    def inputs(self) -> dict[int, int]:
        """Return the storages of earlier blocks that this block reads, with their bytes."""
        return {self._roots[v]: self.sizes[self._roots[v]] for v in self.wiring.inputs}

    def prelude(self) -> tuple[tuple[str, int], ...]:
        """Return the names and bytes of the inputs and prelude values that the block reads."""
        return tuple([(self.wiring.values[v].name, self.sizes[v]) for v in self.wiring.prelude])

    def forward_peak(self) -> int:
        """Return the bytes that are kept or still to be read at the peak of forward; inputs count where they are kept."""
        kept = peak = passing = 0  # ``passing``: bytes that are alive and not kept
        sizes, saved = self.sizes, self.saved
        keeps: dict[int, int] = {}
        for root, i in saved.items():
            made_at = self.wiring.maker.get(root, i)
            keeps[made_at] = keeps.get(made_at, 0) + sizes[root]
        for i, (made, ended) in enumerate(self._lives):
            for v in made:
                if v not in saved:
                    passing += sizes[v]
            kept += keeps.get(i, 0) + self._inner[i]
            peak = max(peak, kept + passing + self.works[i].workspace_bytes)
            for v in ended:
                if v not in saved:
                    passing -= sizes[v]
        return peak

    def backward_peak(self) -> int:
        """Return the bytes of kept values not yet used and of gradients in flight at the peak of backward."""
        kept, peak = self.saved_bytes, 0
        frees: dict[int, int] = {}
        for root, first in self.saved.items():
            frees[first] = frees.get(first, 0) + self.sizes[root]
        for i in reversed(range(len(self.ops))):
            if (gradient_bytes := self._gradients[i]) is not None:
                peak = max(peak, kept + gradient_bytes)
            kept -= frees.get(i, 0) + self._inner[i]
        return peak

    def _flowing(self) -> list[int | None]:
        """Return the bytes of gradients and workspace during the backward of each operator; None for views."""
        wiring, specs, sizes = self.wiring, self._specs, self.sizes
        outputs = (self._roots[v] for v in wiring.outputs)
        gradients = {root: sizes[root] for root in outputs if specs[root].requires_grad}
        now = sum(gradients.values())
        flowing: list[int | None] = [None] * len(self.ops)
        for i in reversed(range(len(self.ops))):
            if not self._views[i]:
                for root in self._reads[i]:
                    if root not in gradients and not wiring.is_parameter[root] and specs[root].requires_grad:
                        gradients[root] = sizes[root]
                        now += sizes[root]
                flowing[i] = now + self.works[i].backward_workspace_bytes
                for v in wiring.makes[i]:
                    now -= gradients.pop(v, 0)
        return flowing
