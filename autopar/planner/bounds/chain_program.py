"""The tightest relaxation: the chains of actions that a schedule itself names, as cuts of a linear program.

What chains and their weights prove is in :mod:`autopar.planner.bounds.chain_proof`. The best weights are those of the linear program
over cuts into parts of blocks (Kelley's cutting planes): it is solved with the chains that are known, two through each rank at first, a
cut is simulated, and the longest chain of that simulation is added, until the two agree. The cut that is simulated lies between that of
the solution, which leaps from one end of what the chains leave open to another, and the quickest one that is known (the in-out
separation of Ben-Ameur and Neto 2007).

Where stages are given its variables are the choices of whole modes of each rank. Else blocks in parts spread evenly; of whole ones a slow
device that has time for 1.6 takes one or two. So where the bound is still below what is aimed at, the same program is solved with whole
numbers of blocks on each stage, as an integer program whose step is no longer than that time: often there is none. Its bound is the
solver's alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from autopar.cost.step.simulation import rank_chains
from autopar.planner.bounds.chain_proof import ROUNDING, ChainProof, Stages, WholeModes, counts_of
from autopar.planner.bounds.instance import Array, PipelineInstance

ROUNDS = 20, 60
"""Programs that are solved for an instance at most, where they are large and where they are small."""

COLUMNS = 6000
"""Of all programs of an instance: the larger they are, the fewer are solved."""

MOST_ACTIONS = 60_000
"""Of a schedule whose chains are looked for: beyond it a simulation takes too long."""

STEP = 0.5
"""Of the way from the quickest cut that is known to the solution of a program, where a chain is looked for first."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainBound:
    """No plan takes less than ``time_s``: by the proof, or of whole blocks, by the solver of integer programs alone.

    Without a proof some rank cannot hold the blocks of its stages, which are given.
    """

    time_s: float
    proof: ChainProof | None


