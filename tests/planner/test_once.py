"""What blocks add to a step once: never more than the cost model says of any rank that has them."""

from __future__ import annotations

import random
from dataclasses import replace

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

MODEL = CostModel(Cluster.parse("h100-sxm5-80gb:2x8"), BF16, "adamw")


def parameter(chance: random.Random, name: str) -> ParameterCost:
    shape = (chance.choice([64, 1024]), chance.choice([512, 65536]))
    return ParameterCost(
        name=name, shape=shape, num_bytes=2 * shape[0] * shape[1], spread=chance.random() < 0.5,
        gradient_sum_axes=chance.choice([(), ("tp",), ("cp",), ("tp", "cp")]),
    )  # fmt: skip


def block(chance: random.Random, name: str) -> BlockCost:
    times = [chance.choice([0.0, 1e-4, 1e-2]) for _ in range(2)]
    return BlockCost(
        key=name, forward_s=times[0], backward_s=times[1], communication_forward_s=0.0, communication_backward_s=0.0,
        saved_bytes=0, input_bytes=0, saved_input_bytes=0, prelude=(), forward_transient_bytes=0,
        backward_transient_bytes=0, sends=(), send_gradients=(), flops=0.0, backward_flops=0.0, messages=(),
        parameters=tuple(parameter(chance, f"{name}.{i}") for i in range(chance.randrange(3))),
    )  # fmt: skip


def step(mesh: Mesh) -> Step:
    return Step(
        mesh=mesh, schedule="1F1B", num_micro_batches=4, zero_stage=1, global_batch_size=16, flops_per_sample=1.0,
        tokens_per_sample=1, adds_gradients=True,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_no_rank_sums_its_gradients_in_less(seed: int) -> None:
    chance = random.Random(seed)
    mesh = (
        Mesh(pp=2, dp_shard=2, cp=2, tp=2, ep_data=2)
        if seed % 2
        else Mesh(pp=2, dp_replicate=2, dp_shard=2, tp=2, ep_data=2)
    )
    kinds = [block(chance, name) for name in ("first", "group", "last")]
    counts = [1, chance.randrange(1, 12), 1]
    least = least_sums_s(MODEL, kinds, counts, step(mesh), others=False)
    order = [k for k, n in enumerate(counts) for _ in range(n)]
    for _ in range(10):
        edges = sorted(chance.randrange(len(order) + 1) for _ in range(4))
        turns = [order[edges[0] : edges[1]], order[edges[2] : edges[3]]]
        again = chance.random() < 0.5
        stages = [StageCost(blocks=tuple(kinds[k] for k in own), recompute=(again,) * len(own)) for own in turns if own]
        found = MODEL.of(step(mesh)).gradients_s(stages)
        assert sum(least[k] for own in turns for k in own) <= sum(found.values()) * (1 + 1e-9)
    if seed % 2 == 0 and any(p.spread for kind in kinds for p in kind.parameters):
        alone = least_sums_s(MODEL, kinds, counts, step(mesh), others=True)
        assert min(alone) >= 0 and max(alone) > 0


def test_the_ends_of_a_pipeline_sum_what_they_share() -> None:
    chance = random.Random(0)
    blocks = [block(chance, name) for name in ("first", "inner", "last")]
    tied = ParameterCost(name="tied", shape=(512, 512), num_bytes=2 * 512**2, shared=True)
    ends = [replace(blocks[0], parameters=(tied,)), blocks[1], replace(blocks[2], parameters=(tied,))]
    mesh = Mesh(pp=4, dp_shard=2, tp=2)
    assert at_both_ends(ends) == (tied,)
    assert at_both_ends(blocks) == ()
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
