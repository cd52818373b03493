"""Work of operators with other kernels than those of torch's eager mode: kernels of compilers and of other programs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import networkx

from autopar.cost.blocks.block_work import BlockWork
from autopar.cost.operators.work import LINEAR
from autopar.cost.operators.work_record import FLOAT, Product, Specs, Work, total
from autopar.graph.graph import Graph, Op, Ref, TensorSpec

_NAMES = (
    "add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar neg.default exp.default"
    " tanh.default sigmoid.default silu.default gelu.default relu.default rsqrt.default pow.Tensor_Scalar to.dtype"
    " _to_copy.default roll.default where.self cat.default masked_fill.Scalar"
)
ELEMENTWISE = frozenset(f"aten.{name}" for name in _NAMES.split())
"""Operators that a compiler fuses with those that read their output; the copies among them move elements within rows."""


LOSSES = frozenset(("autopar.cross_entropy_sum", "aten.cross_entropy_loss.default", "autopar.cross_entropy_vocabulary"))


# practices that concern kernels, of ``profiles/sites/practices.toml``; this module derives ``biased_scores``
PRACTICES = frozenset((
    "fused_elementwise", "fused_loss", "half_loss", "fused_projections", "fused_ring", "dropout",
    "megatron_kernels", "biased_scores", "copied_logits",
))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignKernels:
    """The kernels of a program that are not those of torch's eager mode; implements :class:`autopar.cost.blocks.block_work.Kernels`.

    Attributes:
        practices: a subset of :data:`PRACTICES`. ``biased_scores``: scores of Megatron's attention are added to positions (ALiBi).
    """

    practices: frozenset[str] = frozenset()

    def operator(self, graph: Graph, op: Op, operands: Specs, op_work: Work) -> Work:
        """Return the work of one operator with the program's kernel."""
        logits_bytes = operands[0].num_bytes if operands else 0
        if "fused_loss" in self.practices:
            op_work = fuse_loss(op, logits_bytes, op_work)
        elif "half_loss" in self.practices:
            op_work = halve_loss(op, logits_bytes, op_work)
        if "fused_ring" in self.practices:
            op_work = fuse_ring(op, operands, op_work)
        if "dropout" in self.practices:
            op_work = fuse_dropout(graph, op, operands, op_work, in_chain="fused_elementwise" in self.practices)
        if "megatron_kernels" in self.practices:
            op_work = as_megatron(graph, op, operands, op_work, self.practices)
        return op_work

    def unkept(self, graph: Graph, ops: Sequence[Op]) -> frozenset[int]:
        """Return the positions of operators inside fused chains, whose values backward computes again in its kernel."""
        if "fused_elementwise" not in self.practices:
            return frozenset()
        return frozenset(i for chain in chains(ops) for i in inner(graph, ops, chain))

    def joined(
        self, graph: Graph, ops: Sequence[Op], operands: Sequence[Specs], works: Sequence[Work]
    ) -> tuple[list[Work], Collection[int]]:
        """Return the works with fused kernels, and the positions of linear layers that are part of another one's product."""
        if "fused_elementwise" in self.practices and "megatron_kernels" not in self.practices:
            works = fuse(graph, ops, works)
        if "fused_projections" not in self.practices:
            return list(works), ()
        groups = joined_projections(ops)
        fused = fuse_projections(groups, operands, works)
        for group in groups if "megatron_kernels" in self.practices else ():
            split_projections(group, fused, sum(ops[i].spec.num_bytes for i in group))
        return fused, {i for group in groups for i in group[1:]}


def chains(ops: Sequence[Op]) -> list[list[int]]:
    """Return the positions of elementwise operators that are fused, for each kernel of several operators."""
    at = {op.name: i for i, op in enumerate(ops) if op.target in ELEMENTWISE}
    reads = ((i, at[ref.name]) for name, i in at.items() for ref in ops[i].operands if ref.name in at)
    return [sorted(chain) for chain in networkx.connected_components(networkx.Graph(reads))]


