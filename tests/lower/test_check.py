import copy
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import islice

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar.api import estimate
from autopar.errors import InternalError, UsageError
from autopar.graph.graph import Graph
from autopar.lower.program import BlockProgram, Program, lower
from autopar.plan.mesh import Mesh, P
from autopar.rules import apply
from autopar.tracing.trace import trace
from tests.support.distributed.mixtures import mixture_graph
from tests.support.lower import chooser
from tests.support.lower.chooser import named_typing
from tests.support.lower.models import plan_of, traced
from tests.support.lower.ranks import run_ranks
from tests.support.said import refuses
from tests.support.small_models import model_of
from tools.campaigns.pairs import Pair, check_pair, draw_typing
from tools.campaigns.program_types import typecheck

CHANGES = ("all_", "reduce_scatter", "shard", "keep_on_first", "invariant_to_replicate")


def mutants(program: Program) -> Iterator[tuple[str, Program]]:
    """The program with one change of type replaced by its operand, for every change of every block."""
    for s, stage in enumerate(program.stages):
        for b, block in enumerate(stage.blocks):
            calls = [node for node in block.module.graph.nodes if node.op == "call_function"]
            for name in [call.name for call in calls if getattr(call.target, "__name__", "").startswith(CHANGES)]:
                broken = without(block, name)
                blocks = (*stage.blocks[:b], broken, *stage.blocks[b + 1 :])
                stages = (*program.stages[:s], replace(stage, blocks=blocks), *program.stages[s + 1 :])
                yield f"block {block.index}: {name}", replace(program, stages=stages)


def without(block: BlockProgram, name: str) -> BlockProgram:
    module = copy.deepcopy(block.module)
    node = next(node for node in module.graph.nodes if node.name == name)
    node.replace_all_uses_with(node.all_input_nodes[0])
    module.graph.erase_node(node)
    return replace(block, module=module, kind=f"{block.kind} without {name}")  # blocks of one kind are checked once


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama-untied"])
def test_each_change_of_type_of_a_model_is_needed(name: str) -> None:
    graph = traced(name)
    batch = chooser.batch_typing(graph, 1)
    local = apply.shard(graph, batch, global_batch_size=graph.batch_size, micro_batch_size=1)
    drawn = draw_typing(random.Random(0).randrange, local, "tp", 2)
    program = lower(plan_of(graph, Mesh(tp=2), 1, (batch, drawn), cuts=(2,)), graph)
    for _place, broken in islice(mutants(program), 0, None, 8):
        refuses(InternalError, r"^block \d", typecheck, broken)


