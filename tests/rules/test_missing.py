import pickle
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from autopar.errors import RuleError
from autopar.graph.graph import Graph, Op, Parameter, Ref, TensorSpec
from autopar.rules.by_execution import verify_rule
from autopar.rules.missing import adopt, complete, discover_rule, extra_rules
from autopar.rules.table import RuleTable, has_rule, register_rule, torch_rules
from tests.support.graphs_by_hand import graph_of_ops
from tests.support.rule_examples import Maker
from tests.support.said import refuses

LIBRARY = torch.library.Library("autopar_test", "DEF")
OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "gated(Tensor x, Tensor w)": lambda x, w: torch.sigmoid(x) * w,
    "pairs(Tensor x)": lambda x: x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) ** 2,
    "whole(Tensor x)": lambda x: x / x.norm(),
    "gaps(Tensor x, Tensor y)": lambda x, y: (x - y).norm(dim=-1).sum(),
    "hinges(Tensor x, Tensor y)": lambda x, y: (1 - x.sum(-1) * y).clamp(min=0).sum(),
    "above(Tensor x)": lambda x: torch.where(x < 0, x.flip(0), x),
    "nothing(Tensor x, Tensor y)": lambda x, y: (x * 0 * y).sum(),
}
for text, function in OPERATORS.items():
    LIBRARY.define(f"{text} -> Tensor")
    LIBRARY.impl(text.partition("(")[0], function, "CompositeImplicitAutograd")


def graph_of(target: str, *shapes: tuple[int, ...]) -> Graph:
    real = [TensorSpec(shape=shape, dtype=torch.float32, requires_grad=True) for shape in shapes]
    names = [f"p{i}" for i in range(1, len(shapes))]
    ops = (
        Op(name="y", target=target, args=(Ref("x"), *map(Ref, names)), outputs=(real[0],)),
        Op(name="loss", target="aten.sum.default", args=(Ref("y"),), outputs=(replace(real[0], shape=()),)),
    )
    parameters = [Parameter(name=n, fqn=n, spec=s) for n, s in zip(names, real[1:], strict=True)]
    return graph_of_ops("custom", ops, {"x": real[0]}, parameters)


def names(table: RuleTable, graph: Graph, size: int) -> set[str]:
    op = graph.ops[0]
    specs = tuple(graph.spec(ref) for ref in op.operands)
    return {s.name for s in table.strategies(op, specs, axis="tp", size=Fraction(size))}


@pytest.fixture
def table() -> RuleTable:
    return RuleTable(rules=torch_rules())


def test_an_unknown_operator_is_found(table: RuleTable) -> None:
    graph = graph_of("autopar_test.gated.default", (2, 12, 20), (20,))
    (found,) = complete(graph, table=table)
    assert found.line == "b c a, a -> b c a; linear 1"
    assert {"split a", "split b", "split c", "linear 1"} <= names(table, graph, 2)
    assert not has_rule(found.target, table=table), "found is not declared"


def test_a_split_that_holds_for_two_ranks_alone_is_no_rule(table: RuleTable) -> None:
    graph = graph_of("autopar_test.pairs.default", (2, 16))
    (found,) = complete(graph, table=table)
    assert found.line == "a b^ -> a b^"
    assert names(table, graph, 2) == {"split a", "invariant", "replicate"}
    example = torch.rand(8, 8, dtype=torch.float64).requires_grad_()
    assert verify_rule(graph.ops[0], [example], size=8, table=table) == []


def test_an_operator_for_which_nothing_is_found_is_repeated_and_named_with_the_reason(table: RuleTable) -> None:
    graph = graph_of("autopar_test.whole.default", (2, 12))
    (found,) = complete(graph, table=table)
    assert (found.line, found.why) == ("", "no dim can be split")
    assert complete(graph, table=table) == (found,), "the reason is said again"
    assert names(table, graph, 2) == {"invariant", "replicate"}
    (found,) = complete(graph_of("autopar_test.whole.default", ()), table=table)
    assert (found.line, found.why) == ("", "no operand has a dim")


def of_margins(reduction: int) -> Graph:
    """Torch's own: of targets that are neither 1 nor -1 it is zero, so that it seemed to add up over its features."""
    graph = graph_of("aten.cosine_embedding_loss.default", (2, 12), (2, 12), (2,))
    *rest, last = graph.parameters
    parameters = (*rest, replace(last, spec=replace(last.spec, requires_grad=False)))
    loss = replace(graph.ops[0], args=(*graph.ops[0].args, 0.0, reduction))
    return replace(graph, parameters=parameters, ops=(loss, *graph.ops[1:]))


def of_phases() -> Graph:
    """Numbers that are zero or one have none, which told nothing."""
    graph = graph_of("aten.angle.default", (2, 12))
    (x,) = graph.inputs
    return replace(graph, inputs=(replace(x, spec=replace(x.spec, dtype=torch.complex64)),))


