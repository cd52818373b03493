import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from autopar import nn as autopar_nn
from autopar.errors import PlanError, RuleError, UsageError
from autopar.graph.graph import Graph, Ref
from autopar.lower.check_types import typecheck
from autopar.lower.emit import str_name
from autopar.lower.program import Program, from_local_graph, lower
from autopar.lower.read_plan import axis_typing, batch_typing
from autopar.plan.mesh import Mesh, S
from autopar.plan.plan import Plan
from autopar.rules import apply
from autopar.rules.strategy import Typing
from autopar.tracing.trace import trace
from tests.support.close import assert_close
from tests.support.distributed.mixtures import mixture, mixture_graph
from tests.support.lower import chooser, mlp
from tests.support.lower.models import plan_of, random_program, random_typings, traced, whole_tensors
from tests.support.lower.ranks import assert_as_one_device, dense, parts, run_program, run_ranks
from tests.support.small_models import model_of


def mlp_program(graph: Graph, mesh: Mesh, *, sequence: bool, micro: int = 2, cuts: tuple[int, ...] = ()) -> Program:
    batch = chooser.batch_typing(graph, micro)
    local = apply.shard(graph, batch, global_batch_size=mlp.BATCH, micro_batch_size=micro)
    if mesh.tp > 1:
        local = apply.shard(local, mlp.tensor_typing(mesh.tp, sequence=sequence))
    return from_local_graph(plan_of(graph, mesh, micro, cuts=cuts), local)


def test_printed_code(golden: Callable[[str, str], None]) -> None:
    golden("mlp_tp2.py.txt", mlp_program(mlp.mlp_graph(dropout=0.1), Mesh(tp=2), sequence=True).code)


def test_a_stage_passes_on_what_it_receives_for_later_ones() -> None:
    program = mlp_program(mlp.mlp_graph(), Mesh(tp=2), sequence=True, cuts=(1, 2))
    first, second, last = program.stages
    assert first.receives == () and first.sends == second.receives == ("r0",)
    assert second.sends == last.receives == ("r1",)
    assert last.is_last and last.sends == () and program.loss in last.blocks[-1].outputs
    assert second.prelude is None and first.prelude is not None and first.prelude.outputs[0] == "x"


def losses_by_seed(program: Program, whole: dict[str, torch.Tensor]) -> list[list[float]]:
    """Of one micro-batch, on each rank: twice by one seed, and by another."""
    given = {i.name: whole[i.name][:2] for i in program.graph.inputs}
    totals = {ref.name: torch.tensor(7.0) for ref in program.graph.sums}

    def losses(rank: int) -> list[float]:
        leaves = parts(program.graph, whole, program.mesh, rank)
        return [run_program(program, leaves, given, totals, seed).item() for seed in (3, 3, 4)]

    return run_ranks(program.mesh, losses)


def test_dropout_repeats_itself_and_differs_between_operators_seeds_and_shards() -> None:
    graph = mlp.mlp_graph(dropout=0.5)
    program = mlp_program(graph, Mesh(tp=2), sequence=False)
    assert program.stages[0].blocks[0].inputs[-1] == "rng_seed"
    first, second = losses_by_seed(program, mlp.tensors(graph))
    assert first == second, "the stream between the MLPs is invariant"
    assert first[0] == first[1] != first[2]


