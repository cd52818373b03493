"""Programs with a split sequence, experts on ranks and virtual stages are well typed for worlds of 8, 64 and 1024 ranks."""

from __future__ import annotations

from functools import cache

import pytest

from autopar.api import estimate
from autopar.errors import InternalError
from autopar.lower.check_types import typecheck
from autopar.lower.program import Program, lower
from tests.lower.test_check import mutants
from tests.support.distributed.mixtures import mixture_graph
from tests.support.lower.models import traced

CLUSTERS = {8: "h100-sxm5-80gb:1x8", 64: "h100-sxm5-80gb:8x8", 1024: "h100-sxm5-80gb:128x8"}
SEQUENCES = {
    8: "cp=2 tp=2 dp_shard=2",
    64: "cp=2 tp=2 pp=2 dp_shard=8",
    1024: "cp=2 tp=2 pp=2 dp_replicate=8 dp_shard=16",
}
"""Ulysses splits the 4 key heads over both axes; the others take more ranks of ``cp``."""
LONG_SEQUENCES = {8: "cp=4 tp=2", 64: "cp=8 tp=4 dp_shard=2", 1024: "cp=16 tp=4 pp=2 dp_replicate=2 dp_shard=4"}
EXPERTS = {
    "tp": {8: "ep=4 ep_data=1 tp=4", 64: "ep=4 ep_data=1 tp=4 pp=2", 1024: "ep=4 ep_data=1 tp=4 pp=2 dp_replicate=2"},
    "data": {8: "ep=4 ep_data=4 tp=1", 64: "ep=4 ep_data=4 tp=1 pp=2", 1024: "ep=4 ep_data=4 tp=1 dp_replicate=64"},
    "both": {8: "ep=4 ep_data=2 tp=2", 64: "ep=4 ep_data=2 tp=2 pp=2", 1024: "ep=4 ep_data=2 tp=2 dp_replicate=64"},
}
STAGES = {8: "tp=2 pp=2 dp_shard=2", 64: "tp=4 pp=2 dp_shard=8", 1024: "tp=8 pp=2 dp_replicate=8 dp_shard=8"}


@cache
def planned(kind: str, world_size: int, pins: str) -> Program:
    graph = mixture_graph() if kind == "experts" else traced(kind, hidden=512, seq=64, padded=False)
    plan = estimate(
        graph, cluster=CLUSTERS[world_size], global_batch_size=4 * world_size, pins=pins.split(), precision="bf16"
    )
    assert plan.mesh.world_size == world_size
    return lower(plan, graph)


def check(program: Program, world_size: int) -> None:
    """As the first rank, and as the last one: under a causal mask they see unlike parts."""
    assert typecheck(program) == typecheck(program, rank=world_size - 1) > 20


@pytest.mark.parametrize("world_size", CLUSTERS)
@pytest.mark.parametrize(
    ("kind", "target"),
    [("gather", "attention_gathered"), ("ulysses", "all_to_all"), ("ring", "attention_ring"), ("ring", "zigzag_shard")],
)
def test_a_split_sequence_is_well_typed(kind: str, target: str, world_size: int) -> None:
    pins = (SEQUENCES if kind == "ulysses" else LONG_SEQUENCES)[world_size]
    program = planned("llama", world_size, f"{pins} cp_attention={kind} micro_batch=1")
    assert f"{target}(" in program.code
    check(program, world_size)


@pytest.mark.parametrize("world_size", CLUSTERS)
@pytest.mark.parametrize("ranks", EXPERTS)
def test_experts_on_ranks_are_well_typed(ranks: str, world_size: int) -> None:
    program = planned("experts", world_size, EXPERTS[ranks][world_size])
    mesh = program.mesh
    assert mesh.ep == 4 and mesh.ep_data == {"tp": 1, "data": 4, "both": 2}[ranks]
    spread = [axis for p in program.graph.parameters for axis, kind in p.layout if kind.is_split and axis == "ep_data"]
    assert bool(spread) == (ranks != "tp")
    check(program, world_size)


@pytest.mark.parametrize("world_size", CLUSTERS)
def test_virtual_stages_are_well_typed(world_size: int) -> None:
    pins = f"{STAGES[world_size]} schedule=Interleaved1F1B virtual_stages=2 micro_batch=1"
    program = planned("llama", world_size, pins)
    assert [stage.pp_rank for stage in program.stages] == [0, 1, 0, 1]
    assert all(stage.blocks for stage in program.stages)
    check(program, world_size)


@pytest.mark.parametrize("kind", ["gather", "ulysses", "ring"])
def test_a_change_of_type_on_a_split_sequence_is_needed(kind: str) -> None:
    pins = (SEQUENCES if kind == "ulysses" else LONG_SEQUENCES)[8]
    found = list(mutants(planned("llama", 8, f"{pins} cp_attention={kind} micro_batch=1")))
    of_sequence = [broken for place, broken in found if "_cp_" in place]
    assert of_sequence
    for broken in of_sequence[:6]:
        with pytest.raises(InternalError, match=r"^block \d"):
            typecheck(broken)
