import torch

from autopar.graph.aliasing import contiguous


def test_strides_of_a_dense_tensor() -> None:
    for shape in [(), (3,), (2, 3, 4), (2, 0, 4)]:
        assert contiguous(shape) == torch.empty(shape).stride()
