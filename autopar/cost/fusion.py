"""Chains of elementwise operators as one kernel, as a compiler or a hand-written kernel runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost.work import Work
from autopar.graph.ir import Graph, Op, Ref

_NAMES = (
    "add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar neg.default exp.default"
    " tanh.default sigmoid.default silu.default gelu.default relu.default rsqrt.default pow.Tensor_Scalar to.dtype"
    " _to_copy.default roll.default where.self cat.default masked_fill.Scalar"
)
ELEMENTWISE = frozenset(f"aten.{name}" for name in _NAMES.split())
"""Operators that a compiler joins with those that read their output; copies among them move elements inside rows."""


LOSSES = frozenset(("autopar.cross_entropy_sum", "aten.cross_entropy_loss.default", "autopar.cross_entropy_vocabulary"))


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


def fuse_loss(op: Op, logits_bytes: int, done: Work) -> Work:
    """Cross entropy in one kernel: reads the logits in their own dtype, keeps them and writes their gradient."""
    if op.target not in LOSSES:
        return done
    return replace(
        done, num_bytes=logits_bytes, backward_bytes=2 * logits_bytes, launches=1, backward_launches=1, saved=(0,),
        saved_bytes=0, workspace_bytes=0, backward_workspace_bytes=0,
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
