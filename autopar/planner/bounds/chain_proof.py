"""Chains of actions as certificates: what each stage of a schedule adds to a chain, and the bound that weighted chains give.

An action of a schedule waits for the action before it on its rank and for the message that it needs. A chain of actions of which each waits
for the one before takes no longer than the step. Let chain j have the weight y_j (the weights sum to one), and a byte of rank r the price
p_r in seconds. Then a plan takes at least

    sum of y_j * (seconds of chain j)  +  sum of p_r * (bytes of rank r - room of rank r).

This is a sum over blocks, each in the mode of its stage, and over messages between stages, each determined by the block before it. Its
minimum over all cuts into stages of one or more consecutive blocks is computed by dynamic programming; it is a bound for any weights. So a
:class:`ChainProof` is data, chains, weights and prices, from which the bound can be recomputed without a solver.

Where the stages are given (:meth:`autopar.planner.bounds.instance.PipelineInstance.given_stops`) bytes have no price. Each rank then takes
the choice of whole modes of least weight among those that fit in its memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.cost.step.simulation import chains_of, compiled
from autopar.plan.schedule import peak_table
from autopar.planner.bounds.columns import Columns
from autopar.planner.bounds.instance import Array, PipelineInstance
from autopar.planner.space.candidates import Candidate

ROUNDING = 1e-9
"""The fraction of a plan's time by which its bound is lowered, for rounding errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainProof:
    """A certificate that no plan of an instance takes less than ``bound_s``.

    Attributes:
        bound_s: the bound in seconds.
        chains: actions of the schedule as :class:`autopar.cost.step.simulation.Compiled` numbers them, the last one first.
        weights: one for each chain; they sum to one.
        byte_s: the price of a byte of each pipeline rank in seconds.
    """

    bound_s: float
    chains: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]
    byte_s: tuple[float, ...]

    def verify(self, instance: PipelineInstance) -> bool:
        """Return whether the chains are chains of the schedule and their weights give no less than the stated bound."""
        stages = Stages(instance)
        if not self.weights or min(self.weights) < 0 or sum(self.weights) > 1 + ROUNDING or min(self.byte_s) < 0:
            return False
        if not all(stages.is_chain(chain) for chain in self.chains):
            return False
        return self.bound_s <= float(stages.least_s([self])[0])


Key = tuple[str, int, int, int]


def key_of(candidate: Candidate) -> Key:
    """Return the key of a candidate's schedule; all candidates with this key share chains and proofs."""
    return candidate.schedule, candidate.mesh.pp, candidate.virtual_stages, candidate.num_micro_batches


@lru_cache(maxsize=4096)
def counts_of(key: Key, chain: tuple[int, ...]) -> Array:
    """Return how often a chain has each stage's actions and messages, and on which rank it ends [counts].

    In this order: forwards, backwards, the smaller of both, first forwards, messages and messages back, each for all stages, and one entry
    for each rank.
    """
    schedule, pp, v, m = key
    a, num = compiled(schedule, pp, v, m), pp * v
    actions = np.bincount([a.duration[i] for i in chain], minlength=3 * num).reshape(num, 3)
    sent = [a.message[i] for i, j in itertools.pairwise(chain) if j != a.before[i]]
    messages = np.bincount([i for i in sent if i >= 0], minlength=2 * num).reshape(num, 2)
    forwards, backwards = actions[:, 0] + actions[:, 2], actions[:, 1]
    end = np.arange(pp) == a.rank[chain[0]]
    return np.concatenate(
        [forwards, backwards, np.minimum(forwards, backwards), actions[:, 2], messages[:, 0], messages[:, 1], end]
    ).astype(float)


