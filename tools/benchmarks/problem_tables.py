"""Results of two trees as a table, the rule by which one may follow the other, and the page of both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Results = Mapping[str, Mapping[str, Any]]
"""What was recorded of each problem, by its name."""

MAX_SLOWER = 0.005
"""A plan may take so much longer, as a share of its time."""
MAX_GAP_POINTS = 0.5
"""A gap may be so many points of a percent wider."""
MAX_MEAN_CPU_RATIO = 1.25
MAX_CPU_RATIO = 1.5
"""CPU seconds over those before: of all problems by the geometric mean, and of one."""
ROUNDING = 1e-9
"""Of a step time, up to which two are equal."""

GIB = 2**30
COLUMNS = ("problem", "plan, s", "ratio", "gap, %", "points", "CPU s", "ratio", "evaluated", "memory, GiB", "note")


def comparison(names: Sequence[str], before: Results, after: Results, *, judges_cpu: bool) -> tuple[str, list[str]]:
    """The table of the problems that both have with its means; and what breaks the rule.

    Args:
        judges_cpu: False where the two were not searched side by side: CPU seconds are then shown alone.
    """
    lines, faults, pairs = [row(COLUMNS), row(["---"] * len(COLUMNS))], list[str](), []
    for name in names:
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            lines.append(row([name, *[""] * 8, f"not among the results {'before' if old is None else 'after'}"]))
            continue
        lines.append(_compared(name, old, new))
        faults += [f"{name}: {fault}" for fault in _faults(old, new, judges_cpu=judges_cpu)]
        if "failed" not in old and "failed" not in new:
            pairs.append((old, new))
    if not pairs:
        return "".join(lines), [*faults, "no problem has a plan on both sides"]
    plans, cpu, memory = (_mean(pairs, key) for key in ("time_s", "cpu_s", "peak_bytes"))
    if judges_cpu and cpu > MAX_MEAN_CPU_RATIO:
        faults.append(f"CPU seconds are {cpu:.2f} times those before by the geometric mean")
    lines.append(
        f"\nGeometric means over {len(pairs)} problems, after over before: plans {plans:.4f}, CPU seconds {cpu:.2f}, "
        f"memory {memory:.2f}. Gaps are {_points(pairs):+.2f} points on average.\n"
    )
    return "".join(lines), faults


def verdict(faults: Sequence[str]) -> str:
    """In words."""
    return "\n" + ("".join(f"- {fault}\n" for fault in faults) or "The rule is kept.\n")


def row(cells: Sequence[object]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |\n"


def _mean(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], key: str) -> float:
    """The geometric mean of after over before."""
    return math.exp(sum(math.log(new[key] / old[key]) for old, new in pairs) / len(pairs))


def _points(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> float:
    return sum(100 * (new["gap"] - old["gap"]) for old, new in pairs) / len(pairs)


def _priced_s(old: Mapping[str, Any], new: Mapping[str, Any]) -> float:
    """What a plan is held against: that before, or what its choices take by the new tree's own cost model, where that was asked."""
    return float(new.get("choices_before_s") or old["time_s"])


def _faults(old: Mapping[str, Any], new: Mapping[str, Any], *, judges_cpu: bool) -> Iterator[str]:
    """What breaks the rule for one problem."""
    if old["asked"] != new["asked"]:
        yield "the two results are of different questions; record it again"
        return
    if "failed" in old:
        return
    if "failed" in new:
        yield f"there is no plan any more: {new['failed'].strip().splitlines()[-1]}"
        return
    if (slower := new["time_s"] / _priced_s(old, new) - 1) > MAX_SLOWER:
        yield f"the plan is {100 * slower:.2f} % slower"
    if (points := 100 * (new["gap"] - old["gap"])) > MAX_GAP_POINTS:
        yield f"the gap is {points:.2f} points wider"
    if judges_cpu and (ratio := new["cpu_s"] / old["cpu_s"]) > MAX_CPU_RATIO:
        yield f"the search takes {ratio:.2f} times the CPU seconds"


