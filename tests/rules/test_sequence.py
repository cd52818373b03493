"""Attention over a split sequence: every strategy by execution, mutants of it, and the zig-zag order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.ops import sequence as sequence_ops
from autopar.rules import table as rules
from autopar.rules.by_execution import _in_threads, verify_rule
from autopar.rules.strategy import Strategy
from tests.support.rule_examples import Example, Maker, spec_of

ATTENTION = "aten.scaled_dot_product_attention.default"


def offered(example: Example, size: int, axis: str = "cp") -> dict[str, Strategy]:
    result = torch.nn.functional.scaled_dot_product_attention(*example.operands[:3], enable_gqa=True)
    op = replace(example.op, outputs=(spec_of(result),))
    operands = tuple(spec_of(tensor) for tensor in example.operands)
    return {s.name: s for s in rules.default_table().strategies(op, operands, axis=axis, size=Fraction(size))}


def attentions(make: Maker) -> Iterator[tuple[Example, set[str]]]:
    """Calls, and what must be offered for them on cp."""
    c, r = make.call, make.real
    q, rows = (2, 4, 16, 4), torch.arange(16)
    window = (rows[:, None] >= rows) & (rows[:, None] - rows < 5)
    padded = make.truth(2, 1, 16, 16) | torch.eye(16, dtype=torch.bool)
    bias = r(1, 4, 16, 16, grad=False)
    yield c(ATTENTION, r(*q), r(*q), r(*q), None, 0.0, True), {"gather", "ring", "split h"}
    yield c(ATTENTION, r(*q), r(2, 2, 16, 4), r(2, 2, 16, 4), None, 0.0, True, enable_gqa=True), {"gather", "ring"}
    yield c(ATTENTION, r(*q), r(*q), r(*q)), {"split s", "ring", "split h"}
    yield c(ATTENTION, r(*q), r(2, 4, 8, 4), r(2, 4, 8, 4)), {"split s", "ring", "split h"}
    yield c(ATTENTION, r(*q), r(*q), r(*q), window), {"split s", "ring", "split h"}
    yield c(ATTENTION, r(*q), r(*q), r(*q), padded), {"split s", "ring", "split h"}
    yield c(ATTENTION, r(*q), r(*q), r(*q), bias, scale=0.3), {"split s", "ring", "split h"}
    yield c(ATTENTION, r(*q), r(*q), r(*q), padded[:, :, :1] | True), {"split s", "ring", "split h"}
    yield c(ATTENTION, r(*q), r(*q), r(*q), r(1, 4, 16, 16)), {"split s", "ring", "split h"}
    yield c(ATTENTION, r(*q), r(2, 2, 16, 4), r(2, 2, 16, 4), r(4, 1, 16), enable_gqa=True), {"split s", "ring"}
    yield c(ATTENTION, r(*q), r(*q), r(*q), r(16, 16)), {"split s", "ring", "split h"}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_strategy_gives_what_one_device_gives(size: int) -> None:
    for example, wanted in attentions(Maker(size)):
        assert wanted <= set(offered(example, size))
        assert verify_rule(example.op, example.operands, size=size, axis="cp") == []


def test_mutants_are_caught() -> None:
    (causal, _), *_ = attentions(Maker(0))
    known = offered(causal, 2)
    mutants = {
        "the rank's first query is forgotten": replace(known["gather"], target="", extra=()),
        "a part is taken for the whole": replace(known["ring"], target="", extra=()),
        "a ring in the order of ranks": replace(known["gather"], inputs=known["ring"].inputs),
    }
    for name, mutant in mutants.items():
        assert verify_rule(causal.op, causal.operands, size=2, axis="cp", strategies=[mutant]), name


def test_what_a_ring_cannot_do_is_not_offered() -> None:
    make = Maker(0)
    q = make.real(2, 4, 12, 4)
    assert "ring" in offered(make.call(ATTENTION, q, q, q), 2)
    assert "ring" not in offered(make.call(ATTENTION, q, q, q), 4)  # 12 rows are no 8 chunks
    assert "ring" not in offered(make.call(ATTENTION, q, q, q), 2, axis="tp")


@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 1))
def test_zigzag_there_and_back(ranks: int, chunk: int, dim: int) -> None:
    x = torch.arange(4 * (2 * ranks * chunk) ** 2).view(4 * ranks * chunk, -1)
    there = sequence_ops.zigzag(x, dim, ranks)
    assert torch.equal(sequence_ops.zigzag(there, dim, ranks, back=True), x)
    place = sequence_ops.zigzag(torch.arange(2 * ranks), 0, ranks).view(ranks, 2)
    assert set(place.sum(dim=1).tolist()) == {2 * ranks - 1}  # every rank has the same work under a causal mask


def test_dropout_in_a_ring_repeats_itself_in_backward() -> None:
    make = Maker(0)
    q, k, v = (make.real(1, 2, 4, 3) for _ in range(3))
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    found: list[bool] = []

    def rank(_: int, group: object) -> None:
        def run(*args: torch.Tensor) -> torch.Tensor:
            return sequence_ops.attention_ring(*args, None, 0.4, True, axis=group, ranks=1, salt=3, seed=5)  # type: ignore[arg-type]

        found.append(torch.autograd.gradcheck(run, (q, k, v)))
        found.append(not torch.allclose(run(q, k, v), plain))

    _in_threads(rank, 1)
    assert found == [True, True]