def inner(graph: Graph, ops: Sequence[Op], chain: Sequence[int]) -> list[int]:
    """Return the operators of a chain whose outputs only the chain reads; backward computes them again in its kernel."""
    inside = {ops[i].name for i in chain}
    return [i for i in chain if all(graph.ops[user].name in inside for user in graph.users(Ref(ops[i].name)))]


def fuse(graph: Graph, ops: Sequence[Op], works: Sequence[Work]) -> list[Work]:
    """Return the works with fused chains of elementwise operators: a chain reads each outside value once and writes what others read.

    The bytes of a chain are those of its last operator. Backward moves the gradients of what forward read and wrote, and reads what forward
    read.
    """
    result = list(works)
    for chain in chains(ops):
        inside, unread = {ops[i].name for i in chain}, inner(graph, ops, chain)
        read = {ref for i in chain for ref in ops[i].operands if ref.name not in inside}
        written = [Ref(ops[i].name) for i in chain if i not in unread]
        size = {ref: graph.spec(ref).num_bytes for ref in (*read, *written)}
        trained = [ref for ref in size if graph.spec(ref).requires_grad]
        backward = sum(size[ref] for ref in trained) + sum(size[ref] for ref in read) if trained else 0
        for i in chain[:-1]:
            result[i] = replace(result[i], num_bytes=0, backward_bytes=0, launches=0, backward_launches=0)
        result[chain[-1]] = replace(
            result[chain[-1]],
            num_bytes=sum(size.values()),
            backward_bytes=backward,
            launches=1,
            backward_launches=int(backward > 0),
        )
    return result


def joined_projections(ops: Sequence[Op]) -> list[list[int]]:
    """Return the positions of linear layers with the same input, for each input of several."""
    by_input: dict[Ref, list[int]] = {}
    for i, op in enumerate(ops):
        if op.target in LINEAR:
            by_input.setdefault(op.operands[0], []).append(i)
    return [group for group in by_input.values() if len(group) > 1]


def fuse_projections(groups: Sequence[Sequence[int]], operands: Sequence[Specs], works: Sequence[Work]) -> list[Work]:
    """Return the works with one product for the linear layers of each group, which have one input; it is that of the first of them.

    The input is read once, and its gradient is one product, whose depth is the sum of the output widths.
    """
    result = list(works)
    for group in groups:
        parts, reread_bytes = [works[i] for i in group], (len(group) - 1) * operands[group[0]][0].num_bytes
        first = parts[0].products[0]
        joined = Product(first.count, first.rows, sum(p.products[0].columns for p in parts), first.depth)
        backward = joined.gradients if all(len(p.backward_products) == 2 for p in parts) else ()
        result[group[0]] = replace(
            parts[0],
            flops=sum(p.flops for p in parts),
            products=(joined,),
            backward_flops=sum(p.backward_flops for p in parts),
            backward_products=backward or tuple(product for p in parts for product in p.backward_products),
            num_bytes=sum(p.num_bytes for p in parts) - reread_bytes,
            backward_bytes=sum(p.backward_bytes for p in parts) - 2 * reread_bytes * bool(backward),
            backward_extra_bytes=sum(p.backward_extra_bytes for p in parts),
        )
        for i in group[1:]:
            result[i] = replace(
                works[i], flops=0.0, products=(), backward_flops=0.0, backward_products=(), num_bytes=0, backward_bytes=0,
                backward_extra_bytes=0, launches=0, backward_launches=0,
            )  # fmt: skip
    return result


def fuse_ring(op: Op, operands: Specs, work: Work) -> Work:
    """Return the work of ring attention by fused kernels, one for each rank's keys."""
    if op.target != "autopar.attention_ring":
        return work
    moved, out = total(operands), op.spec.num_bytes
    return replace(
        work, is_attention=True, num_bytes=moved + out, backward_bytes=3 * moved + 2 * out, workspace_bytes=0,
        backward_workspace_bytes=0,
    )  # fmt: skip


