"""Whole blocks that recompute: as few as free enough, up to rounding."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.planner.bounds.columns import Columns
from autopar.planner.bounds.whole_recompute import WholeRecompute
from tests.support.planner.pipelines import block, pipeline

NUM_BLOCKS = 10


def whole(limit_bytes: float) -> WholeRecompute:
    """Ten equal blocks of 1.1 bytes on one rank, of which recompute frees 0.3 of each in 0.25 s, between two that hold nothing."""
    end, kinds = block((2.0, 0.0)), [0, *[1] * NUM_BLOCKS, 2]
    blocks = [end, block((2.0, 1.1), (2.25, 0.8)), end]
    instance = pipeline("none", 1, 1, kinds, blocks, limit_bytes=(limit_bytes,))
    return WholeRecompute(Columns([instance]), np.full((1, 1), float(NUM_BLOCKS)))


def seconds(limit_bytes: float) -> float:
    found = whole(limit_bytes).least_s(np.array([0]), np.full((1, 1), float(NUM_BLOCKS)))
    return float(found[0, 0])


@pytest.mark.parametrize("count", range(NUM_BLOCKS + 1))
def test_a_need_of_whole_blocks_takes_no_block_more(count: int) -> None:
    limit_bytes = NUM_BLOCKS * 1.1 - count * 0.3
    for limit in (limit_bytes, math.nextafter(limit_bytes, 0.0)):
        assert seconds(limit) == pytest.approx(0.25 * count)


@pytest.mark.parametrize("count", range(NUM_BLOCKS))
def test_a_little_more_than_whole_blocks_takes_one_more(count: int) -> None:
    """Of those blocks alone nothing is left that the other mode, which frees nothing, could add; that is no number of seconds."""
    limit_bytes = NUM_BLOCKS * 1.1 - count * 0.3
    for limit in (limit_bytes * (1 - 3e-9), limit_bytes - 0.03):
        assert seconds(limit) == pytest.approx(0.25 * (count + 1))
