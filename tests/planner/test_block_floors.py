import random
from dataclasses import replace
from functools import partial
from math import prod

import pytest

from autopar.cost.blocks.block_cost import BlockCost, ParameterCost
from autopar.cost.model import CostModel, Step
from autopar.cost.step.gradient_buckets import tied as tied_ranks
from autopar.cost.step.pipeline_step import ties_s
from autopar.cost.step.step import StageCost
from autopar.hardware.cluster import Cluster
from autopar.plan.mesh import Mesh
from autopar.plan.plan import BF16
from autopar.planner.bounds.instance import are_inside, at_both_ends, least_sums_s, tie_s
from tests.support import blocks_by_hand
from tests.support.clusters import in_pieces, with_device

CLUSTER = Cluster.parse("h100-sxm5-80gb:2x8")
MODEL = CostModel(CLUSTER, BF16, "adamw")


def block(chance: random.Random, name: str) -> BlockCost:
    times, parameters = [chance.choice([0.0, 1e-4, 1e-2]) for _ in range(2)], []
    for i in range(chance.randrange(3)):
        shape = (chance.choice([64, 1024]), chance.choice([512, 65536]))
        own = ParameterCost(name=f"{name}.{i}", shape=shape, num_bytes=2 * prod(shape), spread=chance.random() < 0.5)
        axes = chance.choice([(), ("tp",), ("cp",), ("tp", "cp")])
        parameters.append(replace(own, gradient_sum_axes=axes))
    return blocks_by_hand.block(name, forward_s=times[0], backward_s=times[1], parameters=tuple(parameters))


def step(mesh: Mesh) -> Step:
    return replace(blocks_by_hand.step(mesh, schedule="1F1B", zero=1), adds_gradients=True)


@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_no_rank_sums_its_gradients_in_less(seed: int, is_measured: bool) -> None:
    chance = random.Random(seed)
    model = CostModel(in_pieces(CLUSTER, chance), BF16, "adamw") if is_measured else MODEL
    mesh = Mesh(pp=2, dp_shard=2, tp=2, ep_data=2, **({"cp": 2} if seed % 2 else {"dp_replicate": 2}))
    kinds = [block(chance, name) for name in ("first", "group", "last")]
    counts = [1, chance.randrange(1, 12), 1]
    least, rank_s = least_sums_s(model, kinds, counts, step(mesh), others=False)
    assert rank_s >= 0
    order = [k for k, n in enumerate(counts) for _ in range(n)]
    for _ in range(10):
        edges = sorted(chance.randrange(len(order) + 1) for _ in range(4))
        edges[1] = max(edges[1], edges[0] + (edges[2] == edges[3]))  # a rank has a block
        turns = [order[edges[0] : edges[1]], order[edges[2] : edges[3]]]
        again = chance.random() < 0.5
        stages = [StageCost(blocks=tuple(kinds[k] for k in own), recompute=(again,) * len(own)) for own in turns if own]
        found = model.of(step(mesh)).gradients_s(stages)
        assert rank_s + sum(least[k] for own in turns for k in own) <= sum(found.values()) * (1 + 1e-9)
    if seed % 2 == 0 and any(p.spread for kind in kinds for p in kind.parameters):
        alone, _ = least_sums_s(model, kinds, counts, step(mesh), others=True)
        assert min(alone) >= 0 and max(alone) > 0


@pytest.mark.parametrize("seed", range(10))
def test_sums_of_the_smallest_block_and_of_all_blocks_are_known_exactly(seed: int) -> None:
    chance = random.Random(seed)
    weights = [
        (ParameterCost(name=f"{i}", shape=(rows, 64), num_bytes=128 * rows, gradient_sum_axes=("tp",)),)
        for i, rows in enumerate(chance.sample(range(8, 512, 8), 3))
    ]
    kinds = [blocks_by_hand.block("", parameters=own) for own in weights]
    own, mesh = [1, chance.randrange(1, 6), 1], Mesh(tp=2, dp_shard=8)
    least, rank_s = least_sums_s(MODEL, kinds, own, step(mesh), others=False)
    smallest = min(range(3), key=lambda k: weights[k][0].numel)
    for turns in ([smallest], [k for k, n in enumerate(own) for _ in range(n)]):
        num_bytes = 4 * sum(weights[k][0].numel for k in turns) // mesh.dp_shard
        sum_s = MODEL.of(step(mesh)).sum_s(("tp",), num_bytes, copied_bytes=0)
        assert rank_s + sum(least[k] for k in turns) == pytest.approx(sum_s, rel=1e-9)


def test_the_ends_of_a_pipeline_sum_what_they_share() -> None:
    chance = random.Random(0)
    blocks = [block(chance, name) for name in ("first", "inner", "last")]
    tied = ParameterCost(name="tied", shape=(512, 512), num_bytes=2 * 512**2, shared=True)
    ends = [replace(blocks[0], parameters=(tied,)), blocks[1], replace(blocks[2], parameters=(tied,))]
    mesh = Mesh(pp=4, dp_shard=2, tp=2)
    assert at_both_ends(ends) == (tied,) and at_both_ends(blocks) == ()
    assert not are_inside(ends, (tied,))
    half = 512 * 512 * 4 // 2  # fp32 at rest, shards of two ranks
    pair_s = MODEL.collectives.pair_time_s("all_reduce", half, mesh)
    assert tie_s(MODEL, (tied,), step(mesh), inside=False) == pair_s > 0
    assert tie_s(MODEL, (replace(tied, trained=False),), step(mesh), inside=False) == 0


