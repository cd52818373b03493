"""What a block takes beside other blocks: added up never more than a stage of them, and as much in the middle of equal ones."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.cost.blocks.block_cost import BlockCost, ParameterCost
from autopar.cost.model import CostModel, Step
from autopar.cost.step.step import StageCost
from autopar.hardware.cluster import Cluster
from autopar.plan.mesh import Mesh
from autopar.plan.plan import BF16
from tests.planner.test_once import block, step
from tests.support.clusters import with_device

HALF = 0.5
"""Of computation, lost to communication beside it: set, so that no fit of the profile changes how often one hides the other."""


MODEL = CostModel(with_device(Cluster.parse("h100-sxm5-80gb:2x8"), interference=HALF), BF16, "adamw")
WAYS = [(Mesh(dp_shard=16), zero) for zero in (1, 2, 3)] + [(Mesh(pp=2, dp_shard=8), zero) for zero in (1, 3)]


def drawn(chance: random.Random, name: str) -> BlockCost:
    numel = chance.choice([2**12, 2**20, 2**28])
    weight = ParameterCost(name=f"{name}.weight", shape=(numel // 64, 64), num_bytes=2 * numel)
    return replace(block(chance, name), parameters=(weight,))


def part_s(blocks: list[BlockCost], place: int, how: Step) -> float:
    before = blocks[place - 1] if place else None
    after = blocks[place + 1] if place + 1 < len(blocks) else None
    time = MODEL.of(how).block_time_s(blocks[place], recompute="none", beside=[(before, after)])
    return time.forward_s + time.backward_s


def stage_s(blocks: list[BlockCost], how: Step) -> float:
    """Of one micro-batch, with the shares of the forwards that gather as they are in a step."""
    stages = [StageCost(blocks=tuple(blocks), recompute=("none",) * len(blocks))] * how.mesh.pp
    (sums, *_) = MODEL.predict(stages, how).stage_times
    return sum(sums)


@pytest.mark.parametrize(("mesh", "zero"), WAYS)
def test_blocks_in_their_places_take_no_more_than_their_stage(mesh: Mesh, zero: int) -> None:
    how = replace(step(mesh), zero_stage=zero, adds_gradients=False)
    beyond = 0
    for seed in range(40):
        chance = random.Random(seed)
        kinds = [drawn(chance, name) for name in "abc"]
        blocks = [chance.choice(kinds) for _ in range(8)]
        start, stop = (0, 8) if mesh.pp == 1 else sorted(chance.sample(range(9), 2))
        whole_s = stage_s(blocks[start:stop], how)
        assert sum(part_s(blocks, i, how) for i in range(start, stop)) <= whole_s * (1 + 1e-9)
        alike = [MODEL.of(how).block_time_s(b, recompute="none") for b in blocks[start:stop]]
        beyond += sum(time.forward_s + time.backward_s for time in alike) > whole_s * (1 + 1e-9)
    # beside others a block's gathers or reductions hide as they would not beside blocks like it
    assert bool(beyond) == (zero >= 2)


def test_one_more_of_equal_blocks_adds_what_it_is_priced_at() -> None:
    how = replace(step(Mesh(dp_shard=16)), zero_stage=3, adds_gradients=False)
    own = drawn(random.Random(1), "a")
    time = MODEL.of(how).block_time_s(own, recompute="none")
    more = stage_s([own] * 5, how) - stage_s([own] * 4, how)
    assert more == pytest.approx(time.forward_s + time.backward_s, rel=1e-9)


def test_the_least_of_the_blocks_beside_counts() -> None:
    how = replace(step(Mesh(dp_shard=16)), zero_stage=3)
    chance = random.Random(3)
    a, b, c = (drawn(chance, name) for name in "abc")
    each = [MODEL.of(how).block_time_s(a, recompute="full", beside=[pair]) for pair in ((b, c), (c, b), (None, c))]
    both = MODEL.of(how).block_time_s(a, recompute="full", beside=[(b, c), (c, b), (None, c)])
    assert both.forward_s == min(time.forward_s for time in each)
    assert both.backward_s == min(time.backward_s for time in each)
