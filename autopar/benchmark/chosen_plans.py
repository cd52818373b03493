"""Which plans are run: all of a space, or a sample of them, and the one that the search picks."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError
from autopar.plan.file import plan_to_dict
from autopar.plan.plan import Plan
from autopar.plan.text import micro_batch_text
from autopar.planner.planner import Planner, Task
from autopar.planner.search import Limits

Advance = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One plan to run; ``key`` is equal for plans that run the same program, ``name`` is for people."""

    key: str
    name: str
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Plans of a space.

    Attributes:
        entries: to run, the picked one among them, in a shuffled order.
        picked: key of the plan that the search picks.
        num_candidates: in the space.
        misfits: names of those sampled that do not fit or are too slow to run, and why.
    """

    entries: tuple[Entry, ...]
    picked: str
    num_candidates: int
    misfits: tuple[tuple[str, str], ...]


def choose(
    task: Task, *, sample: int | None, seed: int, slowest: float | None = None, advance: Advance | None = None
) -> Choice:
    """The best plan of each candidate of the task's space, or of ``sample`` candidates drawn by ``seed``.

    Args:
        slowest: plans that are predicted to take more than so many times the picked one's step are not run.

    Raises:
        InfeasibleError: no plan fits.
    """
    planner = Planner(task)
    pool = list(planner.pool)
    picked = entry_of(planner.search(limits=Limits()))
    drawn = pool if sample is None or sample >= len(pool) else random.Random(seed).sample(pool, sample)
    found, misfits = {picked.key: picked}, []
    for i, candidate in enumerate(drawn):
        if advance is not None:
            advance("planning", i, len(drawn))
        planner.pool = [candidate]  # a search among one is the best plan of this candidate
        try:
            made = entry_of(planner.search(limits=Limits()))
        except InfeasibleError as error:
            misfits.append((str(candidate), str(error)))
            continue
        ratio = made.plan.predicted.step_time_s / picked.plan.predicted.step_time_s
        if slowest is not None and ratio > slowest:
            misfits.append((made.name, f"predicted {ratio:.3g} times as slow as the picked one: not run"))
            continue
        found.setdefault(made.key, made)
    entries = list(found.values())
    random.Random(seed).shuffle(entries)
    return Choice(entries=tuple(entries), picked=picked.key, num_candidates=len(pool), misfits=tuple(misfits))


def variants(tasks: Sequence[Task], pin_sets: Sequence[Sequence[str]]) -> Choice:
    """On one device: a plan for each task (a precision each) and set of pins (micro-batch, recompute).

    The picked one is the fastest by prediction: precisions are not one search.

    Raises:
        InfeasibleError: no plan fits.
    """
    from autopar.planner.space.pins import Pins

    found: dict[str, Entry] = {}
    misfits = []
    for task in tasks:
        for pins in pin_sets:
            try:
                made = entry_of(Planner(replace(task, pins=Pins.parse(pins))).estimate())
            except InfeasibleError as error:
                misfits.append((f"{task.precision.name} {' '.join(pins)}", str(error)))
                continue
            found.setdefault(made.key, made)
    if not found:
        raise InfeasibleError(
            "No plan fits this device",
            got="; ".join(reason for _, reason in misfits[:2]) or None,
            fix="Take a smaller model or batch, or other pins",
        )
    best = min(found.values(), key=lambda entry: entry.plan.predicted.step_time_s)
    return Choice(
        entries=tuple(found.values()), picked=best.key, num_candidates=len(found) + len(misfits), misfits=tuple(misfits)
    )


def entry_of(plan: Plan) -> Entry:
    """Names a plan by what it does; what was predicted, searched and noted does not count."""
    data = plan_to_dict(plan)
    for key in ("predicted", "search", "notes", "pins", "cluster"):
        data.pop(key, None)
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]
    parts = [str(plan.mesh), f"zero={plan.zero_stage}", f"micro_batch={micro_batch_text(plan)}"]
    if plan.mesh.pp > 1:
        parts.append(plan.schedule + (f" v={plan.virtual_stages}" if plan.virtual_stages > 1 else ""))
    if plan.recompute != "none":
        parts.append(f"recompute={plan.recompute}")
    if plan.precision.name != "fp32":
        parts.append(plan.precision.name)
    return Entry(key=digest, name=" ".join(parts), plan=plan)
