"""Chains of actions as proofs: what each stage of a schedule adds to them, and the bound that their weights give.

A schedule's actions wait for each other: each for the one before it on its rank, and for the message that it needs. Any chain of
actions of which each waits for the one before takes no longer than the step. Let chains weigh y_j (the weights sum to one), and a byte
of rank r cost p_r seconds. Then a plan takes at least

    sum of y_j * (seconds of chain j)  +  sum of p_r * (bytes of rank r - room of rank r),

which is a sum over its blocks, each of which adds what its stage and its mode of recompute say, and over the messages between stages,
each of which is that of the block that a stage ends with. The least of it over all cuts into consecutive blocks, one at least on each
stage, is found by dynamic programming, and is a bound whatever the weights are. So a :class:`ChainProof` is data: chains, weights and
prices, from which the bound is worked out again without a solver.

Where the stages are given (:meth:`autopar.planner.bounds.instance.PipelineInstance.given_stops`) bytes need no price: each rank takes
the choice of whole modes that weighs least of those that it has room for.
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
from autopar.planner.bounds.columns import same_kinds
from autopar.planner.bounds.instance import FIELDS, MODES, Array, PipelineInstance, forwards_done
from autopar.planner.space.candidates import Candidate

ROUNDING = 1e-9
"""A bound is below the time of its plan up to this part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainProof:
    """Why no plan of an instance takes less than ``bound_s``.

    Attributes:
        bound_s: seconds.
        chains: actions of the schedule, as :class:`autopar.cost.step.simulation.Compiled` numbers them, the last one first.
        weights: of the chains; they sum to one.
        byte_s: the price of a byte of each pipeline rank.
    """

    bound_s: float
    chains: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]
    byte_s: tuple[float, ...]

    def verify(self, instance: PipelineInstance) -> bool:
        """Whether this proves its bound: each chain is one of the schedule, and the weights give no less than what is stated."""
        stages = Stages(instance)
        if not self.weights or min(self.weights) < 0 or sum(self.weights) > 1 + ROUNDING or min(self.byte_s) < 0:
            return False
        if not all(stages.is_chain(chain) for chain in self.chains):
            return False
        return self.bound_s <= float(stages.least_s([self])[0])


Key = tuple[str, int, int, int]


def key_of(candidate: Candidate) -> Key:
    """Of the schedule of a candidate: chains and proofs of one hold for all candidates of it."""
    return candidate.schedule, candidate.mesh.pp, candidate.virtual_stages, candidate.num_micro_batches


@lru_cache(maxsize=4096)
def counts_of(key: Key, chain: tuple[int, ...]) -> Array:
    """How often each stage's actions and messages are in a chain: its counts, and with which rank's end it ends.

    Forwards, backwards, both of them, first forwards, messages and messages back of all stages stand one after the other.
    """
    schedule, pp, v, m = key
    a, num = compiled(schedule, pp, v, m), pp * v
    found = np.bincount([a.duration[i] for i in chain], minlength=3 * num).reshape(num, 3)
    sent = [a.message[i] for i, j in itertools.pairwise(chain) if j != a.before[i]]
    messages = np.bincount([i for i in sent if i >= 0], minlength=2 * num).reshape(num, 2)
    forwards, backwards = found[:, 0] + found[:, 2], found[:, 1]
    end = np.arange(pp) == a.rank[chain[0]]
    return np.concatenate(
        [forwards, backwards, np.minimum(forwards, backwards), found[:, 2], messages[:, 0], messages[:, 1], end]
    ).astype(float)


