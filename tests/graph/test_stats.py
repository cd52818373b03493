"""Counts of FLOPs against torch's counter, and what backward keeps against what autograd saves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autopar.cost.operators.work import operand_specs, work
from autopar.cost.operators.work_record import argument
from autopar.graph.aliasing import contiguous, storage_roots
from autopar.graph.graph import Graph, Op, Ref
from autopar.graph.interpreter import evaluate
from autopar.models.resolve import resolve_model
from autopar.report.summaries import graph_summary
from tests.support.kept import kept_bytes
from tests.support.zoo import loss_of, subject, traced


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama", "vit", "handwritten"])
def test_forward_flops_are_those_of_torchs_counter(kind: str) -> None:
    model, batch = subject(kind)
    graph = traced(kind)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss_of(model(**batch))
    assert sum(_without_masks(graph, op) for op in graph.ops) == counter.get_total_flops()


def _without_masks(graph: Graph, op: Op) -> int:
    """Forward FLOPs by the count of torch, for which a causal mask spares nothing."""
    flops = work(op, operand_specs(op, graph.spec)).flops
    if op.target == "aten.scaled_dot_product_attention.default" and argument(op, 5, "is_causal", False):
        rows = graph.spec(op.operands[0]).shape[-2]
        flops *= 2 * rows / (rows + 1)
    return round(flops)


def test_backward_flops_are_those_of_torchs_counter_without_attention() -> None:
    model, batch = subject("handwritten")
    graph = traced("handwritten")
    with FlopCounterMode(display=False) as counter:
        loss_of(model(**batch)).backward()
    assert graph_summary(graph)["flops_per_sample"] * graph.batch_size == counter.get_total_flops()


def test_a_summary_counts_the_products_of_experts() -> None:
    graph = resolve_model(
        "hf:mixtral?hidden_size=32&num_attention_heads=4&num_key_value_heads=2&vocab_size=96&intermediate_size=64&num_hidden_layers=1"
    ).trace()
    (experts,) = (op for op in graph.ops if op.target == "autopar.experts")
    without = sum(
        2 * op.spec.numel * graph.spec(op.operands[0]).shape[-1]
        for op in graph.ops
        if op.target == "aten.linear.default"
    )
    per_sample = 2 * 2 * 3 * 32 * 64 * graph.spec(experts.operands[0]).numel // 32 // graph.batch_size
    assert graph_summary(graph)["flops_per_sample"] > 3 * (without / graph.batch_size + per_sample)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", "vit", "t5", "handwritten"])
def test_what_backward_keeps_is_what_autograd_saves(kind: str) -> None:
    model, batch = subject(kind)
    graph = traced(kind)
    measured = _saved_by_autograd(graph, model, batch)
    counted = _saved_by_count(graph)
    assert counted == pytest.approx(measured, rel=0.01)


def _saved_by_autograd(graph: Graph, model: torch.nn.Module, batch: dict[str, Tensor]) -> int:
    whole = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    return kept_bytes(lambda: evaluate(graph, batch, whole, dict(model.named_buffers())), whole.values())


def _saved_by_count(graph: Graph) -> int:
    everything = (*graph.prelude, *graph.ops)
    roots = storage_roots(everything, graph.spec)
    kept: set[Ref] = set()
    inner = 0
    for op in graph.ops:
        done = work(op, [graph.spec(ref) for ref in op.operands], "cpu")
        refs = [op.operands[i] for i in done.saved] + ([Ref(op.name)] if done.saves_output else [])
        kept |= {roots.get(ref, ref) for ref in refs}
        inner += done.saved_bytes
    return inner + sum(graph.spec(ref).num_bytes for ref in kept if not graph.is_parameter(ref))


def test_views_share_storage_and_flattened_expansions_do_not() -> None:
    graph = traced("llama")
    everything = (*graph.prelude, *graph.ops)
    roots = storage_roots(everything, graph.spec)
    for op in graph.ops:
        if op.target == "aten.transpose.int":
            assert roots[Ref(op.name)] == roots.get(op.operands[0], op.operands[0])
        if op.target == "aten.view.default":
            source = graph.producer(op.operands[0])
            copied = source is not None and source.target == "aten.expand.default"
            assert (roots[Ref(op.name)] == Ref(op.name)) == copied
        if op.target == "aten.linear.default":
            assert roots[Ref(op.name)] == Ref(op.name)


def test_strides_of_a_dense_tensor() -> None:
    for shape in [(), (3,), (2, 3, 4), (2, 0, 4)]:
        assert contiguous(shape) == torch.empty(shape).stride()


@pytest.mark.slow
def test_a_big_llama_is_cut_into_its_layers() -> None:
    """Llama 3 70B but for 78 of its 80 layers, which are equal to the other ones."""
    spec = "llama:layers=2,hidden=8192,heads=64,kv_heads=8,ffn=28672,vocab=128256"
    graph = resolve_model(spec, sequence_length=4096, dtype=torch.bfloat16).trace()
    assert len(graph.blocks) == 4
    layer = sum(p.spec.numel for p in graph.block_parameters(graph.blocks[1]))
    assert graph.num_parameters + 78 * layer == 70_553_706_496
    assert len({b.hash for b in graph.blocks}) == 3
    per_token = sum(_without_masks(graph, op) for op in graph.ops) / (2 * 4096)
    matrices = 2 * (graph.num_parameters - 128256 * 8192 - (2 * 2 + 1) * 8192)
    attention = 2 * 2 * 2 * 4096 * 8192
    assert per_token == matrices + attention