CLUSTERS = {8: "h100-sxm5-80gb:1x8", 1024: "h100-sxm5-80gb:128x8"}
MEGATRON = {8: "tp=4 dp_shard=2", 1024: "tp=4 pp=2 dp_replicate=8 dp_shard=16"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world_size"), [("llama-untied", 8), ("gpt2", 1024)])
def test_the_plan_of_a_search_passes_for_its_whole_world(name: str, world_size: int) -> None:
    program = lowered(traced(name, hidden=2048, seq=1024), world_size, MEGATRON[world_size], samples=1)
    assert typecheck(program) > 60
    if world_size > 8:  # on few ranks whole parameters are as fast
        assert any(kind.is_split for p in program.graph.parameters for axis, kind in p.layout if axis == "tp")


SEQUENCES = {8: "cp=2 tp=2 dp_shard=2", 1024: "cp=2 tp=2 pp=2 dp_replicate=8 dp_shard=16"}
"""Ulysses splits the 4 key heads over both axes; the others take more ranks of ``cp``."""
LONG_SEQUENCES = {8: "cp=4 tp=2", 1024: "cp=16 tp=4 pp=2 dp_replicate=2 dp_shard=4"}
EXPERTS = {
    "tp": {8: "ep=4 ep_data=1 tp=4", 1024: "ep=4 ep_data=1 tp=4 pp=2 dp_replicate=2"},
    "data": {8: "ep=4 ep_data=4 tp=1", 1024: "ep=4 ep_data=4 tp=1 pp=2 dp_replicate=64"},
    "both": {8: "ep=4 ep_data=2 tp=2", 1024: "ep=4 ep_data=2 tp=2 pp=2 dp_replicate=64"},
}
STAGES = {8: "tp=2 pp=2 dp_shard=2", 1024: "tp=8 pp=2 dp_replicate=8 dp_shard=8"}
VIRTUAL = "schedule=Interleaved1F1B virtual_stages=2 micro_batch=1"


def lowered(graph: Graph, world_size: int, pins: str, *, samples: int = 4) -> Program:
    options = {"cluster": CLUSTERS[world_size], "global_batch_size": samples * world_size, "precision": "fp32"}
    plan = estimate(graph, pins=pins.split(), **options)
    assert plan.mesh.world_size == world_size
    return lower(plan, graph)


@cache
def planned(kind: str, world_size: int, pins: str) -> Program:
    graph = mixture_graph() if kind == "experts" else traced(kind, hidden=512, seq=64, padded=False)
    return lowered(graph, world_size, pins)


def check(program: Program, world_size: int) -> None:
    """As the first rank, and as the last one: under a causal mask they see unlike parts."""
    assert typecheck(program) == typecheck(program, rank=world_size - 1) > 20


def of_a_split_sequence(kind: str, world_size: int) -> Program:
    pins = (SEQUENCES if kind == "ulysses" else LONG_SEQUENCES)[world_size]
    return planned("llama-untied", world_size, f"{pins} cp_attention={kind} micro_batch=1")


@pytest.mark.parametrize("world_size", CLUSTERS)
@pytest.mark.parametrize(
    ("kind", "targets"),
    [("gather", ["attention_gathered"]), ("ulysses", ["all_to_all"]), ("ring", ["attention_ring", "zigzag_shard"])],
)
def test_a_split_sequence_is_well_typed(kind: str, targets: list[str], world_size: int) -> None:
    program = of_a_split_sequence(kind, world_size)
    assert all(f"{target}(" in program.code for target in targets)
    check(program, world_size)


@pytest.mark.parametrize("world_size", CLUSTERS)
@pytest.mark.parametrize("ranks", EXPERTS)
def test_experts_on_ranks_are_well_typed(ranks: str, world_size: int) -> None:
    program = planned("experts", world_size, EXPERTS[ranks][world_size])
    mesh = program.mesh
    assert mesh.ep == 4 and mesh.ep_data == {"tp": 1, "data": 4, "both": 2}[ranks]
    spread = {axis for p in program.graph.parameters for axis, kind in p.layout if kind.is_split}
    assert ("ep_data" in spread) == (ranks != "tp")
    check(program, world_size)


def test_a_process_with_a_group_is_refused() -> None:
    program = planned("llama-untied", 8, f"{STAGES[8]} {VIRTUAL}")
    assert not dist.is_initialized()
    refuses(UsageError, "beside a process group", run_ranks, Mesh(), lambda rank: typecheck(program))


@pytest.mark.parametrize("world_size", CLUSTERS)
def test_virtual_stages_are_well_typed(world_size: int) -> None:
    program = planned("llama-untied", world_size, f"{STAGES[world_size]} {VIRTUAL}")
    assert [stage.pp_rank for stage in program.stages] == [0, 1, 0, 1]
    assert all(stage.blocks for stage in program.stages)
    check(program, world_size)


@pytest.mark.parametrize("kind", ["gather", "ulysses", "ring"])
def test_a_change_of_type_on_a_split_sequence_is_needed(kind: str) -> None:
    of_sequence = [broken for place, broken in mutants(of_a_split_sequence(kind, 8)) if "_cp_" in place]
    assert of_sequence
    for broken in of_sequence[:6]:
        refuses(InternalError, r"^block \d", typecheck, broken)


MESH = Mesh(cp=2, tp=2)


def _attends(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Causal attention of projections q (keys too) and v; the loss is a sum."""
    q, v = (projected(x).unflatten(-1, (2, 4)).transpose(1, 2) for projected in (self.q, self.v))
    return nn.functional.scaled_dot_product_attention(q, q, v, is_causal=True).sum()


def pair(cp: Mapping[str, str], tp: Mapping[str, str]) -> Pair:
    projections = {name: nn.Linear(8, 8, bias=False, dtype=torch.float64) for name in ("q", "v")}
    graph = trace(model_of(_attends, **projections), (torch.zeros(4, 8, 8, dtype=torch.float64),))
    batch = chooser.batch_typing(graph, 4)
    local = apply.shard(graph, batch, global_batch_size=4, micro_batch_size=4)
    first = named_typing(local, "cp", cp)
    inner = apply.shard(local, first)
    second = named_typing(inner, "tp", tp)
    plan = plan_of(graph, MESH, 4, (batch, first, second), graphs=(graph, local, inner))
    return Pair(whole=graph, traced=graph, plan=plan)


Y = "scaled_dot_product_attention"
SEQUENCE = {"linear": "split b.1", "unflatten": "split d1", "transpose": "split d1", "sum_1": "split d2"}
SPLIT_V = {"linear_1": "split b.1", "unflatten_1": "split d1", "transpose_1": "split d1"}
WHOLE_V = dict.fromkeys(SPLIT_V, "replicate")
PENDING = dict.fromkeys((*SPLIT_V, "sum_1"), "linear 0") | {"linear_1": "split k", Y: "linear 2"}


@pytest.mark.parametrize(
    ("kind", "value", "target"), [("ring", SPLIT_V, "attention_ring"), ("gather", WHOLE_V, "attention_gathered")]
)
def test_a_pending_sum_passes_attention_over_a_split_sequence(kind: str, value: Mapping[str, str], target: str) -> None:
    made = pair({**SEQUENCE, **value, Y: kind}, PENDING)
    program: Program = lower(made.plan, made.traced)
    assert f"{target}(" in program.code
    (attention,) = (op for op in program.graph.ops if op.name == Y)
    assert dict(attention.layouts[0])["tp"] == P
    for rank in range(MESH.world_size):
        assert typecheck(program, rank=rank) > 5
    assert check_pair(made) == ""
