"""What autograd keeps for backward, as torch tells it."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def kept_bytes(run: Callable[[], object], besides: Iterable[Tensor] = ()) -> int:
    """Bytes of the distinct storages that autograd keeps while ``run`` computes, without those of the tensors ``besides``."""
    others = {tensor.untyped_storage().data_ptr() for tensor in besides}
    kept: dict[int, torch.UntypedStorage] = {}  # the storages themselves: memory that is freed has its address again

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for place, storage in kept.items() if place not in others)
