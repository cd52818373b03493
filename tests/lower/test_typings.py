"""Reading a plan's typings back: exact, and faults named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import PlanError, RuleError
from autopar.lower.program import lower
from autopar.lower.read_plan import axis_typing, batch_typing, local_graph
from autopar.plan.mesh import Mesh, S
from autopar.plan.plan import Plan
from autopar.rules import apply
from autopar.rules.strategy import Typing
from tests.support.lower import chooser
from tests.support.lower.models import plan_of, random_typings, traced

GRAPH = "llama-untied"


def typings() -> tuple[Typing, Typing]:
    return random_typings(traced(GRAPH), 2, 2, 5)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(traced(GRAPH), Mesh(tp=2), 2, typings())


def with_block(plan: Plan, index: int, axis: str, **changes: object) -> Plan:
    layout = plan.layouts[index]
    changed = tuple(replace(t, **changes) if t.axis == axis else t for t in layout.typings)  # type: ignore[arg-type]
    layouts = (*plan.layouts[:index], replace(layout, typings=changed), *plan.layouts[index + 1 :])
    return replace(plan, layouts=layouts)


def test_names_give_the_same_strategies(plan: Plan) -> None:
    graph = traced(GRAPH)
    batch, tensor = typings()
    assert batch_typing(plan, graph).strategies == batch.strategies
    local = apply.shard(graph, batch, global_batch_size=4, micro_batch_size=2)
    assert axis_typing(plan, local, "tp").strategies == {op.name: tensor.strategies[op.name] for op in graph.ops}


def test_every_name_is_made_once_and_before_it_is_read(plan: Plan) -> None:
    local = local_graph(plan, traced(GRAPH))
    known = {leaf.name for leaf in (*local.inputs, *local.parameters, *local.buffers)}
    for op in (*local.prelude, *local.ops):
        assert op.name not in known
        assert all(ref.name in known for ref in op.operands)
        assert len(op.layouts) == len(op.outputs)
        known.add(op.name)


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
