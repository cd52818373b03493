"""The problems by which a change of the planner is judged: what it plans, how sure it is, and what that costs.

``python -m tests.benchmarks.problems VERB``, VERB one of:

- ``run``: search a plan for each problem of ``problems.toml``, each in a process of its own by one process, and keep what was
  found: plan, predicted seconds and memory, bound, gap, candidates evaluated, CPU seconds of the search, peak memory;
- ``record``: the same for a revision, as the record that later trees are compared with (``problems-record.json``);
- ``compare``: results beside the record, or this tree beside another revision, asked in turn; ends with 1 where the rule is
  broken: a plan more than 0.5 % slower, a gap more than 0.5 points wider, CPU seconds more than 25 % more by the geometric mean or
  more than 50 % more of one problem;
- ``exhaustive``: evaluate every candidate of the pools that are small enough; ends with 1 where one beats the plan of its problem or
  the bound below which no plan is said to be.

Models are traced once and kept in ``out/problems/traces``, or in ``AUTOPAR_CACHE`` where it is set; tracing is not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.problem_set import (
    HOME,
    ROOT,
    Problem,
    Worker,
    load_problems,
    search_in_turn,
    tree_of,
    write_whole,
)
from tests.benchmarks.problem_tables import comparison

RECORD = HOME / "problems-record.json"
RESULTS = ROOT / "out" / "problems" / "results.json"
BEFORE = "f18d6d6"
"""The revision of the record: the last one before the planner was rebuilt."""


def wanted(options: argparse.Namespace) -> list[Problem]:
    """The problems that a command names, or all."""
    known = load_problems()
    if unknown := set(options.only or ()) - known.keys():
        raise SystemExit(f"Unknown problem {min(unknown)!r}. Choose from: {', '.join(known)}.")
    return [known[name] for name in options.only or known]


def run(options: argparse.Namespace) -> int:
    """Searches of one tree, kept problem by problem in a file."""
    with tree_of(options.rev) as tree, Worker(tree) as worker:
        kept = read(options.out) if options.out.exists() else {}
        head = {"revision": tree.revision, "tree": tree.key(), "limit_s": options.limit}
        problems = kept["problems"] if kept.get("tree") == head["tree"] else {}
        for problem in wanted(options):
            (result,) = search_in_turn([worker], problem, options.limit, options.rounds)
            problems[problem.name] = {"asked": problem.asked(), **result}
            write_whole(options.out, json.dumps({**head, "problems": problems}, indent=1) + "\n")
            print(f"{problem.name}: {in_words(result)}", flush=True)
    return int(any("failed" in problems[problem.name] for problem in wanted(options)))


def in_words(result: dict[str, Any]) -> str:
    """A result on one line."""
    if "failed" in result:
        return f"failed: {result['failed'].splitlines()[-1] if result['failed'] else 'without a word'}"
    choices = ", ".join(
        f"{key} {value}" for key, value in result["plan"].items() if key in ("mesh", "micro_batch", "zero")
    )
    return (
        f"{result['time_s']:.5g} s, gap {100 * result['gap']:.2f} %, {result['evaluated']} of {result['candidates']} candidates, "
        f"{result['cpu_s']:.2f} CPU s, {result['peak_bytes'] / 2**30:.2f} GiB{', at the limit of time' * result['hit_limit']}; {choices}"
    )


def compare(options: argparse.Namespace) -> int:
    """A table, and whether the rule holds."""
    names = [problem.name for problem in wanted(options)]
    if options.against is None:
        before, after = read(RECORD)["problems"], read(options.file)["problems"]
        text, is_kept = comparison(names, before, after)
        print(text)
        return int(not is_kept)
    before, after = {}, {}
    with tree_of(options.against) as old, tree_of(None) as new, Worker(old) as one, Worker(new) as other:
        for problem in wanted(options):
            results = search_in_turn([one, other], problem, options.limit, options.rounds)
            before[problem.name], after[problem.name] = ({"asked": problem.asked(), **own} for own in results)
            print(f"{problem.name}: before: {in_words(results[0])}", flush=True)
            print(f"{problem.name}: after:  {in_words(results[1])}", flush=True)
            if options.out is not None:
                both = {
                    "before": {"revision": old.revision, "problems": before},
                    "after": {"revision": new.revision, "problems": after},
                }
                write_whole(options.out, json.dumps(both, indent=1) + "\n")
    text, is_kept = comparison(names, before, after)
    print(text)
    return int(not is_kept)


def read(path: Path) -> dict[str, Any]:
    """Results that were kept."""
    if not path.exists():
        raise SystemExit(f"There is no file {path}. Write it by the command run or record first.")
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return kept


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--only", nargs="+", metavar="NAME", help="these problems alone")
    timed = argparse.ArgumentParser(add_help=False)
    timed.add_argument(
        "--limit", type=float, default=120.0, metavar="SECONDS", help="time limit of one search (default 120)"
    )
    timed.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="searches of a quick problem, of which CPU seconds are the median (default 3)",
    )
    one = verbs.add_parser(
        "run", parents=[common, timed], help="search a plan for each problem and keep what was found"
    )
    one.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help=f"default {RESULTS.relative_to(ROOT)}")
    one.add_argument("--rev", help="of this revision, in a git worktree that is made for it; default: this tree")
    one.set_defaults(act=run)
    two = verbs.add_parser("record", parents=[common, timed], help=f"write {RECORD.name}")
    two.add_argument("--rev", default=BEFORE, help=f"revision that is recorded (default {BEFORE})")
    two.set_defaults(act=run, out=RECORD)
    three = verbs.add_parser(
        "compare", parents=[common, timed], help="results beside the record, or this tree beside a revision"
    )
    three.add_argument("file", type=Path, nargs="?", default=RESULTS, metavar="FILE", help="results of the command run")
    three.add_argument(
        "--against",
        metavar="REV",
        help="ask this revision and this tree in turn, problem by problem, for fair CPU ratios",
    )
    three.add_argument("--out", type=Path, metavar="FILE", help="with --against: keep both results")
    three.set_defaults(act=compare)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = parsed(words)
    verdict: int = options.act(options)
    return verdict


if __name__ == "__main__":
    sys.exit(main())
