"""Lower bounds against every cut of small chains of blocks, and against what is evaluated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.step.simulation import StageTimes, simulate
from autopar.mesh import Mesh
from autopar.planner.bounds.bound_rows import BlockPrice, Row, forwards_done
from autopar.planner.bounds.bounds import bounds
from autopar.planner.bounds.flow import whole_s
from autopar.planner.bounds.least_prices import least_held
from autopar.planner.bounds.lines import again_prices, least_of
from autopar.planner.space.candidates import Candidate
from autopar.schedule import live_peaks, schedule_actions

_MODES: dict[BlockPrice, tuple[float, float]] = {}
"""Seconds and bytes of the selective mode of the prices that have one."""
_FULL: dict[BlockPrice, float] = {}


_PASSING: dict[BlockPrice, tuple[float, ...]] = {}


def priced(share: float, again_s: float, freed: float, peaks: tuple[float, ...], **parts: float) -> BlockPrice:
    """A price of three modes; the second takes ``share`` of the third one's seconds and frees ``freed`` of its bytes.

    ``peaks``: bytes in passing of each.
    """
    most, least = parts["held_bytes"], parts["held_again_bytes"]
    some = share * again_s, most - freed * (most - least)
    lines = again_prices([0.0, some[0], again_s], [most, some[1], least])
    lean = min(peak + kept - least for peak, kept in zip(peaks, (most, some[1], least), strict=True))
    price = BlockPrice(**parts, **lines, passing_bytes=min(peaks), lean_bytes=lean)
    _MODES[price] = some
    _PASSING[price] = (peaks[0], peaks[2], peaks[1])
    _FULL[price] = again_s
    return price


_prices = st.builds(
    priced,
    share=st.sampled_from([1.0, 0.5, 0.1, 0.05]),
    freed=st.sampled_from([0.05, 0.3, 0.5, 0.9]),
    time_s=st.floats(1.0, 4.0),
    forward_s=st.floats(0.0, 1.0),
    again_s=st.floats(0.0, 1.0),
    once_s=st.floats(0.0, 3.0),
    gather_s=st.floats(0.0, 1.0),
    static_bytes=st.floats(0.0, 3.0),
    held_bytes=st.floats(1.0, 4.0),
    held_again_bytes=st.floats(0.0, 1.0),
    peaks=st.tuples(*[st.sampled_from([0.0, 0.3, 1.0, 3.0])] * 3),
)
_DEGREES = [
    ("none", 1, 1, 3),
    ("GPipe", 2, 1, 3),
    ("GPipe", 3, 1, 2),
    ("1F1B", 2, 1, 2),
    ("1F1B", 2, 1, 5),
    ("1F1B", 3, 1, 6),
    ("Interleaved1F1B", 2, 2, 2),
    ("Interleaved1F1B", 2, 2, 6),
    ("Interleaved1F1B", 2, 3, 4),
    ("Interleaved1F1B", 3, 2, 3),
    ("Interleaved1F1B", 2, 2, 1),
]


def sums(times: Iterable[float]) -> tuple[float, ...]:
    return tuple(accumulate(times, initial=0.0))


@st.composite
def rows(draw: st.DrawFn, degrees: Sequence[tuple[str, int, int, int]] = _DEGREES) -> tuple[Row, list[float]]:
    """A first block, equal ones, a last block; and what each block's gather takes longer where no forward is beside it."""
    first, group, last = draw(_prices), draw(_prices), draw(_prices)
    schedule, pp, v, m = draw(st.sampled_from(degrees))
    count = draw(st.integers(max(pp * v - 2, 1), max(pp * v, 4)))
    blocks = [first, *[group] * count, last]
    alone_s = [draw(st.sampled_from([0.0, 0.7])), *[draw(st.sampled_from([0.0, 0.5]))] * count, 0.3]
    even = -(-count // (pp * v))
    row = Row(
        first=first,
        last=last,
        group=group,
        count=count,
        alone=False,
        others=0,
        total_s=sum(b.time_s for b in blocks),
        forward_s=sum(b.forward_s for b in blocks),
        before_s=sums(b.time_s for b in blocks[: pp - 1]),
        before_forward_s=sums(b.forward_s for b in blocks[: pp - 1]),
        after_backward_s=sums(b.time_s - b.forward_s for b in blocks[len(blocks) - pp + 1 :][::-1])[::-1],
        once_s=sum(b.once_s for b in blocks),
        gathers_s=sum(b.gather_s for b in blocks),
        stage_gathers_s=sums(sorted(alone_s)[: pp * v]),
        every_s=draw(st.sampled_from([0.0, 0.2])),
        send_s=draw(st.sampled_from([0.0, 0.1])) * (pp > 1),
        send_back_s=draw(st.sampled_from([0.0, 0.3])) * (pp > 1),
        stage_bytes=draw(st.sampled_from([0.0, 0.5])) * (pp > 1),
        limit_bytes=draw(st.floats(2.0, 60.0)),
        most=draw(st.sampled_from([math.inf, even, even + 1])) if v > 1 else math.inf,
        schedule=schedule,
        pp=pp,
        virtual_stages=v,
        num_micro_batches=m,
    )
    return row, alone_s


def mode(price: BlockPrice, again: int) -> tuple[float, float]:
    """Seconds and bytes of a block that recomputes nothing, all of it, or the least that it can (0, 1, 2)."""
    if price in _MODES:
        return ((0.0, price.held_bytes), (_FULL[price], price.held_again_bytes), _MODES[price])[again]
    share = (0.0, 1.0, price.least_again_s / price.again_s if price.again_s else 0.0)[again]
    return share * price.again_s, price.held_bytes - share * (price.held_bytes - price.held_again_bytes)


Timed = Callable[[Row, Sequence[StageTimes], Sequence[float]], float]
"""The step of stages, by what follows on each rank."""


def of_own_cores(row: Row, stages: Sequence[StageTimes], once: Sequence[float]) -> float:
    """Each rank runs at its stated speed."""
    found = simulate(row.schedule, row.pp, row.num_micro_batches, stages)
    return max(finish + after for finish, after in zip(found.finish_s, once, strict=True))


def step_s(
    row: Row,
    edges: Sequence[tuple[int, int]],
    again: Sequence[int],
    alone_s: Sequence[float],
    timed: Timed = of_own_cores,
) -> float:
    """The simulated step of one cut; infinite where it does not fit."""
    blocks, pp, m = [row.first, *[row.group] * row.count, row.last], row.pp, row.num_micro_batches
    stages, once, kept, static, passing = [], [0.0] * pp, [], [0.0] * pp, [0.0] * pp
    for s, (start, stop) in enumerate(edges):
        own = list(zip(blocks[start:stop], again[start:stop], strict=True))
        is_last = s == len(edges) - 1
        stages.append(
            StageTimes(
                forward_s=sum(b.forward_s for b, _ in own) + row.every_s,
                backward_s=sum(b.time_s - b.forward_s + mode(b, r)[0] for b, r in own),
                send_forward_s=0.0 if is_last else row.send_s,
                send_backward_s=row.send_back_s if s else 0.0,
                first_forward_s=sum(b.gather_s for b, _ in own) + alone_s[start],
            )
        )
        kept.append(sum(mode(b, r)[1] for b, r in own) + (not is_last) * row.stage_bytes)
        once[s % pp] += sum(b.once_s for b, _ in own)
        static[s % pp] += sum(b.static_bytes for b, _ in own)
        later = 0.0  # what blocks behind kept of the micro-batch is gone
        for b, r in reversed(own):
            passing[s % pp] = max(passing[s % pp], _PASSING.get(b, (b.passing_bytes,) * 3)[r] - later)
            later += mode(b, r)[1]
    for rank in range(pp):
        peaks = live_peaks(row.schedule, pp, row.virtual_stages, m, rank)
        held = max(sum(n * size for n, size in zip(counts, kept[rank::pp], strict=True)) for counts in peaks)
        if static[rank] + passing[rank] + held > row.limit_bytes:
            return float("inf")
    return timed(row, stages, once)


def least_of_all(row: Row, alone_s: Sequence[float], timed: Timed = of_own_cores) -> float:
    """The quickest step over every cut that the row allows and every choice of recompute that fits."""
    n, stages = row.count + 2, row.pp * row.virtual_stages
    best = float("inf")
    for stops in combinations(range(1, n), stages - 1):
        edges = list(zip((0, *stops), (*stops, n), strict=True))
        if max(min(stop, n - 1) - max(start, 1) for start, stop in edges) > row.most:
            continue
        for again in product((0, 1, 2) if row.count <= 4 else (0, 1), repeat=row.count):
            best = min(best, step_s(row, edges, (0, *again, 0), alone_s, timed))
            best = min(best, step_s(row, edges, (1, *again, 1), alone_s, timed))
    return best


@settings(max_examples=40, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=3), st.sampled_from([math.inf, 1.0, 0.9]))
def test_no_cut_is_quicker_than_the_bound(found: list[tuple[Row, list[float]]], share: float) -> None:
    """Steps are simulated; a limit on the time changes what is above it alone."""
    least = [least_of_all(*one) for one in found]
    at_most_s = share * max(time_s for time_s in least)
    at_most_s = math.inf if math.isnan(at_most_s) else at_most_s
    for time_s, bound in zip(least, bounds([row for row, _ in found], at_most_s), strict=True):
        assert bound <= max(time_s, 0.0) * (1 + 1e-9)
        if bound == math.inf:
            assert time_s == math.inf


