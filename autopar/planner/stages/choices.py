"""Which stages consecutive blocks can form and how the blocks of each may recompute: equal blocks counted, without their prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from autopar.planner.space.distinct import distinct_rows
from autopar.planner.stages.activation_modes import Ways

MAX_CHOICES = 32768
"""Choices of recompute enumerated for one stage; past it they are taken in order of bytes saved for a second."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """Choices of recompute of all distinct stages, one stage after the other.

    Attributes:
        taken: for each choice how many blocks of each key take each of their options [choices, options of all keys].
        lengths, first: how many choices a stage has, and where they begin.
        has: for each option of each key 1 where some block takes it.
    """

    taken: Array
    lengths: NDArray[np.int64]
    first: NDArray[np.int64]
    has: tuple[Array, ...]


class CutShape:
    """Which stages and choices of recompute there are; depends on which blocks are equal, not on their prices.

    Args:
        keys: of the blocks, in order.
        ways: for each key how its blocks may recompute.
        fixed: pinned stage by block index.
    """

    def __init__(
        self, keys: Sequence[int], ways: Mapping[int, Ways], *, fixed: Mapping[int, int] | None = None
    ) -> None:
        self.of_block, self.fixed = tuple(keys), dict(fixed or {})
        self.keys = sorted(set(keys))
        self.ways = [ways[key] for key in self.keys]
        self.columns = np.concatenate([[0], np.cumsum([own.options for own in self.ways])])
        """Where the options of each key begin in ``Choices.taken``."""
        n = len(keys)
        counts = np.zeros((n + 1, len(self.keys)), dtype=np.int64)
        np.cumsum(np.array(self.of_block)[:, None] == np.array(self.keys), axis=0, out=counts[1:])
        upper = np.triu_indices(n + 1, 1)
        spans = (counts[None, :, :] - counts[:, None, :])[upper]
        distinct, which = distinct_rows(spans, n)
        order = np.argsort(distinct.sum(axis=1), kind="stable")
        self.distinct = distinct[order]
        """Blocks of each key of stages that differ, those of fewer blocks first."""
        self.sizes = self.distinct.sum(axis=1)
        self.which = np.full((n + 1, n + 1), -1, dtype=np.int64)
        self.which[upper] = np.argsort(order)[which]
        self.exists = self.which >= 0
        self._counts: dict[tuple[Ways, int], NDArray[np.int64]] = {}
        self._choices: dict[range, Choices] = {}

    def _of(self, own: Ways, blocks: int) -> NDArray[np.int64]:
        if (own, blocks) not in self._counts:
            self._counts[own, blocks] = own.counts(blocks)
        return self._counts[own, blocks]

    def no_longer(self, most: int) -> NDArray[np.bool_]:
        """Whether blocks i:j are a stage of at most so many blocks."""
        return self.exists & (self.which < self.up_to(most))

    def up_to(self, most: int) -> int:
        """How many distinct stages have at most so many blocks."""
        return int(np.searchsorted(self.sizes, most, side="right"))

    def choices(self, stages: int, steps: Sequence[tuple[int, int, int]]) -> Choices:
        """Choices of the first so many distinct stages: all of them where those are few, else one block after the other.

        Args:
            steps: keys by position, and from which option to which one their blocks go, best first.
        """
        return self._choices_of(range(stages), steps)

    def choices_alone(self, stage: int, steps: Sequence[tuple[int, int, int]]) -> Choices:
        """As :meth:`choices`, of one distinct stage."""
        return self._choices_of(range(stage, stage + 1), steps)

    def _choices_of(self, stages: range, steps: Sequence[tuple[int, int, int]]) -> Choices:
        if stages in self._choices:
            return self._choices[stages]
        rows, are_few = [], True
        for counts in self.distinct[stages.start : stages.stop]:
            parts = [self._of(own, int(c)) for own, c in zip(self.ways, counts, strict=True)]
            is_few = prod(map(len, parts)) <= MAX_CHOICES
            are_few &= is_few
            rows.append(_crossed(parts) if is_few else self._in_turn(counts, steps))
        lengths = np.array([len(r) for r in rows])
        taken = np.asfortranarray(np.concatenate(rows), dtype=np.float64)
        found = Choices(
            taken=taken,
            lengths=lengths,
            first=np.concatenate([[0], np.cumsum(lengths)[:-1]]),
            has=tuple((taken[:, k] > 0).astype(np.float64) for k in range(taken.shape[1])),
        )
        if are_few:  # whatever each gains
            self._choices[stages] = found
        return found

    def _in_turn(self, counts: NDArray[np.int64], steps: Sequence[tuple[int, int, int]]) -> NDArray[np.int64]:
        taken = np.zeros(int(self.columns[-1]), dtype=np.int64)
        taken[self.columns[:-1]] = counts
        made = [taken.copy()]
        for key, before, after in steps:
            for _ in range(int(counts[key])):
                taken[self.columns[key] + before] -= 1
                taken[self.columns[key] + after] += 1
                made.append(taken.copy())
        return np.array(made)


def _crossed(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Each row of the first with each one of the second, and so on, side by side."""
    found = parts[0]
    for part in parts[1:]:
        found = np.concatenate([np.repeat(found, len(part), axis=0), np.tile(part, (len(found), 1))], axis=1)
    return found