def chain_bound(
    instance: PipelineInstance,
    goal_s: float,
    known: Sequence[ChainProof] = (),
    *,
    above_s: float = 0.0,
    whole_s: float | None = 0.0,
    rounds: int | None = None,
) -> ChainBound | None:
    """The best bound that is found, at least ``goal_s`` where it gets there; infinite where given stages do not fit.

    None where the schedule is too long, or no parts of blocks fit.

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
    stages = Stages(instance)
    if stages.modes is not None and not stages.modes.is_possible:
        return ChainBound(time_s=math.inf, proof=None)
    best: ChainProof | None = None
    if known:
        bounds_s = stages.least_s(known) * (1 - ROUNDING)
        place = int(bounds_s.argmax())
        best = replace(known[place], bound_s=float(bounds_s[place]))
        if best.bound_s >= goal_s or rounds == 0:
            return ChainBound(time_s=best.bound_s, proof=best)
    chains = [chain for proof in known for chain in proof.chains]
    program = _Program(stages, chains) if stages.modes is None else _ModeProgram(stages, stages.modes, chains)
    least_s, within = goal_s if whole_s is None else above_s, None
    for _ in range(rounds or int(np.clip(COLUMNS // program.size, *ROUNDS))):
        solved = program.solve()
        if solved is None:
            break
        proof, solution = solved
        if best is None or proof.bound_s > best.bound_s:
            best = proof
        is_new, within = _separated(program, solution, within)
        is_near = program.step_s - best.bound_s <= PRECISION * program.step_s
        if best.bound_s >= goal_s or is_near or not is_new or program.step_s <= least_s:
            break
    if best is None:
        return None
    time_s, aim_s = best.bound_s, min(whole_s or 0.0, goal_s)
    if isinstance(program, _Program) and NEAR * aim_s <= time_s < aim_s:
        time_s = max(time_s, program.whole_s(aim_s))
    return ChainBound(time_s=time_s, proof=best)


def _separated(program: _Program | _ModeProgram, solution: Array, within: Array | None) -> tuple[bool, Array]:
    """Whether a chain was found, between the quickest cut that is known (None: there is none) and the solution; the quickest one then."""
    if within is None:
        return program.separate(solution), solution
    known_s, between = program.step_s, (within + STEP * (solution - within)).round(DIGITS)
    is_new = program.separate(between)
    return is_new or program.separate(solution), between if program.step_s < known_s else within


def _proof(stages: Stages, chains: Sequence[tuple[int, ...]], weights: Array, byte_s: Array) -> ChainProof:
    """The proof of the chains that have some weight."""
    some = np.flatnonzero(weights > ROUNDING * weights.sum())
    proof = ChainProof(
        bound_s=0.0, chains=tuple(chains[int(i)] for i in some),
        weights=tuple((weights[some] / weights[some].sum()).tolist()), byte_s=tuple(byte_s.tolist()),
    )  # fmt: skip
    return replace(proof, bound_s=float(stages.least_s([proof])[0]) * (1 - ROUNDING))


class _ModeProgram:
    """The shortest step of given stages by some chains; variables: the parts of each choice of whole modes of each rank, and the step.

    Args:
        chains: that are known; without any those through each rank.

    Attributes:
        step_s: the shortest step so far of stages whose backwards are means of choices.
        size: variables.
    """

    def __init__(self, stages: Stages, modes: WholeModes, chains: Sequence[tuple[int, ...]]) -> None:
        self.stages, self.modes, self.step_s = stages, modes, np.inf
        self.rank = np.repeat(np.arange(stages.pp), [len(own) for own in modes.choices])
        self.backward_s = np.zeros((stages.num, len(self.rank)))
        for rank, own in enumerate(modes.choices):
            self.backward_s[rank :: stages.pp, self.rank == rank] = own.T
        self.size = len(self.rank) + 1
        self.scale_s, first = stages.simulated(modes.count, self.backward_s.max(axis=1))
        self.chains = [*dict.fromkeys((first, *(chains or rank_chains(*stages.key))))]

    def solve(self) -> tuple[ChainProof, Array] | None:
        """The proof of the best weights, and the backward seconds of each stage in the solution."""
        stages = self.stages
        counts = np.array([counts_of(stages.key, chain) for chain in self.chains])
        rows = counts[:, stages.num : 2 * stages.num] @ self.backward_s / self.scale_s
        of_rank = np.arange(stages.pp)[:, None] == self.rank
        found = linprog(
            np.arange(self.size) == self.size - 1,
            A_ub=np.concatenate([rows.round(DIGITS), -np.ones((len(rows), 1))], axis=1),
            b_ub=(-self.modes.fixed_s(counts) / self.scale_s).round(DIGITS),
            A_eq=np.pad(of_rank, ((0, 0), (0, 1))), b_eq=np.ones(stages.pp), method="highs-ds",
            options={"presolve": False},
        )  # fmt: skip
        weights = np.maximum(-found.ineqlin.marginals, 0.0) if found.status == 0 else np.zeros(1)
        if weights.sum() <= 0:
            return None
        return _proof(stages, self.chains, weights, np.zeros(stages.pp)), self.backward_s @ found.x[:-1].round(DIGITS)

    def separate(self, backward_s: Array) -> bool:
        """Whether a chain is added: the longest one of a solution."""
        step_s, chain = self.stages.simulated(self.modes.count, backward_s)
        self.step_s = min(self.step_s, step_s)
        is_new = chain not in self.chains
        self.chains += [chain] * is_new
        return is_new


class _Program:
    """The shortest step of parts of blocks by some chains.

    Variables: blocks of each kind on each stage in each mode, the first and the last block where they have to be; the step.

    Args:
        chains: that are known; without any those through each rank. The longest one of even stages is added.

    Attributes:
        step_s: the shortest step of parts of blocks so far.
        fixed: rows that are of no chain.
    """

    def __init__(self, stages: Stages, chains: Sequence[tuple[int, ...]]) -> None:
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
        ends = np.array(stages.instance.ends[:-1], dtype=float).reshape(-1, 2)
        behind = np.cumsum(self.on_stage, axis=0)[: len(ends)]  # blocks on the stages up to each one
        self.rows = np.concatenate([memory, -1.0 * self.on_stage, -1.0 * behind, 1.0 * behind])
        self.rows = np.concatenate([self.rows, np.zeros((len(self.rows), 1))], axis=1)
        self.limits = np.concatenate([stages.room / self.scale_bytes, -np.ones(num), -ends[:, 0], ends[:, 1]])
        self.fixed = len(self.limits)
        self._add([*dict.fromkeys((even, *(chains or rank_chains(*stages.key))))])

    @property
    def size(self) -> int:
        """Variables."""
        return int(self.rows.shape[1])

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
        counts = np.array([counts_of(stages.key, chain) for chain in chains])
        blocks = stages.block_s(counts, np.zeros((len(counts), stages.pp)))[:, self.may] / self.scale_s
        self.chains += chains
        rows = np.concatenate([blocks.round(DIGITS), -np.ones((len(counts), 1))], axis=1)
        self.rows = np.concatenate([self.rows, rows])
        self.limits = np.concatenate([self.limits, (-stages.fixed_s(counts) / self.scale_s).round(DIGITS)])

    def solve(self) -> tuple[ChainProof, Array] | None:
        """The proof of the best weights, and the stages of the solution [s, k, o]; None: there is none."""
        size, stages = self.size, self.stages
        found = linprog(
            np.arange(size) == size - 1, A_ub=self.rows, b_ub=self.limits, A_eq=np.pad(self.of_kind, ((0, 0), (0, 1))),
            b_eq=self.count, method="highs-ds", options={"presolve": False},
        )  # fmt: skip
        if found.status != 0:
            return None
        prices = np.maximum(-found.ineqlin.marginals, 0.0)
        weights = prices[self.fixed :]
        if weights.sum() <= 0:
            return None
        byte_s = prices[: stages.pp] / weights.sum() * self.scale_s / self.scale_bytes
        return _proof(stages, self.chains, weights, byte_s), self._blocks(found.x)

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
