"""Random (model, plan) pairs, each executed on all its ranks and compared with one device: ``python -m tools.campaigns.fuzz``.

Hypothesis draws the pairs; a pair that comes out wrong is shrunk, written to ``--out`` as JSON, and the campaign
goes on with other numbers. What stands in ``tests/campaigns/found`` is run again by the tests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from autopar.errors import AutoparError, RuleError, TraceError
from tools.campaigns.catalogue import UnfitError
from tools.campaigns.pairs import Pair, check_pair, draw_pair, features_of, strategies_of
from tools.campaigns.saved import write

CHUNK = 100
"""Pairs drawn from one seed: what is drawn from seed n does not depend on how many processes there are."""
CHECKED_ONE_IN = 8
"""Pairs whose program is type checked as well."""


class WrongError(AssertionError):
    """A pair that does not compute what one device does; ``kind`` tells unlike failures apart."""


@dataclass
class Tally:
    """What a campaign did; ``refused`` counts drawn models that have no such plan, by the problem."""

    pairs: int = 0
    wrong: int = 0
    unfit: int = 0
    seen: set[str] = field(default_factory=set)
    strategies: set[tuple[str, str]] = field(default_factory=set)
    features: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        self.pairs += other.pairs
        self.wrong += other.wrong
        self.unfit += other.unfit
        self.seen |= other.seen
        self.strategies |= other.strategies
        self.features += other.features
        self.refused += other.refused

    def to_dict(self) -> dict[str, Any]:
        whole = {"pairs": self.pairs, "wrong": self.wrong, "unfit": self.unfit}
        sets = {"seen": sorted(self.seen), "strategies": sorted(map(list, self.strategies))}
        return whole | sets | {"features": dict(self.features), "refused": dict(self.refused)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Tally:
        return cls(
            pairs=data["pairs"],
            wrong=data["wrong"],
            unfit=data["unfit"],
            seen=set(data["seen"]),
            strategies={(target, name) for target, name in data["strategies"]},
            features=Counter(data["features"]),
            refused=Counter(data["refused"]),
        )


@st.composite
def pairs(draw: st.DrawFn) -> Pair | Exception:
    """A pair, or why there is none."""
    try:
        return draw_pair(lambda n: draw(st.integers(0, n - 1)))
    except (UnfitError, RuleError, TraceError) as error:
        return error


def problem_of(pair: Pair, *, checked: bool) -> str:
    """What is wrong with a pair: a difference, or whatever it raises."""
    try:
        return check_pair(pair, checked=checked)
    except Exception as error:  # noqa: BLE001  nothing that a pair raises may end a campaign
        return f"{type(error).__name__}: {error}"


def run_chunk(count: int, number: int, out: Path | None, *, shrink: bool = True) -> Tally:
    """The different ones of about ``count`` pairs drawn from the seed ``number``; a wrong one ends the chunk."""
    tally = Tally()
    worst: list[tuple[Pair, str]] = []

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
    )
    @given(pairs())
    def one(pair: Pair | Exception) -> None:
        if isinstance(pair, Exception):
            if not worst:
                tally.unfit += isinstance(pair, UnfitError)
                if isinstance(pair, AutoparError):
                    tally.refused[pair.problem] += 1
            return
        text = hashlib.sha256(write(pair).encode()).hexdigest()[:16]
        if text in tally.seen and not worst:
            return
        problem = problem_of(pair, checked=int(text, 16) % CHECKED_ONE_IN == 0)
        if not worst:
            tally.pairs += 1
            tally.seen.add(text)
            tally.strategies |= strategies_of(pair)
            tally.features.update(features_of(pair))
        if problem:
            worst[:] = [(pair, problem)]
            raise WrongError(problem)

    try:
        one()
    except (WrongError, Flaky) as error:
        pair, problem = worst[0]
        if isinstance(error, Flaky):
            problem = f"once, and not when run again (the machine may have been busy): {problem}"
        tally.wrong += 1
        print(f"wrong (seed {number}): {problem[:300]}", file=sys.stderr, flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"seed{number}.json").write_text(write(pair) + "\n")
    return tally


def _chunk(job: tuple[int, int, str]) -> Tally:
    count, number, out = job
    return run_chunk(count, number, Path(out))


def campaign(count: int, number: int, out: Path, workers: int) -> Tally:
    """At least ``count`` different pairs: chunks 0, 1, 2 ... until there are enough, whoever runs them.

    Chunks that are done are kept in ``out``; a campaign that was stopped goes on there, unless the code is another.
    """
    total, start, progress = Tally(), time.monotonic(), _Progress(out / f"progress-{number}.json")
    if progress.done:
        print(f"{len(progress.done)} chunks are done already: {progress.path}", file=sys.stderr, flush=True)
    with multiprocessing.get_context("spawn").Pool(workers, initializer=_quiet) as pool:
        running: dict[int, Any] = {}
        ahead = chunk = 0
        while len(total.seen) < count:
            for at in range(ahead, chunk + 2 * workers):
                if at not in progress.done:
                    running[at] = pool.apply_async(_chunk, ((CHUNK, number * 1_000_000 + at, str(out)),))
            ahead = chunk + 2 * workers
            if chunk not in progress.done:
                progress.add(chunk, running.pop(chunk).get())
            total.add(progress.done[chunk])
            chunk += 1
            elapsed = time.monotonic() - start
            print(f"{len(total.seen)} pairs, {total.wrong} wrong, {elapsed:.0f} s", file=sys.stderr, flush=True)
        pool.terminate()
    return total


class _Progress:
    """Chunks that are done, in a file that is replaced whole."""

    def __init__(self, path: Path) -> None:
        self.path, self.code, self.done = path, _code(), dict[int, Tally]()
        if path.is_file():
            kept = json.loads(path.read_text())
            if kept["code"] == self.code:
                self.done = {int(chunk): Tally.from_dict(tally) for chunk, tally in kept["chunks"].items()}

    def add(self, chunk: int, tally: Tally) -> None:
        self.done[chunk] = tally
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".tmp")
        chunks = {str(at): done.to_dict() for at, done in self.done.items()}
        draft.write_text(json.dumps({"code": self.code, "chunks": chunks}))
        draft.replace(self.path)


def _code() -> str:
    """A digest of everything that a pair depends on here."""
    root = Path(__file__).parents[2]
    files = sorted(path for folder in ("autopar", "tests", "tools") for path in (root / folder).rglob("*.py"))
    whole = hashlib.sha256(torch.__version__.encode())
    for path in files:
        whole.update(path.read_bytes())
    return whole.hexdigest()[:16]


def _quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.campaigns.fuzz", description=__doc__)
    parser.add_argument("--pairs", type=int, default=10_000, help="different pairs to execute")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="processes; the result does not depend on them")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"), help="folder for progress and what is wrong")
    options = parser.parse_args(arguments)
    found = campaign(options.pairs, options.seed, options.out, options.workers)
    targets = {target for target, _ in found.strategies}
    print(f"pairs run {found.pairs} ({len(found.seen)} distinct), wrong {found.wrong}")
    print(f"{len(found.strategies)} strategies of {len(targets)} operators")
    print("pairs with: " + ", ".join(f"{name} {count}" for name, count in sorted(found.features.items())))
    print(f"not run: {found.unfit} drawn without a model or a plan, {found.refused.total()} refused:")
    for problem, count in found.refused.most_common():
        print(f"  {count} {problem}")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