@pytest.mark.parametrize(("graph", "line"), [
    (graph_of("autopar_test.gaps.default", (2, 12), (2, 12)), "a+ b^, a+ c^ -> "),  # equal operands have no gap
    (graph_of("autopar_test.hinges.default", (2, 12), (2,)), "a+ b^, a+ -> "),  # positive ones pass no hinge at all
    (graph_of("autopar_test.above.default", (2, 12)), "a^ b -> a^ b"),
    (graph_of("autopar_test.nothing.default", (2, 12), (2, 12)), ""),  # zeros are the sum of any parts
    (of_margins(0), "a b^, a c^, a -> a"), (of_margins(1), ""), (of_margins(2), "a+ b^, a+ c^, a+ -> "),
    (of_phases(), "a b -> a b"),
])  # fmt: skip
def test_no_rule_is_found_by_inputs_that_tell_nothing(graph: Graph, line: str, table: RuleTable) -> None:
    (found,) = complete(graph, table=table)
    assert found.line == line


def test_a_declared_rule_is_checked_by_execution() -> None:
    table = RuleTable(rules={})
    register_rule("autopar_test::gated", "b... n, n -> b... n; linear 1", table=table)
    assert has_rule("autopar_test.gated.default", table=table)
    with pytest.raises(RuleError, match=r"linear 0.*output 0: P differs"):
        register_rule("autopar_test::gated", "b... n, n -> b... n; linear 0", table=table)
    with pytest.raises(RuleError, match="Give arguments that it takes"):
        register_rule("autopar_test::gated", "b... n, m -> b... n m", table=table)
    example = torch.rand(4, 8, dtype=torch.float64), 1
    register_rule("aten::cumsum", "b n^ -> b n; linear 0", example=example, table=table)
    refuses(RuleError, "split n", register_rule, "aten::cumsum", "b n -> b n", example=example, table=table)
    register_rule("autopar_test::gated", "b... n, n -> b... n; linear 0", table=table, check=False)


def test_rules_that_are_not_shipped_reach_another_process() -> None:
    graph = graph_of("autopar_test.gated.default", (2, 12, 20), (20,))
    found, declared = RuleTable(rules=torch_rules()), RuleTable(rules=torch_rules())
    assert extra_rules(graph, table=found) == {}
    complete(graph, table=found)
    declared.register("autopar_test::gated", "b c a, a -> b c a")
    for table in (found, declared):
        elsewhere = RuleTable(rules=torch_rules())
        adopt(pickle.loads(pickle.dumps(extra_rules(graph, table=table))), table=elsewhere)
        complete(graph, table=elsewhere)
        assert names(elsewhere, graph, 2) == names(table, graph, 2)
        assert extra_rules(graph, table=elsewhere) == extra_rules(graph, table=table)
    assert names(found, graph, 2) != names(declared, graph, 2)


def test_a_graph_has_the_rules_of_its_own_lengths_whatever_was_seen_before() -> None:
    table, alone = RuleTable(rules=torch_rules()), RuleTable(rules=torch_rules())
    complete(graph_of("autopar_test.gated.default", (2, 12, 20), (12,)), table=table)  # lengths that it does not take
    graph = graph_of("autopar_test.gated.default", (2, 12, 20), (20,))
    assert complete(graph, table=table) == complete(graph, table=alone)
    assert names(table, graph, 2) == names(alone, graph, 2)


make = Maker()

CALLS = {
    "linalg_inv": (make.call("aten.linalg_inv.default", make.real(4, 6, 6) + 9), "a b^ c^ -> a d^ e^"),
    "relu": (make.call("aten.relu.default", make.real(4, 6)), "a b -> a b"),
    "add": (make.call("aten.add.Tensor", make.real(4, 6), make.real(4, 6)), "a b, a b -> a b; linear 0+1"),
    "mm": (make.call("aten.mm.default", make.real(4, 6), make.real(6, 8)), "c a+, a+ b -> c b; linear 0, 1"),
    "softmax": (make.call("aten.softmax.int", make.real(4, 6), 1), "a b^ -> a c^"),
    "cdist": (make.call("aten.cdist.default", make.real(2, 4, 8), make.real(2, 6, 8)), "a c d^, a b e^ -> a c b"),
}


@pytest.mark.parametrize("name", CALLS)
def test_discovered_lines_hold_and_say_what_is_known(name: str) -> None:
    example, expected = CALLS[name]
    line = discover_rule(example.op, example.operands)
    assert line == expected
    table = RuleTable(rules={})
    table.register(example.op.target, line)
    assert verify_rule(example.op, example.operands, size=2, table=table) == []


def test_a_random_operator_has_no_rule_to_discover() -> None:
    example = make.call("aten.dropout.default", make.real(4, 6), 0.5, True)
    refuses(RuleError, "different results when it runs twice", discover_rule, example.op, example.operands)
