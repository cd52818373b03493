"""Work by other kernels than those of torch's eager mode, and by DeepSpeed's pipeline and Megatron's kernels of 2021 and 2022."""

from dataclasses import replace

import pytest
import torch

from autopar.cost.blocks.block_cost import BlockCost
from autopar.cost.blocks.block_work import BlockWork, block_work
from autopar.cost.model import CostModel
from autopar.cost.operators.work import LINEAR
from autopar.cost.operators.work_record import Work
from autopar.graph.graph import Graph, Op, Ref, TensorSpec
from autopar.hardware.cluster import Cluster
from autopar.models.transformer import Sizes, build
from autopar.plan.mesh import Mesh
from autopar.plan.plan import FP32, Precision
from autopar.tracing.trace import trace
from autopar.validate.foreign_kernels import ForeignKernels, fuse_ring
from autopar.validate.practice import copies_s, second_products
from tests.support.blocks_by_hand import block, stage, step
from tests.support.practices import kernels, runtime

HIDDEN, FFN, TOKENS, HALF = 64, 160, 2 * 32, 2
LLAMA = Sizes(
    family="llama", hidden=HIDDEN, ffn=FFN, heads=4, kv_heads=4, vocabulary=96, sequence=32, attention="scores",
    dtype="bfloat16", dropout=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def llama() -> Graph:
    model, batch = build(LLAMA, 3)
    return trace(model, (), batch, name="llama")


def layer(llama: Graph, kernels: ForeignKernels | None) -> BlockWork:
    """The block with most operators: a whole layer."""
    block = max(llama.blocks, key=lambda block: len(llama.block_ops(block)))
    return block_work(llama, block, "cuda", kernels=kernels)


def linear(done: BlockWork) -> list[Work]:
    return [w for w, op in zip(done.works, done.ops, strict=True) if op.target in LINEAR]


def test_projections_of_one_input_are_one_product(llama: Graph) -> None:
    plain, joined = layer(llama, None), layer(llama, kernels(fused_projections=True))
    assert sum(w.flops for w in linear(plain)) == sum(w.flops for w in linear(joined))
    assert sum(w.backward_flops for w in linear(plain)) == sum(w.backward_flops for w in linear(joined))
    widths = [w.products[0].columns for w in linear(joined) if w.products]
    assert widths == [3 * HIDDEN, HIDDEN, 2 * FFN, HIDDEN]  # q, k, v; out; gate and up; down
    assert [w.launches for w in linear(joined)].count(1) == 4
    spared = (2 + 1) * TOKENS * HIDDEN * HALF  # the input, read once in place of three times and twice
    assert sum(w.num_bytes for w in linear(plain)) - sum(w.num_bytes for w in linear(joined)) == spared
    assert len(plain.fan_in) - len(joined.fan_in) == 2 + 1  # sums of the input's gradients
    assert plain.shape.saved_bytes == joined.shape.saved_bytes


def test_dropout_by_torchs_kernel_writes_a_mask(llama: Graph) -> None:
    def dropped(kernels: ForeignKernels) -> list[Work]:
        done = layer(llama, kernels)
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
    sizes = {"num_bytes": 4 * spec.num_bytes, "backward_bytes": 11 * spec.num_bytes, "workspace_bytes": 0}
    assert done == replace(slow, is_attention=True, **sizes)
    assert fuse_ring(replace(op, target="aten.add.Tensor"), [spec, spec], slow) is slow


def test_every_second_product_of_a_layer_is_made_again(llama: Graph) -> None:
    chosen = second_products(llama)
    done = layer(llama, None)
    found = [op.name in chosen for op in done.ops if op.target in LINEAR]
    assert found == [False, True, False, True, False, True, False]  # key, out and up of seven


H100 = Cluster.parse("h100-sxm5-80gb:4x8")
BATCH, SEQUENCE, HEADS, VOCABULARY = 2, 32, 4, 96
SCORES, VALUES, LOGITS = BATCH * HEADS * SEQUENCE**2, BATCH * SEQUENCE * HIDDEN, BATCH * SEQUENCE * VOCABULARY
SIZES = Sizes(
    family="bloom", hidden=HIDDEN, ffn=4 * HIDDEN, heads=HEADS, kv_heads=HEADS, vocabulary=VOCABULARY,
    sequence=SEQUENCE, attention="scores", dtype="bfloat16", dropout=True,
)  # fmt: skip
PLAIN = kernels(fused_elementwise=True, fused_projections=True, dropout=True)
MEGATRON = ForeignKernels(practices=PLAIN.practices | {"megatron_kernels"})


def blocks(count: int, **changes: object) -> list[BlockCost]:
    return [block(f"layer{i}", rows=8, width=8, **changes) for i in range(count)]


@pytest.fixture(scope="module")
def graph() -> Graph:
    model, batch = build(SIZES, 3)
    return trace(model, (), batch, name="bloom")


def works(graph: Graph, kernels: ForeignKernels, target: str) -> list[Work]:
    done: list[BlockWork] = [block_work(graph, each, "cuda", kernels=kernels) for each in graph.blocks]
    return [w for one in done for w, op in zip(one.works, one.ops, strict=True) if op.target == target]


def test_scores_are_a_product_with_a_factor_that_adds_to_positions(graph: Graph) -> None:
    plain, scores = (works(graph, k, "aten.matmul.default")[0] for k in (PLAIN, MEGATRON))
    assert scores.num_bytes == plain.num_bytes
    more = scores.backward_extra_bytes - plain.backward_extra_bytes
    assert more == 2 * 2 * VALUES * HALF  # gradients of queries and keys times it
    assert scores.backward_launches - plain.backward_launches == 2
    biased = ForeignKernels(practices=MEGATRON.practices | {"biased_scores"})
    assert works(graph, biased, "aten.matmul.default")[0].num_bytes - scores.num_bytes == SCORES * HALF
    before, after = (works(graph, k, "aten.softmax.int")[0] for k in (MEGATRON, biased))
    assert (after.num_bytes - before.num_bytes, after.launches - before.launches) == (SCORES * HALF, 1)
    second = works(graph, biased, "aten.matmul.default")[1]  # probabilities times values
    assert second == works(graph, PLAIN, "aten.matmul.default")[1]


def test_the_residual_is_added_where_dropout_is(graph: Graph) -> None:
    adds = works(graph, MEGATRON, "aten.add.Tensor")
    assert [(w.num_bytes, w.launches) for w in adds] == [(3 * VALUES * HALF, 1)] * len(adds)
    assert not any(w.backward_bytes or w.backward_launches for w in adds)
    masks = [w for w in works(graph, MEGATRON, "autopar.dropout") if not w.launches]
    assert len(masks) == len(adds) and {w.num_bytes for w in masks} == {VALUES}


def test_norms_are_three_kernels_backward_and_the_gradient_of_a_split_product_is_put_together(graph: Graph) -> None:
    plain, own = (works(graph, k, "aten.layer_norm.default")[-1] for k in (PLAIN, MEGATRON))
    assert (plain.backward_launches, own.backward_launches) == (2, 3)
    assert own.backward_bytes - plain.backward_bytes == VALUES * HALF
    plain, own = (works(graph, k, "aten.linear.default")[0] for k in (PLAIN, MEGATRON))
    assert own.backward_extra_bytes - plain.backward_extra_bytes == 2 * 3 * VALUES * HALF
    assert own.backward_launches - plain.backward_launches == 3


def test_the_loss_computes_on_whole_logits_one_kernel_after_the_other(graph: Graph) -> None:
    def loss(kernels: ForeignKernels) -> Work:
        (found,) = works(graph, kernels, "autopar.cross_entropy_sum")
        return found

    own, copied = loss(MEGATRON), loss(ForeignKernels(practices=MEGATRON.practices | {"copied_logits"}))
    cast = LOGITS * (HALF + 4)
    assert own.num_bytes == cast + (1 + 2 + 2 + 1 + 2) * 4 * LOGITS
    assert copied.num_bytes - own.num_bytes == 2 * 4 * LOGITS
    assert own.backward_bytes == cast + 2 * 4 * LOGITS


def test_deepspeeds_messages_are_copied_as_by_hand() -> None:
    stages = [stage(b) for b in blocks(4, sends=(10**7,), send_gradients=(10**7,))]
    mesh, count = Mesh(pp=4, tp=8), 8
    runtimes = [runtime(blocking_sends=True, partitioned_sends=True, copied_sends=c) for c in (False, True)]
    model, other = (CostModel(H100, FP32, "sgd", runtime=runtime) for runtime in runtimes)
    how = step(mesh, schedule="1F1B", count=count)
    parts, copied = model.predict(stages, how), other.predict(stages, how)
    forward_s, backward_s = copies_s(0, 10**7, 8, model.device)  # the first rank finishes last
    gathered_s = model.collectives.time_s("all_gather", 10**7, mesh, ("tp",))
    more_s = copied.breakdown.pipeline_s - parts.breakdown.pipeline_s
    assert more_s == pytest.approx(count * (forward_s + backward_s + gathered_s))
    device, size, ranks = H100.devices[0], 8 * 10**6, 4
    part, whole_s = size / ranks, 1 / device.memory_bandwidth_bytes_per_s
    gather = size + 2 * part + 2 * size + 2 * size  # zeros, the own part, parts out of a flat buffer, a copy
    kernels = 1 + 1 + ranks + 1
    forward_s, backward_s = copies_s(size, size, ranks, device)
    # in: message and its description, each copied twice; gathered; out: cut, two messages
    into_s, out_launches = gather + 4 * part + 2 * part, 2 + 4 + kernels + 1 + 2
    assert forward_s == pytest.approx(into_s * whole_s + out_launches * device.launch_s)
    # in: two messages; output and its gradient gathered; out: cut, two messages
    assert backward_s == pytest.approx((2 * gather + 2 * part) * whole_s + (2 + 2 * kernels + 1 + 2) * device.launch_s)
    assert copies_s(0, 0, ranks, device) == (0.0, 0.0)
    last_s = copies_s(size, 0, ranks, device)[1]
    assert last_s == pytest.approx(2 * part * whole_s + (1 + 2) * device.launch_s)  # its gradient alone
    assert copies_s(size, size, 1, device)[0] == pytest.approx(4 * size * whole_s + 4 * device.launch_s)


def test_gradients_that_are_cast_first() -> None:
    precision = Precision(name="bf16", compute="bfloat16", storage="float32", reduce="float32")
    model, mesh, count = CostModel(H100, precision, "sgd"), Mesh(pp=2, dp_shard=4), 8
    (first, *_) = blocks(2)
    how = replace(step(mesh, schedule="1F1B", count=count), zero_stage=1, adds_gradients=True)
    numel, launches = first.parameters[0].numel, len(first.parameters)
    bandwidth = model.device.memory_bandwidth_bytes_per_s
    inside = model.of(how).block_adding_s(first)
    assert inside == pytest.approx((10 * numel / bandwidth + launches * model.device.launch_s) * (count - 1) / count)
    casting = CostModel(H100, precision, "sgd", runtime=runtime(casts_gradients=True))
    apart = casting.of(how).block_adding_s(first)
    assert apart == pytest.approx(18 * numel / bandwidth + 2 * launches * model.device.launch_s)
