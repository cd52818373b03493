import itertools
from fractions import Fraction
from math import prod
from typing import Any

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
from tests.support.said import refuses

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


FOUND = {
    "an absent bias is left out": (
        LINEAR, (spec(4, 8), spec(12, 8)), spec(4, 12), {"split k": (S(1), S(1)), "linear 0": (P, R)}),
    "a sum with a scalar is not linear": ("x..., x... -> x...; linear 0+1", (spec(4),), spec(4), {"linear 0": None}),
    "a term beside a scalar is": ("x..., x... -> x...; linear 0, 1", (spec(4),), spec(4), {"linear 0": (P,)}),
    "without gradient invariant is written replicate": (
        "x..., x... -> x...", (spec(4), spec(4, grad=False)), spec(4), {"invariant": (I, R)}),
    "without any gradient nothing is invariant": (
        "x... -> x...", (spec(4, grad=False),), spec(4, grad=False),
        {"split x.0": (S(0),), "invariant": None, "replicate": (R,)}),
    "a truth value is never partial": (
        "x... -> x...; linear 0", (spec(4, grad=False, dtype=torch.bool),), spec(4, grad=False), {"linear 0": None}),
    "broadcast dims are not split": (
        "x..., x... -> x...", (spec(4, 1, 8), spec(6, 8)), spec(4, 6, 8),
        {"split x.0": (S(0), R), "split x.1": (R, S(0)), "split x.2": (S(2), S(1))}),
    "a mask may lack a dim": ("b s+, ~b s+ -> b", (spec(4, 8), spec(8)), spec(4), {"split s": (S(1), S(0))}),
    "a mask may have a dim of one": ("b s+, ~b s+ -> b", (spec(4, 8), spec(1, 8)), spec(4), {"split b": (S(0), R)}),
    "a label twice in one tensor is not split": ("a a -> a", (spec(4, 4),), spec(4), {"split a": None}),
}  # fmt: skip
"""Lines, operands and an output; inputs of strategies by name, none where it is not offered."""


@pytest.mark.parametrize(("line", "operands", "output", "inputs"), FOUND.values(), ids=FOUND)
def test_strategies_of_a_line(line: str, operands: tuple[TensorSpec, ...], output: TensorSpec, inputs: Any) -> None:
    found = by_name(line, operands, output)
    assert {name: found[name].inputs if name in found else None for name in inputs} == inputs


@pytest.mark.parametrize(
    ("size", "splits"),
    [(2, {"x.0", "x.1"}), (3, {"x.1"}), (Fraction(1, 2), {"x.0", "x.1"}), (Fraction(4, 3), {"x.0"}), (8, set())],
)
def test_only_dims_that_divide_are_split(size: object, splits: set[str]) -> None:
    found = by_name("x... -> x...", (spec(4, 6),), spec(4, 6), size)
    assert {name.removeprefix("split ") for name in found if name.startswith("split")} == splits


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("a b", "does not have one arrow"), ("a -> b -> c", "does not have one arrow"), ("a k -> a", "lack the dim k"),
        ("a+ -> a", "is contracted \\(\\+\\), but also"), ("a+, a^ -> ", "is contracted \\(\\+\\), but also"),
        ("a-b -> a", "'a-b' is not a dim"), ("a... b... -> a... b...", "several '...'"),
        ("a -> a; linear 1", "'linear' .* an operand that is not there"), ("a -> a; fast", "Unknown text after ';'"),
    ],
)  # fmt: skip
def test_malformed_lines_are_refused_with_the_problem(line: str, problem: str) -> None:
    refuses(RuleError, problem, parse, line)


@pytest.mark.parametrize(
    ("line", "operands", "output"),
    [(LINEAR, ((4, 8), (12, 9)), (4, 12)), ("a b -> a b", ((4,),), (4,)), ("b s+, b s+ -> b", ((4, 8), (8,)), (4,))],
)
def test_sizes_that_contradict_the_line_are_refused(line: str, operands: Any, output: tuple[int, ...]) -> None:
    refuses(RuleError, "do not fit the rule", bind, parse(line), operands, (output,))


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


def shape_of(factors: list[int], data: st.DataObject) -> tuple[int, ...]:
    """Dims that are products of neighbouring factors."""
    cuts = sorted(data.draw(st.sets(st.integers(1, len(factors)), max_size=3)) | {0, len(factors)})
    return tuple(prod(factors[a:b]) for a, b in itertools.pairwise(cuts))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5), st.data())
def test_view_groups_partition_both_shapes_with_equal_products(factors: list[int], data: st.DataObject) -> None:
    before, after = shape_of(factors, data), shape_of(factors, data)
    groups = dim_groups(before, after)
    assert [i for ins, _ in groups for i in ins] == list(range(sum(len(ins) for ins, _ in groups)))
    assert [j for _, outs in groups for j in outs] == list(range(sum(len(outs) for _, outs in groups)))
    for ins, outs in groups:
        assert prod(before[i] for i in ins) == prod(after[j] for j in outs)
    assert prod(before[i] for ins, _ in groups for i in ins) == prod(factors)
