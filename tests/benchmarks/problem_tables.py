"""Results of two trees as a table, and the rule by which one may follow the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAX_SLOWER = 0.005
"""A plan may take so much longer, as a share of its time."""
MAX_GAP_POINTS = 0.5
"""A gap may be so many points of a percent wider."""
MAX_MEAN_CPU_RATIO = 1.25
MAX_CPU_RATIO = 1.5
"""CPU seconds over those before: of all problems by the geometric mean, and of one."""

HEAD = "| problem | plan, s | ratio | gap, % | points | CPU s | ratio | evaluated | memory, GiB | note |\n|---|---|---|---|---|---|---|---|---|---|\n"


def comparison(
    names: Sequence[str], before: Mapping[str, dict[str, Any]], after: Mapping[str, dict[str, Any]]
) -> tuple[str, bool]:
    """The table of the problems that both have, its means and verdict; and whether the rule is kept."""
    lines, faults, pairs = [HEAD], [], []
    for name in names:
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            lines.append(
                f"| {name} | | | | | | | | | not in {'the first' if old is None else 'the second'} results |\n"
            )
            continue
        lines.append(_row(name, old, new))
        faults += [f"{name}: {fault}" for fault in _faults(old, new)]
        if "failed" not in old and "failed" not in new:
            pairs.append((old, new))
    if not pairs:
        return "".join([*lines, "\nNo problem has a plan on both sides.\n"]), False
    means = {key: _mean(pairs, key) for key in ("time_s", "cpu_s", "peak_bytes")}
    if means["cpu_s"] > MAX_MEAN_CPU_RATIO:
        faults.append(f"CPU seconds are {means['cpu_s']:.2f} times those before by the geometric mean")
    lines.append(
        f"\nGeometric means over {len(pairs)} problems, after over before: plans {means['time_s']:.4f}, CPU seconds {means['cpu_s']:.2f}, "
        f"memory {means['peak_bytes']:.2f}.\n\n"
    )
    lines += [f"- {fault}\n" for fault in faults] or ["The rule is kept.\n"]
    return "".join(lines), not faults


def _mean(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], key: str) -> float:
    return math.exp(sum(math.log(new[key] / old[key]) for old, new in pairs) / len(pairs))


def _faults(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """What breaks the rule for one problem."""
    if old["asked"] != new["asked"]:
        yield "the two results are of different questions: record it again"
        return
    if "failed" in old:
        return
    if "failed" in new:
        yield f"there is no plan any more: {new['failed']}"
        return
    if (slower := new["time_s"] / old["time_s"] - 1) > MAX_SLOWER:
        yield f"the plan is {100 * slower:.2f} % slower"
    if (points := 100 * (new["gap"] - old["gap"])) > MAX_GAP_POINTS:
        yield f"the gap is {points:.2f} points wider"
    if (ratio := new["cpu_s"] / old["cpu_s"]) > MAX_CPU_RATIO:
        yield f"the search takes {ratio:.2f} times the CPU seconds"


def _row(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if "failed" in old or "failed" in new:
        sides = [
            f"{side}: {own['failed'].splitlines()[-1]}"
            for side, own in (("before", old), ("after", new))
            if "failed" in own
        ]
        return f"| {name} | | | | | | | | | {'; '.join(sides)} |\n"
    notes = [f"{side} at the limit of time" for side, own in (("before", old), ("after", new)) if own["hit_limit"]]
    notes += [
        f"{side} not the same each time" for side, own in (("before", old), ("after", new)) if not own["is_steady"]
    ]
    if old["plan"] != new["plan"]:
        keys = [key for key in {**old["plan"], **new["plan"]} if old["plan"].get(key) != new["plan"].get(key)]
        notes.append(
            "other plan: "
            + ", ".join(f"{key} {old['plan'].get(key, '-')} → {new['plan'].get(key, '-')}" for key in keys[:3])
        )
    gib = [own["peak_bytes"] / 2**30 for own in (old, new)]
    return (
        f"| {name} | {old['time_s']:.5g}, {new['time_s']:.5g} | {new['time_s'] / old['time_s']:.4f} "
        f"| {100 * old['gap']:.2f}, {100 * new['gap']:.2f} | {100 * (new['gap'] - old['gap']):+.2f} "
        f"| {old['cpu_s']:.2f}, {new['cpu_s']:.2f} | {new['cpu_s'] / old['cpu_s']:.2f} "
        f"| {old['evaluated']}, {new['evaluated']} of {new['candidates']} | {gib[0]:.2f}, {gib[1]:.2f} | {'; '.join(notes)} |\n"
    )
