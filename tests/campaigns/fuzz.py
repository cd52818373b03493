"""Random (model, plan) pairs, each executed on all its ranks and compared with one device: ``python -m tests.campaigns.fuzz``.

Hypothesis draws the pairs; a pair that comes out wrong is shrunk, written to ``--out`` as JSON, and the campaign
goes on with other numbers. What stands in ``tests/campaigns/found`` is run again by the tests.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from autopar.errors import RuleError
from tests.campaigns.catalogue import UnfitError
from tests.campaigns.pairs import Pair, check_pair, draw_pair, strategies_of
from tests.campaigns.saved import write

CHUNK = 200
CHECKED_ONE_IN = 8
"""Pairs whose program is type checked as well."""


class WrongError(AssertionError):
    """A pair that does not compute what one device does; ``kind`` tells unlike failures apart."""


@dataclass
class Tally:
    """What a campaign did."""

    pairs: int = 0
    wrong: int = 0
    unfit: int = 0
    refused: int = 0
    seen: set[str] = field(default_factory=set)
    strategies: set[tuple[str, str]] = field(default_factory=set)
    messages: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        self.pairs += other.pairs
        self.wrong += other.wrong
        self.unfit += other.unfit
        self.refused += other.refused
        self.seen |= other.seen
        self.strategies |= other.strategies
        self.messages += other.messages


@st.composite
def pairs(draw: st.DrawFn) -> Pair | Exception:
    """A pair, or why there is none."""
    try:
        return draw_pair(lambda n: draw(st.integers(0, n - 1)))
    except (UnfitError, RuleError) as error:
        return error


def problem_of(pair: Pair, *, checked: bool) -> str:
    """What is wrong with a pair: a difference, or whatever it raises."""
    try:
        return check_pair(pair, checked=checked)
    except Exception as error:  # noqa: BLE001  nothing that a pair raises may end a campaign
        return f"{type(error).__name__}: {error}"


def run_chunk(count: int, number: int, out: Path | None, *, shrink: bool = True) -> Tally:
    """About ``count`` pairs drawn from the seed ``number``; after a wrong one the rest of the chunk is left out."""
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
    )
    @given(pairs())
    def one(pair: Pair | Exception) -> None:
        if isinstance(pair, Exception):
            if not worst:
                tally.unfit += isinstance(pair, UnfitError)
                tally.refused += isinstance(pair, RuleError)
                if isinstance(pair, RuleError):
                    tally.messages[pair.law] += 1
            return
        text = hashlib.sha256(write(pair).encode()).hexdigest()[:16]
        problem = problem_of(pair, checked=int(text, 16) % CHECKED_ONE_IN == 0)
        if not worst:
            tally.pairs += 1
            tally.seen.add(text)
            tally.strategies |= strategies_of(pair)
        if problem:
            worst[:] = [(pair, problem)]
            raise WrongError(problem)

    try:
        one()
    except WrongError:
        pair, problem = worst[0]
        tally.wrong += 1
        print(f"wrong (seed {number}): {problem[:300]}", file=sys.stderr, flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"seed{number}.json").write_text(write(pair) + "\n")
    return tally


def _chunk(job: tuple[int, int, str]) -> Tally:
    count, number, out = job
    return run_chunk(count, number, Path(out))


def campaign(count: int, number: int, out: Path, processes: int) -> Tally:
    """At least ``count`` pairs."""
    total, chunk, start = Tally(), 0, time.monotonic()
    with multiprocessing.get_context("spawn").Pool(processes, initializer=_quiet) as pool:
        while total.pairs < count:
            todo = min(-(-(count - total.pairs) // CHUNK), 10 * processes)
            jobs = [(CHUNK, number * 1_000_000 + chunk + i, str(out)) for i in range(todo)]
            chunk += todo
            for tally in pool.imap_unordered(_chunk, jobs):
                total.add(tally)
                elapsed = time.monotonic() - start
                print(f"{total.pairs} pairs, {total.wrong} wrong, {elapsed:.0f} s", file=sys.stderr, flush=True)
    return total


def _quiet() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.fuzz", description=__doc__)
    parser.add_argument("--pairs", type=int, default=10_000, help="pairs to execute")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"), help="folder for pairs that come out wrong")
    given_arguments = parser.parse_args(arguments)
    found = campaign(given_arguments.pairs, given_arguments.seed, given_arguments.out, given_arguments.processes)
    targets = {target for target, _ in found.strategies}
    print(f"pairs run {found.pairs} ({len(found.seen)} distinct), wrong {found.wrong}")
    print(
        f"not run: {found.unfit} drawn without a model or a plan, {found.refused} refused by a law: {dict(found.messages)}"
    )
    print(f"{len(found.strategies)} strategies of {len(targets)} operators")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
