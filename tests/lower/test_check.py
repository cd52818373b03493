"""The check accepts what lowering makes, and rejects it with any one change of type taken out."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest
import torch.distributed as dist
from torch import fx

from autopar.api import estimate
from autopar.errors import InternalError, UsageError
from autopar.lower.check_types import typecheck
from autopar.lower.program import BlockProgram, Program, lower
from autopar.plan.mesh import Mesh
from tests.lower.test_program import mlp_program
from tests.support.lower import mlp
from tests.support.lower.models import random_program, traced
from tests.support.lower.ranks import run_ranks

CHANGES = ("all_", "reduce_scatter", "shard", "keep_on_first", "invariant_to_replicate")


def is_change(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "").startswith(CHANGES)


def mutants(program: Program) -> Iterator[tuple[str, Program]]:
    """The program with one change of type replaced by its operand, for every change of every block."""
    for s, stage in enumerate(program.stages):
        for b, block in enumerate(stage.blocks):
            for name in [node.name for node in block.module.graph.nodes if is_change(node)]:
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


MESHES = [Mesh(tp=2), Mesh(tp=4), Mesh(dp_replicate=2, dp_shard=2, tp=2), Mesh(pp=2, dp_shard=8, tp=4)]


@pytest.mark.parametrize("mesh", [Mesh(), *MESHES], ids=str)
@pytest.mark.parametrize("sequence", [False, True])
def test_megatron_typings_pass_at_any_world_size(mesh: Mesh, sequence: bool) -> None:
    program = mlp_program(mlp.mlp_graph(dropout=0.1), mesh, sequence=sequence, micro_batch_size=1)
    assert typecheck(program) >= 20
    assert not dist.is_initialized()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_programs_of_models_pass(name: str, mesh: Mesh) -> None:
    for seed in (0, 1):
        assert typecheck(random_program(traced(name), mesh, 1, seed, cuts=(2,))) > 60


@pytest.mark.parametrize("sequence", [False, True])
def test_each_change_of_type_is_needed(sequence: bool) -> None:
    program = mlp_program(mlp.mlp_graph(), Mesh(dp_replicate=2, tp=2), sequence=sequence)
    count = 0
    for _place, broken in mutants(program):
        with pytest.raises(InternalError, match=r"^block \d"):
            typecheck(broken)
        count += 1
    assert count == (4 if sequence else 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_each_change_of_type_of_a_model_is_needed(name: str) -> None:
    program = random_program(traced(name), Mesh(tp=2), 1, 0, cuts=(2,))
    for _place, broken in islice(mutants(program), 0, None, 8):
        with pytest.raises(InternalError, match=r"^block \d"):
            typecheck(broken)


def test_the_error_names_block_and_operator() -> None:
    program = mlp_program(mlp.mlp_graph(), Mesh(tp=2), sequence=False)
    (broken,) = (broken for place, broken in mutants(program) if place == "block 1: y1_tp_I")
    with pytest.raises(
        InternalError, match=r"block 1 \(layers.1\): z1 \(aten.add.Tensor\): The generated program is inconsistent"
    ):
        typecheck(broken)


def test_a_process_with_a_group_is_refused() -> None:
    program = mlp_program(mlp.mlp_graph(), Mesh(tp=2), sequence=False)
    with pytest.raises(UsageError, match="beside a process group"):
        run_ranks(Mesh(), lambda rank: typecheck(program))


WORLDS = {
    8: ("h100-sxm5-80gb:1x8", ["tp=4", "dp_shard=2"]),
    64: ("h100-sxm5-80gb:8x8", ["tp=4", "pp=2", "dp_shard=8"]),
    1024: ("h100-sxm5-80gb:128x8", ["tp=4", "pp=2", "dp_replicate=8", "dp_shard=16"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_the_plan_of_a_search_passes_for_its_whole_world(name: str, world_size: int) -> None:
    graph = traced(name, hidden=2048, seq=1024)
    cluster, pins = WORLDS[world_size]
    plan = estimate(graph, cluster=cluster, global_batch_size=world_size, pins=pins, precision="bf16")
    assert plan.mesh.world_size == world_size
    program = lower(plan, graph)
    assert typecheck(program) > 60
    if world_size > 8:  # on few ranks whole parameters are as fast
        assert any(kind.is_split for p in program.graph.parameters for axis, kind in p.layout if axis == "tp")