class Stages:
    """An instance by stages [s] and kinds of blocks [k]."""

    def __init__(self, instance: PipelineInstance) -> None:
        pp, v, m = instance.pp, instance.virtual_stages, instance.num_micro_batches
        self.instance, self.pp, self.num = instance, pp, pp * v
        self.key: Key = (instance.schedule, pp, v, m)
        self.rank = np.arange(pp * v) % pp
        device = np.array(instance.device_of_rank)
        tables = np.array([table.numbers for table in instance.floors])  # [device, k, columns]
        kind_of, count = same_kinds(tables[None])
        self.kinds = np.array(kind_of)[instance.kind_of_block]
        numbers = tables[:, [kind_of.index(k) for k in range(count)]][device[self.rank]]
        columns = np.moveaxis(numbers[..., :FIELDS], -1, 0)
        self.forward_s, self.more_s, self.gather_s, self.once_s, self.static, _ = columns
        most = max(len(block.modes) for table in instance.floors for block in table.blocks)
        modes = numbers[..., FIELDS:].reshape(self.num, -1, MODES, 3)[:, :, :most]
        self.backward_s, self.kept, passing = np.moveaxis(modes, -1, 0)  # [s, k, o]
        self.held = forwards_done(instance.schedule, pp, v, m).T.reshape(-1).astype(float)
        self.stage_s = np.array([np.array(instance.forward_s)[device], np.array(instance.backward_s)[device]])[
            :, self.rank
        ]
        sends = instance.sends_s or (0.0,) * pp
        backs = instance.sends_back_s or (0.0,) * pp
        self.sends_s, self.backs_s = np.array(sends)[self.rank], np.array(backs)[(self.rank - 1) % pp]
        self.tie_s = np.zeros(pp)
        self.tie_s[[0, -1]] = instance.tie_s
        place = np.arange(self.num)
        self.beside = instance.sent_bytes * (
            place < self.num - 1
        )  # what a stage keeps of a micro-batch beside its blocks
        self.beside = self.beside + instance.read_bytes * ((place > 0) & (place < self.num - 1))
        least, spare = passing.min(axis=2), len(self.kinds) - self.num
        # the last block of each stage, before and after which each stage has one at least, is at its peak
        ends = [self.kinds[s : s + spare + 1] if s < self.num - 1 else self.kinds[-1:] for s in range(self.num)]
        peak = np.array([own[kinds].min(initial=np.inf) for own, kinds in zip(least, ends, strict=True)])
        self.limit = np.array(instance.limit_bytes)[device] * (1 + ROUNDING) - peak.reshape(v, pp).max(axis=0)
        self.room = self.limit - np.bincount(self.rank, weights=self.held * self.beside, minlength=pp)
        self.actions = compiled(*self.key)
        stops = instance.given_stops()
        self.more_sends_s = self._more_sends_s()
        if stops and self.more_sends_s is not None:  # then messages are known, and count once
            there, back = self.more_sends_s[np.arange(self.num - 1), :, np.array(stops[:-1]) - 1].T
            self.sends_s[:-1] += there
            self.backs_s[1:] += back
            self.more_sends_s = None
        self.modes = WholeModes.of(self, stops) if stops else None

    def _more_sends_s(self) -> Array | None:
        """What the messages behind a stage that ends with a block take over the least ones, there and back [s, 2, block]; None: nothing."""
        if not self.instance.sends_more_s:
            return None
        more = np.array(self.instance.sends_more_s)[self.rank[:-1]]  # [s, kind, 2]
        return np.swapaxes(more[:, self.instance.kind_of_block], 1, 2)

    # --- chains

    def is_chain(self, chain: tuple[int, ...]) -> bool:
        """Whether each action, from the last one on, waits for the next one."""
        a = self.actions
        if not chain or min(chain) < 0 or max(chain) >= len(a.rank):
            return False
        return all(j in (a.before[i], a.need[i]) for i, j in itertools.pairwise(chain))

    def longest(self, blocks: Array) -> tuple[float, tuple[int, ...]]:
        """Seconds of the step of stages with so many blocks of each kind in each mode [s, k, o], and the actions of its longest chain."""
        return self.simulated(blocks.sum(axis=2), (blocks * self.backward_s).sum(axis=(1, 2)))

    def simulated(self, count: Array, backward_s: Array) -> tuple[float, tuple[int, ...]]:
        """Likewise of stages with so many blocks of each kind [s, k], whose backwards take so long [s]."""
        forward_s = (count * self.forward_s).sum(axis=1) + self.stage_s[0]
        backward_s = backward_s + (count * self.more_s).sum(axis=1) + self.stage_s[1]
        first_s = (count * self.gather_s).sum(axis=1) + self.instance.first_s
        once_s = np.bincount(self.rank, weights=(count * self.once_s).sum(axis=1), minlength=self.pp) + self.tie_s
        durations = np.array([forward_s, backward_s, forward_s + first_s]).T.ravel().tolist()
        messages = [*np.array([self.sends_s, self.backs_s]).T.ravel().tolist(), 0.0]
        found = chains_of(self.actions, durations, messages, once_s.tolist(), 1)[0]
        return found.time_s, found.actions

    def even(self) -> Array:
        """Equal parts of all blocks on each stage, in the mode that is quickest there [s, k, o]."""
        count = np.bincount(self.kinds, minlength=self.forward_s.shape[1]) / self.num
        quickest = self.backward_s.argmin(axis=2)[..., None] == np.arange(self.backward_s.shape[2])
        found: Array = count[:, None] * quickest
        return found

    # --- the bound of some weights

    def block_s(self, counts: Array, byte_s: Array) -> Array:
        """What a block adds to chains [n, counts] on each stage in each mode [n, s, k, o]; bytes at the prices of ranks [n, r]."""
        price, backwards = byte_s[:, self.rank, None], counts[:, self.num : 2 * self.num, None, None]
        kept = (price * self.held[:, None])[..., None] * self.kept
        found: Array = (self.other_s(counts) + price * self.static)[..., None] + backwards * self.backward_s + kept
        return found

    def other_s(self, counts: Array) -> Array:
        """Likewise without backwards [n, s, k]."""
        forwards, _, both, firsts = (x[..., None] for x in np.split(counts[:, : 4 * self.num], 4, axis=1))
        ends = counts[:, 6 * self.num + self.rank, None]
        found: Array = forwards * self.forward_s + both * self.more_s + firsts * self.gather_s + ends * self.once_s
        return found

    def fixed_s(self, counts: Array) -> Array:
        """Seconds of chains [n, counts] without any block."""
        own = [*self.stage_s, np.zeros(self.num), np.full(self.num, self.instance.first_s), self.sends_s, self.backs_s]
        found: Array = counts @ np.concatenate([*own, self.tie_s])
        return found

    def least_s(self, proofs: Sequence[ChainProof]) -> Array:
        """Of all cuts of the blocks into stages the least seconds as each proof weighs them.

        By dynamic programming over stages; where these are given, by the least choice of each rank.
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
        for s, (first, last) in enumerate(
            ends
        ):  # the blocks up to each one on the stages up to this one, which has one at least
            begun = np.minimum.accumulate(least - sums[:, s], axis=1)
            least[:, 1:] = sums[:, s, 1:] + begun[:, :-1]
            if self.more_sends_s is not None and s < self.num - 1:
                sent = counts[:, [4 * self.num + s, 5 * self.num + s + 1]]
                least[:, 1:] += sent @ self.more_sends_s[s]
            least[:, :first] = least[:, last + 1 :] = np.inf
        found: Array = least[:, -1] + self.fixed_s(counts) - prices @ self.room
        return found


MOST_CHOICES = 20_000
"""Of the modes of a rank's blocks together: of more only parts of blocks are weighed."""


