"""Operators as fewer or other kernels than those of torch's eager mode: what compilers and other programs run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from autopar.cost.operators.work import LINEAR, Specs, Work
from autopar.cost.operators.work_record import Product, total
from autopar.graph.graph import Graph, Op, Ref
from autopar.validate.kernels.megatron import as_megatron, split_projections

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
            done = as_megatron(
                graph,
                op,
                operands,
                done,
                biased_scores="biased_scores" in self.practices,
                copied_logits="copied_logits" in self.practices,
            )
        return done

    def unkept(self, graph: Graph, ops: Sequence[Op]) -> frozenset[int]:
        """Positions of the operators inside of chains: backward makes their values again in its own kernel."""
        if "fused_elementwise" not in self.practices:
            return frozenset()
        return frozenset(i for chain in chains(graph, ops) for i in inner(graph, ops, chain))

    def joined(
        self, graph: Graph, ops: Sequence[Op], operands: Sequence[Specs], works: Sequence[Work]
    ) -> tuple[list[Work], Collection[int]]:
        """The works where operators run as one kernel; and positions of the linear layers that are a part of another's product."""
        if "fused_elementwise" in self.practices and "megatron_kernels" not in self.practices:
            works = fuse(graph, ops, works)
        if "fused_projections" not in self.practices:
            return list(works), ()
        found, groups = fuse_projections(ops, operands, works), joined_projections(ops)
        for group in groups if "megatron_kernels" in self.practices else ():
            split_projections(group, found, sum(ops[i].spec.num_bytes for i in group))
        return found, {i for group in groups for i in group[1:]}


EAGER = ForeignKernels()
"""Torch's eager mode: a program with these needs no hook."""


def chains(graph: Graph, ops: Sequence[Op]) -> list[list[int]]:
    """Positions of the elementwise operators that run as one kernel, for each kernel of several."""
    group = {op.name: op.name for op in ops if op.target in ELEMENTWISE}

    def find(name: str) -> str:
        while group[name] != name:
            name = group[name]
        return name

    for op in ops:
        if op.name in group:
            for ref in op.operands:
                if ref.name in group:
                    group[find(ref.name)] = find(op.name)
    members: dict[str, list[int]] = {}
    for i, op in enumerate(ops):
        if op.name in group:
            members.setdefault(find(op.name), []).append(i)
    return [chain for chain in members.values() if len(chain) > 1]


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
    for chain in chains(graph, ops):
        _join(graph, ops, result, chain)
    return result


def joined_projections(ops: Sequence[Op]) -> list[list[int]]:
    """Positions of linear layers that read one value, for each value that several read."""
    found: dict[Ref, list[int]] = {}
    for i, op in enumerate(ops):
        if op.target in LINEAR:
            found.setdefault(op.operands[0], []).append(i)
    return [group for group in found.values() if len(group) > 1]


def fuse_projections(ops: Sequence[Op], operands: Sequence[Specs], works: Sequence[Work]) -> list[Work]:
    """The works when linear layers of one input run as one product, at the first of them.

    The input is read once, and its gradient is one product, as deep as all outputs are wide.
    """
    result = list(works)
    for group in joined_projections(ops):
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
    if op.target != "autopar.dropout":
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


def _join(graph: Graph, ops: Sequence[Op], works: list[Work], chain: list[int]) -> None:
    inside = {ops[i].name for i in chain}
    read = {ref for i in chain for ref in ops[i].operands if ref.name not in inside}
    made = (Ref(ops[i].name) for i in chain)
    written = [ref for ref in made if any(graph.ops[user].name not in inside for user in graph.users(ref))]
    size = {ref: graph.spec(ref).num_bytes for ref in (*read, *written)}
    trained = [ref for ref in size if graph.spec(ref).requires_grad]
    backward = sum(size[ref] for ref in trained) + sum(size[ref] for ref in read) if trained else 0
    for i in chain[:-1]:
        works[i] = replace(works[i], num_bytes=0, backward_bytes=0, launches=0, backward_launches=0)
    works[chain[-1]] = replace(
        works[chain[-1]],
        num_bytes=sum(size.values()),
        backward_bytes=backward,
        launches=1,
        backward_launches=int(backward > 0),
    )
