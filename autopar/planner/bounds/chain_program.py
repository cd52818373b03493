"""The chain program, the tightest relaxation: a linear program whose cutting planes are chains of a schedule's actions.

:mod:`autopar.planner.bounds.chain_proof` says what chains and their weights prove. The best weights are the dual solution of a linear
program over fractional cuts of blocks into stages (Kelley's cutting planes). It is solved with the known chains, at first two through each
rank. Then a cut is simulated and the longest chain of that simulation is added, until program and simulation agree. As solutions leap
between extreme points of what the chains leave open, the simulated cut lies between the solution and the fastest cut so far (the in-out
separation of Ben-Ameur and Neto 2007).

Where the stages are given, the variables are the choices of whole modes of each rank. Elsewhere fractional blocks spread evenly where whole
ones cannot: a slow device with time for 1.6 blocks takes one or two. So where the bound falls short of the time aimed at, an integer
program with whole numbers of blocks on each stage is solved for a step no longer than that; often it is infeasible. This last bound has no
certificate but the solver's word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, linprog, milp

from autopar.cost.step.simulation import rank_chains
from autopar.planner.bounds.chain_proof import ROUNDING, ChainProof, Stages, WholeModes, counts_of
from autopar.planner.bounds.instance import Array, PipelineInstance

ROUNDS = 20, 60
"""The limits on linear programs of an instance, for large and for small ones (docs/adr/0023: fewer for small ones widen gaps)."""

COLUMNS = 6000
"""The limit on the variables of all programs of an instance together, within ``ROUNDS``."""

MOST_ACTIONS = 60_000
"""The limit on actions of a schedule whose chains are sought; a longer simulation takes too long."""

STEP = 0.5
"""Where chains are sought first: this fraction of the way from the fastest known cut to the solution (docs/adr/0023 compares others)."""

PRECISION = 2e-4
"""The relative gap between the simulated step and the bound at which the bound is no longer raised."""

KEPT = 12
"""The number of proofs of a schedule, the latest ones, that are tried on its other candidates."""

NEAR = 0.92
"""The least ratio of the bound to the time aimed at for which integer programs are solved: they raise a bound by a few percent at most."""

NODES = 2000
"""The limit on branch-and-bound nodes of an integer program."""

WHOLE_ROUNDS = 3
"""The limit on integer programs of an instance."""

DIGITS = 9
"""The digits of coefficients and solutions after rounding.

