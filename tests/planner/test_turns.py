"""Which blocks of a rank's stages recompute: the least of all choices that fit, against every one of them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations_with_replacement, product

import numpy as np
import pytest

from autopar.cost.blocks.block_cost import BlockCost, Remade
from autopar.cost.step.memory import StageCost
from autopar.plan import Memory, Recompute
from autopar.planner.stages.fitting import Fitting
from autopar.planner.stages.stage_cut import BlockOption, Cut, CutBlock, StageCutter
from autopar.planner.stages.turns import by_turns

PP, TURNS = 2, 2


def cost(chance: random.Random) -> BlockCost:
    return BlockCost(
        key="", forward_s=0.0, backward_s=0.0, communication_forward_s=0.0, communication_backward_s=0.0,
        saved_bytes=chance.randrange(8, 20), input_bytes=chance.randrange(1, 6), saved_input_bytes=0, prelude=(),
        forward_transient_bytes=chance.randrange(4), backward_transient_bytes=0, sends=(), send_gradients=(),
        flops=0.0, backward_flops=0.0, messages=(), parameters=(),
    )  # fmt: skip


MODES: tuple[tuple[Recompute, float], ...] = (("none", 3.0), ("full", 4.0))


THREE = (("none", 3.0), ("selective", 3.25), ("full", 4.0))


def selective(chance: random.Random, price: BlockCost) -> BlockCost:
    """The block with a third mode that keeps less than the first one and more than the last."""
    some = Remade(
        saved_input_bytes=0, saved_bytes=chance.randrange(price.input_bytes, price.saved_bytes + 1),
        forward_transient_bytes=chance.randrange(4), backward_transient_bytes=chance.randrange(4),
    )  # fmt: skip
    return replace(price, selective=some)


def kept(stage: StageCost, number: int) -> int:
    """With what a stage receives and sends: all but the first and the last one are alike."""
    messages = 3 * (number > 0) + 2 * (number + 1 < PP * TURNS)
    return messages + sum(block.kept_bytes(mode) for block, mode in zip(stage.blocks, stage.recompute, strict=True))


def passing(stage: StageCost) -> int:
    found = later = 0
    for block, mode in zip(reversed(stage.blocks), reversed(stage.recompute), strict=True):
        found, later = max(found, block.passing_bytes(mode) - later), later + block.kept_bytes(mode)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_no_other_choice_that_fits_takes_less(seed: int) -> None:
    chance = random.Random(seed)
    price = cost(chance)
    plain, again = (
        BlockOption(mode=mode, time_s=time_s, held_bytes=price.kept_bytes(mode), transient_bytes=0.0)
        for mode, time_s in MODES
    )
    cutter = StageCutter([CutBlock(key=0, options=(plain, again), static_bytes=0.0)] * 8)
    stops = (*sorted(chance.sample(range(1, 8), PP * TURNS - 1)), 8)
    edges = list(zip((0, *stops), stops, strict=False))
    peaks = [np.array([[chance.randrange(1, 6) for _ in range(TURNS)] for _ in range(3)]) for _ in range(PP)]

    def made(modes: tuple[Recompute, ...]) -> list[StageCost]:
        return [StageCost(blocks=(price,) * (stop - start), recompute=modes[start:stop]) for start, stop in edges]

    def activations(stages: list[StageCost], rank: int) -> int:
        sizes = [kept(stage, rank + PP * t) for t, stage in enumerate(stages[rank::PP])]
        return int((peaks[rank] @ np.array(sizes)).max())

    def used(stages: list[StageCost], rank: int) -> int:
        return 5 + activations(stages, rank) + max(map(passing, stages[rank::PP]))

    leanest = made(("full",) * 8)
    limits = [used(leanest, rank) + chance.randrange(60) for rank in range(PP)]
    memory = tuple(
        Memory(pp_rank=r, parameters=2, gradients=2, optimizer=1, activations=activations(leanest, r),
               transient=max(map(passing, leanest[r::PP])), reserved=0)
        for r in range(PP)
    )  # fmt: skip
    first = Fitting(cut=Cut(stops=stops, modes=("full",) * 8, time_s=0.0), made=leanest, memory=memory)
    # equal blocks: how many of each stage recompute is all that counts, those at its beginning as the cut takes them
    least = [8] * PP
    for counts in product(*(range(stop - start + 1) for start, stop in edges)):
        stages = made(
            tuple("full" if i < n else "none" for (a, b), n in zip(edges, counts, strict=True) for i in range(b - a))
        )
        for rank in range(PP):
            if used(stages, rank) <= limits[rank]:
                least[rank] = min(least[rank], sum(counts[rank::PP]))
    for cut in by_turns(first, cutter, kept, peaks, limits):
        found = made(cut.modes)
        for rank in range(PP):
            assert used(found, rank) <= limits[rank]
            assert sum(stage.recompute.count("full") for stage in found[rank::PP]) == least[rank]
    if sum(least) < 8:
        assert by_turns(first, cutter, kept, peaks, limits)


@pytest.mark.parametrize("seed", range(40))
def test_of_three_modes_no_choice_that_fits_is_quicker_on_every_turn(seed: int) -> None:
    """All counts of all modes on all stages of a rank; equal blocks of a stage are in modes of ever less recompute."""
    chance = random.Random(seed)
    price = selective(chance, cost(chance))
    options = tuple(
        BlockOption(mode=mode, time_s=time_s, held_bytes=price.kept_bytes(mode), transient_bytes=0.0)
        for mode, time_s in THREE
    )
    seconds = dict(THREE)
    cutter = StageCutter([CutBlock(key=0, options=options, static_bytes=0.0)] * 8)
    stops = (*sorted(chance.sample(range(1, 8), PP * TURNS - 1)), 8)
    sizes = [stop - start for start, stop in zip((0, *stops), stops, strict=False)]
    peaks = [np.array([[chance.randrange(1, 6) for _ in range(TURNS)] for _ in range(3)]) for _ in range(PP)]

    def used(stages: list[StageCost], rank: int) -> int:
        held = peaks[rank] @ np.array([kept(stage, rank + PP * t) for t, stage in enumerate(stages)])
        return 5 + int(held.max()) + max(map(passing, stages))

    leanest = [StageCost(blocks=(price,) * size, recompute=("full",) * size) for size in sizes]
    limits = [used(leanest[rank::PP], rank) + chance.randrange(60) for rank in range(PP)]
    memory = tuple(
        Memory(pp_rank=r, parameters=2, gradients=2, optimizer=1, activations=0,
               transient=max(map(passing, leanest[r::PP])), reserved=0)
        for r in range(PP)
    )  # fmt: skip
    first = Fitting(cut=Cut(stops=stops, modes=("full",) * 8, time_s=0.0), made=leanest, memory=memory)
    every: list[set[tuple[float, ...]]] = []
    for rank in range(PP):
        own = sizes[rank::PP]
        choices = product(*(combinations_with_replacement([mode for mode, _ in reversed(THREE)], n) for n in own))
        fitting = [
            c
            for c in choices
            if used([StageCost(blocks=(price,) * len(m), recompute=m) for m in c], rank) <= limits[rank]
        ]
        every.append({tuple(sum(map(seconds.__getitem__, modes)) for modes in c) for c in fitting})
    found = by_turns(first, cutter, kept, peaks, limits)
    least = [min(sum(times) for times in own) for own in every]
    assert found or sum(least) == 8 * seconds["full"]
    quickest = [float("inf")] * PP
    for cut in found:
        for rank in range(PP):
            stages = [cut.modes[sum(sizes[:s]) : sum(sizes[: s + 1])] for s in range(rank, PP * TURNS, PP)]
            times = tuple(sum(map(seconds.__getitem__, modes)) for modes in stages)
            assert times in every[rank]  # it fits
            assert not any(
                other != times and all(a <= b for a, b in zip(other, times, strict=True)) for other in every[rank]
            )
            quickest[rank] = min(quickest[rank], sum(times))
    assert not found or quickest == least
