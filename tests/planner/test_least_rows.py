"""Rows of layouts that are not priced have bounds below those that are."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import api
from autopar.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.cost.step.data_parallel import DataParallel, Unit
from autopar.graph.ir import Graph
from autopar.graph.trace import trace
from autopar.mesh import Mesh
from autopar.models import resolve_model
from autopar.plan import BF16
from autopar.planner.bounds.bound_rows import Row
from autopar.planner.bounds.bounds import bounds
from autopar.planner.bounds.least_rows import _Added
from autopar.planner.evaluate.families import Evaluator
from autopar.planner.layouts.types import layout_key_of
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import load_space
from autopar.schedule import SCHEDULES
from autopar.validate.families import Sizes, build

CLUSTER = Cluster.parse("h100-sxm5-80gb:1x8")
SAME = 1e-4
"""Precision of bounds."""
MEMORY = ("static_bytes", "held_bytes", "held_again_bytes", "passing_bytes", "lean_bytes")


@pytest.fixture(scope="module")
def graph() -> Graph:
    source = resolve_model("gpt:layers=4,hidden=256,heads=4,vocab=1026", sequence_length=64)
    return api.trace_model(source.model, source.example_inputs, BF16, name=source.name)


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
@pytest.mark.parametrize("tp", [2, 4])
def test_bounds_before_layouts_are_priced_are_below_those_after(graph: Graph, tp: int, zero_stage: int) -> None:
    model = CostModel(CLUSTER, BF16, "adamw")
    evaluator = Evaluator.of(graph, model, global_batch_size=64, pins=Pins.parse(()), space=load_space("default"))
    closer = 0
    for pp, size in product((1, 2), (1, 4)):
        shards = 8 // (pp * tp)
        mesh = Mesh(pp=pp, tp=tp, dp_shard=shards) if zero_stage else Mesh(pp=pp, tp=tp, dp_replicate=shards)
        candidate = Candidate(
            mesh=mesh, micro_batch_size=size, num_micro_batches=64 // (size * shards), zero_stage=zero_stage,
            schedule="none" if pp == 1 else "1F1B", virtual_stages=1,
        )  # fmt: skip
        assert candidate.schedule in SCHEDULES
        whole = evaluator.context.unsplit(candidate)
        step = evaluator.context.step(candidate, whole)
        ideal = evaluator.cascade.ideal(candidate)
        assert isinstance(ideal, Row)
        assert not evaluator.cascade.least_rows.is_too_large(candidate, whole, evaluator.context.step)
        split = layout_key_of(candidate)
        quickest = evaluator.layouts.quickest_s(split), evaluator.layouts.least_s(split)
        for draft in evaluator.context.known_layouts(candidate):
            option = evaluator.layouts.price(draft)
            rows = (
                ideal,
                evaluator.cascade.least_rows.least(candidate, ideal, whole, step, *quickest),
                evaluator.cascade.rows.exact(candidate, option, evaluator.context.step(candidate, option)),
            )
            for part, name in product(("first", "last", "group"), MEMORY):
                assert getattr(getattr(ideal, part), name) <= getattr(getattr(rows[-1], part), name)
            *below, exact = bounds(rows)
            assert max(below) <= exact * (1 + SAME)
            closer += below[-1] > below[0]
    assert closer


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_recompute_beside_collectives_that_outlast_blocks_is_not_counted_whole(graph: Graph, zero_stage: int) -> None:
    """On a network that is slow beside small blocks a part of what they recompute is hidden."""
    model = CostModel(Cluster.parse("h100-sxm5-80gb:8x1?nic_bandwidth=1e9"), BF16, "adamw")
    evaluator = Evaluator.of(graph, model, global_batch_size=512, pins=Pins.parse(()), space=load_space("default"))
    candidate = Candidate(
        mesh=Mesh(dp_shard=8), micro_batch_size=16, num_micro_batches=4, zero_stage=zero_stage, schedule="none",
        virtual_stages=1,
    )  # fmt: skip
    option, ideal = evaluator.context.unsplit(candidate), evaluator.cascade.ideal(candidate)
    exact = evaluator.cascade.rows.exact(candidate, option, evaluator.context.step(candidate, option))
    assert isinstance(ideal, Row)
    for part, name in product(("first", "last", "group"), ("again_s", "least_again_s", "full_s")):
        assert getattr(getattr(ideal, part), name) <= getattr(getattr(exact, part), name) * (1 + 1e-9)
    assert ideal.group.again_s > 0


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_the_bound_of_a_cut_is_no_more_than_its_step(graph: Graph, zero_stage: int) -> None:
    """Blocks differ: small layers between an embedding and a head whose gathers take longer than they do."""
    model = CostModel(Cluster.parse("h100-sxm5-80gb:8x1?nic_bandwidth=1e9"), BF16, "adamw")
    evaluator = Evaluator.of(graph, model, global_batch_size=512, pins=Pins.parse(()), space=load_space("default"))
    count = len(graph.blocks)
    for pp in (1, 2) if zero_stage != 2 else (1,):
        mesh = Mesh(pp=pp, dp_shard=8 // pp)
        candidate = Candidate(
            mesh=mesh, micro_batch_size=16, num_micro_batches=32 // mesh.dp_shard, zero_stage=zero_stage,
            schedule="none" if pp == 1 else "1F1B", virtual_stages=1,
        )  # fmt: skip
        option = evaluator.context.unsplit(candidate)
        problem = evaluator.plans.problem(candidate, option)
        for stop in range(1, count) if pp == 2 else (count,):
            stops = (stop, count)[2 - pp :]
            for place in (0, -1):
                modes = tuple(block.options[place].mode for block in problem.block_options[0].blocks)
                time_s = problem.time_s(problem.fitting(stops, modes))
                assert problem.busy_s(stops, modes) <= time_s * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(
    blocks=st.lists(st.tuples(*[st.floats(0.0, 4.0)] * 4), min_size=1, max_size=4),
    share=st.floats(0.0, 1.0),
    interference=st.floats(0.0, 1.0),
    kind=st.sampled_from([(3, 1), (2, 1), (3, 2), (1, 1)]),
)
def test_what_data_axes_add_is_no_more_than_they_do(
    blocks: list[tuple[float, ...]], share: float, interference: float, kind: tuple[int, int]
) -> None:
    """Of all blocks without a pipeline, of those of a stage with one; at any part of their work."""
    zero_stage, pp = kind
    data = DataParallel(Mesh(pp=pp, dp_shard=2), zero_stage, BF16, pp > 1)
    units = [
        Unit(
            numel=1, trained_numel=1, shard_numel=1, trained_shard_numel=1, trained_shard_shapes=((1,),), spread_numel=0,
            num_trained=1, gather_s=gather_s, reduce_s=reduce_s, replicate_s=0.0, hooks_s=0.5,
        )
        for _, _, gather_s, reduce_s in blocks
    ]  # fmt: skip
    forward, backward = [own[0] for own in blocks], [own[1] for own in blocks]
    whole_s = sum(forward) + sum(backward) + data.backward_s(units, backward, interference, is_last=False)
    whole_s += data.every_forward_s(units, forward, interference) * (not data.is_pipelined)
    least_s = floor_s = 0.0
    for i, unit in enumerate(units):
        before, after = units[i - 1] if i else None, units[i + 1] if i + 1 < len(units) else None
        moved_s = unit.gather_s * data.gathers_always
        if not data.is_pipelined:
            moved_s = data.gathers_always * sum(one.gather_s for one in (before, after) if one)
            moved_s += data.reduces_always * after.reduce_s if after else 0.0
        passes = 1 if data.is_pipelined else 2
        added = _Added(passes * 0.5, moved_s, not data.is_pipelined, interference)
        work_s = share * (forward[i] + backward[i])
        least_s += added.least_s(work_s)
        floor_s += work_s + added.floor_s
    assert floor_s <= least_s * (1 + 1e-9) + 1e-12
    assert least_s <= whole_s * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("tp", [2, 8])
def test_no_layout_needs_less_memory_than_the_best_of_all(tp: int) -> None:
    """A head that is large beside the layers: split over the vocabulary it makes fewer tensors of all logits."""
    sizes = Sizes(family="llama", hidden=64, ffn=256, heads=8, kv_heads=8, vocabulary=8192, sequence=512,
                  attention="flash", dtype="bfloat16")  # fmt: skip
    model, batch = build(sizes, 3)
    evaluator = Evaluator.of(
        trace(model, (), batch, name="llama"), CostModel(CLUSTER, BF16, "adamw"), global_batch_size=64, pins=Pins.parse(()),
        space=load_space("default"),
    )  # fmt: skip
    mesh = Mesh(tp=tp, dp_shard=8 // tp)
    candidate = Candidate(
        mesh=mesh, micro_batch_size=8, num_micro_batches=tp, zero_stage=1, schedule="none", virtual_stages=1
    )
    ideal = evaluator.cascade.ideal(candidate)
    assert isinstance(ideal, Row)
    for draft in evaluator.context.known_layouts(candidate):
        option = evaluator.layouts.price(draft)
        exact = evaluator.cascade.rows.exact(candidate, option, evaluator.context.step(candidate, option))
        for part, name in product(("first", "last", "group"), MEMORY):
            assert getattr(getattr(ideal, part), name) <= getattr(getattr(exact, part), name), (part, name)