def _compared(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    sides = (("before", old), ("after", new))
    if "failed" in old or "failed" in new:
        failed = [f"{side}: {own['failed'].strip().splitlines()[-1]}" for side, own in sides if "failed" in own]
        return row([name, *[""] * 8, "; ".join(failed)])
    notes = [f"{side} at the limit of time" for side, own in sides if own["hit_limit"]]
    notes += [f"{side} not the same each time" for side, own in sides if not own["is_steady"]]
    if (priced_s := _priced_s(old, new)) != old["time_s"]:
        notes.append(f"the choices before take {priced_s:.5g} s here")
    if old["plan"] != new["plan"]:
        keys = [key for key in {**old["plan"], **new["plan"]} if old["plan"].get(key) != new["plan"].get(key)]
        notes.append(
            "other plan: "
            + ", ".join(f"{key} {old['plan'].get(key, '-')} → {new['plan'].get(key, '-')}" for key in keys[:3])
        )
    return row(
        [
            name,
            f"{old['time_s']:.5g}, {new['time_s']:.5g}",
            f"{new['time_s'] / old['time_s']:.4f}",
            f"{100 * old['gap']:.2f}, {100 * new['gap']:.2f}",
            f"{100 * (new['gap'] - old['gap']):+.2f}",
            f"{old['cpu_s']:.2f}, {new['cpu_s']:.2f}",
            f"{new['cpu_s'] / old['cpu_s']:.2f}",
            f"{old['evaluated']}, {new['evaluated']} of {new['candidates']}",
            f"{old['peak_bytes'] / GIB:.2f}, {new['peak_bytes'] / GIB:.2f}",
            "; ".join(notes),
        ]
    )


# --- pools that were evaluated candidate by candidate


def judged(plan: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the candidates of a pool say of a search's record.

    Returns:
        candidates, fitting: how many there are, and how many have a plan; faster: those whose plan beats that of the search; below: those
        whose plan is faster than the bound; best_s, best: the fastest of all.
    """
    fitting = [own for own in evaluations if "time_s" in own]
    best = min(fitting, key=lambda own: own["time_s"])
    return {
        "candidates": len(evaluations),
        "fitting": len(fitting),
        "faster": sum(own["time_s"] < plan["time_s"] * (1 - ROUNDING) for own in fitting),
        "below": sum(own["time_s"] < plan["bound_s"] * (1 - ROUNDING) for own in fitting),
        "best_s": best["time_s"],
        "best": best["candidate"],
        "time_s": plan["time_s"],
        "bound_s": plan["bound_s"],
    }


def exhaustive_table(judgements: Results) -> str:
    """One line a problem."""
    columns = (
        "problem",
        "candidates",
        "with a plan",
        "plan, s",
        "bound, s",
        "best of all, s",
        "faster than the plan",
        "below the bound",
        "best of all",
    )
    lines = [row(columns), row(["---"] * len(columns))]
    for name, own in judgements.items():
        best = [f"{own['best_s']:.5g}", own["faster"], own["below"], own["best"] if own["faster"] else "the plan"]
        lines.append(
            row([name, own["candidates"], own["fitting"], f"{own['time_s']:.5g}", f"{own['bound_s']:.5g}", *best])
        )
    return "".join(lines)


# --- the page

PAGE = """# The problems

Written by `python -m tools.benchmarks.problems page`; do not edit. {count} searches by which a change of the planner is judged
(`tools/benchmarks/problems.toml`). The record is of revision {revision}, before the planner was rebuilt. Each search ran in a process of its
own, without tracing, with a limit of {limit:g} CPU seconds; CPU seconds are of one process, memory is the largest that it had, torch and the traced
model counted in. Times of steps are predictions.

## The record

"""


def page(
    names: Sequence[str], record: Mapping[str, Any], results: Mapping[str, Any] | None, pools: Mapping[str, Any] | None
) -> str:
    """The page of the record, of the latest results beside it, and of the pools that were evaluated whole."""
    problems = record["problems"]
    parts = [PAGE.format(count=len(names), revision=record["revision"], limit=record["limit_s"])]
    columns = ("problem", "plan, s", "memory, GiB", "gap, %", "evaluated", "CPU s", "peak of the search, GiB", "plan")
    parts += [row(columns), row(["---"] * len(columns))]
    parts += [_recorded(name, problems[name]) for name in names if name in problems]
    if results is not None:
        text, faults = comparison(names, problems, results["problems"], judges_cpu=results.get("beside") is not None)
        parts += [f"\n## Revision {results['revision']} beside it\n\n", text, verdict(faults)]
    if pools is not None:
        parts.append(
            f"\n## Pools evaluated whole\n\nEvery candidate of these problems, at revision {pools['revision']}, evaluated alone and without a "
            "bound on its time. None may be faster than the plan of the search, none below its bound.\n\n"
        )
        parts.append(exhaustive_table(pools["problems"]))
    return "".join(parts)


def _recorded(name: str, own: Mapping[str, Any]) -> str:
    if "failed" in own:
        return row([name, *[""] * 6, f"failed: {own['failed'].strip().splitlines()[-1]}"])
    plan = own["plan"]
    words = [plan["mesh"], f"ZeRO {plan['zero']}", f"micro-batch {plan['micro_batch']}"]
    words += [f"{plan['schedule']} v={plan.get('virtual_stages', 1)}"] if "schedule" in plan else []
    words += ["at the limit of time"] if own["hit_limit"] else []
    return row(
        [
            name,
            f"{own['time_s']:.5g}",
            f"{own['memory_bytes'] / GIB:.1f}",
            f"{100 * own['gap']:.2f}",
            f"{own['evaluated']} of {own['candidates']}",
            f"{own['cpu_s']:.2f}",
            f"{own['peak_bytes'] / GIB:.2f}",
            ", ".join(words),
        ]
    )
