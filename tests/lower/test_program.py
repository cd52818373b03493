"""Lowered programs compute what the graph computes: loss and every gradient, on every rank."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from autopar import ops
from autopar.graph.ir import Graph
from autopar.lower.program import Program, from_local_graph
from autopar.mesh import Mesh
from autopar.plan import BlockPlan, Plan, StagePlan
from autopar.rules import apply
from tests.example_plans import single_plan
from tests.lower import mlp
from tests.lower.ranks import interpret, parts, run_program, run_ranks, run_sums, slice_of


def plan_for(graph: Graph, mesh: Mesh, micro_batch_size: int, cuts: tuple[int, ...] = ()) -> Plan:
    bounds = (0, *cuts, len(graph.blocks))
    stages = pairwise(bounds)
    return replace(
        single_plan(),
        mesh=mesh,
        global_batch_size=mlp.BATCH,
        micro_batch_size=micro_batch_size,
        blocks=tuple(BlockPlan(index=b.index, label=b.label, layout=0) for b in graph.blocks),
        stages=tuple(StagePlan(index=i, start=a, stop=b, pp_rank=i) for i, (a, b) in enumerate(stages)),
    )


def mlp_program(
    graph: Graph, mesh: Mesh, *, sequence: bool, micro_batch_size: int = 2, cuts: tuple[int, ...] = ()
) -> Program:
    local = apply.shard(
        graph,
        mlp.batch_typing(graph, Fraction(mlp.BATCH, micro_batch_size)),
        global_batch_size=mlp.BATCH,
        micro_batch_size=micro_batch_size,
    )
    if mesh.tp > 1:
        local = apply.shard(local, mlp.tensor_typing(mesh.tp, sequence=sequence))
    return from_local_graph(plan_for(graph, mesh, micro_batch_size, cuts), local)


def dense(graph: Graph, whole: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    leaves = {p.name: whole[p.name].clone().requires_grad_() for p in graph.parameters}
    loss = interpret(graph, {**whole, **leaves})
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def sharded(
    program: Program, whole: dict[str, torch.Tensor], rank: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the global batch on one rank, micro-batch by micro-batch, data ranks included."""
    graph, mesh = program.graph, program.mesh
    size, count = program.plan.micro_batch_size, program.plan.num_micro_batches
    first = mesh.data_index(rank) * count
    batches = [
        {i.name: whole[i.name][(first + m) * size : (first + m + 1) * size] for i in graph.inputs} for m in range(count)
    ]
    totals = run_sums(program, batches)
    for value in totals.values():
        dist.all_reduce(value, group=ops.group("dp_replicate"))
    leaves = parts(graph, whole, mesh, rank)
    loss = torch.zeros(())
    for batch in batches:
        part = run_program(program, leaves, batch, totals)
        part.backward()
        loss += part.detach()
    dist.all_reduce(loss, group=ops.group("dp_replicate"))
    gradients = {}
    for parameter in graph.parameters:
        gradient = leaves[parameter.name].grad
        assert gradient is not None, parameter.name
        for axis in ("dp_replicate", *parameter.gradient_sum_axes):
            dist.all_reduce(gradient, group=ops.group(axis))
        gradients[parameter.name] = gradient
    return loss, gradients


@pytest.mark.parametrize(
    ("mesh", "sequence", "cuts"),
    [
        (Mesh(), False, ()),
        (Mesh(dp_replicate=2), False, ()),
        (Mesh(tp=2), False, ()),
        (Mesh(tp=2), True, ()),
        (Mesh(tp=4), True, (1,)),
        (Mesh(dp_replicate=2, tp=2), True, (1, 2)),
    ],
    ids=str,
)
def test_every_rank_has_the_loss_and_gradients_of_one_device(mesh: Mesh, sequence: bool, cuts: tuple[int, ...]) -> None:
    graph = mlp.mlp_graph()
    whole = mlp.tensors(graph)
    loss, gradients = dense(graph, whole)
    size = 2 if mesh.data == 1 else 1
    program = mlp_program(graph, mesh, sequence=sequence, micro_batch_size=size, cuts=cuts)
    for rank, (got, found) in enumerate(run_ranks(mesh, lambda rank: sharded(program, whole, rank))):
        torch.testing.assert_close(got, loss, rtol=1e-5, atol=0)
        for parameter in program.graph.parameters:
            expected = slice_of(gradients[parameter.name], parameter.layout, mesh, rank)
            torch.testing.assert_close(found[parameter.name], expected, rtol=1e-4, atol=1e-6)


def test_a_gradient_is_a_pending_sum_only_where_the_parameter_is_used_by_split_work() -> None:
    by_name = {p.name: p for p in mlp_program(mlp.mlp_graph(), Mesh(tp=2), sequence=True).graph.parameters}
    assert by_name["bias0"].gradient_sum_axes == ("tp",)
    assert by_name["up0"].gradient_sum_axes == ()
    by_name = {p.name: p for p in mlp_program(mlp.mlp_graph(), Mesh(tp=2), sequence=False).graph.parameters}
    assert by_name["bias0"].gradient_sum_axes == ()


def test_equal_blocks_are_printed_once_and_lines_say_their_layout() -> None:
    code = mlp_program(mlp.mlp_graph(), Mesh(tp=2), sequence=True).code
    assert code.count("def forward(") == 1 + 1 + 3  # sums, prelude; first layer (from x, not split), layer, head
    assert "h1 = torch.ops.aten.linear.default(" in code
    assert "[2, 8, 16] batch: S(0), tp: S(2)" in code
    assert "autopar_ops_reduce_scatter(y1, 'tp', 1)" in code


def test_a_stage_passes_on_what_it_receives_for_later_ones() -> None:
    program = mlp_program(mlp.mlp_graph(), Mesh(tp=2), sequence=True, cuts=(1, 2))
    first, second, last = program.stages
    assert first.receives == () and first.sends == second.receives == ("r0",)
    assert second.sends == last.receives == ("r1",)
    assert last.is_last and last.sends == () and program.loss in last.blocks[-1].outputs
    assert second.prelude is None and first.prelude is not None and first.prelude.outputs[0] == "x"


def test_dropout_repeats_itself_and_differs_between_operators_seeds_and_shards() -> None:
    graph = mlp.mlp_graph(dropout=0.5)
    whole = mlp.tensors(graph)
    mesh = Mesh(tp=2)
    program = mlp_program(graph, mesh, sequence=False)
    block = program.stages[0].blocks[0]
    assert block.inputs[-1] == "rng_seed"

    def losses(rank: int) -> list[float]:
        leaves = parts(program.graph, whole, mesh, rank)
        batch = {i.name: whole[i.name][:2] for i in program.graph.inputs}
        totals = {"count": torch.tensor(7)}
        return [run_program(program, leaves, batch, totals, seed).item() for seed in (3, 3, 4)]

    first, second = run_ranks(mesh, losses)
    assert first == second, "the stream between the MLPs is invariant"
    assert first[0] == first[1] != first[2]
    code = program.code
    assert "axes = ['dp_replicate', 'dp_shard', 'tp']" in code and "salt = 1" in code
