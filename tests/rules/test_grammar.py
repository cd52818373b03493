import itertools
from fractions import Fraction
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import RuleError
from autopar.graph.aliasing import dim_groups
from autopar.graph.graph import TensorSpec
from autopar.plan.mesh import I, P, R, S
from autopar.rules.grammar import Pattern, bind, enumerate_strategies, parse
from autopar.rules.strategy import Strategy
from tests.support.planner.graphs import spec

LINEAR = "b... k+, n k+, n -> b... n; linear 0+2?, 1+2?"


def by_name(line: str, operands: tuple[TensorSpec, ...], output: TensorSpec, size: object = 2) -> dict[str, Strategy]:
    pattern = bind(parse(line), tuple(o.shape for o in operands), (output.shape,))
    found = list(enumerate_strategies(pattern, operands, (output,), Fraction(size)))
    assert len({s.name for s in found}) == len(found)
    return {s.name: s for s in found}


def test_a_linear_has_megatrons_strategies() -> None:
    found = by_name(LINEAR, (spec(4, 6, 8), spec(12, 8), spec(12)), spec(4, 6, 12))
    assert {name: (s.inputs, s.outputs) for name, s in found.items()} == {
        "split b.0": ((S(0), R, R), (S(0),)), "split b.1": ((S(1), R, R), (S(1),)), "split k": ((S(2), S(1), P), (P,)),
        "split n": ((R, S(0), S(0)), (S(2),)), "invariant": ((I, I, I), (I,)), "replicate": ((R, R, R), (R,)),
        "linear 0+2": ((P, R, P), (P,)), "linear 1+2": ((R, P, P), (P,)),
    }  # fmt: skip
    assert found["split k"].work == Fraction(1, 2) and found["replicate"].work == 1


def test_an_absent_bias_is_left_out() -> None:
    found = by_name(LINEAR, (spec(4, 8), spec(12, 8)), spec(4, 12))
    assert found["split k"].inputs == (S(1), S(1)) and found["linear 0"].inputs == (P, R)


def test_a_sum_with_a_scalar_is_not_linear() -> None:
    assert "linear 0" not in by_name("x..., x... -> x...; linear 0+1", (spec(4),), spec(4))
    assert by_name("x..., x... -> x...; linear 0, 1", (spec(4),), spec(4))["linear 0"].inputs == (P,)


def test_without_gradient_invariant_is_written_replicate() -> None:
    found = by_name("x..., x... -> x...", (spec(4), spec(4, grad=False)), spec(4))
    assert found["invariant"].inputs == (I, R)
    none = by_name("x... -> x...", (spec(4, grad=False),), spec(4, grad=False))
    assert set(none) == {"split x.0", "replicate"}


def test_a_truth_value_is_never_partial() -> None:
    found = by_name("x... -> x...; linear 0", (spec(4, grad=False, dtype=torch.bool),), spec(4, grad=False))
    assert "linear 0" not in found


def test_broadcast_dims_are_not_split() -> None:
    found = by_name("x..., x... -> x...", (spec(4, 1, 8), spec(6, 8)), spec(4, 6, 8))
    assert found["split x.0"].inputs == (S(0), R) and found["split x.1"].inputs == (R, S(0))
    assert found["split x.2"].inputs == (S(2), S(1))


def test_a_mask_may_lack_dims() -> None:
    line = "b s+, ~b s+ -> b"
    assert by_name(line, (spec(4, 8), spec(8)), spec(4))["split s"].inputs == (S(1), S(0))
    assert by_name(line, (spec(4, 8), spec(1, 8)), spec(4))["split b"].inputs == (S(0), R)
    with pytest.raises(RuleError, match="do not fit the rule"):
        by_name("b s+, b s+ -> b", (spec(4, 8), spec(8)), spec(4))


@pytest.mark.parametrize(
    ("size", "splits"),
    [(2, {"x.0", "x.1"}), (3, {"x.1"}), (Fraction(1, 2), {"x.0", "x.1"}), (Fraction(4, 3), {"x.0"}), (8, set())],
)
def test_only_dims_that_divide_are_split(size: object, splits: set[str]) -> None:
    found = by_name("x... -> x...", (spec(4, 6),), spec(4, 6), size)
    assert {name.removeprefix("split ") for name in found if name.startswith("split")} == splits


