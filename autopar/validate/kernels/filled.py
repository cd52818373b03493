"""What deterministic algorithms of torch add to the kernels of Transformer Engine: new tensors are filled before use.

``torch.use_deterministic_algorithms(True)`` fills what ``torch.empty`` gives with NaN (``fill_uninitialized_memory``, by
default). Products, norms and fused attention of Transformer Engine allocate outputs and gradients so; torch's own
elementwise kernels and what it compiles allocate below that.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.cost.blocks.block_work import BlockWork
from autopar.cost.operators.work import LINEAR
from autopar.cost.operators.work_record import Work, total
from autopar.graph.graph import Graph, Op

NORMS = frozenset(("aten.layer_norm.default", "aten.rms_norm.default"))


def is_filled(op: Op) -> bool:
    """Whether Transformer Engine has a kernel of its own for the operator."""
    return op.target in LINEAR or op.target in NORMS or "attention" in op.target


def filled(done: BlockWork, graph: Graph) -> BlockWork:
    """The work with the fills as one more operator: each tensor is one kernel and written once.

    Args:
        graph: of one rank; the block is a part of it.
    """
    ops = [op for op in done.ops if is_filled(op)]
    if not ops:
        return done
    made = [spec for op in ops for spec in op.outputs]
    trained = [op for op in ops if any(spec.requires_grad for spec in op.outputs)]
    read = dict.fromkeys(ref for op in trained for ref in op.operands)
    gradients = [spec for spec in map(graph.spec, read) if spec.requires_grad]
    fills = Work(
        num_bytes=total(made),
        launches=len(made),
        backward_bytes=total(gradients),
        backward_launches=len(gradients),
    )
    return replace(done, ops=(*done.ops, ops[-1]), works=(*done.works, fills))
