from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autopar.errors import InternalError
from autopar.graph.graph import Graph, Op, Parameter, Ref
from autopar.lower.check_sums import check_gradients
from autopar.lower.program import Program, lower
from autopar.plan.mesh import I, Mesh, R
from autopar.rules import apply
from autopar.rules import table as rules
from autopar.rules.strategy import Strategy
from tests.support.graphs_by_hand import graph_of_ops
from tests.support.lower.chooser import named_typing
from tests.support.lower.models import plan_of
from tests.support.planner.graphs import op, spec
from tests.support.said import refuses
from tools.campaigns import program_types as check
from tools.campaigns.program_types import typecheck

SAMPLES = 4
Names = Mapping[str, str]


def graph(*, negated: bool) -> Graph:
    """Two convolutions of x, the second by a parameter ``negated`` or as it is; the loss is the sum of squares. The checker does not
    know convolutions: one of a sum that is pending on another axis passes as the program states."""
    shape, weight = (SAMPLES, 4, 8), (4, 4, 1)
    ops = (
        *((op("v", "aten.neg.default", (Ref("w"),), *weight),) if negated else ()),
        op("y", "aten.conv1d.default", (Ref("x"), Ref("u")), *shape),
        op("z", "aten.conv1d.default", (Ref("y"), Ref("v" if negated else "w")), *shape),
        op("square", "aten.mul.Tensor", (Ref("z"), Ref("z")), *shape),
        op("loss", "aten.sum.default", (Ref("square"),)),
    )
    parameters = [Parameter(name=name, fqn=f"m.{name}", spec=spec(*weight)) for name in ("u", "w")]
    mixing = "z"  # values may change their type over data ranks
    return graph_of_ops("convolution", ops, {"x": spec(*shape, grad=False)}, parameters, mixing=mixing)


def program(mesh: Mesh, *, negated: bool = False, **names: Names) -> Program:
    """Strategies by axis and operator, in the order of the axes."""
    traced = local = graph(negated=negated)
    graphs, typings = [], []
    for axis, chosen in names.items():
        typings.append(named_typing(local, axis, chosen))
        graphs.append(local)
        sizes = {"global_batch_size": SAMPLES, "micro_batch_size": SAMPLES // 2} if axis == apply.BATCH else {}
        local = apply.shard(local, typings[-1], **sizes)
    return lower(plan_of(traced, mesh, SAMPLES // 2, tuple(typings), graphs=tuple(graphs)), traced)


SPLIT = {"v": "replicate", "y": "split b", "z": "split b", "square": "split x.0", "loss": "split d0"}
WHOLE = dict.fromkeys(SPLIT, "invariant")
PENDING = WHOLE | {"y": "split c", "z": "linear 0"}
"""On ``tp``: the first convolution is a pending sum, and so is the second."""


@pytest.fixture
def wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight of the second convolution of split samples is read as I, where R is right."""
    right = rules.RuleTable.strategies

    def strategies(self: rules.RuleTable, one: Op, *given: Any, **options: Any) -> tuple[Strategy, ...]:
        found = right(self, one, *given, **options)
        wrong = {s: replace(s, inputs=tuple(I if kind == R else kind for kind in s.inputs)) for s in found}
        return tuple(wrong[s] if (one.name, s.name) == ("z", "split b") else s for s in found)

    monkeypatch.setattr(rules.RuleTable, "strategies", strategies)


def assert_refused(made: Program, monkeypatch: pytest.MonkeyPatch, *said: str) -> None:
    caught = refuses(InternalError, r"^block 0 \(m\): ", typecheck, made)
    assert [words for words in said if words not in str(caught)] == []
    monkeypatch.setattr(check, "check_program", lambda program: None)
    assert typecheck(made) > 0  # the types of single operators do not show it


def test_a_gradient_that_is_counted_once_for_each_data_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = program(Mesh(dp_replicate=2, tp=2), batch=WHOLE | {"y": "split b"}, tp=PENDING)
    said = "z (aten.conv1d.default)", "parameter m.w, R on batch, is summed", "complete on each (z is I)"
    assert_refused(made, monkeypatch, *said)


@pytest.mark.usefixtures("wrong_rule")
def test_a_gradient_without_its_sum_over_the_ranks_of_an_axis_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = program(Mesh(dp_shard=2, cp=2, tp=2), batch=SPLIT, cp=SPLIT, tp=PENDING)
    said = "z (aten.conv1d.default)", "parameter m.w, I on cp, lacks its sum", "y of type S(0) beside it"
    assert_refused(made, monkeypatch, *said)


def test_the_same_program_with_the_right_types_passes() -> None:
    mesh = Mesh(dp_shard=2, cp=2, tp=2)
    made = program(mesh, batch=SPLIT, cp=SPLIT, tp=PENDING)
    assert typecheck(made) > 0
    assert {p.name: p.gradient_sum_axes for p in made.graph.parameters} == {"u": ("cp",), "w": ("cp", "tp")}


@pytest.mark.usefixtures("wrong_rule")
def test_a_value_made_of_a_parameter_needs_the_sum_over_samples() -> None:
    made = program(Mesh(dp_replicate=2), negated=True, batch=SPLIT | {"v": "invariant"})
    said = r"z \(aten.conv1d.default\): The gradient of v, I on batch, lacks its sum"
    refuses(InternalError, said, check_gradients, made.graph, "batch")


def test_a_forgotten_sum_at_rest_is_refused() -> None:
    """The parameter is read as I, as if the runtime did not sum what ``cp`` leaves pending."""
    made = program(Mesh(dp_shard=2, cp=2), batch=SPLIT, cp=SPLIT)
    parameters = tuple(replace(p, gradient_sum_axes=()) for p in made.graph.parameters)
    forgotten = replace(made, graph=replace(made.graph, parameters=parameters))
    refuses(InternalError, r"parameter m.w, I on cp, lacks its sum over the ranks .* beside it", typecheck, forgotten)
