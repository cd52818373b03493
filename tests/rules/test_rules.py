from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import RuleError
from autopar.graph.graph import Op, TensorSpec
from autopar.plan.mesh import I, P, R, S
from autopar.rules.by_execution import call
from autopar.rules.strategy import Strategy
from autopar.rules.table import RuleTable, default_table, has_rule, register_rule
from tests.rules.test_grammar import shape_of
from tests.support.ranks_in_threads import verify_rule
from tests.support.rule_examples import Example, Maker, spec_of

TP, TWO, make = "tp", Fraction(2), Maker()


def prepared(example: Example) -> tuple[Op, tuple[TensorSpec, ...]]:
    outputs = call(example.op, example.operands)
    return replace(example.op, outputs=tuple(map(spec_of, outputs))), tuple(map(spec_of, example.operands))


def named(example: Example, size: int = 2, axis: str = TP) -> dict[str, Strategy]:
    op, operands = prepared(example)
    return {s.name: s for s in default_table().strategies(op, operands, axis=axis, size=Fraction(size))}


def test_vocabulary_strategies_are_not_offered_on_the_batch_axis() -> None:
    embedding = make.call("aten.embedding.default", make.real(8, 4), make.whole(4, 8), 3)
    loss = make.call("autopar.cross_entropy_sum", make.real(4, 8, 12), make.whole(4, 8), -100, 0.0)
    rows, classes = (named(example)["vocabulary"] for example in (embedding, loss))
    assert (rows.inputs, rows.outputs, rows.target) == ((S(0), R), (P,), "autopar.embedding_vocabulary")
    assert (classes.inputs, classes.outputs) == ((S(2), R), (I,))
    assert not any("vocabulary" in named(example, axis="batch") for example in (embedding, loss))
    assert named(loss, axis="batch")["split b.0"].outputs == (P,)


def test_causal_attention_keeps_its_queries_whole_and_grouped_heads_together() -> None:
    q = make.real(4, 8, 8, 4)
    attention = "aten.scaled_dot_product_attention.default"
    assert "split s" not in named(make.call(attention, q, q, q, None, 0.0, True))
    free = named(make.call(attention, q, q, q, None, 0.1, False))
    assert free["split s"].inputs == (S(2), R, R) and free["split s"].random
    assert not free["replicate"].random
    kv = make.real(4, 2, 8, 4)
    grouped = make.call(attention, q, kv, kv, None, 0.0, True, enable_gqa=True)
    assert named(grouped)["split h"].inputs == (S(1), S(1), S(1))
    assert "split h" not in named(grouped, size=4)


def test_parts_are_drawn_by_themselves_where_no_number_depends_on_another() -> None:
    parts, order = (named(make.call(f"aten.{name}.default", n)) for name, n in (("rand", (4, 6)), ("randperm", 4)))
    assert {name: s.random for name, s in parts.items()} == {"split d0": True, "split d1": True, "replicate": False}
    assert not any(s.random for s in order.values()) and order.keys() == {"replicate"}


def test_rounding_casts_want_the_whole_sum() -> None:
    x = make.real(4, 8)
    assert "linear 0" not in named(make.call("aten.to.dtype", x, torch.bfloat16))
    low = x.detach().bfloat16().requires_grad_()
    assert "linear 0" in named(make.call("aten.to.dtype", low, torch.float32))


def test_an_operator_without_a_rule_is_named_or_repeated_on_request() -> None:
    op, operands = prepared(make.call("aten.linalg_inv.default", make.real(4, 4)))
    assert not has_rule(op.target)
    with pytest.raises(RuleError, match=r"aten.linalg_inv.default.*register_rule"):
        default_table().strategies(op, operands, axis=TP, size=TWO)
    found = default_table().strategies(op, operands, axis=TP, size=TWO, fallback=True)
    wanted = [("invariant", (I,), (I,)), ("replicate", (R,), (R,))]
    assert [(s.name, s.inputs, s.outputs) for s in found] == wanted


