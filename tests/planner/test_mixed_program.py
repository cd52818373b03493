"""The program of cuts into parts of blocks against a general solver."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from autopar.planner.bounds.mixed_program import Program
from autopar.planner.bounds.mixed_stages import Chain, Stages, side_by_side

CLOSE = 1e-6


def some_stages(rng: np.random.Generator, pp: int, v: int) -> Stages:
    """Stages with random prices and one or two parts of recompute; a few ranks have room for little."""
    stages, n, parts = Stages.__new__(Stages), pp * v, int(rng.integers(1, 3))
    stages.num_parts = parts
    stages.pp, stages.m, stages.rank, stages.count = pp, 8, np.arange(n) % pp, int(rng.integers(n + 1, 6 * n))
    for name in ("forward_s", "backward_s", "gather_s", "once_s", "send_s", "send_back_s", "forward0_s", "backward0_s"):
        setattr(stages, name, rng.uniform(0.1, 1.0, n))
    stages.again_s = rng.uniform(0.0, 0.5, parts * n)
    stages.gather0_s, stages.once0_s = np.zeros(n), rng.uniform(0, 1, pp)
    stages.least = rng.integers(0, 2, n).astype(float)
    stages.num_bytes = rng.uniform(1.0, 2.0, n)
    stages.freed_bytes = np.tile(stages.num_bytes, parts) * rng.uniform(0.3, 0.9, parts * n) / parts
    stages.room_bytes = stages.count * rng.uniform(0.8, 4.0, pp)
    return stages


def some_chains(rng: np.random.Generator, stages: Stages, count: int) -> list[Chain]:
    """All work of each rank, then others."""
    n, pp = len(stages.rank), stages.pp
    found = []
    for k in range(pp + count):
        own = (stages.rank == k) * 8.0 if k < pp else rng.integers(0, 9, n) * 1.0
        found.append(
            Chain(
                forwards=own,
                backwards=own,
                gathers=own / 8,
                sends=rng.integers(0, 3, n) * 1.0,
                sends_back=rng.integers(0, 3, n) * 1.0,
                ends=np.eye(pp)[k % pp],
                byte_s=np.zeros(pp),
            )
        )
    return found


def least_step_s(stages: Stages, chains: list[Chain], laws: list[tuple[np.ndarray, float]]) -> float:
    """By the general solver: the variables are blocks, recomputed ones and the step; infinite where there is no cut."""
    n, pp, every = len(stages.rank), stages.pp, len(stages.again_s)
    block, again, fixed = stages.each_s(side_by_side(chains))
    own = (stages.rank == np.arange(pp)[:, None]).astype(float)
    above = [np.hstack([block, again, -np.ones((len(chains), 1))])]
    freed = np.tile(own, every // n) * stages.freed_bytes
    above += [np.hstack([own * stages.num_bytes, -freed, np.zeros((pp, 1))])]
    above += [np.hstack([np.tile(-np.eye(n), (every // n, 1)), np.eye(every), np.zeros((every, 1))])]
    above += [np.concatenate([law, np.zeros(every + 1)])[None] for law, _ in laws]
    solved = linprog(
        np.eye(n + every + 1)[-1],
        A_ub=np.vstack(above),
        b_ub=np.concatenate([-fixed, stages.room_bytes, np.zeros(every), [limit for _, limit in laws]]),
        A_eq=np.concatenate([np.ones(n), np.zeros(every + 1)])[None],
        b_eq=[stages.count],
        bounds=[*((least, None) for least in stages.least), *[(0, None)] * (every + 1)],
    )
    return float(solved.x[-1]) if solved.x is not None else float("inf")


def longest_s(stages: Stages, chains: list[Chain], blocks: np.ndarray, again: np.ndarray) -> float:
    block, more, fixed = stages.each_s(side_by_side(chains))
    return float((block @ blocks + more @ again + fixed).max())


@pytest.mark.parametrize("seed", range(16))
def test_the_shortest_step_is_that_of_a_general_solver_and_the_weighed_chains_prove_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages = some_stages(rng, int(rng.integers(1, 5)), int(rng.integers(1, 4)))
    chains = some_chains(rng, stages, 6)
    program = Program(stages, chains[:-3], 10.0)
    for known in (chains[:-3], chains):  # more chains, from the solution that there is
        program.add(known[len(program.chains) :])
        found, best_s = program.solve(), least_step_s(stages, known, [])
        if best_s == float("inf"):
            assert found is None and program.is_impossible
            return
        assert found is not None
        assert longest_s(stages, known, found.blocks, found.again) == pytest.approx(best_s, rel=CLOSE)
        assert found.blocks.sum() == pytest.approx(stages.count)
        freed = (stages.freed_bytes * found.again).reshape(-1, len(stages.rank)).sum(axis=0)
        assert (np.bincount(stages.rank, stages.num_bytes * found.blocks - freed)
                <= stages.room_bytes * (1 + CLOSE)).all()  # fmt: skip
        for bound_s in (stages.least_s(found.weighed), program.least_s()):
            assert best_s * (1 - CLOSE) <= bound_s <= best_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_where_every_block_is_bound_to_a_stage_the_bound_is_close_below_that_cut(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages = some_stages(rng, int(rng.integers(1, 5)), int(rng.integers(1, 4)))
    stages.least = rng.integers(1, 4, len(stages.rank)).astype(float)
    stages.count = int(stages.least.sum())
    stages.room_bytes = stages.count * rng.uniform(2.0, 4.0, stages.pp)
    chains = some_chains(rng, stages, 6)
    program = Program(stages, chains, 10.0)
    found, best_s = program.solve(), least_step_s(stages, chains, [])
    assert found is not None
    for bound_s in (stages.least_s(found.weighed), program.least_s()):
        assert best_s * 0.98 <= bound_s <= best_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_a_branch_has_fewer_or_more_blocks_and_its_bound_is_that_of_a_general_solver(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages = some_stages(rng, int(rng.integers(2, 5)), int(rng.integers(1, 3)))
    chains = some_chains(rng, stages, 4)
    program = Program(stages, chains, 10.0)
    found = program.solve()
    if found is None:
        return
    sums = np.concatenate([(stages.rank == np.arange(stages.pp)[:, None]).astype(float), np.eye(len(stages.rank))])
    values = sums @ found.blocks
    before_s, worth = program.least_s(), [program.tableau.worth(laws) for laws in program.halves(sums, values)]
    for k in range(len(sums)):
        for half, sign in enumerate((1, -1)):
            other = program.twin()
            other.keep(program.halves(sums, values)[half][k])
            limit = sign * (np.floor(values[k]) + half)
            best_s = least_step_s(stages, chains, [(sign * sums[k], float(limit))])
            branch = other.solve()
            if best_s == float("inf"):
                assert branch is None and other.is_impossible
                continue
            assert branch is not None and sign * (sums[k] @ branch.blocks) <= limit + CLOSE
            assert best_s * (1 - CLOSE) <= other.least_s() <= best_s * (1 + 1e-9)
            aims = [program.free * 10.0 / time_s for time_s in (before_s, best_s)]
            assert worth[half][k] <= (aims[0] - aims[1]) * (1 + CLOSE) + CLOSE
    assert program.least_s() == before_s  # what branches know, this one does not
