"""The same minimum as :mod:`autopar.planner.sharding.elimination`, by integer programming (HiGHS through scipy)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from autopar.errors import AutoparError
from autopar.planner.sharding.elimination import Energy, Factor, Minimum

_OPTIMAL, _INFEASIBLE = 0, 2  # status codes of scipy.optimize.milp


class _Rows:
    """Equality constraints collected row by row."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.right: list[float] = []

    def add(self, terms: list[tuple[int, float]], right: float) -> None:
        for column, value in terms:
            self.rows.append(len(self.right))
            self.columns.append(column)
            self.values.append(value)
        self.right.append(right)


def minimise_by_milp(energy: Energy, *, fixed: Mapping[int, int] | None = None) -> Minimum | None:
    """The exact minimum with the variables of ``fixed`` held; None when every assignment is forbidden.

    One 0/1 column for each state of each variable and one column in [0, 1] for each allowed entry of each table of
    two or more variables, tied to the states by marginalisation (the local polytope of Wainwright and Jordan).

    Raises:
        AutoparError: the solver stops without an answer.
    """
    first = np.concatenate([[0], np.cumsum(energy.sizes)]).astype(int)
    cost: list[float] = [0.0] * int(first[-1])
    upper = [1.0] * int(first[-1])
    rows = _Rows()
    for v, size in enumerate(energy.sizes):
        rows.add([(int(first[v]) + s, 1.0) for s in range(size)], 1.0)
    for v, state in (fixed or {}).items():
        rows.add([(int(first[v]) + state, 1.0)], 1.0)
    constant = 0.0
    for factor in energy.factors:
        if not factor.scope:
            constant += float(factor.table)
        elif len(factor.scope) == 1:
            start, stop = first[factor.scope[0]], first[factor.scope[0] + 1]
            upper[start:stop] = [
                u * bool(ok) for u, ok in zip(upper[start:stop], np.isfinite(factor.table), strict=True)
            ]
            allowed = np.where(np.isfinite(factor.table), factor.table, 0.0)
            cost[start:stop] = (np.array(cost[start:stop]) + allowed).tolist()
        else:
            _add_joint(factor, energy.sizes, first, cost, rows)
    if np.isinf(constant):
        return None
    return _solve(energy, first, np.array(cost), np.array(upper + [1.0] * (len(cost) - len(upper))), rows)


def _add_joint(factor: Factor, sizes: tuple[int, ...], first: np.ndarray, cost: list[float], rows: _Rows) -> None:
    """A column for each allowed entry of a table; those with a state in common add up to that state's column."""
    sums: dict[tuple[int, int], list[tuple[int, float]]] = {
        (v, s): [(int(first[v]) + s, -1.0)] for v in factor.scope for s in range(sizes[v])
    }
    for index in product(*(range(sizes[v]) for v in factor.scope)):
        value = float(factor.table[index])
        if np.isfinite(value):
            for v, s in zip(factor.scope, index, strict=True):
                sums[v, s].append((len(cost), 1.0))
            cost.append(value)
    for terms in sums.values():
        rows.add(terms, 0.0)


def _solve(energy: Energy, first: np.ndarray, cost: np.ndarray, upper: np.ndarray, rows: _Rows) -> Minimum | None:
    scale = float(np.max(np.abs(cost), initial=0.0)) or 1.0  # the solver's tolerances are absolute
    integrality = np.zeros(len(cost))
    integrality[: first[-1]] = 1
    matrix = coo_array((rows.values, (rows.rows, rows.columns)), shape=(len(rows.right), len(cost))).tocsc()
    result = milp(
        cost / scale * 1e3,
        integrality=integrality,
        bounds=Bounds(np.zeros(len(cost)), upper),
        constraints=LinearConstraint(matrix, rows.right, rows.right),
        options={"mip_rel_gap": 0.0},
    )
    if result.status == _INFEASIBLE:
        return None
    if result.status != _OPTIMAL:
        raise AutoparError("the integer program has an answer", value=result.message, remedy="report the model")
    assignment = tuple(int(np.argmax(result.x[first[v] : first[v + 1]])) for v in range(len(energy.sizes)))
    return Minimum(assignment=assignment, value=energy.value(assignment))