@pytest.mark.parametrize(("name", "tp"), [("gpt2", 2), ("gpt2", 4), ("llama-untied", 2), ("llama-untied", 4)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_well_typed_program_of_a_model_computes_what_one_device_does(name: str, tp: int, seed: int) -> None:
    graph = traced(name)
    whole = whole_tensors(graph)
    loss, gradients = dense(graph, whole)
    assert_as_one_device(random_program(graph, Mesh(tp=tp), 2, seed, cuts=(2,)), whole, loss, gradients)


def test_a_tied_weight_has_a_copy_on_each_stage_and_one_home_in_a_stage_that_reads_it_twice() -> None:
    graph = traced("gpt2")
    batch = chooser.batch_typing(graph, 2)
    tied = "p_transformer_wte_weight"
    two = lower(plan_of(graph, Mesh(pp=2), 2, (batch,), cuts=(2,)), graph)
    assert two.tied == ((tied, (0, 1)),)
    assert tied in two.stages[0].blocks[0].parameters and tied in two.stages[1].blocks[-1].parameters
    one = lower(plan_of(graph, Mesh(), 2, (batch,)), graph)
    assert one.tied == () and one.stages[0].shared_parameters == (tied,)
    assert all(tied not in b.parameters for b in one.stages[0].blocks)
    assert tied in one.stages[0].blocks[0].inputs and tied in one.stages[0].blocks[-1].inputs
    assert len(set(one.stages[0].parameters)) == len(graph.parameters)


def test_attention_dropout_draws_from_the_stream_of_the_program() -> None:
    graph = traced("gpt2", 0.5)
    program = lower(plan_of(graph, Mesh(), 2, (chooser.batch_typing(graph, 2),)), graph)
    assert "seeded.attention(" in program.code and "F.scaled_dot_product_attention" not in program.code
    ((first, again, other),) = losses_by_seed(program, whole_tensors(graph))
    assert first == again != other


def _chosen(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Orders rows several times in blocks of their own: later calls have the names that torch gives further outputs."""
    kept = []
    for layer in self.layers:
        x, order = layer(x).topk(4)
        kept.append((x, order))
    return torch.stack([y.gather(-1, order) for y, order in kept]).square().sum()


def test_no_output_has_the_name_of_another_operator() -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    graph = trace(model_of(_chosen, layers=layers), (torch.zeros(2, 4),))
    refs = [Ref(op.name, i) for op in graph.ops for i in range(len(op.outputs))]
    assert {str_name(ref) for ref in refs} >= {"topk", "topk_1", "topk_2"}
    assert len({str_name(ref) for ref in refs}) == len(refs)


WAYS = {"autopar.experts", "autopar.experts_split", "autopar.experts_dispatch"}


def test_loss_and_gradients_are_those_of_one_device_whatever_the_way() -> None:
    graph = mixture_graph()
    whole = whole_tensors(graph)
    loss, gradients = dense(graph, whole)
    seen = set()
    for tp, seed in ((2, 0), (2, 1), (2, 2), (2, 3), (2, 4), (4, 5), (4, 6)):
        made = random_program(graph, Mesh(tp=tp), 2, seed)
        assert min(typecheck(made), typecheck(made, Mesh(dp_shard=16, tp=tp))) > 20
        assert_as_one_device(made, whole, loss, gradients)
        seen |= {op.target for op in made.graph.ops} & WAYS
    assert seen == WAYS, "the seeds cover every way"


def test_traced_and_eager_agree_and_experts_without_tokens_have_a_gradient() -> None:
    model = mixture().build()
    graph = mixture_graph()
    batch = {"input_ids": torch.randint(0, 64, (4, 8)), "labels": torch.randint(0, 64, (4, 8))}
    with torch.no_grad():
        for layer in model.layers:
            layer.router.weight[0] -= 100 * model.embed.weight.mean(0)
    loss = model(**batch)
    loss.backward()
    values = {p.name: model.get_parameter(p.fqn).detach() for p in graph.parameters}
    found, gradients = dense(graph, {**values, **batch})
    assert_close(found, loss)
    for parameter in graph.parameters:
        assert_close(gradients[parameter.name], model.get_parameter(parameter.fqn).grad)
    experts = autopar_nn.Experts(num_experts=3, hidden=4, ffn=8)
    x = torch.randn(5, 4)
    experts(x, torch.ones(5, 1), torch.ones(5, 1, dtype=torch.int64)).sum().backward()
    assert experts.gate.grad is not None and not experts.gate.grad[[0, 2]].any() and experts.gate.grad[1].any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    experts = autopar_nn.Experts(num_experts=3, hidden=4, ffn=8)
    with pytest.raises(UsageError, match="tensors given to the experts do not fit"):
        experts(torch.randn(5, 3), torch.ones(5, 1), torch.ones(5, 1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("activation", "says"),
    [
        ("", "Unknown activation ''"),
        ("swish", "Unknown activation 'swish'"),
        ("silu limt=7", "Unknown option of the activation silu 'limt'. Did you mean 'limit'?"),
        ("silu limit=x", "The limit of the activation is 'x'. Give a number"),
    ],
)
def test_an_activation_that_is_none_is_told(activation: str, says: str) -> None:
    experts = autopar_nn.Experts(num_experts=3, hidden=4, ffn=8, activation=activation)
    with pytest.raises(UsageError, match=re.escape(says)):
        experts(torch.randn(5, 4), torch.ones(5, 1), torch.ones(5, 1, dtype=torch.int64))


GRAPH = "llama-untied"


def typings() -> tuple[Typing, Typing]:
    return random_typings(traced(GRAPH), 2, 2, 5)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(traced(GRAPH), Mesh(tp=2), 2, typings())


def with_block(plan: Plan, index: int, axis: str, **changes: object) -> Plan:
    layout = plan.layouts[index]
    changed = tuple(replace(t, **changes) if t.axis == axis else t for t in layout.typings)
    layouts = (*plan.layouts[:index], replace(layout, typings=changed), *plan.layouts[index + 1 :])
    return replace(plan, layouts=layouts)


def test_names_give_the_same_strategies(plan: Plan) -> None:
    graph = traced(GRAPH)
    batch, tensor = typings()
    found = batch_typing(plan, graph).strategies
    assert {name: (s.name, s.inputs, s.outputs) for name, s in found.items()} == {
        name: (s.name, s.inputs, s.outputs) for name, s in batch.strategies.items()
    }
    local = apply.shard(graph, batch, global_batch_size=4, micro_batch_size=2)
    assert axis_typing(plan, local, "tp").strategies == {op.name: tensor.strategies[op.name] for op in graph.ops}


def test_faults_of_a_plan_are_named(plan: Plan) -> None:
    graph = traced(GRAPH)
    names = plan.layouts[1].typings[1].strategies
    faults = {
        "for this model": replace(plan, model=replace(plan.model, fingerprint="other")),
        "number of blocks of the plan does not match": replace(plan, blocks=plan.blocks[:-1]),
        "no layout 99": replace(plan, blocks=(replace(plan.blocks[0], layout=99), *plan.blocks[1:])),
        "Missing types and strategies of the block on axis tp": replace(
            plan, layouts=tuple(replace(x, typings=x.typings[:1]) for x in plan.layouts)
        ),
        "number of strategies does not match": with_block(plan, 1, "tp", strategies=names[:-1]),
        "has no strategy 'nonsense'": with_block(plan, 1, "tp", strategies=("nonsense", *names[1:])),
        "types of the block's parameters does not match": with_block(plan, 1, "tp", parameters=()),
        "strategies of the prelude does not match": replace(plan, prelude=()),
    }
    for problem, broken in faults.items():
        with pytest.raises(PlanError, match=problem):
            lower(broken, graph)


def test_a_tied_parameter_has_one_type_at_rest() -> None:
    graph = traced("gpt2")
    batch = chooser.batch_typing(graph, 2)
    plan = plan_of(graph, Mesh(), 2, (batch,))
    broken = with_block(plan, 0, "batch", parameters=tuple(S(0) for _ in graph.block_parameters(graph.blocks[0])))
    with pytest.raises((PlanError, RuleError), match="a parameter two types on axis batch"):
        lower(broken, graph)
