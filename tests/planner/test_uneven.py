"""Blocks between the stages of a plan whose virtual stages are not equal."""

from __future__ import annotations

import math
import random
from itertools import accumulate, combinations

import pytest

from autopar.cost.step.critical_path import longest_chains
from autopar.cost.step.simulation import StageTimes, simulate
from autopar.planner.stages.uneven import TRIES, exactly, is_even, moved


def test_only_the_stages_that_are_asked_for_are_allowed() -> None:
    ways = exactly((2, 3, 7), 7)
    assert [[tuple(map(int, pair)) for pair in zip(*way.nonzero(), strict=True)] for way in ways] == [
        [(0, 2)],
        [(2, 3)],
        [(3, 7)],
    ]


def test_stages_are_even_by_the_blocks_that_count() -> None:
    counted = [False, True, True, True, True, False]
    assert is_even((3, 6), counted)
    assert not is_even((2, 6), counted)


@pytest.mark.parametrize("seed", range(12))
def test_moves_shorten_the_step_as_far_as_single_blocks_can(seed: int) -> None:
    """Against every cut: no move of one block off the longest chain is left that helps, and the best of all is near."""
    chance = random.Random(seed)
    pp, v, m, blocks = 2, 2, 4, chance.randrange(6, 10)
    seconds = [1.0 + 0.5 * chance.random() for _ in range(blocks)]

    def stages(stops: tuple[int, ...]) -> list[StageTimes]:
        parts = [sum(seconds[i:j]) for i, j in zip((0, *stops), stops, strict=False)]
        return [StageTimes(forward_s=part, backward_s=2 * part) for part in parts]

    tried = []

    def priced(stops: tuple[int, ...]) -> float:
        tried.append(stops)
        return simulate("Interleaved1F1B", pp, m, stages(stops)).time_s if stops[0] < 4 else math.inf

    def weights(stops: tuple[int, ...]) -> list[float]:
        (chain, *_) = longest_chains("Interleaved1F1B", pp, m, stages(stops), [0.0] * pp, 1)
        return [float(weight) for weight in chain.forwards + 2 * chain.backwards]

    first = (*range(1, pp * v), blocks)  # all that are left on the last stage
    step_s = priced(first)
    stops = moved(first, step_s, priced, weights)
    found_s = priced(stops)
    assert found_s < step_s
    assert len(tried) <= TRIES + 2
    sizes = [j - i for i, j in zip((0, *stops), stops, strict=False)]
    each = weights(stops)
    for a in range(pp * v):
        for b in range(pp * v):
            if sizes[a] > 1 and each[a] > each[b]:
                other = [size - (s == a) + (s == b) for s, size in enumerate(sizes)]
                assert priced(tuple(accumulate(other))) >= found_s * (1 - 1e-6)
    best_s = min(priced((*inner, blocks)) for inner in combinations(range(1, blocks), pp * v - 1))
    assert found_s <= 1.15 * best_s
