"""Stage cuts against brute force."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.plan import Recompute
from autopar.planner.stages.activation_modes import BlockOption, Ways, useful, ways_of
from autopar.planner.stages.stage_cut import CutBlock, StageCutter


def block(key: int, rng: np.random.Generator) -> CutBlock:
    time, held, extra = rng.integers(1, 9), rng.integers(2, 9), rng.integers(0, 3)
    least = BlockOption(
        mode="selective", time_s=time + rng.integers(0, 4) / 4, held_bytes=float(rng.integers(1, held + 1)),
        transient_bytes=float(rng.integers(0, 9)),
    )  # fmt: skip
    some = (least,) if rng.integers(0, 3) else ()
    return CutBlock(
        key=key,
        options=(
            BlockOption(mode="none", time_s=float(time), held_bytes=float(held), transient_bytes=float(extra)),
            *some,
            BlockOption(mode="full", time_s=time * 4 / 3, held_bytes=1.0, transient_bytes=float(extra + held)),
        ),
        static_bytes=float(rng.integers(0, 5)),
    )


def brute_force(blocks: Sequence[CutBlock], stages: int, in_flight: Sequence[int], limit: float, m: int) -> float:
    best = np.inf
    for inner in combinations(range(1, len(blocks)), stages - 1):
        edges = [0, *inner, len(blocks)]
        least: list[list[float]] = []
        for s in range(stages):
            mine = blocks[edges[s] : edges[s + 1]]
            fits = []
            for choice in product(*(b.options for b in mine)):
                memory = sum(b.static_bytes for b in mine) + in_flight[s] * sum(o.held_bytes for o in choice)
                if memory + max(o.transient_bytes for o in choice) <= limit:
                    fits.append(sum(o.time_s for o in choice))
            least.append(fits)
        if all(least):
            times = [min(t) for t in least]
            best = min(best, sum(times) + (m - 1) * max(times))
    return float(best)


@settings(max_examples=150, deadline=None)
@given(
    keys=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    stages=st.integers(1, 4),
    m=st.integers(1, 8),
    limit=st.integers(5, 60),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_cut_is_the_best_of_all(keys: list[int], stages: int, m: int, limit: int, seed: int) -> None:
    made = {key: block(key, np.random.default_rng([seed, key])) for key in set(keys)}
    blocks = [made[key] for key in keys]
    in_flight = [min(m, stages - s) for s in range(stages)]
    found = StageCutter(blocks).cut(stages, in_flight=in_flight, limit_bytes=[limit] * stages, num_micro_batches=m)
    best = brute_force(blocks, stages, in_flight, limit, m) if stages <= len(blocks) else np.inf
    if np.isinf(best):
        assert found is None
    else:
        assert found is not None
        assert found.time_s == pytest.approx(best)
        assert found.stops[-1] == len(blocks)
        assert len(found.modes) == len(blocks)


def test_a_pinned_stage_is_kept() -> None:
    blocks = [block(0, np.random.default_rng(0))] * 8
    cutter = StageCutter(blocks, fixed={0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 0})
    found = cutter.cut(2, in_flight=[2, 1], limit_bytes=[1e9, 1e9], num_micro_batches=4)
    assert found is not None
    assert found.stops == (6, 8)


def test_heavy_ends_get_fewer_layers() -> None:
    light = block(0, np.random.default_rng(0))
    heavy = CutBlock(
        key=1,
        options=(BlockOption(mode="none", time_s=3 * light.options[0].time_s, held_bytes=1, transient_bytes=0),),
        static_bytes=0.0,
    )
    cutter = StageCutter([light] * 13 + [heavy])
    found = cutter.cut(4, in_flight=[4, 3, 2, 1], limit_bytes=[1e9] * 4, num_micro_batches=16)
    assert found is not None
    assert found.stops == (4, 8, 12, 14)


def test_an_80_layer_model_is_cut_in_milliseconds() -> None:
    import time

    layer, end = block(0, np.random.default_rng(0)), block(1, np.random.default_rng(1))
    cutter = StageCutter([end, *[layer] * 80, end])
    start = time.thread_time()
    found = cutter.cut(16, in_flight=list(range(16, 0, -1)), limit_bytes=[1e9] * 16, num_micro_batches=64)
    assert found is not None
    assert time.thread_time() - start < 1.0


def test_a_stage_is_cut_only_where_it_is_allowed() -> None:
    rng = np.random.default_rng(0)
    blocks = [block(0, rng)] * 6
    size = np.arange(7)[None, :] - np.arange(7)[:, None]
    asked = {"in_flight": [1] * 3, "limit_bytes": [np.inf] * 3, "num_micro_batches": 8}
    free = StageCutter(blocks).cut(3, **asked)  # type: ignore[arg-type]
    held = StageCutter(blocks).cut(3, allowed=[size <= 1, size <= 3, size <= 2], **asked)  # type: ignore[arg-type]
    assert free is not None and free.stops == (2, 4, 6)
    assert held is not None and held.stops == (1, 4, 6)
    assert StageCutter(blocks).cut(3, allowed=[size <= 1] * 3, **asked) is None  # type: ignore[arg-type]


def option(mode: Recompute, time_s: float, held_bytes: float, transient_bytes: float = 0.0) -> BlockOption:
    return BlockOption(mode=mode, time_s=time_s, held_bytes=held_bytes, transient_bytes=transient_bytes)


def test_few_counts_of_three_modes_are_tried() -> None:
    """Two blocks without recompute and one with all of it keep 26 bytes in 13.3 seconds; three selective ones 24 in 12.3."""
    plain, some, full = option("none", 4.0, 12.0), option("selective", 4.1, 8.0), option("full", 5.3, 2.0)
    ways = ways_of([plain, some, full])
    assert ways == Ways(3, 2, 1)
    tried = ways.counts(4).tolist()
    assert tried == [[4, 0, 0], [1, 0, 3], [0, 0, 4], [3, 1, 0], [1, 1, 2], [0, 1, 3], [2, 2, 0], [1, 2, 1], [0, 2, 2],
                     [1, 3, 0], [0, 3, 1], [0, 4, 0]]  # fmt: skip
    assert len(ways.counts(80)) < 3 * 81 < len(Ways(3).counts(80))
    more = ways_of([plain, option("selective", 4.1, 8.0, 1.0), full])  # it needs more in passing than both
    assert more == Ways(3, 2, 1, anyway=True)
    assert len(more.counts(80)) < 4 * 81
    dear = ways_of([plain, option("selective", 5.0, 8.0), full])  # two of these: one without and one with all of it
    assert dear == Ways(3, middle=2)
    assert len(dear.counts(80)) < 4 * 81


def test_what_is_worse_in_everything_is_no_option() -> None:
    plain, same, full = option("none", 4.0, 12.0), option("selective", 4.0, 12.0), option("full", 5.0, 12.0)
    assert useful([plain, same, full]) == (plain,)
    assert useful([plain, option("selective", 4.5, 8.0), full]) == (plain, option("selective", 4.5, 8.0))


@settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 14), limit=st.integers(1, 200), in_flight=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_one_stage_of_equal_blocks_is_the_best_of_all(count: int, limit: int, in_flight: int, seed: int) -> None:
    own = block(0, np.random.default_rng(seed))
    found = StageCutter([own] * count).cut(1, in_flight=[in_flight], limit_bytes=[limit], num_micro_batches=1)
    best = np.inf
    for counts in product(range(count + 1), repeat=len(own.options)):
        held = sum(n * o.held_bytes for n, o in zip(counts, own.options, strict=True))
        passing = max((o.transient_bytes for n, o in zip(counts, own.options, strict=True) if n), default=0.0)
        if sum(counts) == count and count * own.static_bytes + in_flight * held + passing <= limit:
            best = min(best, sum(n * o.time_s for n, o in zip(counts, own.options, strict=True)))
    assert found is None if np.isinf(best) else found is not None and found.time_s == pytest.approx(best)
