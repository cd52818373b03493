"""Bounds where ranks share cores against every cut of small chains; tests/campaigns holds them against every plan of small problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.pipeline import StageTimes, shared_time_s, simulate
from autopar.search.bound_rows import BlockPrice, Row
from autopar.search.bounds import bounds
from autopar.search.cores import at_speed_s, chain_s, least_part
from tests.search.test_bounds import least_of_all, rows

_DEGREES = [
    ("GPipe", 2, 1, 1),
    ("GPipe", 2, 1, 3),
    ("GPipe", 3, 1, 2),
    ("1F1B", 2, 1, 2),
    ("1F1B", 2, 1, 5),
    ("1F1B", 3, 1, 3),
    ("Interleaved1F1B", 2, 2, 1),
    ("Interleaved1F1B", 2, 2, 4),
]


def of_shared_cores(
    core_share: float, host_s: float, row: Row, stages: Sequence[StageTimes], once: Sequence[float]
) -> float:
    """A step as ``CostModel.breakdown`` says; ``host_s``: of one micro-batch on all stages."""
    own_s = host_s / (2 * len(stages))
    stages = [replace(s, forward_s=s.forward_s + own_s, backward_s=s.backward_s + own_s) for s in stages]
    degrees = row.schedule, row.pp, row.num_micro_batches
    found = simulate(*degrees, stages)
    rank = max(range(row.pp), key=lambda r: found.finish_s[r] + once[r])
    factor = min(shared_time_s(*degrees, stages, core_share) / found.time_s, 1.0)
    return factor * found.finish_s[rank] + once[rank]


@settings(max_examples=20, deadline=None)
@given(rows(_DEGREES), st.sampled_from([0.25, 0.5, 0.6, 0.9]), st.sampled_from([0.0, 1.0]))
def test_no_cut_of_ranks_that_share_cores_is_quicker_than_the_bound(
    one: tuple[Row, list[float]], core_share: float, host_s: float
) -> None:
    row, alone_s = one
    least_s = least_of_all(row, alone_s, lambda *own: of_shared_cores(core_share, host_s, *own))
    stated_s = float(bounds([row])[0])
    bound_s = at_speed_s(row, stated_s, speed=least_part(core_share, row.pp), host_s=host_s)
    assert bound_s <= least_s * (1 + 1e-9)
    if bound_s == math.inf:
        assert least_s == math.inf


@pytest.mark.parametrize("core_share", [0.25, 0.5, 0.9])
def test_a_bound_is_reached_by_one_micro_batch_after_which_there_is_nothing(core_share: float) -> None:
    """Its actions follow each other, with a message between any two of them."""
    price = BlockPrice(
        time_s=3.0, forward_s=1.0, again_s=0.0, least_again_s=0.0, once_s=0.0, gather_s=0.0, static_bytes=0.0,
        held_bytes=1.0, held_again_bytes=1.0, passing_bytes=0.0, lean_bytes=0.0,
    )  # fmt: skip
    row = Row(
        first=price, last=price, group=price, count=2, alone=False, others=0, total_s=12.0, forward_s=4.0,
        before_s=(0.0, 3.0), before_forward_s=(0.0, 1.0), after_backward_s=(2.0, 0.0), once_s=0.0, gathers_s=0.0,
        stage_gathers_s=(0.0,) * 3, every_s=0.1, send_s=0.3, send_back_s=0.4, stage_bytes=0.0, limit_bytes=100.0,
        most=math.inf, schedule="GPipe", pp=2, virtual_stages=1, num_micro_batches=1,
    )  # fmt: skip
    least_s = least_of_all(row, [0.0] * 4, lambda *own: of_shared_cores(core_share, 0.5, *own))
    assert least_s == pytest.approx(max(core_share, 0.5) * (12.0 + 2 * 0.1 + 0.5) + 0.3 + 0.4)
    bound_s = at_speed_s(row, float(bounds([row])[0]), speed=least_part(core_share, 2), host_s=0.5)
    assert bound_s == pytest.approx(least_s)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 5])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_chain_is_as_long_as_the_longest_of_stages_that_fill_it(stages: int, num_micro_batches: int) -> None:
    length_s, messages_s, m = 10.0, 0.3, num_micro_batches
    own: list[float] = []
    for r in range(stages):
        own.append((length_s - sum(own) - r * messages_s) / m)
    assert chain_s(sum(own), messages_s, stages, m) == pytest.approx(length_s)
