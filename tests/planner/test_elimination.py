import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations, product
from math import prod
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.planner.sharding.elimination import MAX_TABLE_ENTRIES, Entry, Marginals, prepare
from autopar.planner.sharding.energy import Table, elimination_order


class Energy(NamedTuple):
    """A sum of tables over discrete variables of these sizes: a table has a dim for each variable of its scope, in that order."""

    sizes: tuple[int, ...]
    factors: tuple[tuple[tuple[int, ...], Table], ...]

    def value(self, assignment: Sequence[int]) -> float:
        """Of one state for each variable."""
        return float(sum(table[tuple(assignment[v] for v in scope)] for scope, table in self.factors))


class Minimum(NamedTuple):
    """An assignment of least energy, and that energy."""

    assignment: tuple[int, ...]
    value: float


Solver = Callable[[Energy], Minimum | None]


@st.composite
def energies(draw: st.DrawFn) -> Energy:
    """Up to 5 variables of up to 4 states, tables of up to 3 variables, a fifth of the entries forbidden."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    factors = [((v,), rng.random(n)) for v, n in enumerate(sizes)]
    for _ in range(draw(st.integers(0, 6))):
        arity = draw(st.integers(1, min(3, len(sizes))))
        scope = tuple(int(v) for v in rng.permutation(len(sizes))[:arity])
        table = rng.random([sizes[v] for v in scope])
        table[rng.random(table.shape) < 0.2] = np.inf
        factors.append((scope, table))
    return Energy(sizes=sizes, factors=tuple(factors))


def marginalise(energy: Energy, keep: tuple[int, ...], *, max_entries: int = MAX_TABLE_ENTRIES) -> Marginals:
    """The minimum over all variables but ``keep``, for every combination of those."""
    prepared = prepare(energy.sizes, tuple(scope for scope, _ in energy.factors), keep, max_entries=max_entries)
    return prepared.solve_all([table[None] for _, table in energy.factors], 1)


def minimise(energy: Energy, *, max_entries: int = MAX_TABLE_ENTRIES) -> Minimum | None:
    """The exact minimum; None when every assignment is forbidden."""
    marginals = marginalise(energy, (), max_entries=max_entries)
    value = float(marginals.tables[0])
    return None if np.isinf(value) else Minimum(assignment=marginals.decode([Entry(0, ())])[0], value=value)


# where no table may have an entry, all problems go to the integer program; where 8, most of them
SOLVERS = [minimise, partial(minimise, max_entries=0), partial(minimise, max_entries=8)]


@pytest.mark.parametrize("solve", SOLVERS)
@settings(max_examples=200, deadline=None)
@given(energy=energies())
def test_the_minimum_is_that_of_all_assignments(solve: Solver, energy: Energy) -> None:
    best, found = min(map(energy.value, product(*(range(n) for n in energy.sizes)))), solve(energy)
    if np.isinf(best):
        assert found is None
    else:
        assert found.value == pytest.approx(best, abs=1e-9)
        assert energy.value(found.assignment) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("solve", SOLVERS)
def test_tiny_costs_are_still_told_apart(solve: Solver) -> None:
    tiny = ((0,), np.array([3e-9, 1e-9, 2e-9]))
    assert solve(Energy(sizes=(3,), factors=(tiny,))).assignment == (1,)


@settings(max_examples=100, deadline=None)
@given(energy=energies(), data=st.data())
def test_marginal_is_the_minimum_for_each_kept_state(energy: Energy, data: st.DataObject) -> None:
    keep = tuple(data.draw(st.permutations(range(len(energy.sizes))))[: data.draw(st.integers(0, 2))])
    marginals = marginalise(energy, keep)
    for index in product(*(range(energy.sizes[k]) for k in keep)):
        whole = product(*(range(n) for n in energy.sizes))
        allowed = (a for a in whole if all(a[k] == i for k, i in zip(keep, index, strict=True)))
        best = min(energy.value(a) for a in allowed)
        assert float(marginals.tables[0, *index]) == pytest.approx(best, abs=1e-9)
        if np.isfinite(best):
            assert energy.value(marginals.decode([Entry(0, index)])[0]) == pytest.approx(best, abs=1e-9)


def test_nothing_fits_together_where_a_variable_has_no_state() -> None:
    assert minimise(Energy(sizes=(2, 0), factors=(((0,), np.zeros(2)),))) is None


@given(sizes=st.lists(st.integers(2, 5), min_size=4, max_size=9), width=st.integers(1, 3), seed=st.integers(0, 1 << 16))
def test_no_table_exceeds_the_largest_clique_of_a_chordal_graph(sizes: list[int], width: int, seed: int) -> None:
    """Such a graph grows by variables that are tied to a clique: it has an order that adds no edge."""
    draw = random.Random(seed)
    cliques = [tuple(range(min(width + 1, len(sizes))))]
    for v in range(len(cliques[0]), len(sizes)):
        cliques.append((v, *draw.sample(draw.choice(cliques), width)))
    pairs = [pair for clique in cliques for pair in combinations(clique, 2)]
    names = list(range(len(sizes)))
    draw.shuffle(names)
    own = [sizes[names.index(i)] for i in range(len(sizes))]
    order, largest = elimination_order(own, [(names[a], names[b]) for a, b in pairs])
    assert sorted(order) == list(range(len(sizes)))
    assert largest == max(prod(sizes[v] for v in clique) for clique in cliques)