def test_a_label_twice_in_one_tensor_is_not_split() -> None:
    assert "split a" not in by_name("a a -> a", (spec(4, 4),), spec(4))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("a b", "does not have one arrow"),
        ("a -> b -> c", "does not have one arrow"),
        ("a k -> a", "lack the dim k"),
        ("a+ -> a", "is contracted \\(\\+\\), but also"),
        ("a+, a^ -> ", "is contracted \\(\\+\\), but also"),
        ("a-b -> a", "'a-b' is not a dim"),
        ("a... b... -> a... b...", "several '...'"),
        ("a -> a; linear 1", "'linear' .* an operand that is not there"),
        ("a -> a; fast", "Unknown text after ';'"),
    ],
)
def test_malformed_lines_are_refused_with_the_problem(line: str, problem: str) -> None:
    with pytest.raises(RuleError, match=problem):
        parse(line)


def test_sizes_that_contradict_the_line_are_refused() -> None:
    with pytest.raises(RuleError, match="do not fit the rule"):
        bind(parse(LINEAR), ((4, 8), (12, 9)), ((4, 12),))
    with pytest.raises(RuleError, match="do not fit the rule"):
        bind(parse("a b -> a b"), ((4,),), ((4,),))


labels = st.sampled_from("abcdef")


@st.composite
def patterns(draw: st.DrawFn) -> tuple[Pattern, tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """A product-like operator: any operands, an output of some of their labels, the others contracted or whole."""
    operands = draw(st.lists(st.lists(labels, min_size=1, max_size=4, unique=True), min_size=1, max_size=3))
    used = sorted({label for operand in operands for label in operand})
    out = draw(st.lists(st.sampled_from(used), max_size=4, unique=True))
    frozen = draw(st.sets(st.sampled_from(used)))
    sizes = {label: draw(st.sampled_from([1, 2, 3, 4, 6])) for label in used}
    marks = {x: "^" if x in frozen else "" if x in out else "+" for x in used}
    line = ", ".join(" ".join(x + marks[x] for x in o) for o in operands) + " -> " + " ".join(out)
    specs = tuple(spec(*(sizes[x] for x in o), grad=draw(st.booleans())) for o in operands)
    output = spec(*(sizes[x] for x in out), grad=any(s.requires_grad for s in specs))
    return bind(parse(line), tuple(s.shape for s in specs), (output.shape,)), specs, (output,)


@settings(max_examples=150, deadline=None)
@given(patterns(), st.sampled_from([Fraction(2), Fraction(3), Fraction(1, 2)]))
def test_laws_of_every_strategy(
    drawn: tuple[Pattern, tuple[TensorSpec, ...], tuple[TensorSpec, ...]], size: Fraction
) -> None:
    pattern, operands, outputs = drawn
    for strategy in enumerate_strategies(pattern, operands, outputs, size):
        pairs = [*zip(strategy.inputs, operands, strict=True), *zip(strategy.outputs, outputs, strict=True)]
        assert all(t != I or s.requires_grad for t, s in pairs)
        assert all((s.shape[t.dim] / size).denominator == 1 for t, s in pairs if t.is_split)
        kinds = {t.kind for t in strategy.inputs}
        assert not ("I" in kinds and kinds & {"S", "P"})
        if strategy.name.startswith("split"):
            label = strategy.name.removeprefix("split ")
            assert strategy.work == 1 / size
            assert label not in pattern.frozen
            assert (strategy.outputs == (P,)) == (label in pattern.contracted)
            for t, names in zip(strategy.inputs, pattern.inputs, strict=True):
                assert t.is_split == (label in names)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5), st.data())
def test_view_groups_partition_both_shapes_with_equal_products(factors: list[int], data: st.DataObject) -> None:
    def shape() -> tuple[int, ...]:
        cuts = sorted(data.draw(st.sets(st.integers(1, len(factors)), max_size=3)) | {0, len(factors)})
        return tuple(prod(factors[a:b]) for a, b in itertools.pairwise(cuts))

    before, after = shape(), shape()
    groups = dim_groups(before, after)
    assert [i for ins, _ in groups for i in ins] == list(range(sum(len(ins) for ins, _ in groups)))
    assert [j for _, outs in groups for j in outs] == list(range(sum(len(outs) for _, outs in groups)))
    for ins, outs in groups:
        assert prod(before[i] for i in ins) == prod(after[j] for j in outs)
    assert prod(before[i] for ins, _ in groups for i in ins) == prod(factors)
