"""Kernels of Megatron's layers of 2021 and 2022 (Megatron-LM, Megatron-DeepSpeed) where they are more than torch's operators.

By its source: megatron/model/transformer.py (``ParallelAttention``), megatron/mpu/cross_entropy.py and
megatron/fused_kernels/layer_norm_cuda_kernel.cu.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.cost.operators.work_record import FLOAT, Specs, Work
from autopar.graph.graph import Graph, Op, Ref

LOSSES = frozenset(("autopar.cross_entropy_sum", "aten.cross_entropy_loss.default", "autopar.cross_entropy_vocabulary"))
SOFTMAX, PRODUCT, NORM = "aten.softmax.int", "aten.matmul.default", "aten.layer_norm.default"
ADD, DROPOUT = "aten.add.Tensor", "autopar.dropout"
LOSS_LAUNCHES, LOSS_BACKWARD_LAUNCHES = 22, 10
"""Calls of the loss and its mean: cross_entropy.py, ``CrossEntropy`` in gpt_model.py."""
SPLIT_LAUNCHES = 3
"""Copies of the gradients of queries, keys and values into that of the product that made them (``torch.split``)."""


def as_megatron(
    graph: Graph, op: Op, operands: Specs, done: Work, *, biased_scores: bool = False, copied_logits: bool = False
) -> Work:
    """The work of one operator as Megatron runs it.

    - The product of queries and keys is ``baddbmm`` with a factor: autograd multiplies both gradients by it, in kernels of
      their own. With ALiBi (``biased_scores``) it adds to positions, which torch copies into the output before, once for each
      score.
    - A norm's backward is three kernels: gradients of weight and bias in two, which read the output's gradient and the input
      a second time.
    - Bias, dropout and the residual's addition are one kernel, one for attention and one for the feed-forward; backward is
      that of the dropout, as the residual's gradient is the output's own.
    - The loss computes on logits in single precision, one kernel after the other: a cast, the maximum, the difference, the
      exponential, its sum and the quotient (``copied_logits``: a copy before them); backward is a product and a cast.
    """
    if op.target == PRODUCT and _makes_scores(graph, op):
        scaled = 2 * sum(spec.num_bytes for spec in operands if spec.requires_grad)
        return replace(
            done,
            num_bytes=done.num_bytes + (op.spec.num_bytes if biased_scores else 0),
            beside_bytes=done.beside_bytes + scaled,
            backward_launches=done.backward_launches + sum(spec.requires_grad for spec in operands),
        )
    if op.target == SOFTMAX and biased_scores:  # the copy stands here, as it is no part of the product
        return replace(done, num_bytes=done.num_bytes + op.spec.num_bytes, launches=done.launches + 1)
    if op.target == NORM and done.backward_launches == 2:
        return replace(done, backward_bytes=done.backward_bytes + operands[0].num_bytes, backward_launches=3)
    if op.target == ADD and any(_made_by(graph, ref) == DROPOUT for ref in op.operands):
        return replace(done, backward_bytes=0, backward_launches=0)
    if op.target in LOSSES:
        return _loss(op, operands, done, copied_logits)
    return done


def split_projections(group: list[int], works: list[Work], outputs_bytes: int) -> None:
    """The gradient of a product whose output was split is put together by copies; stands at the first of ``group``."""
    first = works[group[0]]
    if first.backward_launches:
        works[group[0]] = replace(
            first,
            beside_bytes=first.beside_bytes + 2 * outputs_bytes,
            backward_launches=first.backward_launches + SPLIT_LAUNCHES,
        )


def _made_by(graph: Graph, ref: Ref) -> str:
    producer = graph.producer(ref)
    return "" if producer is None else producer.target


def _makes_scores(graph: Graph, op: Op) -> bool:
    return any(graph.ops[name].target == SOFTMAX for name in graph.users(Ref(op.name)))


def _loss(op: Op, operands: Specs, done: Work, copied_logits: bool) -> Work:
    logits = operands[0]
    whole = logits.numel * FLOAT
    cast = logits.num_bytes + whole if logits.dtype.itemsize < FLOAT else 0
    passes = 1 + 2 + 2 + 1 + 2 + 2 * copied_logits  # reads and writes: maximum, difference, exponential, sum, quotient
    return replace(
        done,
        num_bytes=cast + passes * whole,
        backward_bytes=cast + 2 * whole,
        launches=LOSS_LAUNCHES + copied_logits,
        backward_launches=LOSS_BACKWARD_LAUNCHES if done.backward_launches else 0,
    )