class Stages:
    """The floors, messages and memory of an instance, by stage [s], kind of block [k], mode [o] and pipeline rank [r].

    Args:
        instance: the instance that the arrays describe.

    Attributes:
        rank: the pipeline rank of each stage [s]; ``num``: the number of stages.
        kinds: the kind of each block of the model, in order; kinds with equal floors are one.
        forward_s, more_s, gather_s, once_s, static: the fields of a block's floor [s, k]; ``backward_s``, ``kept``: those of its modes [s,
            k, o].
        held: the micro-batches that a stage holds when its rank's first backward begins [s].
        limit, room: a rank's bytes without its peak, and for the blocks of its stages [r].
        sends_s, backs_s: the message of each stage to the next one, and back to the one before [s].
        modes: the choices of whole modes where the stages are given; None elsewhere.
    """

    def __init__(self, instance: PipelineInstance) -> None:
        pp, v, m = instance.pp, instance.virtual_stages, instance.num_micro_batches
        self.instance, self.pp, self.num = instance, pp, pp * v
        self.key: Key = (instance.schedule, pp, v, m)
        self.rank = rank = np.arange(pp * v) % pp
        c = Columns([instance])
        self.kinds = np.repeat([kind for kind, _ in c.runs], [count for _, count in c.runs])
        fields = c.forward_s, c.more_s, c.gather_s, c.once_s, c.static_bytes
        self.forward_s, self.more_s, self.gather_s, self.once_s, self.static = (field[0, rank] for field in fields)
        self.backward_s, self.kept, passing = c.backward_s[0, rank], c.kept_bytes[0, rank], c.passing_bytes[0, rank]
        self.held = c.held[0].T.reshape(-1)
        self.stage_s = np.stack([c.stage_forward_s[0, rank], c.stage_backward_s[0, rank]])
        self.sends_s, self.backs_s = c.sends_s[0, rank], c.backs_s[0, rank - 1]
        self.ranks_s = c.ranks_s[0]
        place = np.arange(self.num)
        # Bytes that a stage keeps of a micro-batch besides those of its blocks.
        self.stage_bytes = instance.sent_bytes * (place < self.num - 1)
        self.stage_bytes = self.stage_bytes + instance.read_bytes * ((place > 0) & (place < self.num - 1))
        # Each stage peaks in its last block.
        may_end = c.may_end()[0].transpose(1, 0, 2).reshape(self.num, -1)
        peak = np.where(may_end, passing.min(axis=2), np.inf).min(axis=1).reshape(v, pp).max(axis=0)
        self.limit, self.room = c.limit_bytes[0] - peak, c.room_bytes[0] - peak
        self.actions = compiled(*self.key)
        stops = instance.given_stops()
        self.more_sends_s = self._more_sends_s()
        if stops and self.more_sends_s is not None:  # the blocks behind which messages are sent are known
            there, back = self.more_sends_s[np.arange(self.num - 1), :, np.array(stops[:-1]) - 1].T
            self.sends_s[:-1] += there
            self.backs_s[1:] += back
            self.more_sends_s = None
        self.modes = WholeModes.of(self, stops) if stops else None

    def _more_sends_s(self) -> Array | None:
        """Return by how much the messages behind a stage that ends with each block exceed the least ones, there and back [s, 2, block].

        None where no message does.
        """
        if not self.instance.sends_more_s:
            return None
        more = np.array(self.instance.sends_more_s)[self.rank[:-1]]  # [s, kind, 2]
        return np.swapaxes(more[:, self.instance.kind_of_block], 1, 2)

    # --- chains

    def is_chain(self, chain: tuple[int, ...]) -> bool:
        """Return whether each action of the chain, from the last one on, waits for the next one."""
        a = self.actions
        if not chain or min(chain) < 0 or max(chain) >= len(a.rank):
            return False
        return all(j in (a.before[i], a.need[i]) for i, j in itertools.pairwise(chain))

    def longest(self, blocks: Array) -> tuple[float, tuple[int, ...]]:
        """Return the seconds of a step and the actions of its longest chain, with so many blocks of each kind in each mode [s, k, o]."""
        return self.simulated(blocks.sum(axis=2), (blocks * self.backward_s).sum(axis=(1, 2)))

    def simulated(self, count: Array, backward_s: Array) -> tuple[float, tuple[int, ...]]:
        """Return the same for so many blocks of each kind [s, k] whose backwards take ``backward_s`` [s] on each stage."""
        forward_s = (count * self.forward_s).sum(axis=1) + self.stage_s[0]
        backward_s = backward_s + (count * self.more_s).sum(axis=1) + self.stage_s[1]
        first_s = (count * self.gather_s).sum(axis=1) + self.instance.first_s
        once_s = np.bincount(self.rank, weights=(count * self.once_s).sum(axis=1), minlength=self.pp) + self.ranks_s
        durations = np.array([forward_s, backward_s, forward_s + first_s]).T.ravel().tolist()
        messages = [*np.array([self.sends_s, self.backs_s]).T.ravel().tolist(), 0.0]
        chain = chains_of(self.actions, durations, messages, once_s.tolist(), 1)[0]
        return chain.time_s, chain.actions

    def even(self) -> Array:
        """Return equal shares of all blocks for each stage, in the fastest mode of each [s, k, o]."""
        count = np.bincount(self.kinds, minlength=self.forward_s.shape[1]) / self.num
        quickest = self.backward_s.argmin(axis=2)[..., None] == np.arange(self.backward_s.shape[2])
        blocks: Array = count[:, None] * quickest
        return blocks

    # --- the bound of some weights

    def block_s(self, counts: Array, byte_s: Array) -> Array:
        """Return what a block adds to chains [n, counts] on each stage in each mode [n, s, k, o], its bytes priced [n, r]."""
        price, backwards = byte_s[:, self.rank, None], counts[:, self.num : 2 * self.num, None, None]
        kept = (price * self.held[:, None])[..., None] * self.kept
        added_s: Array = (self.other_s(counts) + price * self.static)[..., None] + backwards * self.backward_s + kept
        return added_s

    def other_s(self, counts: Array) -> Array:
        """Return the same without backwards and bytes [n, s, k]."""
        forwards, _, both, firsts = (x[..., None] for x in np.split(counts[:, : 4 * self.num], 4, axis=1))
        ends = counts[:, 6 * self.num + self.rank, None]
        added_s: Array = forwards * self.forward_s + both * self.more_s + firsts * self.gather_s + ends * self.once_s
        return added_s

    def fixed_s(self, counts: Array) -> Array:
        """Return the seconds of chains [n, counts] without any block."""
        sec = [*self.stage_s, np.zeros(self.num), np.full(self.num, self.instance.first_s), self.sends_s, self.backs_s]
        fixed: Array = counts @ np.concatenate([*sec, self.ranks_s])
        return fixed

    def least_s(self, proofs: Sequence[ChainProof]) -> Array:
        """Return the bound that each proof's weights and prices give: the minimum over all cuts into stages, in seconds [n].

        It is computed by dynamic programming over stages; where the stages are given, by the least choice of each rank.
        """
        counts = np.array(
            [np.array(p.weights) @ np.array([counts_of(self.key, chain) for chain in p.chains]) for p in proofs]
        )
        if self.modes is not None:
            return self.modes.fixed_s(counts) + self.modes.least_s(counts)
        prices = np.array([p.byte_s for p in proofs])
        cost = self.block_s(counts, prices).min(axis=3)[:, :, self.kinds]  # [n, s, block]
        sums = np.concatenate([np.zeros((*cost.shape[:2], 1)), np.cumsum(cost, axis=2)], axis=2)
        least = np.full((len(proofs), sums.shape[2]), np.inf)
        least[:, 0] = 0.0
        ends = self.instance.ends or ((1, len(self.kinds)),) * self.num
        # ``least``: the minimum over cuts of the blocks up to each position into the stages so far, one block or more each.
        for s, (first, last) in enumerate(ends):
            before = np.minimum.accumulate(least - sums[:, s], axis=1)
            least[:, 1:] = sums[:, s, 1:] + before[:, :-1]
            if self.more_sends_s is not None and s < self.num - 1:
                sent = counts[:, [4 * self.num + s, 5 * self.num + s + 1]]
                least[:, 1:] += sent @ self.more_sends_s[s]
            least[:, :first] = least[:, last + 1 :] = np.inf
        bounds: Array = least[:, -1] + self.fixed_s(counts) - prices @ self.room
        return bounds


