"""What repeated runs say of the order that true times reach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from autopar.validate.runs import Run
from tests.support.published import NEEDS_PUBLISHED, OWN, PUBLISHED, read_runs
from tools.evidence.noise import bound, bounds_table


def _made(spread: float, plans: int = 24, step: float = 0.03, seed: int = 1) -> tuple[list[Run], list[float]]:
    """Plans whose true times are ``step`` apart, each measured twice, and these true times."""
    base, generator = read_runs(OWN)[0], np.random.default_rng(seed)
    runs, truth = [], []
    for i in range(plans):
        plan = replace(base, tp=2**i, virtual_stages=1 + i, name=f"plan {i}")
        for _ in range(2):
            truth.append(step * i)
            runs.append(
                replace(plan, step_time_s=math.exp(step * i + spread * generator.standard_normal()), line=len(truth))
            )
    return runs, truth


def _in_order(runs: Sequence[Run], truth: Sequence[float]) -> float:
    times = [math.log(run.step_time_s or 1.0) for run in runs]
    told = [(i, j) for i, j in combinations(range(len(runs)), 2) if abs(times[i] - times[j]) > math.log(1.02)]
    return sum((times[i] - times[j]) * (truth[i] - truth[j]) > 0 for i, j in told) / len(told)


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3])
def test_the_bound_is_what_the_true_times_that_made_the_runs_reach(spread: float) -> None:
    made = [_made(spread, seed=seed) for seed in range(6)]
    found = [bound(runs, draws=40) for runs, _ in made]
    real = [b for b in found if b is not None]
    assert [b.repeats for b in real] == [24] * len(made)
    assert np.mean([b.spread for b in real]) == pytest.approx(spread, rel=0.15)
    reached = np.mean([_in_order(runs, truth) for runs, truth in made])
    assert np.mean([b.ordered[0] for b in real]) == pytest.approx(reached, abs=0.03)
    assert all(b.ordered[1] < b.ordered[0] < b.ordered[2] for b in real)


def test_runs_without_repeats_that_differ_say_nothing() -> None:
    runs, truth = _made(0.02)
    assert bound([replace(run, step_time_s=math.exp(t)) for run, t in zip(runs, truth, strict=True)]) is None
    assert bound(runs[:6]) is None


def test_equal_times_releases_and_the_worst_are_what_they_are_said_to_be() -> None:
    runs, _ = _made(0.02)
    printed_twice = [replace(run, line=run.line + 100) for run in runs]
    assert bound([*runs, *printed_twice], draws=2).repeats == bound(runs, draws=2).repeats  # type: ignore[union-attr]
    releases = [replace(run, source=f"runs ({'ab'[i % 2]}); address") for i, run in enumerate(runs)]
    assert bound(releases, draws=2) is not None
    assert bound(releases, releases=True, draws=2) is None
    far = [replace(runs[0], step_time_s=2.0 * (runs[0].step_time_s or 0.0)), *runs[1:]]
    wide, narrow = bound(far, draws=2), bound(far, without_worst=True, draws=2)
    assert wide is not None and narrow is not None
    assert narrow.spread < 0.5 * wide.spread
    assert narrow.repeats == wide.repeats - 1


def test_the_table_names_sources_with_repeats_alone() -> None:
    runs, _ = _made(0.02, plans=6)
    other = [replace(run, source="once; address", name=str(i), tp=2**i) for i, run in enumerate(runs)]
    text = bounds_table([*runs, *other])
    assert "once" not in text
    assert "repeats of a configuration" in text
    assert bounds_table(other) == ""


@NEEDS_PUBLISHED
def test_noise_explains_pairs_of_bigscience_but_not_its_rank_correlation() -> None:
    runs = [run for run in read_runs(PUBLISHED) if run.source.startswith("BigScience")]
    found = bound(runs, draws=200)
    assert found is not None
    assert found.pairs == 379
    assert found.ordered[2] * found.pairs < 342
    assert found.rho[1] > 0.92