def fuse_dropout(graph: Graph, op: Op, operands: Specs, work: Work, *, in_chain: bool) -> Work:
    """Return the work of torch's dropout kernel: it reads the input, writes the output and a mask of bytes; backward reads the mask.

    Args:
        graph, op, operands: the operator.
        work: its work in eager mode.
        in_chain: whether elementwise kernels are fused. If only an addition reads the output, its kernel computes it, and only the mask is
            written.
    """
    if op.target != DROPOUT:
        return work
    x = operands[0]
    users = [graph.ops[name].target for name in graph.users(Ref(op.name))]
    added = in_chain and users == ["aten.add.Tensor"]
    moved = 2 * x.num_bytes + x.numel
    return replace(
        work, num_bytes=x.numel if added else moved, backward_bytes=moved if work.backward_launches else 0,
        launches=0 if added else 1, backward_launches=min(work.backward_launches, 1), workspace_bytes=0,
    )  # fmt: skip


def fuse_loss(op: Op, logits_bytes: int, work: Work) -> Work:
    """Return the work of cross entropy in one kernel, which reads and keeps the logits in their dtype and writes their gradient."""
    if op.target not in LOSSES:
        return work
    return replace(
        work, num_bytes=logits_bytes, backward_bytes=2 * logits_bytes, launches=1, backward_launches=1, saved=(0,),
        saved_bytes=0, workspace_bytes=0, backward_workspace_bytes=0,
    )  # fmt: skip


def halve_loss(op: Op, logits_bytes: int, work: Work) -> Work:
    """Return the work of torch's cross entropy on logits that are not cast: log-softmax (kept) and its gradient have their size."""
    if op.target not in LOSSES or op.target == "autopar.cross_entropy_vocabulary":
        return work
    return replace(
        work, num_bytes=2 * logits_bytes, backward_bytes=4 * logits_bytes, launches=2, backward_launches=2,
        saved_bytes=logits_bytes, workspace_bytes=0, backward_workspace_bytes=logits_bytes,
    )  # fmt: skip


# --- Megatron's layers of 2021 and 2022 (Megatron-LM, Megatron-DeepSpeed). Sources: megatron/model/transformer.py (`ParallelAttention`),
# megatron/mpu/cross_entropy.py and megatron/fused_kernels/layer_norm_cuda_kernel.cu

SOFTMAX, PRODUCT, NORM = "aten.softmax.int", "aten.matmul.default", "aten.layer_norm.default"
ADD, DROPOUT = "aten.add.Tensor", "autopar.dropout"
LOSS_LAUNCHES, LOSS_BACKWARD_LAUNCHES = 22, 10
"""Kernels of the loss and its mean, forward and backward: cross_entropy.py, ``CrossEntropy`` in gpt_model.py."""
SPLIT_LAUNCHES = 3
"""Copies of the gradients of queries, keys and values into that of the fused projection (``torch.split``)."""


