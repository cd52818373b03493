"""Variables of an energy eliminated one by one: what is added up at each step follows from the scopes of its tables alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]

_NOTHING: Table = np.zeros(0)

MAX_KEPT = 1 << 16
"""Entries of a table that is kept until it is known which of its minima are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One variable eliminated, or what stays in the end.

    Attributes:
        variable: -1 in the end.
        scope: of the table that is left.
        shape: of the sum, that of the variable in front.
        parts: the tables that are added up, those of earlier steps counted on; how their dims are ordered, None: as they are;
            and their shape, None: as they are.
    """

    variable: int
    scope: tuple[int, ...]
    shape: tuple[int, ...]
    parts: tuple[tuple[int, tuple[int, ...] | None, tuple[int, ...] | None], ...]


def steps_of(
    sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], order: Sequence[int], keep: tuple[int, ...]
) -> tuple[Step, ...]:
    """The variables of ``order`` eliminated one by one, whatever the tables cost."""
    alive = dict(enumerate(scopes))
    buckets: list[dict[int, tuple[int, ...]]] = [{} for _ in sizes]
    for key, own in alive.items():
        for v in own:
            buckets[v][key] = own
    steps = []
    for v in order:
        bucket = dict(buckets[v])
        scope = tuple(sorted({u for own in bucket.values() for u in own} - {v}))
        steps.append(_step(v, scope, (v, *scope), bucket, sizes))
        for key, own in bucket.items():
            del alive[key]
            for u in own:
                del buckets[u][key]
        key = len(scopes) + len(steps) - 1
        alive[key] = scope
        for u in scope:
            buckets[u][key] = scope
    return (*steps, _step(-1, keep, keep, alive, sizes))


def _step(
    v: int, scope: tuple[int, ...], over: tuple[int, ...], parts: dict[int, tuple[int, ...]], sizes: Sequence[int]
) -> Step:
    position = {u: i for i, u in enumerate(over)}
    full = tuple([sizes[u] for u in over])
    found = []
    for key, own in parts.items():
        places = [position[u] for u in own]
        ordered = sorted(places)
        axes = None if ordered == places else (0, *[1 + places.index(i) for i in ordered])
        shape = None
        if len(own) < len(over):
            around = [1] * len(over)
            for i in places:
                around[i] = full[i]
            shape = tuple(around)
        found.append((key, axes, shape))
    return Step(variable=v, scope=scope, shape=full, parts=tuple(found))


def _sum(step: Step, tables: Sequence[Table]) -> Table:
    """The sum of the tables of a step, the energies side by side in front."""
    total: Table | None = None
    full = (max([len(tables[k]) for k, _, _ in step.parts], default=1), *step.shape)
    is_own = False  # else it is a view of a part
    for k, axes, shape in step.parts:
        part = tables[k] if axes is None else tables[k].transpose(axes)
        if shape is not None:
            part = part.reshape((len(part), *shape))
        if total is None:
            total = part
        elif is_own and total.shape == full:
            total += part
        else:
            total, is_own = total + part, True
    if total is None:
        return np.zeros(full)
    return total if total.shape == full else np.broadcast_to(total, full).copy()


def eliminate(
    steps: Sequence[Step], tables: Sequence[Table], keep: tuple[int, ...], count: int
) -> tuple[Table, Callable[[Sequence[tuple[int, tuple[int, ...]]]], NDArray[np.intp]]]:
    """Minimise over the variables of the steps one by one, remembering the best state for each context.

    ``tables`` have the energies side by side in front; the decoder takes which of them it is asked for, and where, for several
    at once, and gives the states of each variable [variables, asked]. ``count``: of variables.
    """
    known = list(tables)
    choices: list[tuple[int, tuple[int, ...], Table, NDArray[np.intp] | None]] = []
    for step in steps[:-1]:
        total = _sum(step, known)
        # few contexts are ever asked for: of small tables they are looked at then
        is_small = total.size <= MAX_KEPT
        choices.append(
            (step.variable, step.scope, total if is_small else _NOTHING, None if is_small else total.argmin(axis=1))
        )
        known.append(np.minimum.reduce(total, axis=1))
        for k, _, _ in step.parts:
            known[k] = _NOTHING  # nobody asks for it again
    table = _sum(steps[-1], known)
    choices.reverse()

    def decode(asked: Sequence[tuple[int, tuple[int, ...]]]) -> NDArray[np.intp]:
        which = np.array([own for own, _ in asked], dtype=np.intp)
        same = np.zeros_like(which)  # of a table that is that of all energies
        found = dict(zip(keep, np.array([index for _, index in asked], dtype=np.intp).T, strict=True))
        for v, scope, total, best in choices:
            context = [found[u] for u in scope]
            if best is not None:
                found[v] = best[(which if len(best) > 1 else same, *context)]
            else:
                found[v] = total[(which if len(total) > 1 else same, slice(None), *context)].argmin(axis=1)
        return np.array([found[v] for v in range(count)], dtype=np.intp).reshape(count, len(asked))

    return table, decode
