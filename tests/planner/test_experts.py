from dataclasses import replace

import pytest
import torch

from autopar import search as search_plan
from autopar.api import estimate
from autopar.cost.operators.work import work
from autopar.errors import InfeasibleError, PlanError, UsageError
from autopar.graph.graph import Op, Ref, TensorSpec
from autopar.lower.program import lower
from autopar.plan.check import check_plan
from autopar.plan.file import plan_from_dict, plan_to_dict
from autopar.plan.mesh import S
from autopar.plan.plan import Plan
from autopar.planner.space.candidates import candidates, conflict
from autopar.planner.space.pins import Pins
from tests.planner.test_candidates import PROBLEM
from tests.support.distributed.mixtures import mixture, mixture_graph
from tests.support.distributed.subjects import HfSubject, graph_of
from tests.support.example_plans import at_rest
from tests.support.planner.graphs import mlp
from tests.support.said import refuses
from tools.campaigns.program_types import typecheck


def planned(*pins: str, ranks: int = 4) -> Plan:
    return estimate(mixture_graph(), cluster=f"cpu:1x{ranks}", global_batch_size=16, pins=pins)


def test_without_ep_experts_are_whole_or_split_inside_and_a_search_finds_ranks_for_it() -> None:
    plan = planned("ep=1", "tp=2")
    assert plan.mesh.ep == 1
    names = {s for layout in plan.layouts for typing in layout.typings for s in typing.strategies}
    assert not any(name == "experts" or name.startswith("dispatch") for name in names)
    assert search_plan(mixture_graph(), cluster="cpu:1x4", global_batch_size=16, pins=["ep=2"]).mesh.ep == 2


@pytest.mark.parametrize(
    ("pins", "ep", "ep_data", "where"),
    [
        (("ep=2", "tp=2", "ep_data=1"), 2, 1, "(ep=2 on tp)"),
        (("ep=4", "tp=4", "ep_data=1"), 4, 1, "(ep=4 on tp)"),
        (("ep=2", "tp=1"), 2, 2, "(ep=2 on data)"),
        (("ep=4", "dp_replicate=4"), 4, 4, "(ep=4 on data)"),
        (("ep=2", "dp_shard=2", "dp_replicate=2"), 2, 2, "(ep=2 on data)"),
        (("ep=4", "tp=2"), 4, 2, "(ep=4 on data=2 x tp=2)"),
    ],
)
def test_ep_borrows_ranks_of_tp_or_data(pins: tuple[str, ...], ep: int, ep_data: int, where: str) -> None:
    plan = planned(*pins)
    assert (plan.mesh.ep, plan.mesh.ep_data, plan.mesh.world_size) == (ep, ep_data, 4)
    assert where in str(plan)
    if ep_data == 1:
        assert {kind for name, kind in at_rest(plan).items() if "experts" in name} == {S(0)}
    else:
        assert any(note.startswith("mixtures of experts (2): experts spread") for note in plan.notes)
    assert plan_from_dict(plan_to_dict(plan)) == plan
    assert typecheck(lower(plan, mixture_graph())) > 10


def test_what_ep_cannot_be_is_named() -> None:
    said = r"layers\.0.*: The pins leave no strategy to autopar\.experts"
    refuses(InfeasibleError, said, planned, "ep=3", ranks=3)
    refuses(InfeasibleError, said, planned, "ep=8", "tp=8", ranks=8)
    refuses(InfeasibleError, "ep_data divides 4 experts", planned, "ep_data=8", ranks=8)
    plan = planned("ep=4", "dp_replicate=4")
    refuses(PlanError, r"ep_data=.*, or ep_data times tp", check_plan, replace(plan, mesh=replace(plan.mesh, ep=2)))
    layouts = tuple(replace(a, typings=tuple(t for t in a.typings if t.axis != "ep_data")) for a in plan.layouts)
    said = "number of strategies on axis ep_data does not match"
    refuses(PlanError, said, lower, replace(plan, layouts=layouts), mixture_graph())
    given = {"cluster": "cpu:1x4", "global_batch_size": 16, "pins": ["ep=2"]}
    refuses(UsageError, "no experts that ep could split", estimate, mlp(), **given)


def test_an_auxiliary_loss_is_no_mean_of_means() -> None:
    """It is a product of two means over tokens, in each of two layers."""
    graph, given = graph_of(mixture(balanced=True)), {"cluster": "cpu:1x4", "global_batch_size": 16}
    plan = estimate(graph, pins=["dp=4"], **given)
    assert plan.num_micro_batches == 1
    assert any("statistics over the global batch" in note for note in plan.notes)
    totals = [op for op in lower(plan, graph).graph.ops if op.target == "autopar.change_over_data"]
    assert [op.spec.numel for op in totals] == [4, 4], "the counts alone travel, and they have no gradient"
    assert not any(op.spec.requires_grad for op in totals)
    refuses(InfeasibleError, "one micro-batch a data rank", estimate, graph, pins=["dp=4", "micro_batch=2"], **given)
    refuses(PlanError, r"in 2 micro-batches\. Pin num_micro_batches=1", lower, replace(plan, micro_batch_size=2), graph)


