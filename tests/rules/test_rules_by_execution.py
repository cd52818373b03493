"""Every rule of the table, run: each strategy forward and backward against one device."""

from __future__ import annotations

import time
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from autopar.rules.by_execution import _gloo, _in_threads, call, verify_rule
from autopar.rules.grammar import Pattern, enumerate_strategies
from autopar.rules.table import RuleTable, default_table, torch_rules
from tests.support.rule_examples import (
    OUTSIDE,
    Example,
    Maker,
    elementwise,
    every,
    experts,
    losses,
    moved,
    products,
    reductions,
    spec_of,
    whole,
)

FAMILIES = {
    "elementwise": lambda make: elementwise(default_table(), make),
    "moved": moved,
    "whole": whole,
    "reductions": reductions,
    "products": products,
    "losses": losses,
    "experts": experts,
}


def needs_other_axis(example: Example) -> bool:
    """Operators that an earlier axis made run on ranks of that axis."""
    return "other" in (*example.op.args, *(value for _, value in example.op.kwargs))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_strategy_gives_what_one_device_gives(family: str, size: int) -> None:
    examples = [e for e in FAMILIES[family](Maker(size)) if not needs_other_axis(e)]
    failures = [line for e in examples for line in verify_rule(e.op, e.operands, size=size, seed=size)]
    assert len(examples) > 7
    assert failures == []


def test_no_rank_begins_before_all_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick one closed its connections while others still made theirs (`Connection closed by peer`)."""
    made: list[int] = []
    seen: list[int] = []

    def slowly(store: Any, rank: int, size: int, name: str) -> Any:
        group = _gloo(store, rank, size, name)
        time.sleep(0.1 * rank)
        made.append(rank)
        return group

    monkeypatch.setattr("autopar.rules.by_execution._gloo", slowly)
    _in_threads(lambda index, group: seen.append(len(made)), 3)
    assert seen == [3, 3, 3]


def test_every_rule_has_an_example() -> None:
    declared = RuleTable(rules=torch_rules())  # not those that other tests have found by execution
    covered = {example.target for example in every(declared)}
    assert set(declared.rules) - covered == OUTSIDE


# Frozen for reasons that a small run does not show: a convolution whose windows do not overlap could split
# its window, and attention's kernels want the values as wide as the keys.
_HARMLESS = {
    ("aten.conv2d.default", "w0"),
    ("aten.conv2d.default", "w1"),
    ("aten.scaled_dot_product_attention.default", "f"),
    ("autopar.attention", "f"),
}


@pytest.mark.slow
def test_no_frozen_dim_could_be_split() -> None:
    """Mutation: letting any frozen label free gives a strategy that the run rejects, by chance at most once."""
    first, second = _survivors(0), _survivors(1)
    assert first & second <= _HARMLESS


def thawed(pattern: Pattern, label: str) -> Pattern:
    """The same pattern with a frozen label let free."""
    inside = all(label in labels for labels in pattern.outputs)
    contracted = pattern.contracted if inside else pattern.contracted | {label}
    return replace(pattern, frozen=pattern.frozen - {label}, contracted=contracted)


def _survivors(seed: int) -> set[tuple[str, str]]:
    table, size = default_table(), Fraction(2)
    survivors, mutants = set(), 0
    for example in every(table, seed):
        if needs_other_axis(example):
            continue
        dense = call(example.op, example.operands)
        outputs = tuple(spec_of(tensor) for tensor in dense)
        operands = tuple(spec_of(tensor) for tensor in example.operands)
        op = replace(example.op, outputs=outputs)
        pattern = table.pattern(op, operands)
        for label in pattern.frozen:
            found = enumerate_strategies(thawed(pattern, label), operands, outputs, size)
            mutant = next((s for s in found if s.name == f"split {label}"), None)
            if mutant is not None and not mutant.random:
                mutants += 1
                if not verify_rule(op, example.operands, size=2, strategies=[mutant]):
                    survivors.add((op.target, label))
    assert mutants > 100
    return survivors
