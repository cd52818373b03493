import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from autopar import nn as autopar_nn
from autopar.errors import PlanError, RuleError, UsageError
from autopar.graph.graph import Ref
from autopar.lower.emit import str_name
from autopar.lower.program import lower
from autopar.plan.mesh import Mesh, S
from autopar.plan.plan import Plan
from autopar.rules import apply
from autopar.tracing.trace import trace
from tests.support.distributed.plans import make_plan
from tests.support.lower import chooser
from tests.support.lower.models import plan_of, traced
from tests.support.said import refuses
from tests.support.small_models import model_of


def _kept(self: torch.nn.Module, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = x + layer(x)
    return x.square().sum() / keep.ne(0).sum()


MEGATRON = ("split n", "split x.2", "split x.2", "split k", "split x.1")
"""Strategies of a layer: its hidden dim is split, and between layers the sequence."""


def test_printed_code(golden: Callable[[str, str], None]) -> None:
    parts = lambda: (torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16))
    layers = torch.nn.ModuleList(torch.nn.Sequential(*parts()) for _ in range(2))
    graph = trace(model_of(_kept, layers=layers), (torch.zeros(4, 8, 16), torch.ones(4, 8, dtype=torch.int64)))
    batch = chooser.batch_typing(graph, 2)
    local = apply.shard(graph, batch, global_batch_size=4, micro_batch_size=2)
    strategies = zip(graph.ops, (*MEGATRON, *MEGATRON, "split x.1", "split d1", "linear 0"), strict=True)
    tensor = chooser.named_typing(local, "tp", {op.name: strategy for op, strategy in strategies})
    rests = {p.name: S(int("3" in p.fqn)) for p in graph.parameters if not p.fqn.endswith("3.bias")}
    typings = batch, replace(tensor, parameters=rests)
    golden("mlp_tp2.py.txt", lower(plan_of(graph, Mesh(tp=2), 2, typings, graphs=(graph, local)), graph).code)


def _chosen(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Orders rows several times in blocks of their own: later calls have the names that torch gives further outputs."""
    for layer in self.layers:
        x = torch.add(*layer(x).topk(4))
    return x.square().sum()


def test_no_output_has_the_name_of_another_operator() -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    graph = trace(model_of(_chosen, layers=layers), (torch.zeros(2, 4),))
    refs = [Ref(op.name, i) for op in graph.ops for i in range(len(op.outputs))]
    assert {str_name(ref) for ref in refs} >= {"topk", "topk_1", "topk_2"}
    assert len({str_name(ref) for ref in refs}) == len(refs)


@pytest.mark.parametrize(
    ("activation", "width", "says"),
    [
        ("silu", 3, "tensors given to the experts do not fit"),
        ("", 4, "Unknown activation ''"),
        ("swish", 4, "Unknown activation 'swish'"),
        ("silu limt=7", 4, "Unknown option of the activation silu 'limt'. Did you mean 'limit'?"),
        ("silu limit=x", 4, "The limit of the activation is 'x'. Give a number"),
    ],
)
def test_tensors_that_do_not_fit_and_activations_that_are_none_are_told(activation: str, width: int, says: str) -> None:
    experts = autopar_nn.Experts(num_experts=3, hidden=4, ffn=8, activation=activation)
    given = torch.randn(5, width), torch.ones(5, 1), torch.ones(5, 1, dtype=torch.int64)
    refuses(UsageError, re.escape(says), experts, *given)


GRAPH = "llama-untied"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(traced(GRAPH), Mesh(tp=2), global_batch_size=4, micro_batch_size=2)


def with_block(plan: Plan, index: int, axis: str, **changes: object) -> Plan:
    layout = plan.layouts[index]
    changed = tuple(replace(t, **changes) if t.axis == axis else t for t in layout.typings)
    layouts = (*plan.layouts[:index], replace(layout, typings=changed), *plan.layouts[index + 1 :])
    return replace(plan, layouts=layouts)


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
        refuses(PlanError, problem, lower, broken, graph)


def test_a_tied_parameter_has_one_type_at_rest() -> None:
    graph = traced("gpt2")
    plan = make_plan(graph, Mesh(), global_batch_size=4, micro_batch_size=2)
    broken = with_block(plan, 0, "batch", parameters=tuple(S(0) for _ in graph.block_parameters(graph.blocks[0])))
    refuses((PlanError, RuleError), "a parameter two types on axis batch", lower, broken, graph)