@settings(max_examples=40, deadline=None)
@given(rows())
def test_a_bound_of_sums_alone_is_none_of_parts(one: tuple[Row, list[float]]) -> None:
    """Where forwards are only known to take as long as they do at least, their backwards are not what is left."""
    row, alone_s = one
    less = {name: replace(getattr(row, name), forward_s=0.0) for name in ("first", "last", "group")}
    zeros = (0.0,) * row.pp
    bound = bounds(
        [replace(row, **less, forward_s=0.0, before_forward_s=zeros, after_backward_s=zeros, tells_apart=False)]
    )
    assert bound[0] <= least_of_all(row, alone_s) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(rows([("none", 1, 1, 3), ("none", 1, 1, 1), ("GPipe", 1, 1, 2)]), st.sampled_from([math.inf, 1.0, 0.5, 2.0]))
def test_what_fits_without_a_pipeline_takes_its_flow(one: tuple[Row, list[float]], share: float) -> None:
    """The same as of columns, which try times."""
    row = one[0]
    found = whole_s(replace(row, limit_bytes=100.0))
    assert found is not None
    assert bounds([replace(row, limit_bytes=100.0)], share * found)[0] == found
    found = whole_s(row)
    if found is not None:
        assert bounds([row], share * found)[0] == found
        assert found <= least_of_all(*one) * (1 + 1e-9)
        # prices have the least bytes in passing of all modes: as they are blocks may need more
        most = max(max(_PASSING[b]) for b in (row.first, row.group, row.last))
        roomy = replace(row, limit_bytes=(row.limit_bytes + most) * (1 + 1e-12))  # sums round otherwise block by block
        assert step_s(roomy, [(0, row.count + 2)], [0] * (row.count + 2), one[1]) < math.inf


