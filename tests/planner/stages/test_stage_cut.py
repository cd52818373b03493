from collections.abc import Sequence
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.plan.plan import Recompute
from autopar.planner.stages.recompute import BlockOption, CutBlock, lower_hull, undominated
from autopar.planner.stages.stage_cut import (
    TAIL_STEP,
    Cut,
    CutBlocks,
    Mask,
    Tails,
    cut,
    stage_masks,
    stops_of_least_time,
)


def option(mode: Recompute, time_s: float, held_bytes: float, transient_bytes: float = 0.0) -> BlockOption:
    return BlockOption(mode=mode, time_s=time_s, held_bytes=held_bytes, transient_bytes=transient_bytes)


def block(
    key: int, rng: np.random.Generator, *, has_two: bool = False, own: np.random.Generator | None = None
) -> CutBlock:
    """``own``: for the times, which differ from device to device."""
    held, extra, static = (float(n) for n in rng.integers([2, 0, 0], [9, 3, 5]))
    least, size, has_some = (float(n) for n in rng.integers([1, 0, 0], [held + 1, 9, 3]))
    time_s, more_s = (float(n) for n in (own or rng).integers([1, 0], [9, 4]))
    some = (option("selective", time_s + more_s / 4, least, size),) if has_some and not has_two else ()
    return CutBlock(
        key=key,
        options=(option("none", time_s, held, extra), *some, option("full", time_s * 4 / 3, 1.0, extra + held)),
        static_bytes=static,
    )


def found(
    ranks: Sequence[Sequence[CutBlock]], stages: int, in_flight: Sequence[int], limits: Sequence[float], m: int,
    *, allowed: Sequence[Mask] | None = None,
) -> Cut | None:  # fmt: skip
    masks = stage_masks(len(ranks[0]), stages, allowed, {})
    own = [CutBlocks(blocks) for blocks in ranks]
    return cut(own, in_flight=in_flight, limit_bytes=limits, num_micro_batches=m, allowed=masks)


def stage_times(blocks: Sequence[CutBlock], in_flight: int, limit: float) -> list[float]:
    times = []
    for choice in product(*(b.options for b in blocks)):
        held = in_flight * sum(o.held_bytes for o in choice) + max(o.transient_bytes for o in choice)
        if held + sum(b.static_bytes for b in blocks) <= limit:
            times.append(sum(o.time_s for o in choice))
    return times


def brute_force(
    ranks: Sequence[Sequence[CutBlock]], stages: int, in_flight: Sequence[int], limits: Sequence[float], m: int
) -> float:
    best, n = np.inf, len(ranks[0])
    for inner in combinations(range(1, n), stages - 1):
        edges = zip((0, *inner), (*inner, n), strict=True)
        least = [
            min(stage_times(ranks[s % len(ranks)][i:j], in_flight[s], limits[s]), default=np.inf)
            for s, (i, j) in enumerate(edges)
        ]
        if np.isfinite(least).all():
            best = min(best, sum(least) + (m - 1) * max(least))
    return float(best)


