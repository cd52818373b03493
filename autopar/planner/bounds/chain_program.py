"""The tightest relaxation: the chains of actions that a schedule itself names, as cuts of a linear program.

A schedule's actions wait for each other: each for the one before it on its rank, and for the message that it needs. Any chain of
actions of which each waits for the one before takes no longer than the step. Let chains weigh y_j (the weights sum to one), and a byte
of rank r cost p_r seconds. Then a plan takes at least

    sum of y_j * (seconds of chain j)  +  sum of p_r * (bytes of rank r - room of rank r),

which is a sum over its blocks: each adds what its stage and its mode of recompute say. The least of it over all cuts into consecutive
blocks, one at least on each stage, is found by dynamic programming, and is a bound whatever the weights are. So a :class:`ChainProof`
is data: chains, weights and prices, from which the bound is worked out again without a solver.

The best weights are those of the linear program over cuts into parts of blocks (Kelley's cutting planes): it is solved with the
chains that are known, two through each rank at first, its cut is simulated, and the longest chain of that simulation is added, until the
two agree.

Blocks in parts spread evenly; of whole ones a slow device that has time for 1.6 takes one or two. So where the bound is still below what is
aimed at, the same program is solved with whole numbers of blocks on each stage, as an integer program whose step is no longer than that
time: often there is none. Its bound is the solver's alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from autopar.cost.step.simulation import chains_of, compiled, rank_chains
from autopar.planner.bounds.columns import same_kinds
from autopar.planner.bounds.instance import FIELDS, MODES, Array, PipelineInstance, forwards_done
from autopar.planner.space.candidates import Candidate

ROUNDS = 20, 60
"""Programs that are solved for an instance at most, where they are large and where they are small."""

COLUMNS = 6000
"""Of all programs of an instance: the larger they are, the fewer are solved."""

MOST_ACTIONS = 60_000
"""Of a schedule whose chains are looked for: beyond it a simulation takes too long."""

PRECISION = 2e-4
"""Of the simulated step, within which a bound is not raised further."""

KEPT = 12
"""Proofs of a schedule that are tried on its other candidates: those that were found last."""

NEAR = 0.92
"""Of the time that is aimed at: below, whole blocks are left, as they raise a bound by some percent at most."""

NODES = 2000
"""Of an integer program, at most."""

WHOLE_ROUNDS = 3
"""Integer programs that are solved for an instance at most."""

DIGITS = 9
"""Of numbers in programs and their solutions: beyond them results of the same sums may differ, and with them which of equal ones is found."""

WHOLE = 1e-5
"""Of the bound of an integer program, what the solver's tolerances may be."""

INFEASIBLE = 2
"""What scipy calls a program without a solution."""

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
        return self.bound_s <= float(stages.least_s([self])[0])


Key = tuple[str, int, int, int]


def key_of(candidate: Candidate) -> Key:
    """Of the schedule of a candidate: chains and proofs of one hold for all candidates of it."""
    return candidate.schedule, candidate.mesh.pp, candidate.virtual_stages, candidate.num_micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainBound:
    """No plan takes less than ``time_s``: by the proof, or of whole blocks, by the solver of integer programs alone."""

    time_s: float
    proof: ChainProof


