"""Both exact solvers against brute force, through one suite of laws."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.planner.sharding import energy as orders
from autopar.planner.sharding.elimination import MAX_TABLE_ENTRIES, Entry, marginalise, minimise_by_milp
from autopar.planner.sharding.energy import Energy, Factor, Minimum, Table, elimination_order


@st.composite
def energies(draw: st.DrawFn) -> Energy:
    """Up to 5 variables of up to 4 states, tables of up to 3 variables, a fifth of the entries forbidden."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    factors = [Factor(scope=(v,), table=rng.random(n)) for v, n in enumerate(sizes)]
    for _ in range(draw(st.integers(0, 6))):
        arity = draw(st.integers(1, min(3, len(sizes))))
        scope = tuple(int(v) for v in rng.permutation(len(sizes))[:arity])
        table = rng.random([sizes[v] for v in scope])
        table[rng.random(table.shape) < 0.2] = np.inf
        factors.append(Factor(scope=scope, table=table))
    return Energy(sizes=sizes, factors=tuple(factors))


def brute_force(energy: Energy) -> float:
    return min(energy.value(a) for a in product(*(range(n) for n in energy.sizes)))


def pairwise(unary: Sequence[Table], pairs: dict[tuple[int, int], Table]) -> Energy:
    """An energy from one table a variable and one a pair."""
    factors = [Factor(scope=(i,), table=table) for i, table in enumerate(unary)]
    factors += [Factor(scope=pair, table=table) for pair, table in pairs.items()]
    return Energy(sizes=tuple(map(len, unary)), factors=tuple(factors))


class SolverLaws:
    """What every exact solver keeps."""

    def solve(self, energy: Energy) -> Minimum | None:
        raise AssertionError("a solver is given by the subclass")

    @settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(energy=energies())
    def test_equals_brute_force(self, energy: Energy) -> None:
        best, found = brute_force(energy), self.solve(energy)
        if np.isinf(best):
            assert found is None
        else:
            assert found is not None
            assert found.value == pytest.approx(best, abs=1e-9)
            assert energy.value(found.assignment) == pytest.approx(best, abs=1e-9)

    def test_forbidden_everywhere_is_none(self) -> None:
        assert self.solve(pairwise([np.zeros(2), np.zeros(2)], {(0, 1): np.full((2, 2), np.inf)})) is None

    def test_tiny_costs_are_still_told_apart(self) -> None:
        found = self.solve(pairwise([np.array([3e-9, 1e-9, 2e-9])], {}))
        assert found is not None
        assert found.assignment == (1,)


def minimise(energy: Energy, *, max_entries: int = MAX_TABLE_ENTRIES) -> Minimum | None:
    """The exact minimum; None when every assignment is forbidden."""
    marginals = marginalise(energy, (), max_entries=max_entries)
    value = float(marginals.tables[0])
    return None if np.isinf(value) else Minimum(assignment=marginals.decode([Entry(0, ())])[0], value=value)


class TestElimination(SolverLaws):
    def solve(self, energy: Energy) -> Minimum | None:
        return minimise(energy)


class TestMilp(SolverLaws):
    def solve(self, energy: Energy) -> Minimum | None:
        return minimise_by_milp(energy)


class TestWidthBound(SolverLaws):
    """Elimination that may make no table of more than 8 entries: most problems go to the MILP."""

    def solve(self, energy: Energy) -> Minimum | None:
        return minimise(energy, max_entries=8)


@settings(max_examples=100, deadline=None)
@given(energy=energies(), data=st.data())
def test_marginal_is_the_minimum_for_each_kept_state(energy: Energy, data: st.DataObject) -> None:
    keep = tuple(data.draw(st.permutations(range(len(energy.sizes))))[: data.draw(st.integers(0, 2))])
    marginals = marginalise(energy, keep)
    for index in product(*(range(energy.sizes[k]) for k in keep)):
        allowed = (
            a
            for a in product(*(range(n) for n in energy.sizes))
            if all(a[k] == i for k, i in zip(keep, index, strict=True))
        )
        best = min(energy.value(a) for a in allowed)
        assert float(marginals.tables[0, *index]) == pytest.approx(best, abs=1e-9)
        if np.isfinite(best):
            assert energy.value(marginals.decode([Entry(0, index)])[0]) == pytest.approx(best, abs=1e-9)


def test_a_chain_is_eliminated_with_tables_of_two_variables() -> None:
    pairs = {(i, i + 1): np.ones((5, 5)) for i in range(49)}
    order, largest = elimination_order([5] * 50, pairs)
    assert sorted(order) == list(range(50))
    assert largest == 25


@pytest.mark.parametrize("seed", [3, 5, 7])
def test_a_wide_energy_gets_a_better_order_and_the_same_minimum(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(seed)
    sizes = noise.integers(2, 6, 30)
    edges = [(i, j) for i in range(30) for j in range(i + 1, 30)]
    pairs = {(i, j): noise.random((sizes[i], sizes[j])) for i, j in edges if noise.random() < 0.12}
    wide = pairwise([noise.random(n) for n in sizes], pairs)
    _, before = elimination_order(wide.sizes, [factor.scope for factor in wide.factors])
    least = minimise(wide)
    monkeypatch.setattr(orders, "MANY_ENTRIES", 1 << 9)
    order, largest = elimination_order(wide.sizes, [factor.scope for factor in wide.factors])
    found = minimise(wide)
    assert sorted(order) == list(range(30))
    assert largest < before
    assert found is not None and least is not None
    assert found.value == pytest.approx(least.value)
    assert wide.value(found.assignment) == pytest.approx(found.value)