def test_a_pipeline_or_recompute_is_looked_at_more_closely() -> None:
    price = BlockPrice(
        time_s=3.0, forward_s=1.0, again_s=1.0, least_again_s=1.0, once_s=0.5, gather_s=0.0, static_bytes=1.0,
        held_bytes=4.0, held_again_bytes=1.0, passing_bytes=2.0, lean_bytes=5.0,
    )  # fmt: skip
    row = Row(
        first=price, last=price, group=price, count=2, alone=False, others=0, total_s=12.0, forward_s=4.0,
        before_s=(0.0,), before_forward_s=(0.0,), after_backward_s=(0.0,), once_s=2.0, gathers_s=0.0,
        stage_gathers_s=(0.0,) * 2, every_s=0.0, send_s=0.0, send_back_s=0.0, stage_bytes=0.0, limit_bytes=25.0,
        most=math.inf, schedule="none", pp=1, virtual_stages=1, num_micro_batches=2,
    )  # fmt: skip
    assert whole_s(row) == pytest.approx(2 * 12 + 2)  # four times five bytes, and five in passing
    assert whole_s(replace(row, limit_bytes=24.9)) is None
    assert whole_s(replace(row, pp=2)) is None
    assert whole_s(replace(row, most=1.0)) is None


def test_a_bound_is_reached_where_the_relaxations_do_not_matter() -> None:
    """Equal blocks on equal ranks, memory that makes one of two blocks recompute."""
    price = BlockPrice(
        time_s=3.0,
        forward_s=1.0,
        again_s=1.0,
        least_again_s=1.0,
        once_s=0.5,
        gather_s=0.0,
        static_bytes=1.0,
        held_bytes=4.0,
        held_again_bytes=1.0,
        passing_bytes=0.0,
        lean_bytes=0.0,
    )
    nothing = replace(
        price,
        time_s=0.0,
        forward_s=0.0,
        again_s=0.0,
        least_again_s=0.0,
        once_s=0.0,
        static_bytes=0.0,
        held_bytes=0.0,
        held_again_bytes=0.0,
    )
    row = Row(
        first=nothing,
        last=nothing,
        group=price,
        count=4,
        alone=False,
        others=0,
        total_s=12.0,
        forward_s=4.0,
        before_s=(0.0, 0.0),
        before_forward_s=(0.0, 0.0),
        after_backward_s=(0.0, 0.0),
        once_s=2.0,
        gathers_s=0.0,
        stage_gathers_s=(0.0,) * 3,
        every_s=0.0,
        send_s=0.0,
        send_back_s=0.0,
        stage_bytes=0.0,
        limit_bytes=15.0,
        most=math.inf,
        schedule="1F1B",
        pp=2,
        virtual_stages=1,
        num_micro_batches=8,
    )
    assert float(bounds([replace(row, limit_bytes=100.0)])[0]) == pytest.approx(54 + 1, rel=1e-3)
    assert least_of_all(replace(row, limit_bytes=100.0), [0.0] * 6) == pytest.approx(54 + 1)
    # the first rank: 2 + 2 * 8 bytes are too much by 3, so that one of its blocks recomputes. Its first backward begins after
    # forwards of 4 and a backward of 4; its own take 8 * 5, its other forwards 6 * 2
    assert float(bounds([row])[0]) == pytest.approx(4 + 4 + 40 + 12 + 1, rel=1e-3)
    assert bounds([replace(row, limit_bytes=3.0)])[0] == float("inf")


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("micro_batches", [4, 8, 16])
@pytest.mark.parametrize(("schedule", "virtual_stages"), [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2)])
def test_a_rank_holds_as_many_micro_batches_as_the_bound_says(
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
    done = forwards_done(schedule, pp, virtual_stages, micro_batches)
    for rank in range(pp):
        moments = live_peaks(schedule, pp, virtual_stages, micro_batches, rank)
        assert any(all(a <= b for a, b in zip(done[rank], counts, strict=True)) for counts in moments)
        order = schedule_actions(schedule, pp, virtual_stages, micro_batches)[rank]
        before = order[: next(i for i, action in enumerate(order) if action.kind == "B")]
        stages = range(rank, pp * virtual_stages, pp)
        assert [sum(action.stage == s for action in before) for s in stages] == done[rank].tolist()
    assert least_held(candidate) == done.min()


@settings(max_examples=60, deadline=None)
@given(st.lists(_prices, min_size=1, max_size=3), st.floats(0.0, 1.0))
def test_lines_of_recompute_are_below_every_mode(found: list[BlockPrice], share: float) -> None:
    """Those of a price and of the least of several, for blocks that are in one mode or in parts in several."""
    least = least_of(found)
    freed = max(least.held_bytes - least.held_again_bytes, 1e-12)
    for price in found:
        for one, other in ((0, 1), (0, 2), (1, 2)):
            (a_s, a), (b_s, b) = mode(price, one), mode(price, other)
            time_s, kept = share * a_s + (1 - share) * b_s, share * a + (1 - share) * b
            less = least.held_bytes - kept
            assert least.again_s * less / freed <= time_s + 1e-9 or less < 0
            assert least.more_byte_s * less - least.more_free_s <= time_s + 1e-9


_times = st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 10.0))


@given(st.lists(_times, min_size=1, max_size=4))
def test_the_least_of_several_has_no_pass_longer_than_any(passes: list[tuple[float, float]]) -> None:
    """Forward, backward and both: of different blocks, chains of a pipeline count them apart."""
    price = BlockPrice(
        time_s=0.0, forward_s=0.0, again_s=0.0, least_again_s=0.0, once_s=0.0, gather_s=0.0, static_bytes=0.0,
        held_bytes=0.0, held_again_bytes=0.0, passing_bytes=0.0, lean_bytes=0.0,
    )  # fmt: skip
    found = [replace(price, time_s=forward + backward, forward_s=forward) for forward, backward in passes]
    least = least_of(found)
    for own in found:
        assert least.time_s <= own.time_s
        assert least.forward_s <= own.forward_s
        assert least.time_s - least.forward_s <= own.time_s - own.forward_s + 1e-12