MOST_CHOICES = 20_000
"""The limit on choices of whole modes of a rank's blocks; with more, bounds are of fractions of blocks.

It guards against products that grow with stages; no problem of docs/adr/0023 reaches it.
"""


class WholeModes:
    """The choices of whole modes with which the blocks of given stages fit in each rank's memory.

    A rank's activations are largest at one of the moments of its schedule; they have to fit at each of them.

    Args:
        stages: the stages of the instance.
        count: the blocks of each kind on each stage [s, k].
        choices: for each rank the backward seconds of its stages [choices, v], without dominated choices; empty where the blocks do not
            fit.
    """

    def __init__(self, stages: Stages, count: Array, choices: Sequence[Array]) -> None:
        self.stages, self.count, self.choices = stages, count, choices
        self.is_possible = all(len(of_rank) for of_rank in choices)

    @classmethod
    def of(cls, stages: Stages, stops: Sequence[int]) -> WholeModes | None:
        """Return the choices for stages that end at these blocks; None where there are too many."""
        starts = (0, *stops[:-1])
        count = np.array(
            [
                np.bincount(stages.kinds[start:stop], minlength=stages.static.shape[1])
                for start, stop in zip(starts, stops, strict=True)
            ]
        )
        modes = [_modes_of(stages, s, count[s]) for s in range(stages.num)]
        choices = []
        for rank in range(stages.pp):
            turns = range(rank, stages.num, stages.pp)
            if math.prod(len(modes[s][0]) for s in turns) > MOST_CHOICES:
                return None
            room = stages.limit[rank] - (stages.static * count)[[*turns]].sum()
            fits = _held(stages, rank, [modes[s][0] + stages.stage_bytes[s] for s in turns]) <= room
            is_quickest = fits.copy()  # no stage can take its next faster mode
            for axis in range(fits.ndim):
                np.swapaxes(is_quickest, 0, axis)[1:] &= ~np.swapaxes(fits, 0, axis)[:-1]
            places = np.nonzero(is_quickest)
            choices.append(np.stack([modes[s][1][place] for s, place in zip(turns, places, strict=True)], axis=1))
        return cls(stages, count, choices)

    def fixed_s(self, counts: Array) -> Array:
        """Return the seconds of chains [n, counts] without the backwards of blocks."""
        fixed: Array = self.stages.fixed_s(counts) + (self.stages.other_s(counts) * self.count).sum(axis=(1, 2))
        return fixed

    def least_s(self, counts: Array) -> Array:
        """Return the least seconds of the backwards of blocks in chains [n, counts]; infinite where a rank has no choice."""
        backwards = counts[:, self.stages.num : 2 * self.stages.num]
        least = np.zeros(len(counts))
        for rank, of_rank in enumerate(self.choices):
            least += (backwards[:, rank :: self.stages.pp] @ of_rank.T).min(axis=1, initial=np.inf)
        return least


def _modes_of(stages: Stages, s: int, count: NDArray[np.int64]) -> tuple[Array, Array]:
    """Return the Pareto front of a stage's whole modes: bytes kept of a micro-batch, and backward seconds in ascending order."""
    kept, seconds = np.zeros(1), np.zeros(1)
    for kind in np.repeat(np.arange(len(count)), count):
        kept = np.add.outer(kept, stages.kept[s, kind]).ravel()
        seconds = np.add.outer(seconds, stages.backward_s[s, kind]).ravel()
        order = np.lexsort((kept, seconds))
        kept, seconds = kept[order], seconds[order]
        is_leaner = np.append(True, kept[1:] < np.minimum.accumulate(kept)[:-1])
        kept, seconds = kept[is_leaner], seconds[is_leaner]
    return kept, seconds


def _held(stages: Stages, rank: int, kept: Sequence[Array]) -> Array:
    """Return the largest activations of a rank over its schedule, by what each stage keeps of a micro-batch: one axis for each stage."""
    schedule, pp, v, m = stages.key
    held = [np.asarray(sum(np.ix_(*map(np.multiply, moment, kept)))) for moment in peak_table(schedule, pp, v, m, rank)]
    most: Array = np.max(held, axis=0)
    return most