@pytest.mark.parametrize("holders", [(), (0,), (1,), (1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_what_blocks_between_the_ends_read_too_takes_no_less(pp: int, holders: tuple[int, ...]) -> None:
    """An encoder and a decoder with one table of tokens, which the head reads too: whichever ranks have it, its ends wait."""
    chance = random.Random(0)
    tied = ParameterCost(name="tied", shape=(512, 512), num_bytes=2 * 512**2, shared=True)
    other = replace(tied, name="other", shape=(64, 512), num_bytes=2 * 64 * 512)
    ends = [replace(block(chance, name), parameters=(tied, other)) for name in ("first", "last")]
    plain = block(chance, "inner")
    costs = [ends[0], replace(plain, parameters=(tied,)), ends[1]]
    assert at_both_ends(costs) == (tied, other)
    assert are_inside(costs, (tied, other))
    own = step(Mesh(pp=pp, dp_shard=2, tp=2))
    reads = [r in holders for r in range(pp)]
    stages = [
        [*ends[:1][r:], replace(plain, parameters=(tied,) * has), *ends[1:][pp - 1 - r :]]
        for r, has in enumerate(reads)
    ]
    found = tied_ranks(stages, MODEL.of(own).data)
    least_s = tie_s(MODEL, (tied, other), own, inside=True)
    for rank in (0, pp - 1):
        assert 0 < least_s <= ties_s(MODEL.collectives, found, own, rank) * (1 + 1e-9)


# half of computation is lost to communication beside it, so that no fit of the profile changes how often one hides the other
HIDING = CostModel(with_device(CLUSTER, interference=0.5), BF16, "adamw")
WAYS = [(Mesh(dp_shard=16), zero) for zero in (1, 2, 3)] + [(Mesh(pp=2, dp_shard=8), zero) for zero in (1, 3)]


def drawn(chance: random.Random, name: str) -> BlockCost:
    numel = chance.choice([2**12, 2**20, 2**28])
    weight = ParameterCost(name=f"{name}.weight", shape=(numel // 64, 64), num_bytes=2 * numel)
    return replace(block(chance, name), parameters=(weight,))


def stage_s(blocks: list[BlockCost], how: Step) -> float:
    """Of one micro-batch, with the shares of the forwards that gather as they are in a step."""
    stages = [StageCost(blocks=tuple(blocks), recompute=("none",) * len(blocks))] * how.mesh.pp
    (sums, *_) = HIDING.predict(stages, how).stage_times
    return sum(sums)


@pytest.mark.parametrize(("mesh", "zero"), WAYS)
def test_blocks_in_their_places_take_no_more_than_their_stage(mesh: Mesh, zero: int) -> None:
    how = replace(step(mesh), zero_stage=zero, adds_gradients=False)
    beyond = 0
    for seed in range(40):
        chance = random.Random(seed)
        kinds = [drawn(chance, name) for name in "abc"]
        blocks = [None, *(chance.choice(kinds) for _ in range(8)), None]
        start, stop = (1, 9) if mesh.pp == 1 else sorted(chance.sample(range(1, 10), 2))
        whole_s, priced = stage_s(blocks[start:stop], how), partial(HIDING.of(how).block_time_s, recompute="none")
        parts = [priced(blocks[i], neighbours=[(blocks[i - 1], blocks[i + 1])]) for i in range(start, stop)]
        assert sum(time.forward_s + time.backward_s for time in parts) <= whole_s * (1 + 1e-9)
        alike = [priced(b) for b in blocks[start:stop]]
        beyond += sum(time.forward_s + time.backward_s for time in alike) > whole_s * (1 + 1e-9)
    # beside others a block's gathers or reductions hide as they would not beside blocks like it
    assert bool(beyond) == (zero >= 2)


def test_one_more_of_equal_blocks_adds_what_it_is_priced_at_and_the_least_of_the_blocks_beside_counts() -> None:
    how = replace(step(Mesh(dp_shard=16)), zero_stage=3, adds_gradients=False)
    own = drawn(random.Random(1), "a")
    time = HIDING.of(how).block_time_s(own, recompute="none")
    more = stage_s([own] * 5, how) - stage_s([own] * 4, how)
    assert more == pytest.approx(time.forward_s + time.backward_s, rel=1e-9)
    how = replace(step(Mesh(dp_shard=16)), zero_stage=3)
    chance = random.Random(3)
    a, b, c = (drawn(chance, name) for name in "abc")
    each = [HIDING.of(how).block_time_s(a, recompute="full", neighbours=[pair]) for pair in ((b, c), (c, b), (None, c))]
    both = HIDING.of(how).block_time_s(a, recompute="full", neighbours=[(b, c), (c, b), (None, c)])
    assert both.forward_s == min(time.forward_s for time in each)
    assert both.backward_s == min(time.backward_s for time in each)