def test_a_users_rule_is_one_line_and_stays_in_its_table() -> None:
    table = RuleTable(rules=dict(default_table().rules))
    square = (torch.eye(3, dtype=torch.float64) + make.real(4, 3, 3),)
    register_rule("aten::linalg_inv", "b... n^ m^ -> b... n m", example=square, table=table)
    example = make.call("aten.linalg_inv.default", torch.eye(3, dtype=torch.float64) + make.real(4, 3, 3))
    op, operands = prepared(example)
    assert "split b.0" in {s.name for s in table.strategies(op, operands, axis=TP, size=TWO)}
    assert verify_rule(op, example.operands, size=2, table=table) == []
    assert not has_rule("aten.linalg_inv.default")
    register_rule("aten.linalg_inv.default", "b... n m -> b... n m; linear 0", check=False, table=table)
    failures = verify_rule(op, example.operands, size=2, table=table)
    assert any("linear 0" in line for line in failures)


def test_verification_finds_a_wrong_rule() -> None:
    example = make.call("aten.softmax.int", make.real(4, 8), 1)
    op, _ = prepared(example)
    wrong = [
        Strategy(name="split", inputs=(S(1),), outputs=(S(1),)),
        Strategy(name="linear", inputs=(P,), outputs=(P,)),
        Strategy(name="gradient", inputs=(I,), outputs=(R,)),
        Strategy(name="sum", inputs=(R,), outputs=(P,)),
    ]
    failures = verify_rule(op, example.operands, size=2, strategies=wrong)
    assert len(failures) == len(wrong) and "gradient of operand 0" in failures[2]


sizes = st.sampled_from([1, 2, 3, 4, 6])


@settings(max_examples=40, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=4), st.data())
def test_random_views(factors: list[int], data: st.DataObject) -> None:
    make = Maker()
    example = make.call("aten.view.default", make.real(*shape_of(factors, data)), shape_of(factors, data))
    assert verify_rule(example.op, example.operands, size=2) == []


@settings(max_examples=40, deadline=None)
@given(st.lists(sizes, max_size=3), st.integers(0, 3), st.integers(0, 7), st.sampled_from(["add", "mul", "where"]))
def test_random_broadcasts(shape: list[int], drop: int, ones: int, name: str) -> None:
    make = Maker()
    other = [1 if ones >> i & 1 else n for i, n in enumerate(shape)][min(drop, len(shape)) :]
    operands = (make.real(*shape), make.real(*other))
    mask = [make.truth(*other)] if name == "where" else []
    example = make.call("aten.where.self" if mask else f"aten.{name}.Tensor", *mask, *operands)
    assert verify_rule(example.op, example.operands, size=2) == []


@settings(max_examples=25, deadline=None)
@given(sizes, sizes, sizes, sizes, st.sampled_from([2, 3]))
def test_random_linears_and_attentions(b: int, s: int, k: int, n: int, size: int) -> None:
    make = Maker()
    linear = make.call("aten.linear.default", make.real(b, s, k), make.real(n, k), make.real(n))
    assert verify_rule(linear.op, linear.operands, size=size) == []
    q, kv = make.real(b, n, s, k), make.real(b, n, s + 1, k)
    mask = make.truth(b, 1, s, s + 1) | (torch.arange(s + 1) == 0)
    attention = make.call("aten.scaled_dot_product_attention.default", q, kv, kv.detach(), mask)
    assert verify_rule(attention.op, attention.operands, size=size) == []


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 4]), st.sampled_from([0.0, 0.2]), st.sampled_from([-100, 5]))
def test_vocabulary_parallel_loss_with_ignored_labels(seed: int, size: int, smoothing: float, ignored: int) -> None:
    make = Maker(seed)
    labels = torch.where(make.real(3, 4, grad=False) < 0.5, ignored, make.whole(3, 4, high=8))
    logits = (make.real(3, 4, 8, grad=False) * 200 - 100).requires_grad_()
    example = make.call("autopar.cross_entropy_sum", logits, labels, ignored, smoothing)
    reference = F.cross_entropy(
        logits.view(-1, 8), labels.view(-1), ignore_index=ignored, label_smoothing=smoothing, reduction="sum"
    )
    assert torch.equal(call(example.op, example.operands)[0], reference)
    assert verify_rule(example.op, example.operands, size=size) == []
