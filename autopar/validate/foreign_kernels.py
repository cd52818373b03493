"""Operators as fewer or other kernels than those of torch's eager mode: what compilers and other programs run."""

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
"""Operators that a compiler joins with those that read their output; copies among them move elements inside rows."""


LOSSES = frozenset(("autopar.cross_entropy_sum", "aten.cross_entropy_loss.default", "autopar.cross_entropy_vocabulary"))


PRACTICES = frozenset((
    "fused_elementwise", "fused_loss", "half_loss", "fused_projections", "fused_ring", "dropout",
    "megatron_kernels", "biased_scores", "copied_logits",
))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignKernels:
    """Which kernels of a program are not those of torch's eager mode; implements :class:`autopar.cost.blocks.block_work.Kernels`.

    Attributes:
        practices: of :data:`PRACTICES`, as ``profiles/sites/practices.toml`` has them; ``biased_scores``: scores of Megatron's attention add
            to positions (ALiBi).
    """

    practices: frozenset[str] = frozenset()

    def operator(self, graph: Graph, op: Op, operands: Specs, done: Work) -> Work:
        """The work of one operator by a kernel of its own."""
        logits_bytes = operands[0].num_bytes if operands else 0
        if "fused_loss" in self.practices:
            done = fuse_loss(op, logits_bytes, done)
        elif "half_loss" in self.practices:
            done = halve_loss(op, logits_bytes, done)
        if "fused_ring" in self.practices:
            done = fuse_ring(op, operands, done)
        if "dropout" in self.practices:
            done = fuse_dropout(graph, op, operands, done, in_chain="fused_elementwise" in self.practices)
        if "megatron_kernels" in self.practices:
            done = as_megatron(graph, op, operands, done, self.practices)
        return done

    def unkept(self, graph: Graph, ops: Sequence[Op]) -> frozenset[int]:
        """Positions of the operators inside of chains: backward makes their values again in its own kernel."""
        if "fused_elementwise" not in self.practices:
            return frozenset()
        return frozenset(i for chain in chains(ops) for i in inner(graph, ops, chain))

    def joined(
        self, graph: Graph, ops: Sequence[Op], operands: Sequence[Specs], works: Sequence[Work]
    ) -> tuple[list[Work], Collection[int]]:
        """The works where operators run as one kernel; and positions of the linear layers that are a part of another's product."""
        if "fused_elementwise" in self.practices and "megatron_kernels" not in self.practices:
            works = fuse(graph, ops, works)
        if "fused_projections" not in self.practices:
            return list(works), ()
        groups = joined_projections(ops)
        found = fuse_projections(groups, operands, works)
        for group in groups if "megatron_kernels" in self.practices else ():
            split_projections(group, found, sum(ops[i].spec.num_bytes for i in group))
        return found, {i for group in groups for i in group[1:]}


def chains(ops: Sequence[Op]) -> list[list[int]]:
    """Positions of the elementwise operators that run as one kernel, for each kernel of several."""
    at = {op.name: i for i, op in enumerate(ops) if op.target in ELEMENTWISE}
    reads = ((i, at[ref.name]) for name, i in at.items() for ref in ops[i].operands if ref.name in at)
    return [sorted(chain) for chain in networkx.connected_components(networkx.Graph(reads))]


def inner(graph: Graph, ops: Sequence[Op], chain: Sequence[int]) -> list[int]:
    """Those of a chain that nothing outside of it reads: backward makes them again in its own kernel."""
    inside = {ops[i].name for i in chain}
    return [i for i in chain if all(graph.ops[user].name in inside for user in graph.users(Ref(ops[i].name)))]


