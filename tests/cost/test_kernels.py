"""Work by other kernels than those of torch's eager mode: what is joined is counted once, and products stay what they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.cost.blocks.block_work import BlockWork, block_work
from autopar.cost.operators.work import LINEAR
from autopar.cost.operators.work_record import Work
from autopar.graph.graph import Graph, Op, Ref, TensorSpec
from autopar.models.transformer import Sizes, build
from autopar.tracing.trace import trace
from autopar.validate.foreign_kernels import ForeignKernels, fuse_ring
from autopar.validate.practice import second_products
from tests.support.practices import kernels

HIDDEN, FFN, TOKENS, HALF = 64, 160, 2 * 32, 2
SIZES = Sizes(
    family="llama", hidden=HIDDEN, ffn=FFN, heads=4, kv_heads=4, vocabulary=96, sequence=32, attention="scores",
    dtype="bfloat16", dropout=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def graph() -> Graph:
    model, batch = build(SIZES, 3)
    return trace(model, (), batch, name="llama")


def layer(graph: Graph, kernels: ForeignKernels | None) -> BlockWork:
    """The block with most operators: a whole layer."""
    block = max(graph.blocks, key=lambda block: len(graph.block_ops(block)))
    return block_work(graph, block, "cuda", kernels=kernels)


def linear(done: BlockWork) -> list[Work]:
    return [w for w, op in zip(done.works, done.ops, strict=True) if op.target in LINEAR]


def test_projections_of_one_input_are_one_product(graph: Graph) -> None:
    plain, joined = layer(graph, None), layer(graph, kernels(fused_projections=True))
    assert sum(w.flops for w in linear(plain)) == sum(w.flops for w in linear(joined))
    assert sum(w.backward_flops for w in linear(plain)) == sum(w.backward_flops for w in linear(joined))
    widths = [w.products[0].columns for w in linear(joined) if w.products]
    assert widths == [3 * HIDDEN, HIDDEN, 2 * FFN, HIDDEN]  # q, k, v; out; gate and up; down
    assert [w.launches for w in linear(joined)].count(1) == 4
    spared = (2 + 1) * TOKENS * HIDDEN * HALF  # the input, read once in place of three times and twice
    assert sum(w.num_bytes for w in linear(plain)) - sum(w.num_bytes for w in linear(joined)) == spared
    assert len(plain.fan_in) - len(joined.fan_in) == 2 + 1  # sums of the input's gradients
    assert plain.shape.saved_bytes == joined.shape.saved_bytes


def test_dropout_by_torchs_kernel_writes_a_mask(graph: Graph) -> None:
    def dropped(kernels: ForeignKernels) -> list[Work]:
        done = layer(graph, kernels)
        return [w for w, op in zip(done.works, done.ops, strict=True) if op.target == "autopar.dropout"]

    scores, added = 2 * 4 * 32 * 32, TOKENS * HIDDEN
    own, chained = dropped(kernels(dropout=True)), dropped(kernels(dropout=True, fused_elementwise=True))
    assert [w.num_bytes for w in own] == [5 * scores, 5 * added, 5 * added]
    assert [w.num_bytes for w in chained] == [5 * scores, added, added]
    assert [w.backward_bytes for w in chained] == [w.backward_bytes for w in own]


def test_a_fused_ring_moves_no_scores() -> None:
    spec = TensorSpec(shape=(1, 4, 16, 8), dtype=torch.bfloat16, requires_grad=True)
    op = Op(name="mixed", target="autopar.attention_ring", args=(Ref("q"), Ref("k"), Ref("v")), outputs=(spec,))
    slow = Work(flops=1e6, backward_flops=2.5e6, num_bytes=10**9, backward_bytes=10**9, workspace_bytes=10**9)
    done = fuse_ring(op, [spec, spec, spec], slow)
    assert done == replace(
        slow, is_attention=True, num_bytes=4 * spec.num_bytes, backward_bytes=11 * spec.num_bytes, workspace_bytes=0
    )
    assert fuse_ring(replace(op, target="aten.add.Tensor"), [spec, spec], slow) is slow


def test_every_second_product_of_a_layer_is_made_again(graph: Graph) -> None:
    chosen = second_products(graph)
    done = layer(graph, None)
    found = [op.name in chosen for op in done.ops if op.target in LINEAR]
    assert found == [False, True, False, True, False, True, False]  # key, out and up of seven
