from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar.errors import RuleError
from autopar.graph.graph import Graph, Op, Ref
from autopar.ops import sequence as sequence_ops
from autopar.plan.mesh import I, R, S, Type
from autopar.rules.apply import shard
from autopar.rules.strategy import ZIGZAG_SAFE, Strategy, Typing, check_strategy
from autopar.rules.table import default_table
from autopar.tracing.trace import trace
from tests.rules.test_rules import named
from tests.support.lower.chooser import named_typing
from tests.support.ranks_in_threads import in_threads, verify_rule
from tests.support.rule_examples import Example, Maker, every
from tests.support.said import refuses
from tests.support.small_models import model_of

ATTENTION = "aten.scaled_dot_product_attention.default"


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
        assert wanted <= set(named(example, size, axis="cp"))
        assert verify_rule(example.op, example.operands, size=size, axis="cp") == []


def test_mutants_are_caught() -> None:
    (causal, _), *_ = attentions(Maker(0))
    known = named(causal, axis="cp")
    mutants = {
        "the rank's first query is forgotten": replace(known["gather"], target=""),
        "a part is taken for the whole": replace(known["ring"], target=""),
        "a ring in the order of ranks": replace(known["gather"], inputs=known["ring"].inputs),
    }
    for name, mutant in mutants.items():
        assert verify_rule(causal.op, causal.operands, size=2, axis="cp", strategies=[mutant]), name


def test_what_a_ring_cannot_do_is_not_offered() -> None:
    make = Maker(0)
    q = make.real(2, 4, 12, 4)
    call = make.call(ATTENTION, q, q, q)
    assert "ring" in named(call, axis="cp")
    assert "ring" not in named(call, size=4, axis="cp")  # 12 rows are no 8 chunks
    assert "ring" not in named(call)


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
            return sequence_ops.attention_ring(*args, None, 0.4, True, axis=group, ranks=1, salt=3, seed=5)

        found.append(torch.autograd.gradcheck(run, (q, k, v)))
        found.append(not torch.allclose(run(q, k, v), plain))

    in_threads(rank, 1)
    assert found == [True, True]


@pytest.mark.slow
def test_every_rule_is_right_in_zigzag_order() -> None:
    """Parts of chunks that are no neighbours: for every strategy that may stand beside a ring, forward and gradient."""
    examples = [e for e in every(default_table(), 5) if not e.needs_other_axis]
    options = {"size": 2, "axis": "cp", "seed": 5, "zigzag": True}
    failures = [line for e in examples for line in verify_rule(e.op, e.operands, **options)]
    assert len(examples) > 400
    assert failures == []


def test_the_check_in_zigzag_order_finds_what_depends_on_neighbours() -> None:
    """Neighbours change places: right for two ranks with two of four each, wrong where a chunk is half a pair."""

    @torch.library.custom_op("zigzag_check::swapped", mutates_args=())
    def swapped(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 2).flip(1).reshape(-1)

    op = Op(name="call", target="zigzag_check.swapped.default", args=(Ref("x"),), outputs=())
    x, split = torch.randn(4, dtype=torch.float64), Strategy(name="split", inputs=(S(0),), outputs=(S(0),))
    assert verify_rule(op, [x], size=2, strategies=[split]) == []
    assert verify_rule(op, [x], size=2, strategies=[split], zigzag=True)


def test_what_knows_its_part_is_refused() -> None:
    """Look-up and loss over split classes, attention that begins at its rank's first row; not sums with a count."""
    for target in ("autopar.embedding_vocabulary", "autopar.cross_entropy_vocabulary", "autopar.attention_gathered"):
        strategy = Strategy(name="s", inputs=(), outputs=(), target=target)
        caught = refuses(RuleError, "cannot be used beside ring attention", check_strategy, strategy, "here")
        assert caught.fix and caught.where == "here"
    for target in ZIGZAG_SAFE:
        check_strategy(Strategy(name="s", inputs=(), outputs=(), target=target), "here")


def _attends(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """x times a weight and its transpose, attention of it with itself, a sum."""
    g = F.linear(F.linear(x, self.w), self.v)
    return F.scaled_dot_product_attention(g, g, g, is_causal=True).sum()


def ring_graph(length: int = 8) -> Graph:
    weights = {name: nn.Parameter(torch.zeros(*shape)) for name, shape in (("w", (8, 4)), ("v", (4, 8)))}
    return trace(model_of(_attends, **weights), (torch.zeros(2, 1, length, 4),))


def ring_typing(*, w: Type = I, v: Type = I, x: Type = R, hidden: bool = True) -> Typing:
    linear = (
        {"linear": "split n", "linear_1": "split k"} if hidden else dict.fromkeys(("linear", "linear_1"), "split b.2")
    )
    chosen = {**linear, "scaled_dot_product_attention": "ring", "sum_1": "split d2"}
    typing = named_typing(ring_graph(), "cp", chosen)
    return replace(typing, parameters={"p_w": w, "p_v": v}, inputs={"x": x})


def made(graph: Graph) -> list[tuple[str, str]]:
    return [(op.name, op.target) for op in (*graph.prelude, *graph.ops) if "_cp_" in op.name]


def test_a_part_is_put_into_zigzag_order_by_way_of_the_whole_which_has_its_own() -> None:
    local = shard(ring_graph(), ring_typing(w=S(0), v=S(0)))
    assert made(local)[:4] == [
        ("p_w_cp_I", "autopar.all_gather"), ("p_w_cp_S0", "autopar.zigzag_shard"), ("p_v_cp_I", "autopar.all_gather"),
        ("p_v_cp_S1", "autopar.zigzag_shard"),
    ]  # fmt: skip
    assert [p.spec.shape for p in local.parameters] == [(4, 4), (2, 8)]
    assert [p.layout for p in local.parameters] == [(("cp", S(0)),)] * 2
    assert dict(local.parameter("p_w").layout)["cp"] == S(0)
    local = shard(ring_graph(), ring_typing(w=S(0), v=S(1), x=S(2), hidden=False))
    assert made(local) == [
        ("x_cp_R", "autopar.all_gather"), ("x_cp_S2", "autopar.zigzag_shard"), ("p_w_cp_R", "autopar.all_gather"),
        ("p_v_cp_R", "autopar.all_gather"), ("sum_1_cp_I", "autopar.all_reduce"),
    ]  # fmt: skip


def test_a_dim_that_is_not_made_of_two_chunks_a_rank_is_refused() -> None:
    said = r"cannot be split as S\(2\).* by twice cp=2.*cp_attention"
    refuses(RuleError, said, shard, ring_graph(length=6), ring_typing())
