"""The problems by which a change of the planner is judged: what it plans, how sure it is of it, and what that costs.

python -m tools.benchmarks.problems VERB [--help]

run         Search a plan for each problem of problems.toml, each in a process of its own, by one process. What was found is
            kept in a file: plan, predicted seconds and memory, bound, gap, candidates evaluated, CPU seconds of the search
            alone, peak memory, and whether the search came to its limit of time.
record      The same for a revision, as the record that later trees are compared with (problems-record.json).
compare     Results beside the record; or this tree beside another revision, both searched in turn, problem by problem.
            Ends with 1 where the rule is broken: a plan is more than 0.5 % slower, a gap more than 0.5 points wider, or
            (side by side alone, as the machine's speed changes) CPU seconds are more than 25 % more by the geometric mean
            or more than 50 % more for one problem.
exhaustive  Evaluate every candidate of the pools that are small enough. Ends with 1 where one beats the plan of the search,
            or is faster than the bound below which the search says that there is no plan. What was evaluated is kept, so
            that a run goes on after a stop.
page        Write docs/evidence/problems.md from the record, the latest results and the latest evaluations.

Models are traced once and kept, in AUTOPAR_CACHE where that is set, else in out/problems; tracing is not counted.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

from tools.benchmarks.problem_set import (
    HOME,
    ROOT,
    Problem,
    Worker,
    evaluated,
    load_problems,
    search_in_turn,
    search_once,
    tree_of,
    write_whole,
)
from tools.benchmarks.problem_tables import comparison, exhaustive_table, judged, page, verdict

RECORD = HOME / "problems-record.json"
OUT = ROOT / "out" / "problems"
RESULTS, POOLS = OUT / "results.json", OUT / "exhaustive.json"
PAGE = ROOT / "docs" / "evidence" / "problems.md"
BEFORE = "f18d6d6"
"""The revision of the record: the last one before the planner was rebuilt."""


def run(options: argparse.Namespace) -> int:
    """Searches of one tree, kept problem by problem in a file."""
    asked = wanted(options)
    with tree_of(options.rev) as tree, Worker(tree) as worker:
        head = {"revision": tree.revision, "tree": tree.key(), "limit_s": options.limit}
        known = load_problems(options.problems)
        problems = {name: own for name, own in same_tree(options.out, head).items() if name in known}
        for problem in asked:
            (result,) = search_in_turn([worker], problem, options.limit, options.rounds)
            problems[problem.name] = {"asked": problem.asked(), **result}
            write(options.out, {**head, "problems": problems})
            print(f"{problem.name}: {in_words(result)}", flush=True)
    return int(any("failed" in problems[problem.name] for problem in asked))


def compare(options: argparse.Namespace) -> int:
    """A table, and whether the rule holds."""
    names = [problem.name for problem in wanted(options)]
    if options.against is None:
        before, after = read(options.record)["problems"], read(options.file)["problems"]
        if options.only is None:
            names = [name for name in names if name in after]
    else:
        before, after = side_by_side(options)
    text, faults = comparison(names, before, after, judges_cpu=options.against is not None)
    print(text + verdict(faults))
    return int(bool(faults))


def side_by_side(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results of another revision and of this tree."""
    before, after = dict[str, Any](), dict[str, Any]()
    with tree_of(options.against) as old, tree_of(None) as new, Worker(old) as one, Worker(new) as other:
        for problem in wanted(options):
            results = search_in_turn([one, other], problem, options.limit, options.rounds)
            if options.reprice and "choices" in results[0] and "failed" not in results[1]:
                priced = search_once(other, problem, options.limit, pins=results[0]["choices"])
                results[1]["choices_before_s"] = priced.get("time_s")
            for tree, file, kept, result in (
                (old, OUT / "before.json", before, results[0]),
                (new, options.out, after, results[1]),
            ):
                kept[problem.name] = {"asked": problem.asked(), **result}
                head = {"revision": tree.revision, "tree": tree.key(), "limit_s": options.limit, "beside": old.revision}
                write(file, {**head, "problems": kept})
            for side, result in zip(("before", "after "), results, strict=True):
                print(f"{problem.name}, {side}: {in_words(result)}", file=sys.stderr, flush=True)
    return before, after


def exhaustive(options: argparse.Namespace) -> int:
    """Every candidate of the small pools against plan and bound."""
    with tree_of(options.rev) as tree, Worker(tree) as worker:
        head = {"revision": tree.revision, "tree": tree.key()}
        judgements = same_tree(options.out, head)
        for problem in wanted(options, is_exhaustive=True):
            plan = search_once(worker, problem, options.limit)
            if "failed" in plan:
                raise SystemExit(f"{problem.name}: the search has no plan: {plan['failed']}")
            judgements[problem.name] = judged(plan, evaluated(worker, problem, options.out.parent / "evaluations"))
            write(options.out, {**head, "problems": judgements})
            own = judgements[problem.name]
            print(
                f"{problem.name}: {own['candidates']} candidates, {own['faster']} faster than the plan, {own['below']} below "
                "the bound", file=sys.stderr, flush=True
            )  # fmt: skip
    print(exhaustive_table(judgements))
    return int(any(own["faster"] or own["below"] for own in judgements.values()))