def as_megatron(graph: Graph, op: Op, operands: Specs, work: Work, practices: Collection[str]) -> Work:
    """Return the work of one operator as Megatron runs it.

    - The product of queries and keys is ``baddbmm`` with a factor. Autograd multiplies both gradients by it in separate kernels. With ALiBi
      (``biased_scores``) scores are added to positions, which torch first copies into the output, one for each score.
    - Backward of a norm is three kernels. Two give the gradients of weight and bias, and read the output's gradient and the input again.
    - Bias, dropout and the residual's addition are one kernel, one for attention and one for the feed-forward. Backward is that of the
      dropout, since the residual's gradient is that of the output.
    - The loss uses logits in single precision, in separate kernels: a cast, the maximum, the difference, the exponential, its sum and the
      quotient (``copied_logits``: a copy before them). Backward is a product and a cast.
    """
    biased_scores = "biased_scores" in practices
    if op.target == PRODUCT and _makes_scores(graph, op):
        scaled = 2 * sum(spec.num_bytes for spec in operands if spec.requires_grad)
        return replace(
            work,
            num_bytes=work.num_bytes + (op.spec.num_bytes if biased_scores else 0),
            backward_extra_bytes=work.backward_extra_bytes + scaled,
            backward_launches=work.backward_launches + sum(spec.requires_grad for spec in operands),
        )
    if op.target == SOFTMAX and biased_scores:  # the copy counts here, as it is no part of the product
        return replace(work, num_bytes=work.num_bytes + op.spec.num_bytes, launches=work.launches + 1)
    if op.target == NORM and work.backward_launches == 2:
        return replace(work, backward_bytes=work.backward_bytes + operands[0].num_bytes, backward_launches=3)
    if op.target == ADD and DROPOUT in {made.target for made in map(graph.producer, op.operands) if made is not None}:
        return replace(work, backward_bytes=0, backward_launches=0)
    if op.target in LOSSES:
        return _loss(operands[0], work, "copied_logits" in practices)
    return work


def split_projections(group: list[int], works: list[Work], outputs_bytes: int) -> None:
    """Add the copies that join the gradients of a split output to the first of ``group``."""
    first = works[group[0]]
    if first.backward_launches:
        works[group[0]] = replace(
            first,
            backward_extra_bytes=first.backward_extra_bytes + 2 * outputs_bytes,
            backward_launches=first.backward_launches + SPLIT_LAUNCHES,
        )


def _makes_scores(graph: Graph, op: Op) -> bool:
    return any(graph.ops[name].target == SOFTMAX for name in graph.users(Ref(op.name)))


def _loss(logits: TensorSpec, work: Work, copied_logits: bool) -> Work:
    """Return the work of Megatron's loss."""
    float_bytes = logits.numel * FLOAT
    cast = logits.num_bytes + float_bytes if logits.dtype.itemsize < FLOAT else 0
    passes = 1 + 2 + 2 + 1 + 2 + 2 * copied_logits  # reads and writes: maximum, difference, exponential, sum, quotient
    return replace(
        work,
        num_bytes=cast + passes * float_bytes,
        backward_bytes=cast + 2 * float_bytes,
        launches=LOSS_LAUNCHES + copied_logits,
        backward_launches=LOSS_BACKWARD_LAUNCHES if work.backward_launches else 0,
    )


# --- Deterministic algorithms fill tensors of `torch.empty` with NaN (`fill_uninitialized_memory`, by default). Products, norms and
# fused attention of Transformer Engine allocate outputs and gradients by it. Elementwise and compiled kernels of torch do not.

NORMS = frozenset(("aten.layer_norm.default", "aten.rms_norm.default"))


def is_filled(op: Op) -> bool:
    """Return whether Transformer Engine has a kernel for the operator."""
    return op.target in LINEAR or op.target in NORMS or "attention" in op.target


def filled(block: BlockWork, graph: Graph) -> BlockWork:
    """Return the work with the fills as one more operator; each tensor is written once, by a kernel of its own.

    Args:
        block: the work of a block.
        graph: the graph of one rank, which has the block.
    """
    ops = [op for op in block.ops if is_filled(op)]
    if not ops:
        return block
    outputs = [spec for op in ops for spec in op.outputs]
    trained = [op for op in ops if any(spec.requires_grad for spec in op.outputs)]
    read = dict.fromkeys(ref for op in trained for ref in op.operands)
    gradients = [spec for spec in map(graph.spec, read) if spec.requires_grad]
    fills = Work(
        num_bytes=total(outputs),
        launches=len(outputs),
        backward_bytes=total(gradients),
        backward_launches=len(gradients),
    )
    return replace(block, ops=(*block.ops, ops[-1]), works=(*block.works, fills))
