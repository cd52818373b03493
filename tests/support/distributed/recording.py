"""Which collectives a rank runs: kind, bytes and mesh axes, recorded below everything that starts them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.parallel_model import ParallelModel

Recorded = tuple[str, tuple[int, ...], int]
"""Kind, ranks of the group (of a send: of the group that it stands in), bytes: of the whole tensor; of one rank's part
for all-to-all and sends."""

_KINDS = {
    "allreduce_": "all_reduce", "_allgather_base_": "all_gather", "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_": "reduce_scatter", "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all", "send": "send", "broadcast_": "broadcast", "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}  # fmt: skip
_SILENT = ("_wrap_tensor_autograd", "recv_", "recv_any_source_", "wait_tensor", "barrier", "monitored_barrier_")


class Recorder(TorchDispatchMode):
    """Records every collective of ``torch.distributed`` that this thread starts over more than one rank.

    The operators below ``dist.*`` and those of functional collectives come by here, whoever calls them. One that is
    not known is an error, so that nothing is missed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Recorded] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.name()
        if name.startswith(("c10d::", "_c10d_functional::", "_c10d_functional_autograd::")):
            self._note(name.partition("::")[2].partition(".")[0], func, args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, func: Any, args: tuple[Any, ...]) -> None:
        if name in _SILENT:
            return
        kind = _KINDS[name]
        group = _group(func, args)
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) > 1:
            self.found[kind, tuple(sorted(ranks)), _bytes(kind, args, len(ranks))] += 1


def _group(func: Any, args: tuple[Any, ...]) -> dist.ProcessGroup:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "group_name":
            return dist.distributed_c10d._resolve_process_group(value)
        if argument.name == "process_group":
            return dist.ProcessGroup.unbox(value)
    raise AssertionError(f"no group among the arguments of {func}")


def _flat(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [tensor for value in values for tensor in _flat(value)] if isinstance(values, list | tuple) else []


def _bytes(kind: str, args: tuple[Any, ...], size: int) -> int:
    sizes = [sum(t.numel() * t.element_size() for t in _flat(value)) for value in args[:2]]
    if kind == "all_gather":  # functional ones are given the input alone
        return max(sizes) if min(sizes) else max(sizes) * size
    if kind == "reduce_scatter":
        return max(sizes)
    return sizes[0] if kind != "all_to_all" else sizes[-1] or sizes[0]


def one_step(parallel: ParallelModel, batch: Mapping[str, Tensor], clips: bool) -> dict[Recorded, int]:
    """What this rank sends in the second step of a run: a first one has FSDP and the pipeline set up."""
    optimizer, scaler = torch.optim.SGD(parallel.parameters(), lr=0.01), parallel.grad_scaler()
    parallel.train_step(batch)
    optimizer.zero_grad()
    with Recorder() as recorder:
        parallel.train_step(batch)
        scaler.unscale_(optimizer)
        if clips:
            parallel.clip_grad_norm_(1.0)
    return dict(recorder.found)
