"""Lower bounds against every cut of small chains of blocks, and against what is evaluated."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.mesh import Mesh
from autopar.schedule import live_peaks
from autopar.search.bounds import BlockPrice, Row, bounds
from autopar.search.candidates import Candidate
from autopar.search.rows import least_in_flight

_prices = st.builds(
    BlockPrice,
    time_s=st.floats(0.1, 4.0),
    again_s=st.floats(0.0, 1.0),
    once_s=st.floats(0.0, 1.0),
    static_bytes=st.floats(0.0, 3.0),
    held_bytes=st.floats(1.0, 4.0),
    held_again_bytes=st.floats(0.0, 1.0),
    passing_bytes=st.floats(0.0, 1.0),
)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """A first block, equal ones, a last block, on one stage a rank (1F1B)."""
    first, group, last = draw(_prices), draw(_prices), draw(_prices)
    count, pp, m = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    every_s = draw(st.sampled_from([0.0, 0.2]))
    blocks = [first, *[group] * count, last]
    return Row(
        first=first,
        last=last,
        group=group,
        count=count,
        alone=False,
        others=0,
        total_s=sum(b.time_s for b in blocks),
        before_s=tuple(sum(b.time_s for b in blocks[:r]) for r in range(pp)),
        once_s=sum(b.once_s for b in blocks),
        every_s=every_s,
        limit_bytes=draw(st.floats(2.0, 40.0)),
        pp=pp,
        virtual_stages=1,
        num_micro_batches=m,
        waits=True,
        in_flight=tuple(min(m, pp - r) for r in range(pp)),
    )


def least_of_all(row: Row) -> float:
    """The quickest step over every cut and every choice of recompute that fits."""
    blocks = [row.first, *[row.group] * row.count, row.last]
    best = float("inf")
    for stops in combinations(range(1, len(blocks)), row.pp - 1):
        edges = list(zip((0, *stops), (*stops, len(blocks)), strict=True))
        for again in product((False, True), repeat=len(blocks)):
            time_s, before, fits = 0.0, 0.0, True
            for rank, (start, stop) in enumerate(edges):
                own = [(b, r) for b, r in zip(blocks[start:stop], again[start:stop], strict=True)]
                once = sum(b.time_s + b.again_s * r for b, r in own) + row.every_s
                held = sum(b.held_again_bytes if r else b.held_bytes for b, r in own)
                used = sum(b.static_bytes for b, _ in own) + row.in_flight[rank] * held
                fits &= used + max(b.passing_bytes for b, _ in own) <= row.limit_bytes
                time_s = max(time_s, before + row.num_micro_batches * once + sum(b.once_s for b, _ in own))
                before += once
            if fits:
                best = min(best, time_s)
    return best


@settings(max_examples=150, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=3))
def test_no_cut_is_quicker_than_the_bound(found: list[Row]) -> None:
    for row, bound in zip(found, bounds(found), strict=True):
        assert bound <= least_of_all(row) * (1 + 1e-9)


def test_a_bound_is_reached_where_the_relaxations_do_not_matter() -> None:
    """Equal blocks on equal ranks, memory that makes one of two blocks recompute."""
    price = BlockPrice(
        time_s=3.0, again_s=1.0, once_s=0.5, static_bytes=1.0, held_bytes=4.0, held_again_bytes=1.0, passing_bytes=0.0
    )
    nothing = replace(
        price, time_s=0.0, again_s=0.0, once_s=0.0, static_bytes=0.0, held_bytes=0.0, held_again_bytes=0.0
    )
    row = Row(
        first=nothing,
        last=nothing,
        group=price,
        count=4,
        alone=False,
        others=0,
        total_s=12.0,
        before_s=(0.0, 0.0),
        once_s=2.0,
        every_s=0.0,
        limit_bytes=15.0,
        pp=2,
        virtual_stages=1,
        num_micro_batches=8,
        waits=True,
        in_flight=(2, 1),
    )
    # the first rank: 2 + 2 * 8 bytes are too much by 3, which half of a block recomputed frees
    assert float(bounds([row])[0]) == pytest.approx(6 + 8 * 6 + 1, rel=1e-3)
    assert float(bounds([replace(row, limit_bytes=100.0)])[0]) == pytest.approx(6 + 8 * 6 + 1, rel=1e-3)
    assert bounds([replace(row, limit_bytes=3.0)])[0] == float("inf")


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("micro_batches", [4, 8, 16])
@pytest.mark.parametrize(("schedule", "virtual_stages"), [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2)])
def test_a_rank_holds_at_least_as_many_micro_batches_as_the_bound_says(
    pp: int, micro_batches: int, schedule: str, virtual_stages: int
) -> None:
    candidate = Candidate(
        mesh=Mesh(pp=pp),
        micro_batch_size=1,
        num_micro_batches=micro_batches,
        zero_stage=0,
        schedule=schedule,  # type: ignore[arg-type]
        virtual_stages=virtual_stages,
    )
    for rank, least in enumerate(least_in_flight(candidate)):
        moments = live_peaks(schedule, pp, virtual_stages, micro_batches, rank)
        assert least <= max(min(counts) for counts in moments)