# --- sequences

SMALL = replace(PROBLEM, world_size=16, global_batch_size=32)
LONG = replace(SMALL, sequences=(32768,), key_heads=(8,))


def split_sequence(kind: str, *pins: str, ranks: int = 2, world: int = 0) -> Plan:
    wanted = [f"cp={ranks}", f"cp_attention={kind}", "micro_batch=2", *pins]
    return estimate(graph_of(HfSubject("llama")), cluster=f"cpu:1x{world or ranks}", global_batch_size=4, pins=wanted)


def test_a_long_sequence_is_split_without_being_asked() -> None:
    assert any(c.mesh.cp > 1 for c in candidates(LONG, Pins()))
    assert all(c.mesh.cp == 1 for c in candidates(replace(LONG, sequences=(4096,)), Pins()))
    assert all(c.mesh.cp == 4 for c in candidates(replace(LONG, sequences=(4096,)), Pins.parse(["cp=4"])))


def test_what_cannot_be_split_is_refused_by_name() -> None:
    odd = replace(LONG, sequences=(36,))
    assert "cp divides the sequence of 36" in conflict(odd, Pins.parse(["cp=8"]))
    assert "2 * cp divides the sequence of 36 (ring)" in conflict(odd, Pins.parse(["cp=4", "cp_attention=ring"]))
    assert candidates(odd, Pins.parse(["cp=4", "cp_attention=gather"]))
    assert "cp divides 8 heads (Ulysses)" in conflict(LONG, Pins.parse(["cp=16", "cp_attention=ulysses"]))
    plain = replace(SMALL, sequences=())
    assert "cp=1 in a model without attention operators" in conflict(plain, Pins.parse(["cp=2"]))
    refuses(InfeasibleError, "heads \\(Ulysses\\)", split_sequence, "ulysses", ranks=8)
    written = replace(LONG, has_written_attention=True)
    found = conflict(written, Pins.parse(["cp=2", "cp_attention=ring"]))
    assert any("attention is written out" in name for name in found)
    assert candidates(written, Pins.parse(["cp=2", "cp_attention=gather"]))


@pytest.mark.parametrize(("kind", "name"), [("gather", "split s"), ("ulysses", "split h"), ("ring", "ring")])
def test_the_sequence_is_split_everywhere(kind: str, name: str) -> None:
    plan = split_sequence(kind)
    inner = [typing for layout in plan.layouts[1:-1] for typing in layout.typings if typing.axis == "cp"]
    assert inner
    for typing in inner:
        assert name in typing.strategies and not {"invariant", "replicate", "split b"} & set(typing.strategies)
        assert [str(t) for t in typing.boundary] == ["S(1)"]
        assert {str(t) for t in typing.parameters} == {"I"}


def test_the_time_of_cp_is_named_apart_from_that_of_tp() -> None:
    alone = split_sequence("ulysses").predicted
    assert alone.breakdown.context_parallel_s > 0 and alone.breakdown.tensor_parallel_s == 0
    both = split_sequence("ring", "tp=2", "*.mlp.down_proj.weight=tp:S(1)", world=4).predicted
    assert min(both.breakdown.context_parallel_s, both.breakdown.tensor_parallel_s) > 0
    for predicted in (alone, both):
        assert predicted.breakdown.total_s == pytest.approx(predicted.step_time_s)


def test_a_gathered_causal_mask_is_priced_by_its_slowest_rank() -> None:
    """The last rank sees all keys; in the balanced order of a ring each sees half."""
    shapes = [TensorSpec(shape=(1, 4, n, 8), dtype=torch.float32) for n in (512, 1024, 1024)]
    args = (Ref("q"), Ref("k"), Ref("v"), None, 0.0, True)
    output = TensorSpec(shape=(1, 4, 512, 8), dtype=torch.float32)
    gathered = Op(name="a", target="autopar.attention_gathered", args=args, outputs=(output,))
    ring = replace(gathered, target="autopar.attention_ring", kwargs=(("ranks", 2),))
    local = [replace(shape, shape=(1, 4, 512, 8)) for shape in shapes]
    # a row of the whole sequence of 1024 sees half of it and itself
    assert work(gathered, shapes, "cuda").flops * 1025 / 2048 == work(ring, local, "cuda").flops
