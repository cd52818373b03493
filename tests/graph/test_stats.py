import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.graph.aliasing import contiguous, storage_roots
from autopar.graph.graph import Ref
from autopar.models.resolve import resolve_model
from autopar.report.summaries import graph_summary
from tests.support.zoo import loss_of, subject, traced


def test_backward_flops_are_those_of_torchs_counter_without_attention() -> None:
    model, batch = subject("handwritten")
    graph = traced("handwritten")
    with FlopCounterMode(display=False) as counter:
        loss_of(model(**batch)).backward()
    assert graph_summary(graph)["flops_per_sample"] * graph.batch_size == counter.get_total_flops()


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