The last bits of equal sums differ between processes; degenerate programs would then have other solutions.
"""

WHOLE = 1e-5
"""The fraction by which an integer program's bound is lowered for the solver's tolerances."""

INFEASIBLE = 2
"""The status of :func:`scipy.optimize.milp` for a program without a solution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainBound:
    """A lower bound ``time_s`` of all plans, in seconds, and the best proof.

    The proof gives ``time_s``, or less where an integer program has raised the bound. It is None where some rank cannot hold the blocks of
    its given stages.
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
    """Return the best bound that is found, at least ``goal_s`` where it gets there; infinite where given stages do not fit.

    None where the schedule is too long, or not even fractional blocks fit.

    Args:
        goal_s: the search for chains ends when the bound reaches it.
        known: proofs of other instances of the schedule; their weights are tried first, and their chains are the first cutting planes.
        above_s: the search for chains ends when some fractional cut takes no longer, as the bound cannot exceed this time.
        whole_s: where the bound of fractional blocks is near this time, integer programs raise it up to here. None: the caller asks only
            whether the bound reaches the goal; the search ends when some fractional cut takes no longer than the goal.
        rounds: the limit on linear programs; 0 solves none where proofs are known. None, or 0 without proofs: as many as are worth it.
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
    least_s, fastest = goal_s if whole_s is None else above_s, None
    for _ in range(rounds or int(np.clip(COLUMNS // program.size, *ROUNDS))):
        solved = program.solve()
        if solved is None:
            break
        proof, solution = solved
        if best is None or proof.bound_s > best.bound_s:
            best = proof
        is_new, fastest = _separated(program, solution, fastest)
        is_near = program.step_s - best.bound_s <= PRECISION * program.step_s
        if best.bound_s >= goal_s or is_near or not is_new or program.step_s <= least_s:
            break
    if best is None:
        return None
    time_s, aim_s = best.bound_s, min(whole_s or 0.0, goal_s)
    if isinstance(program, _Program) and NEAR * aim_s <= time_s < aim_s:
        time_s = max(time_s, program.whole_s(aim_s))
    return ChainBound(time_s=time_s, proof=best)


def _separated(program: _Program | _ModeProgram, solution: Array, fastest: Array | None) -> tuple[bool, Array]:
    """Separate a chain between the fastest known cut (None: there is none) and the solution.

    Returns whether a new chain was found, and the fastest cut then.
    """
    if fastest is None:
        return program.separate(solution), solution
    fastest_s, between = program.step_s, (fastest + STEP * (solution - fastest)).round(DIGITS)
    is_new = program.separate(between)
    return is_new or program.separate(solution), between if program.step_s < fastest_s else fastest


def _proof(stages: Stages, chains: Sequence[tuple[int, ...]], weights: Array, byte_s: Array) -> ChainProof:
    """Return the proof of the chains whose weights are not zero."""
    used = np.flatnonzero(weights > ROUNDING * weights.sum())
    proof = ChainProof(
        bound_s=0.0, chains=tuple(chains[int(i)] for i in used),
        weights=tuple((weights[used] / weights[used].sum()).tolist()), byte_s=tuple(byte_s.tolist()),
    )  # fmt: skip
    return replace(proof, bound_s=float(stages.least_s([proof])[0]) * (1 - ROUNDING))


def _shortest(rows: Array, limits: Array, parts: NDArray[np.bool_], totals: Array) -> OptimizeResult:
    """Solve for the least last variable, the step, where ``rows`` of all variables keep ``limits``, and ``parts`` of the others make ``totals``."""
    step = np.arange(rows.shape[1]) == rows.shape[1] - 1
    equal, options = np.pad(parts, ((0, 0), (0, 1))), {"presolve": False}
    return linprog(step, A_ub=rows, b_ub=limits, A_eq=equal, b_eq=totals, method="highs-ds", options=options)


class _ModeProgram:
    """The linear program of given stages: the shortest step under the constraints of some chains.

    Its variables are the fractions of each rank's choices of whole modes, and the step.

    Args:
        stages: the instance by stages.
        modes: the choices of each rank.
        chains: the known chains; if empty, those through each rank.

    Attributes:
        step_s: the shortest simulated step so far, of backwards that are convex combinations of choices.
        size: the number of variables.
    """

    def __init__(self, stages: Stages, modes: WholeModes, chains: Sequence[tuple[int, ...]]) -> None:
        self.stages, self.modes, self.step_s = stages, modes, np.inf
        self.rank = np.repeat(np.arange(stages.pp), [len(choices) for choices in modes.choices])
        self.backward_s = np.zeros((stages.num, len(self.rank)))
        for rank, choices in enumerate(modes.choices):
            self.backward_s[rank :: stages.pp, self.rank == rank] = choices.T
        self.size = len(self.rank) + 1
        self.scale_s, first = stages.simulated(modes.count, self.backward_s.max(axis=1))
        self.chains = [*dict.fromkeys((first, *(chains or rank_chains(*stages.key))))]

    def solve(self) -> tuple[ChainProof, Array] | None:
        """Return the proof of the best weights and the backward seconds of each stage in the solution; None without weights."""
        stages = self.stages
        counts = np.array([counts_of(stages.key, chain) for chain in self.chains])
        rows = counts[:, stages.num : 2 * stages.num] @ self.backward_s / self.scale_s
        result = _shortest(
            np.concatenate([rows.round(DIGITS), -np.ones((len(rows), 1))], axis=1),
            (-self.modes.fixed_s(counts) / self.scale_s).round(DIGITS),
            np.arange(stages.pp)[:, None] == self.rank,
            np.ones(stages.pp),
        )
        weights = np.maximum(-result.ineqlin.marginals, 0.0) if result.status == 0 else np.zeros(1)
        if weights.sum() <= 0:
            return None
        return _proof(stages, self.chains, weights, np.zeros(stages.pp)), self.backward_s @ result.x[:-1].round(DIGITS)

    def separate(self, backward_s: Array) -> bool:
        """Simulate a solution and add its longest chain; return whether that chain is new."""
        step_s, chain = self.stages.simulated(self.modes.count, backward_s)
        self.step_s = min(self.step_s, step_s)
        is_new = chain not in self.chains
        self.chains += [chain] * is_new
        return is_new


class _Program:
    """The linear program of stages that are cut freely: the shortest step of fractional blocks under the constraints of some chains.

    Its variables are the blocks of each kind on each stage in each mode, and the step. A kind is on no stage where the order of blocks
    leaves none of them.

    Args:
        stages: the instance by stages.
        chains: the known chains; if empty, those through each rank. The longest chain of equal stages is added.

    Attributes:
        step_s: the shortest simulated step of fractional blocks so far.
        fixed: the number of constraints that are not chains; they come first.
    """

    def __init__(self, stages: Stages, chains: Sequence[tuple[int, ...]]) -> None:
        self.stages = stages
        self.step_s = np.inf
        num, kinds, _ = shape = stages.backward_s.shape
        self.count = np.bincount(stages.kinds, minlength=kinds).astype(float)
        is_allowed = np.zeros(shape, dtype=bool)
        for place, k in enumerate(stages.kinds):  # the stages before and behind a block have a block each
            is_allowed[max(place + num - len(stages.kinds), 0) : place + 1, k] = True
        self.is_allowed, (stage, kind, _) = is_allowed, is_allowed.nonzero()
        self.scale_s, even = stages.longest(stages.even())
        self.scale_bytes = max(float(np.abs(stages.room).max()), 1.0)
        num_bytes = (stages.static[..., None] + stages.held[:, None, None] * stages.kept)[is_allowed] / self.scale_bytes
        self.on_stage, self.of_kind = (np.arange(size)[:, None] == own for size, own in ((num, stage), (kinds, kind)))
        memory = (np.arange(stages.pp)[:, None] == stages.rank[stage]) * num_bytes.round(DIGITS)
        self.chains: list[tuple[int, ...]] = []
        ends = np.array(stages.instance.ends[:-1], dtype=float).reshape(-1, 2)
        behind = np.cumsum(self.on_stage, axis=0)[: len(ends)]  # the number of blocks on the stages up to each one
        self.rows = np.concatenate([memory, -1.0 * self.on_stage, -1.0 * behind, 1.0 * behind])
        self.rows = np.concatenate([self.rows, np.zeros((len(self.rows), 1))], axis=1)
        self.limits = np.concatenate([stages.room / self.scale_bytes, -np.ones(num), -ends[:, 0], ends[:, 1]])
        self.fixed = len(self.limits)
        self._add([*dict.fromkeys((even, *(chains or rank_chains(*stages.key))))])

    @property
    def size(self) -> int:
        """The number of variables."""
        return int(self.rows.shape[1])

    def separate(self, blocks: Array) -> bool:
        """Simulate a solution and add its longest chain; return whether that chain is new."""
        step_s, chain = self.stages.longest(blocks)
        self.step_s = min(self.step_s, step_s)
        return self.add(chain)

    def add(self, chain: tuple[int, ...]) -> bool:
        """Add a chain; return whether it is new."""
        if chain in self.chains:
            return False
        self._add([chain])
        return True

    def _add(self, chains: Sequence[tuple[int, ...]]) -> None:
        stages = self.stages
        counts = np.array([counts_of(stages.key, chain) for chain in chains])
        blocks = stages.block_s(counts, np.zeros((len(counts), stages.pp)))[:, self.is_allowed] / self.scale_s
        self.chains += chains
        rows = np.concatenate([blocks.round(DIGITS), -np.ones((len(counts), 1))], axis=1)
        self.rows = np.concatenate([self.rows, rows])
        self.limits = np.concatenate([self.limits, (-stages.fixed_s(counts) / self.scale_s).round(DIGITS)])

    def solve(self) -> tuple[ChainProof, Array] | None:
        """Return the proof of the best weights, and the blocks of the solution [s, k, o]; None where the program has no solution."""
        stages, result = self.stages, _shortest(self.rows, self.limits, self.of_kind, self.count)
        if result.status != 0:
            return None
        prices = np.maximum(-result.ineqlin.marginals, 0.0)
        weights = prices[self.fixed :]
        if weights.sum() <= 0:
            return None
        byte_s = prices[: stages.pp] / weights.sum() * self.scale_s / self.scale_bytes
        return _proof(stages, self.chains, weights, byte_s), self._blocks(result.x)

    def whole_s(self, goal_s: float) -> float:
        """Return a bound of the step with whole numbers of blocks on each stage and each rank, at most ``goal_s``.

        While a solution below the goal is found, the longest chain of its stages is added, up to ``WHOLE_ROUNDS`` times.
        """
        stages, bound_s = self.stages, 0.0
        on_rank = (np.arange(stages.pp)[:, None] == stages.rank) @ self.on_stage
        parts = np.concatenate([self.on_stage, on_rank])  # the last variables are the blocks of each
        equal = np.block([[self.of_kind, np.zeros((len(self.count), 1 + len(parts)))],
                          [parts, np.zeros((len(parts), 1)), -np.eye(len(parts))]])  # fmt: skip
        count = np.append(self.count, np.zeros(len(parts)))
        step, place = self.rows.shape[1] - 1, np.arange(self.rows.shape[1] + len(parts))
        most = np.where(place == step, goal_s / self.scale_s * (1 + WHOLE), np.inf)
        for _ in range(WHOLE_ROUNDS):
            rows = np.pad(self.rows, ((0, 0), (0, len(parts))))
            result = milp(
                place == step, integrality=place > step, bounds=Bounds(0.0, most),
                constraints=[LinearConstraint(rows, -np.inf, self.limits), LinearConstraint(equal, count, count)],
                options={"node_limit": NODES, "mip_rel_gap": PRECISION},
            )  # fmt: skip
            if result.status == INFEASIBLE:
                return goal_s
            if result.mip_dual_bound is not None:
                bound_s = max(bound_s, float(result.mip_dual_bound) * self.scale_s * (1 - WHOLE))
            if result.x is None or not self.add(stages.longest(self._blocks(result.x))[1]):
                break
        return bound_s

    def _blocks(self, values: Array) -> Array:
        """Return the blocks of each kind on each stage in each mode [s, k, o].

        They are rounded, so that the choice among equally long chains does not depend on the last bits.
        """
        blocks = np.zeros(self.is_allowed.shape)
        blocks[self.is_allowed] = np.round(values[: self.is_allowed.sum()], DIGITS)
        return blocks