class WholeModes:
    """Ranks whose stages are given: the whole modes in which their blocks fit.

    A rank holds the most at one of the moments of its schedule, and at each what its blocks keep has to fit.

    Args:
        stages: of the instance.
        count: blocks of each kind on each stage [s, k].
        choices: for each rank the backward seconds of its stages [choices, v]: of two of which one takes no longer on any stage the
            other is left out. None at all where the rank cannot hold its blocks.
    """

    def __init__(self, stages: Stages, count: Array, choices: Sequence[Array]) -> None:
        self.stages, self.count, self.choices = stages, count, choices
        self.is_possible = all(len(own) for own in choices)

    @classmethod
    def of(cls, stages: Stages, stops: Sequence[int]) -> WholeModes | None:
        """Of stages that end at some blocks; None where there are too many choices."""
        starts = (0, *stops[:-1])
        count = np.array(
            [
                np.bincount(stages.kinds[start:stop], minlength=stages.static.shape[1])
                for start, stop in zip(starts, stops, strict=True)
            ]
        )
        own = [_modes_of(stages, s, count[s]) for s in range(stages.num)]
        choices = []
        for rank in range(stages.pp):
            turns = range(rank, stages.num, stages.pp)
            if math.prod(len(own[s][0]) for s in turns) > MOST_CHOICES:
                return None
            room = stages.limit[rank] - (stages.static * count)[[*turns]].sum()
            fits = _held(stages, rank, [own[s][0] + stages.beside[s] for s in turns]) <= room
            is_quickest = fits.copy()  # no stage can be one step quicker
            for axis in range(fits.ndim):
                np.swapaxes(is_quickest, 0, axis)[1:] &= ~np.swapaxes(fits, 0, axis)[:-1]
            places = np.nonzero(is_quickest)
            choices.append(np.stack([own[s][1][place] for s, place in zip(turns, places, strict=True)], axis=1))
        return cls(stages, count, choices)

    def fixed_s(self, counts: Array) -> Array:
        """Seconds of chains [n, counts] but for the backwards of blocks."""
        found: Array = self.stages.fixed_s(counts) + (self.stages.other_s(counts) * self.count).sum(axis=(1, 2))
        return found

    def least_s(self, counts: Array) -> Array:
        """Seconds of the backwards of blocks in chains [n, counts] at the least; infinite where a rank has no choice."""
        backwards = counts[:, self.stages.num : 2 * self.stages.num]
        found = np.zeros(len(counts))
        for rank, own in enumerate(self.choices):
            found += (backwards[:, rank :: self.stages.pp] @ own.T).min(axis=1, initial=np.inf)
        return found


def _modes_of(stages: Stages, s: int, count: NDArray[np.int64]) -> tuple[Array, Array]:
    """What a stage's blocks keep of a micro-batch and what their backwards take, in their whole modes: the quickest first, and leaner ones."""
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
    """The most that a rank's stages hold of micro-batches at a moment, by what each keeps of one: an axis for each stage."""
    schedule, pp, v, m = stages.key
    held = [np.asarray(sum(np.ix_(*map(np.multiply, moment, kept)))) for moment in peak_table(schedule, pp, v, m, rank)]
    found: Array = np.max(held, axis=0)
    return found
