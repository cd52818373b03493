"""The tightest relaxation: the chains of actions that a schedule itself names, as cuts of a linear program.

A schedule's actions wait for each other: each for the one before it on its rank, and for the message that it needs. Any chain of
actions of which each waits for the one before takes no longer than the step. Let chains weigh y_j (the weights sum to one), and a byte
of rank r cost p_r seconds. Then a plan takes at least

    sum of y_j * (seconds of chain j)  +  sum of p_r * (bytes of rank r - room of rank r),

which is a sum over its blocks: each adds what its stage and its mode of recompute say. The least of it over all cuts into consecutive
blocks, one at least on each stage, is found by dynamic programming, and is a bound whatever the weights are. So a :class:`ChainProof`
is data: chains, weights and prices, from which the bound is worked out again without a solver.

The best weights are those of the linear program over cuts into parts of blocks (Kelley's cutting planes): it is solved with the
chains that are known, its cut is simulated, and the longest chain of that simulation is added, until the two agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from autopar.cost.step.critical_path import chains_of
from autopar.cost.step.simulation import compiled
from autopar.planner.bounds.instance import FIELDS, MODES, Array, PipelineInstance, forwards_done
from autopar.planner.space.candidates import Candidate

ROUNDS = 40
"""Programs that are solved for an instance at most."""

MOST_ACTIONS = 60_000
"""Of a schedule whose chains are looked for: beyond it a simulation takes too long."""

PRECISION = 1e-3
"""Of the simulated step, within which a bound is not raised further."""

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
        stages = _Stages(instance)
        if not self.weights or min(self.weights) < 0 or sum(self.weights) > 1 + ROUNDING or min(self.byte_s) < 0:
            return False
        if not all(stages.is_chain(chain) for chain in self.chains):
            return False
        found = stages.least_s([stages.counts(chain) for chain in self.chains], self.weights, self.byte_s)
        return self.bound_s <= found


Key = tuple[str, int, int, int]


def key_of(candidate: Candidate) -> Key:
    """Of the schedule of a candidate: chains and proofs of one hold for all candidates of it."""
    return candidate.schedule, candidate.mesh.pp, candidate.virtual_stages, candidate.num_micro_batches


def chain_bound(instance: PipelineInstance, goal_s: float, known: Sequence[ChainProof] = ()) -> ChainProof | None:
    """The best bound that is found, at least ``goal_s`` where it gets there; None where the schedule is too long, or nothing fits.

    Args:
        goal_s: the program is left where its bound is no less.
        known: proofs of other instances of the schedule: their weights are tried first, and their chains are the first ones.
    """
    if 2 * instance.pp * instance.virtual_stages * instance.num_micro_batches > MOST_ACTIONS:
        return None
    stages = _Stages(instance)
    best: ChainProof | None = None
    for proof in known:
        counts = [stages.counts(chain) for chain in proof.chains]
        bound_s = stages.least_s(counts, proof.weights, proof.byte_s) * (1 - ROUNDING)
        if best is None or bound_s > best.bound_s:
            best = replace(proof, bound_s=bound_s)
        if bound_s >= goal_s:
            return best
    chains = [*dict.fromkeys((stages.longest(*stages.even())[1], *(one for proof in known for one in proof.chains)))]
    for _ in range(ROUNDS):
        solved = _solved(stages, chains)
        if solved is None:
            break
        weights, byte_s, forward_s, backward_s, first_s, once_s = solved
        some = [i for i, weight in enumerate(weights) if weight > ROUNDING]
        total = sum(weights[i] for i in some)
        own = tuple(weights[i] / total for i in some)
        bound_s = stages.least_s([stages.counts(chains[i]) for i in some], own, byte_s) * (1 - ROUNDING)
        if best is None or bound_s > best.bound_s:
            best = ChainProof(bound_s=bound_s, chains=tuple(chains[i] for i in some), weights=own, byte_s=byte_s)
        time_s, chain = stages.longest(forward_s, backward_s, first_s, once_s)
        if best.bound_s >= goal_s or time_s - best.bound_s <= PRECISION * time_s or chain in chains:
            break
        chains.append(chain)
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """How often each stage's actions and messages are in a chain, and the rank with whose end it ends."""

    forwards: Array
    backwards: Array
    firsts: Array
    sends: Array
    backs: Array
    rank: int