def chain_bound(
    instance: PipelineInstance,
    goal_s: float,
    known: Sequence[ChainProof] = (),
    *,
    above_s: float = 0.0,
    whole_s: float | None = 0.0,
    rounds: int | None = None,
) -> ChainBound | None:
    """The best bound that is found, at least ``goal_s`` where it gets there; None where the schedule is too long, or nothing fits.

    Args:
        goal_s: the program is left where its bound is no less.
        known: proofs of other instances of the schedule: their weights are tried first, and their chains are the first ones.
        above_s: the program is left where some parts of blocks take no more: its bound then comes to no more than that.
        whole_s: up to here the bound is raised by whole blocks, where the one of parts of blocks is near. None: it is only asked whether
            the bound comes to the goal, and the program is left where some parts of blocks take less.
        rounds: programs that are solved at most; None: as many as are worth it.
    """
    if 2 * instance.pp * instance.virtual_stages * instance.num_micro_batches > MOST_ACTIONS:
        return None
    stages = _Stages(instance)
    best: ChainProof | None = None
    if known:
        bounds_s = stages.least_s(known) * (1 - ROUNDING)
        place = int(bounds_s.argmax())
        best = replace(known[place], bound_s=float(bounds_s[place]))
        if best.bound_s >= goal_s:
            return ChainBound(time_s=best.bound_s, proof=best)
        if rounds == 0:
            return ChainBound(time_s=best.bound_s, proof=best)
    program = _Program(stages, [chain for proof in known for chain in proof.chains])
    least_s = goal_s if whole_s is None else above_s
    for _ in range(rounds or int(np.clip(COLUMNS // program.rows.shape[1], *ROUNDS))):
        solved = program.solve()
        if solved is None:
            break
        proof, blocks = solved
        if best is None or proof.bound_s > best.bound_s:
            best = proof
        is_new = program.separate(blocks)
        is_near = program.step_s - best.bound_s <= PRECISION * program.step_s
        if best.bound_s >= goal_s or is_near or not is_new or program.step_s <= least_s:
            break
    if best is None:
        return None
    time_s, aim_s = best.bound_s, min(whole_s or 0.0, goal_s)
    if NEAR * aim_s <= time_s < aim_s:
        time_s = max(time_s, program.whole_s(aim_s))
    return ChainBound(time_s=time_s, proof=best)


@lru_cache(maxsize=4096)
def _counts(key: Key, chain: tuple[int, ...]) -> Array:
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


class _Stages:
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
        sent = self.held * instance.sent_bytes * (np.arange(self.num) < self.num - 1)
        limit = np.array(instance.limit_bytes)[device] * (1 + ROUNDING)
        least, spare = passing.min(axis=2), len(self.kinds) - self.num
        # the last block of each stage, before and after which each stage has one at least, is at its peak
        ends = [self.kinds[s : s + spare + 1] if s < self.num - 1 else self.kinds[-1:] for s in range(self.num)]
        peak = np.array([own[kinds].min(initial=np.inf) for own, kinds in zip(least, ends, strict=True)])
        peak = peak.reshape(v, pp).max(axis=0)
        self.room = limit - np.bincount(self.rank, weights=sent, minlength=pp) - peak
        self.actions = compiled(*self.key)

    # --- chains

    def is_chain(self, chain: tuple[int, ...]) -> bool:
        """Whether each action, from the last one on, waits for the next one."""
        a = self.actions
        if not chain or min(chain) < 0 or max(chain) >= len(a.rank):
            return False
        return all(j in (a.before[i], a.need[i]) for i, j in itertools.pairwise(chain))

    def longest(self, blocks: Array) -> tuple[float, tuple[int, ...]]:
        """Seconds of the step of stages with so many blocks of each kind in each mode [s, k, o], and the actions of its longest chain."""
        count = blocks.sum(axis=2)
        forward_s = (count * self.forward_s).sum(axis=1) + self.stage_s[0]
        backward_s = (blocks * self.backward_s).sum(axis=(1, 2)) + (count * self.more_s).sum(axis=1) + self.stage_s[1]
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
        forwards, backwards, both, firsts = (x[..., None] for x in np.split(counts[:, : 4 * self.num], 4, axis=1))
        price, ends = byte_s[:, self.rank, None], counts[:, 6 * self.num + self.rank, None]
        own = forwards * self.forward_s + both * self.more_s + firsts * self.gather_s + ends * self.once_s
        kept = (price * self.held[:, None])[..., None] * self.kept
        found: Array = (own + price * self.static)[..., None] + backwards[..., None] * self.backward_s + kept
        return found

    def fixed_s(self, counts: Array) -> Array:
        """Seconds of chains [n, counts] without any block."""
        own = [*self.stage_s, np.zeros(self.num), np.full(self.num, self.instance.first_s), self.sends_s, self.backs_s]
        found: Array = counts @ np.concatenate([*own, self.tie_s])
        return found

    def least_s(self, proofs: Sequence[ChainProof]) -> Array:
        """Of all cuts of the blocks into stages the least seconds as each proof weighs them, by dynamic programming over stages."""
        counts = np.array(
            [np.array(p.weights) @ np.array([_counts(self.key, chain) for chain in p.chains]) for p in proofs]
        )
        prices = np.array([p.byte_s for p in proofs])
        cost = self.block_s(counts, prices).min(axis=3)[:, :, self.kinds]  # [n, s, block]
        sums = np.concatenate([np.zeros((*cost.shape[:2], 1)), np.cumsum(cost, axis=2)], axis=2)
        least = np.full((len(proofs), sums.shape[2]), np.inf)
        least[:, 0] = 0.0
        for s in range(self.num):  # the blocks up to each one on the stages up to this one, which has one at least
            begun = np.minimum.accumulate(least - sums[:, s], axis=1)
            least[:, 1:] = sums[:, s, 1:] + begun[:, :-1]
            least[:, 0] = np.inf
        found: Array = least[:, -1] + self.fixed_s(counts) - prices @ self.room
        return found


class _Program:
    """The shortest step of parts of blocks by some chains.

    Variables: blocks of each kind on each stage in each mode, the first and the last block where they have to be; the step.

    Args:
        chains: that are known; without any those through each rank. The longest one of even stages is added.

    Attributes:
        step_s: the shortest step of parts of blocks so far.
    """

    def __init__(self, stages: _Stages, chains: Sequence[tuple[int, ...]]) -> None:
        self.stages = stages
        self.step_s = np.inf
        num, kinds, _ = shape = stages.backward_s.shape
        may = np.ones(shape, dtype=bool)
        self.count = np.bincount(stages.kinds, minlength=kinds).astype(float)
        for k, at in ((stages.kinds[0], 0), (stages.kinds[-1], num - 1)):
            if self.count[k] == 1:  # the only one of its kind: on no other stage
                may[:, k] &= np.arange(num)[:, None] == at
        self.may, (stage, kind, _) = may, may.nonzero()
        self.scale_s, even = stages.longest(stages.even())
        self.scale_bytes = max(float(np.abs(stages.room).max()), 1.0)
        num_bytes = (stages.static[..., None] + stages.held[:, None, None] * stages.kept)[may] / self.scale_bytes
        self.on_stage, self.of_kind = (np.arange(size)[:, None] == own for size, own in ((num, stage), (kinds, kind)))
        memory = (np.arange(stages.pp)[:, None] == stages.rank[stage]) * num_bytes.round(DIGITS)
        self.chains: list[tuple[int, ...]] = []
        self.rows = np.concatenate([memory, -1.0 * self.on_stage])
        self.rows = np.concatenate([self.rows, np.zeros((len(self.rows), 1))], axis=1)
        self.limits = np.concatenate([stages.room / self.scale_bytes, -np.ones(num)])
        self._add([*dict.fromkeys((even, *(chains or rank_chains(*stages.key))))])

    def separate(self, blocks: Array) -> bool:
        """Whether a chain is added: the longest one of a solution."""
        step_s, chain = self.stages.longest(blocks)
        self.step_s = min(self.step_s, step_s)
        return self.add(chain)

    def add(self, chain: tuple[int, ...]) -> bool:
        """Whether a chain was not known."""
        if chain in self.chains:
            return False
        self._add([chain])
        return True

    def _add(self, chains: Sequence[tuple[int, ...]]) -> None:
        stages = self.stages
        counts = np.array([_counts(stages.key, chain) for chain in chains])
        blocks = stages.block_s(counts, np.zeros((len(counts), stages.pp)))[:, self.may] / self.scale_s
        self.chains += chains
        rows = np.concatenate([blocks.round(DIGITS), -np.ones((len(counts), 1))], axis=1)
        self.rows = np.concatenate([self.rows, rows])
        self.limits = np.concatenate([self.limits, (-stages.fixed_s(counts) / self.scale_s).round(DIGITS)])

    def solve(self) -> tuple[ChainProof, Array] | None:
        """The proof of the best weights, and the stages of the solution [s, k, o]; None: there is none."""
        size, stages, fixed = self.rows.shape[1], self.stages, self.stages.pp + self.stages.num
        found = linprog(
            np.arange(size) == size - 1, A_ub=self.rows, b_ub=self.limits, A_eq=np.pad(self.of_kind, ((0, 0), (0, 1))),
            b_eq=self.count, method="highs-ds", options={"presolve": False},
        )  # fmt: skip
        if found.status != 0:
            return None
        prices = np.maximum(-found.ineqlin.marginals, 0.0)
        weights, byte_s = prices[fixed:], prices[: stages.pp]
        some, total = np.flatnonzero(weights > ROUNDING * weights.sum()), weights.sum()
        if total <= 0:
            return None
        proof = ChainProof(
            bound_s=0.0, chains=tuple(self.chains[i] for i in some),
            weights=tuple((weights[some] / weights[some].sum()).tolist()),
            byte_s=tuple((byte_s / total * self.scale_s / self.scale_bytes).tolist()),
        )  # fmt: skip
        proof = replace(proof, bound_s=float(stages.least_s([proof])[0]) * (1 - ROUNDING))
        return proof, self._blocks(found.x)

    def whole_s(self, goal_s: float) -> float:
        """The least step in which each stage, and each rank, has a whole number of blocks, up to ``goal_s``.

        Where there is one below, the longest chain of its stages is added, a few times.
        """
        stages, bound_s = self.stages, 0.0
        on_rank = (np.arange(stages.pp)[:, None] == stages.rank) @ self.on_stage
        parts = np.concatenate([self.on_stage, on_rank])  # their blocks are the last variables
        equal = np.block([[self.of_kind, np.zeros((len(self.count), 1 + len(parts)))],
                          [parts, np.zeros((len(parts), 1)), -np.eye(len(parts))]])  # fmt: skip
        count = np.append(self.count, np.zeros(len(parts)))
        step, place = self.rows.shape[1] - 1, np.arange(self.rows.shape[1] + len(parts))
        most = np.where(place == step, goal_s / self.scale_s * (1 + WHOLE), np.inf)
        for _ in range(WHOLE_ROUNDS):
            rows = np.pad(self.rows, ((0, 0), (0, len(parts))))
            found = milp(
                place == step, integrality=place > step, bounds=Bounds(0.0, most),
                constraints=[LinearConstraint(rows, -np.inf, self.limits), LinearConstraint(equal, count, count)],
                options={"node_limit": NODES, "mip_rel_gap": PRECISION},
            )  # fmt: skip
            if found.status == INFEASIBLE:
                return goal_s
            if found.mip_dual_bound is not None:
                bound_s = max(bound_s, float(found.mip_dual_bound) * self.scale_s * (1 - WHOLE))
            if found.x is None or not self.add(stages.longest(self._blocks(found.x))[1]):
                break
        return bound_s

    def _blocks(self, values: Array) -> Array:
        """Of each kind on each stage in each mode [s, k, o]; rounded, so that which chain is the longest does not depend on rounding."""
        found = np.zeros(self.may.shape)
        found[self.may] = np.round(values[: self.may.sum()], DIGITS)
        return found