@settings(max_examples=150, deadline=None)
@given(
    keys=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    kinds=st.lists(st.integers(0, 1), min_size=1, max_size=4),
    m=st.integers(1, 8),
    limit=st.integers(5, 60),
    factor=st.sampled_from([0.5, 1.0, 2.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_cut_fits_and_is_the_best_of_all_up_to_a_step_of_recompute_a_stage(
    keys: list[int], kinds: list[int], m: int, limit: int, factor: float, seed: int
) -> None:
    """Several kinds of blocks and of devices; what is left between is the last step of a knapsack."""
    ranks = [
        [block(k, np.random.default_rng([seed, k]), own=np.random.default_rng([seed, k, kind])) for k in keys]
        for kind in kinds
    ]
    stages, limits = len(kinds), [limit * (factor if kind else 1.0) for kind in kinds]
    in_flight = [min(m, stages - s) for s in range(stages)]
    best = brute_force(ranks, stages, in_flight, limits, m) if stages <= len(keys) else np.inf
    own = found(ranks, stages, in_flight, limits, m)
    assert (own is None) == np.isinf(best)
    if own is None:
        return
    options = [b.options for blocks in ranks for b in blocks]
    most_s = max(abs(a.time_s - b.time_s) for own in options for a, b in product(own, own))
    assert best * (1 - 1e-9) <= own.time_s <= best + (stages + m - 1) * most_s
    free = found(ranks, stages, in_flight, [1e9] * stages, m)  # nothing binds: exactly
    assert free.time_s == pytest.approx(brute_force(ranks, stages, in_flight, [1e9] * stages, m))
    times = []
    for s, (start, stop) in enumerate(zip((0, *own.stops), own.stops, strict=False)):
        mine = ranks[s][start:stop]
        chosen = [
            next(o for o in b.options if o.mode == mode) for b, mode in zip(mine, own.modes[start:stop], strict=True)
        ]
        held = in_flight[s] * sum(o.held_bytes for o in chosen) + max(o.transient_bytes for o in chosen)
        assert held + sum(b.static_bytes for b in mine) <= limits[s] + 1e-6
        times.append(sum(o.time_s for o in chosen))
    assert sum(times) + (m - 1) * max(times) == pytest.approx(own.time_s)


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(1, 7), stages=st.integers(1, 3), m=st.integers(1, 8), limit=st.integers(5, 60),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_of_equal_blocks_it_is_the_best_of_all(count: int, stages: int, m: int, limit: int, seed: int) -> None:
    blocks = [block(0, np.random.default_rng(seed), has_two=True)] * count
    in_flight = [min(m, stages - s) for s in range(stages)]
    best = brute_force([blocks], stages, in_flight, [limit] * stages, m) if stages <= count else np.inf
    own = found([blocks], stages, in_flight, [limit] * stages, m)
    assert own is None if np.isinf(best) else own is not None and own.time_s == pytest.approx(best)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_stops_are_the_best_of_all(data: st.DataObject) -> None:
    """Any times of stages: the sum and the slowest, and tails, against every cut."""
    n, m = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 9))
    stages = data.draw(st.integers(1, n))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    tables = [np.where(rng.random((n + 1, n + 1)) < 0.8, rng.integers(1, 12, (n + 1, n + 1)), np.inf) for _ in range(2)]
    tables = [np.where(np.triu(np.ones_like(table), 1) > 0, table, np.inf) for table in tables]
    which = rng.integers(0, 2, stages).tolist()
    starts, ends = (tuple(np.cumsum(rng.integers(0, 9, (stages, n + 1)), axis=1)) for _ in range(2))
    tails = Tails(fixed_s=tuple(rng.integers(-9, 9, stages).tolist()), start_s=starts, stop_s=ends)
    best = best_with_tails = np.inf
    for inner in combinations(range(1, n), stages - 1):
        times = [tables[k][i, j] for k, i, j in zip(which, (0, *inner), (*inner, n), strict=True)]
        if np.isfinite(times).all():
            time_s = sum(times) + (m - 1) * max(times)
            best, best_with_tails = min(best, time_s), min(best_with_tails, time_s + tails.of((*inner, n)))
    own = stops_of_least_time(tables, which, m)
    assert own is None if np.isinf(best) else own is not None and own[1] == pytest.approx(best)
    own = stops_of_least_time(tables, which, m, tails)
    assert (own is None) == np.isinf(best)
    if own is not None:
        stops, time_s = own
        times = [tables[k][i, j] for k, i, j in zip(which, (0, *stops), stops, strict=False)]
        assert time_s == sum(times) + (m - 1) * max(times) + tails.of(stops)
        assert best_with_tails <= time_s <= best_with_tails * (1 + TAIL_STEP) + 1e-9


def test_a_stage_is_cut_only_where_it_is_allowed() -> None:
    blocks = [block(0, np.random.default_rng(0))] * 6
    size = np.arange(7)[None, :] - np.arange(7)[:, None]
    free = found([blocks], 3, [1] * 3, [np.inf] * 3, 8)
    held = found([blocks], 3, [1] * 3, [np.inf] * 3, 8, allowed=[size <= 1, size <= 3, size <= 2])
    assert free is not None and free.stops == (2, 4, 6)
    assert held is not None and held.stops == (1, 4, 6)
    assert found([blocks], 3, [1] * 3, [np.inf] * 3, 8, allowed=[size <= 1] * 3) is None


def test_the_work_does_not_grow_with_the_product_of_counts() -> None:
    """Six kinds of 16 blocks each with three modes: 153 ** 6 choices of recompute on one stage."""
    kinds = [block(k, np.random.default_rng(k)) for k in range(6)]
    blocks = [kinds[i % 6] for i in range(96)]
    needs = sum(b.static_bytes + b.options[0].held_bytes for b in blocks)
    own = found([blocks], 1, [1], [0.6 * needs], 4)
    assert set(own.modes) > {"none"}


def test_what_is_worse_in_everything_is_no_option_and_the_hull_frees_most_for_a_second() -> None:
    plain, same, full = option("none", 4.0, 12.0), option("selective", 4.0, 12.0), option("full", 5.0, 12.0)
    assert undominated([plain, same, full]) == (plain,)
    assert undominated([plain, option("selective", 4.5, 8.0), full]) == (plain, option("selective", 4.5, 8.0))
    plain, some, full = option("none", 4.0, 12.0), option("selective", 4.1, 8.0), option("full", 5.3, 2.0)
    assert lower_hull([plain, some, full]) == [0, 1, 2]
    assert lower_hull([plain, option("selective", 5.0, 11.0), full]) == [0, 2]
    assert lower_hull([full, plain]) == [1, 0]