class _Stages:
    """An instance by stages [s] and kinds of blocks [k]."""

    def __init__(self, instance: PipelineInstance) -> None:
        pp, v, m = instance.pp, instance.virtual_stages, instance.num_micro_batches
        self.instance, self.pp, self.num = instance, pp, pp * v
        self.rank = np.arange(pp * v) % pp
        device = np.array(instance.device_of_rank)
        numbers = np.array([table.numbers for table in instance.floors])[device]  # [r, k, columns]
        self.forward_s, self.more_s, _, self.gather_s, self.once_s, self.static = np.moveaxis(
            numbers[self.rank][..., :FIELDS], -1, 0
        )
        count = max(len(block.modes) for table in instance.floors for block in table.blocks)
        modes = numbers[self.rank][..., FIELDS:].reshape(self.num, -1, MODES, 3)[:, :, :count]
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
        self.kinds = instance.kind_of_block
        sent = self.held * instance.sent_bytes * (np.arange(self.num) < self.num - 1)
        limit = np.array(instance.limit_bytes)[device] * (1 + ROUNDING)
        least = passing.min(axis=2)
        inner = [k for k in range(least.shape[1]) if k != self.kinds[-1] or (self.kinds == k).sum() > 1]
        peak = least[:pp, inner].min(axis=1) if inner else least[:pp, self.kinds[-1]]
        peak[-1] = least[-1, self.kinds[-1]]
        self.room = limit - np.bincount(self.rank, weights=sent, minlength=pp) - peak
        self.actions = compiled(instance.schedule, pp, v, m)

    # --- chains

    def is_chain(self, chain: tuple[int, ...]) -> bool:
        """Whether each action, from the last one on, waits for the next one."""
        a = self.actions
        if not chain or min(chain) < 0 or max(chain) >= len(a.rank):
            return False
        return all(j in (a.before[i], a.need[i]) for i, j in itertools.pairwise(chain))

    def counts(self, chain: tuple[int, ...]) -> _Counts:
        """Of the actions of a chain, and of the messages between them."""
        a, found, sent = self.actions, np.zeros(3 * self.num), np.zeros(2 * self.num + 1)
        for i in chain:
            found[a.duration[i]] += 1
        for i, j in itertools.pairwise(chain):
            if j != a.before[i]:
                sent[a.message[i]] += 1
        durations, messages = found.reshape(-1, 3), sent[:-1].reshape(-1, 2)
        return _Counts(
            forwards=durations[:, 0] + durations[:, 2], backwards=durations[:, 1], firsts=durations[:, 2],
            sends=messages[:, 0], backs=messages[:, 1], rank=a.rank[chain[0]],
        )  # fmt: skip

    def longest(
        self, forward_s: Array, backward_s: Array, first_s: Array, once_s: Array
    ) -> tuple[float, tuple[int, ...]]:
        """Seconds of the step of stages that take so long, and the actions of its longest chain."""
        durations = np.array([forward_s, backward_s, forward_s + first_s]).T.ravel().tolist()
        messages = [*np.array([self.sends_s, self.backs_s]).T.ravel().tolist(), 0.0]
        found = chains_of(self.actions, durations, messages, once_s.tolist(), 1)[0]
        return found.time_s, found.actions

    def even(self) -> tuple[Array, Array, Array, Array]:
        """Times of stages with equal parts of all blocks: forwards, backwards, first gathers; what ranks do once."""
        count = np.bincount(self.kinds, minlength=self.forward_s.shape[1]) / self.num
        times = self.forward_s @ count, self.backward_s.min(axis=2) @ count
        once_s = self.tie_s + np.bincount(self.rank, weights=self.once_s @ count, minlength=self.pp)
        return times[0] + self.stage_s[0], times[1] + self.stage_s[1], self.gather_s @ count, once_s

    # --- the bound of some weights

    def block_s(self, counts: _Counts, byte_s: Array) -> Array:
        """What a block adds on each stage in each mode [s, k, o]; bytes at the prices of ranks."""
        price = byte_s[self.rank][:, None]
        own = counts.forwards[:, None] * self.forward_s + counts.firsts[:, None] * self.gather_s
        own = own + np.minimum(counts.forwards, counts.backwards)[:, None] * self.more_s + price * self.static
        own = own + (self.rank == counts.rank)[:, None] * self.once_s
        seconds = counts.backwards[:, None, None] * self.backward_s
        found: Array = own[..., None] + seconds + (price * self.held[:, None])[..., None] * self.kept
        return found

    def fixed_s(self, counts: _Counts) -> float:
        """Seconds of a chain without any block."""
        found = counts.forwards @ self.stage_s[0] + counts.backwards @ self.stage_s[1] + self.tie_s[counts.rank]
        found += counts.firsts.sum() * self.instance.first_s + counts.sends @ self.sends_s + counts.backs @ self.backs_s
        return float(found)

    def least_s(self, chains: list[_Counts], weights: tuple[float, ...], byte_s: tuple[float, ...]) -> float:
        """Of all cuts of the blocks into stages the least weighed seconds, by dynamic programming over stages."""
        prices, none = np.array(byte_s), np.zeros(self.pp)
        every = sum(weight * self.block_s(own, none) for own, weight in zip(chains, weights, strict=True))
        bytes_s = prices[self.rank][:, None]
        every = every + (bytes_s * self.static)[..., None] + (bytes_s * self.held[:, None])[..., None] * self.kept
        cost = every.min(axis=2)[:, self.kinds]  # [s, block]
        sums = np.concatenate([np.zeros((self.num, 1)), np.cumsum(cost, axis=1)], axis=1)
        least = np.full(sums.shape[1], np.inf)
        least[0] = 0.0
        for own in sums:  # the blocks up to each one on the stages up to this one, which has one at least
            begun = np.minimum.accumulate(least - own)
            least = np.concatenate([[np.inf], own[1:] + begun[:-1]])
        fixed = sum(weight * self.fixed_s(own) for own, weight in zip(chains, weights, strict=True))
        return float(least[-1] + fixed - prices @ self.room)


