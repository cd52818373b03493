"""The axis cp: when it is tried, what it splits, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar import api
from autopar.cost.operators.work import work
from autopar.errors import InfeasibleError
from autopar.graph.graph import Op, Ref, TensorSpec
from autopar.plan.plan import Plan
from autopar.planner.space.candidates import candidates, conflict
from autopar.planner.space.pins import Pins
from tests.planner.test_candidates import PROBLEM
from tests.support.distributed.subjects import HfSubject, graph_of

SMALL = replace(PROBLEM, world_size=16, global_batch_size=32)
LONG = replace(SMALL, sequences=(32768,), key_heads=(8,))


def planned(kind: str, *pins: str, subject: str = "llama", ranks: int = 2, world: int = 0) -> Plan:
    wanted = [f"cp={ranks}", f"cp_attention={kind}", "micro_batch=2", *pins]
    return api.estimate(
        graph_of(HfSubject(subject)), cluster=f"cpu:1x{world or ranks}", global_batch_size=4, pins=wanted
    )


def test_a_long_sequence_is_split_without_being_asked() -> None:
    assert any(c.mesh.cp > 1 for c in candidates(LONG, Pins()))
    assert all(c.mesh.cp == 1 for c in candidates(replace(LONG, sequences=(4096,)), Pins()))
    assert all(c.mesh.cp == 4 for c in candidates(replace(LONG, sequences=(4096,)), Pins.parse(["cp=4"])))


def test_what_does_not_divide_is_refused_by_name() -> None:
    odd = replace(LONG, sequences=(36,))
    assert "cp divides the sequence of 36" in conflict(odd, Pins.parse(["cp=8"]))
    assert "2 * cp divides the sequence of 36 (ring)" in conflict(odd, Pins.parse(["cp=4", "cp_attention=ring"]))
    assert candidates(odd, Pins.parse(["cp=4", "cp_attention=gather"]))
    assert "cp divides 8 heads (Ulysses)" in conflict(LONG, Pins.parse(["cp=16", "cp_attention=ulysses"]))
    plain = replace(SMALL, sequences=())
    assert "cp=1 in a model without attention operators" in conflict(plain, Pins.parse(["cp=2"]))


@pytest.mark.parametrize(("kind", "name"), [("gather", "split s"), ("ulysses", "split h"), ("ring", "ring")])
def test_the_sequence_is_split_everywhere(kind: str, name: str) -> None:
    plan = planned(kind)
    inner = [typing for layout in plan.layouts[1:-1] for typing in layout.typings if typing.axis == "cp"]
    assert inner
    for typing in inner:
        assert name in typing.strategies
        assert not {"invariant", "replicate", "split b"} & set(typing.strategies)
        assert [str(t) for t in typing.boundary] == ["S(1)"]
        assert {str(t) for t in typing.parameters} == {"I"}


def test_heads_that_ulysses_cannot_split() -> None:
    with pytest.raises(InfeasibleError, match="heads \\(Ulysses\\)"):
        planned("ulysses", ranks=8)


def test_the_time_of_cp_is_named_apart_from_that_of_tp() -> None:
    alone = planned("ulysses").predicted
    assert alone.breakdown.context_parallel_s > 0
    assert alone.breakdown.tensor_parallel_s == 0
    both = planned("ring", "tp=2", "*.mlp.down_proj.weight=tp:S(1)", world=4).predicted
    assert min(both.breakdown.context_parallel_s, both.breakdown.tensor_parallel_s) > 0
    for predicted in (alone, both):
        assert predicted.breakdown.total_s == pytest.approx(predicted.step_time_s)


def test_attention_that_is_written_out_has_no_ring() -> None:
    written = replace(LONG, has_written_attention=True)
    found = conflict(written, Pins.parse(["cp=2", "cp_attention=ring"]))
    assert any("attention is written out" in name for name in found)
    assert candidates(written, Pins.parse(["cp=2", "cp_attention=gather"]))


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
