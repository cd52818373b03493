"""Why this plan: its neighbours among the candidates, what each would cost, and where the difference lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import ne

from autopar.plan.prediction import Prediction
from autopar.planner.bounds.cascade import LEVELS
from autopar.planner.branch_and_bound.process_group import ProcessGroup
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.layouts.layout import layout_key_of
from autopar.planner.search import Evaluation
from autopar.planner.space.candidates import Candidate

MAX_ALTERNATIVES = 10
"""Neighbours that a plan is compared with."""

CLEAR = 1.05
"""Times the plan that neighbours are known to take at the least where no more is said of them."""

_CHOICES: tuple[tuple[str, Callable[[Candidate], object]], ...] = (
    ("tp", lambda c: c.mesh.tp),
    ("cp", lambda c: c.mesh.cp),
    ("pp", lambda c: c.mesh.pp),
    ("ep_data", lambda c: c.mesh.ep_data),
    ("zero", lambda c: c.zero_stage),
    ("dp_shard", lambda c: c.mesh.dp_shard),
    ("micro_batch", lambda c: c.micro_batch_size),
    ("vocab_multiple", lambda c: c.vocab_multiple),
    ("data_shares", lambda c: "unequal" if c.shares else "equal"),
    ("order of node groups", lambda c: "-".join(map(str, c.order)) or "as given"),
    ("offload", lambda c: ", ".join(c.on_host) or "none"),
    ("schedule", lambda c: f"{c.schedule} v={c.virtual_stages}" if c.virtual_stages > 1 else c.schedule),
)
_PARTS = (
    ("compute", "compute_s"),
    ("recompute", "recompute_s"),
    ("tensor-parallel communication", "tensor_parallel_s"),
    ("context-parallel communication", "context_parallel_s"),
    ("data-parallel communication", "data_parallel_s"),
    ("pipeline sends", "pipeline_s"),
    ("pipeline bubble", "bubble_s"),
    ("optimizer", "optimizer_s"),
    ("copies to and from the host", "offload_s"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alternative:
    """A candidate with another value of one choice and as little else changed as can be.

    Attributes:
        choice: with the other value, as ``tp=4``.
        comparison: with the plan, in words.
        evaluation: its best plan, where bounds did not say enough and it has one.
    """

    choice: str
    candidate: Candidate
    comparison: str
    evaluation: Evaluation | None

    def __str__(self) -> str:
        return f"{self.choice}: {self.comparison}"


def compare(
    evaluator: Evaluator, pool: Sequence[Candidate], best: Evaluation, group: ProcessGroup | None = None
) -> list[Alternative]:
    """The alternatives to a plan, compared with it.

    Args:
        group: the processes of the search, of which each compares the candidates whose layouts it has worked out.
    """
    group = ProcessGroup() if group is None else group
    named = _alternatives(pool, best.candidate)
    distinct = list(dict.fromkeys(other for _, other in named))  # one may be an alternative by several choices
    first_s = evaluator.bounds_s(0, distinct)
    compared: dict[Candidate, tuple[str, Evaluation | None]] = {}
    for other, bound_s in zip(distinct, first_s, strict=True):
        if group.owner(layout_key_of(other)) == group.rank:
            compared[other] = _compare(evaluator, best, other, bound_s)
    for some in group.allgather(compared):
        compared |= some
    return [
        Alternative(choice=choice, candidate=other, comparison=compared[other][0], evaluation=compared[other][1])
        for choice, other in named
    ]


def _alternatives(pool: Sequence[Candidate], best: Candidate) -> list[tuple[str, Candidate]]:
    """For each choice the nearest candidates with another value of it."""
    found: list[tuple[str, Candidate]] = []
    mine = [value(best) for _, value in _CHOICES]
    columns = [[value(c) for c in pool] for _, value in _CHOICES]
    spreads = _spreads(pool, best)
    distances = [
        sum(map(ne, values, mine)) + spread for values, spread in zip(zip(*columns, strict=True), spreads, strict=True)
    ]
    for (name, value), own, values in zip(_CHOICES, mine, columns, strict=True):
        near = _neighbours(pool, distances, values, own)[: MAX_ALTERNATIVES - len(found)]
        found += [(f"{name}={value(other)}", other) for other in near]
    return found


def _neighbours(
    pool: Sequence[Candidate], distances: Sequence[float], values: Sequence[object], mine: object
) -> list[Candidate]:
    """For the values below and above (or beside) ``mine`` the candidate that differs least.

    Args:
        distances: how much each of the pool differs.
        values: what each has of the choice.
    """
    nearest: dict[object, tuple[float, Candidate]] = {}
    for candidate, distance, key in zip(pool, distances, values, strict=True):
        if key != mine and (key not in nearest or distance < nearest[key][0]):
            nearest[key] = (distance, candidate)
    if isinstance(mine, int):
        numbers = sorted(k for k in nearest if isinstance(k, int))
        beside = [k for k in numbers if k < mine][-1:] + [k for k in numbers if k > mine][:1]
        return [nearest[k][1] for k in beside]
    return [nearest[k][1] for k in sorted(nearest, key=str)][:2]


def _spreads(pool: Sequence[Candidate], best: Candidate) -> list[float]:
    """How far the degrees of each are from those of the best, less than any other choice counts."""
    mine = (*best.mesh.degrees, best.micro_batch_size)
    known: dict[tuple[int, ...], float] = {}
    found = []
    for candidate in pool:
        own = (*candidate.mesh.degrees, candidate.micro_batch_size)
        if own not in known:
            known[own] = sum(max(x / y, y / x) for x, y in zip(own, mine, strict=True)) / 1e6
        found.append(known[own])
    return found


def _compare(evaluator: Evaluator, best: Evaluation, other: Candidate, bound_s: float) -> tuple[str, Evaluation | None]:
    """In words, with the other one's plan where it was made; ``bound_s``: a first bound of the other one."""
    best_s = best.prediction.step_time_s
    for level in range(1, LEVELS):
        if bound_s < best_s:  # up to there a bound is a function of the candidate alone
            bound_s = max(bound_s, min(evaluator.bounds_s(level, [other], CLEAR * best_s)[0], CLEAR * best_s))
    if bound_s < best_s:
        bound_s = max(bound_s, evaluator.chained_s(other, CLEAR * best_s))
    if best_s <= bound_s < float("inf"):
        more_s = bound_s - best_s
        return f"at least {more_s:.3g} s ({100 * more_s / best_s:.1f}%) slower ({other}), by its lower bound", None
    found = (evaluator.hopeless(other) if bound_s == float("inf") else None) or evaluator.evaluate(other)
    if not isinstance(found, Evaluation):
        return f"no plan ({other}); {found.reason}", None
    more_s = found.prediction.step_time_s - best_s
    word = "slower" if more_s >= 0 else "faster"
    share = 100 * abs(more_s) / best_s
    return (
        f"{abs(more_s):.3g} s ({share:.1f}%) {word} ({other}); {_difference(best.prediction, found.prediction)}",
        found,
    )


def _difference(mine: Prediction, theirs: Prediction) -> str:
    """The two parts of the step that differ most."""
    changes = [(getattr(theirs.breakdown, key) - getattr(mine.breakdown, key), name) for name, key in _PARTS]
    largest = sorted(changes, key=lambda change: -abs(change[0]))[:2]
    return ", ".join(f"{name} {change:+.3g} s" for change, name in largest if change)