def _solved(
    stages: _Stages, chains: list[tuple[int, ...]]
) -> tuple[tuple[float, ...], tuple[float, ...], Array, Array, Array, Array] | None:
    """The shortest step of parts of blocks by these chains: their weights, prices of bytes, and the times of its stages; None: there is none.

    Variables: blocks of each kind on each stage in each mode, the first and the last block where they have to be; the step.
    """
    num, kinds, modes = stages.backward_s.shape
    size = num * kinds * modes
    count = np.bincount(stages.kinds, minlength=kinds).astype(float)
    counts = [stages.counts(chain) for chain in chains]
    none = np.zeros(stages.pp)
    blocks = np.array([stages.block_s(own, none).ravel() for own in counts])
    fixed = np.array([stages.fixed_s(own) for own in counts])
    scale_s, scale_bytes = (
        max(float(fixed.max()), float(blocks.max()), 1e-12),
        max(float(np.abs(stages.room).max()), 1.0),
    )
    stage, kind = (
        x.ravel() for x in np.meshgrid(np.arange(num), np.arange(kinds), np.arange(modes), indexing="ij")[:2]
    )
    num_bytes = (stages.static[..., None] + stages.held[:, None, None] * stages.kept).ravel()
    place = np.arange(size)
    chain_rows = np.concatenate([blocks / scale_s, -np.ones((len(chains), 1))], axis=1)
    upper = np.concatenate([chain_rows, np.zeros((stages.pp + num, size + 1))])
    upper[len(chains) + stages.rank[stage], place] = num_bytes / scale_bytes
    upper[len(chains) + stages.pp + stage, place] = -1.0
    limits = np.concatenate([-fixed / scale_s, stages.room / scale_bytes, -np.ones(num)])
    equal = coo_array((np.ones(size), (kind, place)), shape=(kinds, size + 1))
    lower, most = np.zeros(size + 1), np.full(size + 1, np.inf)
    most[:size] = count[kind]
    for k, at in ((stages.kinds[0], 0), (stages.kinds[-1], num - 1)):
        if count[k] == 1:  # the only one of its kind: on no other stage
            most[:size][(kind == k) & (stage != at)] = 0.0
    found = linprog(
        np.append(np.zeros(size), 1.0), A_ub=upper, b_ub=limits, A_eq=equal, b_eq=count,
        bounds=np.array([lower, most]).T, method="highs",
    )  # fmt: skip
    if found.status != 0:
        return None
    prices = np.maximum(-found.ineqlin.marginals, 0.0)
    weights, byte_s = prices[: len(chains)], prices[len(chains) : len(chains) + stages.pp]
    total = weights.sum()
    if total <= 0:
        return None
    x = found.x[:size].reshape(num, kinds, modes)
    own = x.sum(axis=2)
    once_s = stages.tie_s + np.bincount(stages.rank, weights=(own * stages.once_s).sum(axis=1), minlength=stages.pp)
    return (
        tuple((weights / total).tolist()),
        tuple((byte_s / total * scale_s / scale_bytes).tolist()),
        (own * stages.forward_s).sum(axis=1) + stages.stage_s[0],
        (x * stages.backward_s).sum(axis=(1, 2)) + (own * stages.more_s).sum(axis=1) + stages.stage_s[1],
        (own * stages.gather_s).sum(axis=1) + stages.instance.first_s,
        once_s,
    )
