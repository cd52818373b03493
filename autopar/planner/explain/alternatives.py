"""Why this plan: its neighbours, what each would cost, and where the difference lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import ne

from autopar.plan import Prediction
from autopar.planner.bounds.cascade import LEVELS
from autopar.planner.branch_and_bound.process_group import MAX_REASONS, Crew
from autopar.planner.evaluate.evaluator import Evaluation
from autopar.planner.evaluate.families import Evaluator
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.layouts.types import LayoutKey, layout_key_of
from autopar.planner.space.candidates import Candidate

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


def explain(
    evaluator: Evaluator, pool: Sequence[Candidate], best: Evaluation, crew: Crew | None = None
) -> tuple[str, ...]:
    """One sentence for each neighbour: a candidate with another value of one choice and as little else changed as can be.

    ``crew``: the processes of the search, of which each compares candidates whose layouts it knows.
    """
    crew = Crew() if crew is None else crew
    others: list[tuple[str, Candidate]] = []
    mine = [value(best.candidate) for _, value in _CHOICES]
    every = [[value(c) for c in pool] for _, value in _CHOICES]
    spreads = _spreads(pool, best.candidate)
    far = [
        sum(map(ne, values, mine)) + spread for values, spread in zip(zip(*every, strict=True), spreads, strict=True)
    ]
    for (name, value), own, values in zip(_CHOICES, mine, every, strict=True):
        near = _neighbours(pool, far, values, own)[: MAX_REASONS - len(others)]
        others += [(f"{name}={value(other)}", other) for other in near]
    distinct = list(dict.fromkeys(other for _, other in others))  # one may be a neighbour by several choices
    splits = [layout_key_of(other.micro_batch_size, other.mesh) for other in distinct]
    if crew.is_forked:
        _exchange(evaluator.layouts, splits, crew)
    said: dict[Candidate, str] = {}
    # bounds that were found on the way depend on what they were found with; these are of neighbours alone, in every process
    first_s = evaluator.bounds_s(0, distinct)
    apart = [crew.distance(split) for split in splits]
    # what is known here first, then what is new to all; of what another knows, that which it comes to last
    for i in sorted(range(len(distinct)), key=lambda i: (apart[i], -i if apart[i] == 2 else i)):
        if crew.takes(i):
            said[distinct[i]] = _compare(evaluator, best, distinct[i], first_s[i])
    for found in crew.gather(said):
        said |= found
    return tuple(f"{what}: {said[other]}" for what, other in others)


def _exchange(layouts: Layouts, splits: Sequence[LayoutKey], crew: Crew) -> None:
    """What one process has worked out of the layouts of these becomes known to all."""
    for memos in crew.gather(layouts.memos(split for split in splits if crew.owner(split) == crew.rank)):
        layouts.learn(memos)


def _neighbours(
    pool: Sequence[Candidate], far: Sequence[float], values: Sequence[object], mine: object
) -> list[Candidate]:
    """For the values below and above (or beside) ``mine`` the candidate that differs least.

    ``far``: how much each of the pool differs; ``values``: what each has of the choice.
    """
    nearest: dict[object, tuple[float, Candidate]] = {}
    for candidate, differs, key in zip(pool, far, values, strict=True):
        if key != mine and (key not in nearest or differs < nearest[key][0]):
            nearest[key] = (differs, candidate)
    numbers = sorted(k for k in nearest if isinstance(k, int))
    if isinstance(mine, int):
        beside = [k for k in numbers if k < mine][-1:] + [k for k in numbers if k > mine][:1]
        return [nearest[k][1] for k in beside]
    return [nearest[k][1] for k in sorted(nearest, key=str)][:2]


def _spreads(pool: Sequence[Candidate], best: Candidate) -> list[float]:
    """How far the degrees of each are from those of the best, less than any other choice counts."""
    mine = (*best.mesh.degrees, best.micro_batch_size)
    known: dict[tuple[int, ...], float] = {}
    found = []
    for candidate in pool:
        mesh = candidate.mesh
        own = mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp, candidate.micro_batch_size
        if own not in known:
            known[own] = sum([x / y if x > y else y / x for x, y in zip(own, mine, strict=True)]) / 1e6
        found.append(known[own])
    return found


def _compare(evaluator: Evaluator, best: Evaluation, other: Candidate, least_s: float) -> str:
    """``least_s``: a first bound of the other one."""
    best_s = best.prediction.step_time_s
    for level in range(1, LEVELS):
        if least_s < best_s:
            least_s = max(least_s, evaluator.bounds_s(level, [other], CLEAR * best_s)[0])
    if best_s <= least_s < float("inf"):
        more = least_s - best_s
        return f"at least {more:.3g} s ({100 * more / best_s:.1f}%) slower ({other}), by its lower bound"
    found = (evaluator.hopeless(other) if least_s == float("inf") else None) or evaluator.evaluate(other)
    if not isinstance(found, Evaluation):
        return f"no plan ({other}); {found.reason}"
    slower = found.prediction.step_time_s - best.prediction.step_time_s
    share = 100 * slower / best.prediction.step_time_s
    word = "slower" if slower >= 0 else "faster"
    return f"{abs(slower):.3g} s ({abs(share):.1f}%) {word} ({other}); {_difference(best.prediction, found.prediction)}"


def _difference(mine: Prediction, theirs: Prediction) -> str:
    """The two parts of the step that differ most."""
    changes = [(getattr(theirs.breakdown, key) - getattr(mine.breakdown, key), name) for name, key in _PARTS]
    largest = sorted(changes, key=lambda change: -abs(change[0]))[:2]
    return ", ".join(f"{name} {change:+.3g} s" for change, name in largest if change)
