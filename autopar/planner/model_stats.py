"""What a model does for a sample, and bytes in words."""

from __future__ import annotations

from autopar.cost.model import CostModel
from autopar.cost.operators.work import work
from autopar.device import KernelKind
from autopar.graph.compact import Compact
from autopar.graph.ir import Graph


def readable(num_bytes: float) -> str:
    """Bytes for people.

    >>> readable(3 * 2**29)
    '1.5 GiB'
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes:.0f} bytes"


def flops_per_sample(compact: Compact, model: CostModel) -> float:
    """Products of matrices, forward and backward."""
    known: dict[str, float] = {}
    for index, block in enumerate(compact.graph.blocks):
        if block.hash not in known:
            known[block.hash] = flops_of_block(compact, index, model.device.kernel_kind)
    blocks = zip(compact.graph.blocks, compact.members, strict=True)
    return sum(known[block.hash] * len(members) for block, members in blocks)


def flops_of_block(compact: Compact, index: int, kind: KernelKind) -> float:
    """Products of matrices of one block and one sample, forward and backward."""
    graph, total = compact.graph, 0.0
    for op in graph.block_ops(graph.blocks[index]):
        done = work(op, [graph.spec(ref) for ref in op.operands], kind)
        total += done.flops + done.backward_flops
    return total / graph.batch_size


def tokens_per_sample(graph: Graph) -> int:
    """Elements of one sample of the first batch input where it is a sequence of ids, else 1."""
    for leaf in graph.inputs:
        if leaf.batch_dim is not None:
            return leaf.spec.numel // graph.batch_size if not leaf.spec.dtype.is_floating_point else 1
    return 1
