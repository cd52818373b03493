import torch

from autopar.graph.aliasing import contiguous, storage_roots
from autopar.graph.graph import Ref
from tests.support.zoo import traced


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