def fuse(graph: Graph, ops: Sequence[Op], works: Sequence[Work]) -> list[Work]:
    """The works when each chain of elementwise operators reads what comes from outside of it once and writes what others read.

    A chain's bytes stand at its last operator. Backward moves the gradients of what forward read and wrote, and what
    forward read once more.
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
    """Positions of linear layers that read one value, for each value that several read."""
    found: dict[Ref, list[int]] = {}
    for i, op in enumerate(ops):
        if op.target in LINEAR:
            found.setdefault(op.operands[0], []).append(i)
    return [group for group in found.values() if len(group) > 1]


def fuse_projections(groups: Sequence[Sequence[int]], operands: Sequence[Specs], works: Sequence[Work]) -> list[Work]:
    """The works when the linear layers of each group, which have one input, run as one product, at the first of them.

    The input is read once, and its gradient is one product, as deep as all outputs are wide.
    """
    result = list(works)
    for group in groups:
        parts, again = [works[i] for i in group], (len(group) - 1) * operands[group[0]][0].num_bytes
        first = parts[0].products[0]
        whole = Product(first.count, first.rows, sum(p.products[0].columns for p in parts), first.depth)
        backward = whole.gradients if all(len(p.backward_products) == 2 for p in parts) else ()
        result[group[0]] = replace(
            parts[0],
            flops=sum(p.flops for p in parts),
            products=(whole,),
            backward_flops=sum(p.backward_flops for p in parts),
            backward_products=backward or tuple(product for p in parts for product in p.backward_products),
            num_bytes=sum(p.num_bytes for p in parts) - again,
            backward_bytes=sum(p.backward_bytes for p in parts) - 2 * again * bool(backward),
            beside_bytes=sum(p.beside_bytes for p in parts),
        )
        for i in group[1:]:
            result[i] = replace(
                works[i], flops=0.0, products=(), backward_flops=0.0, backward_products=(), num_bytes=0, backward_bytes=0,
                beside_bytes=0, launches=0, backward_launches=0,
            )  # fmt: skip
    return result


def fuse_ring(op: Op, operands: Specs, done: Work) -> Work:
    """Attention in a ring by fused kernels, one for each rank's keys."""
    if op.target != "autopar.attention_ring":
        return done
    moved, out = total(operands), op.spec.num_bytes
    return replace(
        done, is_attention=True, num_bytes=moved + out, backward_bytes=3 * moved + 2 * out, workspace_bytes=0,
        backward_workspace_bytes=0,
    )  # fmt: skip


def fuse_dropout(graph: Graph, op: Op, operands: Specs, done: Work, *, in_chain: bool) -> Work:
    """Dropout by torch's kernel: reads, writes the output and a mask of bytes; backward reads the mask.

    Args:
        in_chain: elementwise kernels are joined: where an addition alone reads the output, its kernel makes it, and only the
            mask is written besides.
    """
    if op.target != DROPOUT:
        return done
    x = operands[0]
    users = [graph.ops[name].target for name in graph.users(Ref(op.name))]
    added = in_chain and users == ["aten.add.Tensor"]
    moved = 2 * x.num_bytes + x.numel
    return replace(
        done, num_bytes=x.numel if added else moved, backward_bytes=moved if done.backward_launches else 0,
        launches=0 if added else 1, backward_launches=min(done.backward_launches, 1), workspace_bytes=0,
    )  # fmt: skip


def fuse_loss(op: Op, logits_bytes: int, done: Work) -> Work:
    """Cross entropy in one kernel: reads the logits in their own dtype, keeps them and writes their gradient."""
    if op.target not in LOSSES:
        return done
    return replace(
        done, num_bytes=logits_bytes, backward_bytes=2 * logits_bytes, launches=1, backward_launches=1, saved=(0,),
        saved_bytes=0, workspace_bytes=0, backward_workspace_bytes=0,
    )  # fmt: skip


def halve_loss(op: Op, logits_bytes: int, done: Work) -> Work:
    """Cross entropy of torch on logits that nothing casts: log-softmax (kept) and its gradient are as large as they are."""
    if op.target not in LOSSES or op.target == "autopar.cross_entropy_vocabulary":
        return done
    return replace(
        done, num_bytes=2 * logits_bytes, backward_bytes=4 * logits_bytes, launches=2, backward_launches=2,
        saved_bytes=logits_bytes, workspace_bytes=0, backward_workspace_bytes=logits_bytes,
    )  # fmt: skip


# --- Megatron's layers of 2021 and 2022 (Megatron-LM, Megatron-DeepSpeed), by megatron/model/transformer.py (`ParallelAttention`),
# megatron/mpu/cross_entropy.py and megatron/fused_kernels/layer_norm_cuda_kernel.cu

SOFTMAX, PRODUCT, NORM = "aten.softmax.int", "aten.matmul.default", "aten.layer_norm.default"
ADD, DROPOUT = "aten.add.Tensor", "autopar.dropout"
LOSS_LAUNCHES, LOSS_BACKWARD_LAUNCHES = 22, 10
"""Calls of the loss and its mean: cross_entropy.py, ``CrossEntropy`` in gpt_model.py."""
SPLIT_LAUNCHES = 3
"""Copies of the gradients of queries, keys and values into that of the product that made them (``torch.split``)."""


def as_megatron(graph: Graph, op: Op, operands: Specs, done: Work, practices: Collection[str]) -> Work:
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
    biased_scores = "biased_scores" in practices
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
        return _loss(operands[0], done, "copied_logits" in practices)
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


def _loss(logits: TensorSpec, done: Work, copied_logits: bool) -> Work:
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


# --- Deterministic algorithms fill what `torch.empty` gives with NaN (`fill_uninitialized_memory`, by default). Products, norms and
# fused attention of Transformer Engine allocate outputs and gradients so; torch's own elementwise kernels and what it compiles
# allocate below that.

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