def write_page(options: argparse.Namespace) -> int:
    """The page of all that is known."""
    later = [read(path) if path.exists() else None for path in (options.results, options.pools)]
    write_whole(options.page, page(list(load_problems(options.problems)), read(options.record), *later))
    return 0


# --- files and words


def wanted(options: argparse.Namespace, *, is_exhaustive: bool = False) -> list[Problem]:
    """The problems that a command names, or all."""
    known = load_problems(options.problems)
    if is_exhaustive:
        known = {name: problem for name, problem in known.items() if problem.is_exhaustive}
    if unknown := set(options.only or ()) - known.keys():
        raise SystemExit(f"Unknown problem {min(unknown)!r}. Choose from: {', '.join(known)}.")
    return [known[name] for name in options.only or known]


def same_tree(path: Path, head: dict[str, Any]) -> dict[str, Any]:
    """What a file keeps of problems, if it is of the same tree and limit; else nothing."""
    kept = read(path) if path.exists() else {}
    problems: dict[str, Any] = {}
    if all(kept.get(key) == head.get(key) for key in ("tree", "limit_s")):
        problems = kept["problems"]
    return problems


def read(path: Path) -> dict[str, Any]:
    """A file that another command wrote."""
    if not path.exists():
        raise SystemExit(f"There is no file {path}. One of the commands run, record and exhaustive writes it.")
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return kept


def write(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=1) + "\n")


def in_words(result: dict[str, Any]) -> str:
    """A result on one line."""
    if "failed" in result:
        return f"failed: {result['failed'].strip().splitlines()[-1]}"
    plan = result["plan"]
    return (
        f"{result['time_s']:.5g} s, gap {100 * result['gap']:.2f} %, {result['evaluated']} of {result['candidates']} candidates, "
        f"{result['cpu_s']:.2f} CPU s, {result['peak_bytes'] / 2**30:.2f} GiB{', at the limit of time' * result['hit_limit']}; "
        f"{plan['mesh']}, ZeRO {plan['zero']}, micro-batch {plan['micro_batch']}"
    )


# --- the command line


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.problems",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = argparse.ArgumentParser(add_help=False)
    add = common.add_argument
    add("--only", nargs="+", metavar="NAME", help="these problems alone")
    add("--problems", type=Path, default=HOME / "problems.toml", metavar="FILE", help="default: problems.toml")
    add(
        "--limit",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="limit of one search, in CPU seconds (default 120)",
    )
    add("--rounds", type=int, default=3, help="searches of a quick problem; CPU seconds are their median (default 3)")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, act: Any, text: str, **defaults: Any) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, parents=[common], help=text, description=text)
        made.set_defaults(act=act, **defaults)
        return made

    own = verb("run", run, "search a plan for each problem, and keep what was found")
    own.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help=f"default {RESULTS.relative_to(ROOT)}")
    own.add_argument("--rev", help="of this revision, in a git worktree that is made for it; default: this tree")
    own = verb("record", run, f"write {RECORD.name}, what later trees are compared with", out=RECORD)
    own.add_argument("--rev", default=BEFORE, help=f"revision that is recorded (default {BEFORE})")
    own = verb("compare", compare, "results beside the record, or this tree beside a revision")
    own.add_argument("file", type=Path, nargs="?", default=RESULTS, metavar="FILE", help="what the command run kept")
    own.add_argument("--record", type=Path, default=RECORD, metavar="FILE", help=f"default {RECORD.name}")
    own.add_argument("--against", metavar="REV", help="search this revision and this tree in turn, for fair CPU ratios")
    own.add_argument(
        "--reprice", action="store_true",
        help="with --against, where the cost model changed: hold plans against what the other revision's choices (mesh, "
        "micro-batch, ZeRO, schedule) take by this tree's cost model",
    )  # fmt: skip
    own.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="with --against: where results are kept")
    own = verb("exhaustive", exhaustive, "evaluate every candidate of the small pools against plan and bound")
    own.add_argument("--out", type=Path, default=POOLS, metavar="FILE", help=f"default {POOLS.relative_to(ROOT)}")
    own.add_argument("--rev", help="of this revision; default: this tree")
    own = verb("page", write_page, f"write {PAGE.relative_to(ROOT)}")
    for name, path in (("record", RECORD), ("results", RESULTS), ("pools", POOLS), ("page", PAGE)):
        own.add_argument(f"--{name}", type=Path, default=path, metavar="FILE", help=f"default {path.relative_to(ROOT)}")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = parsed(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an interrupt: worktrees are removed
    status: int = options.act(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
