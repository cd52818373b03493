"""What is known of operators: which draw random numbers, which are attention, which selective recompute makes again in backward.

**Selective recompute.** Kept are the outputs of what is dear, sends, draws or decides: products with a parameter, convolutions, fused attention,
changes of type, experts, look-ups in tables, losses, random draws, choices (top-k, sorts), code that nobody knows. Made
again are element-wise operators, activations, norms, softmaxes, reductions and copies, and products of two activations
whose result is larger than both (the scores of attention that is not fused). So torchtitan's "op" selective checkpointing,
and Megatron's (Korthikanti et al. 2022, section 5) where attention is not fused. With exceptions where nothing would be freed:

- a sum, a difference or a dropout of values that are all kept is kept: what it reads is as large, and would be needed;
- a group of operators made again that read each other's values (rotary positions, casts, the mean behind a projection) is kept
  where what backward needs of their values is no larger than what they read and nothing else of the block keeps.

It depends on the graph of one rank alone, so that the cost model and the program that runs agree.
See docs/adr/0015-selective-recompute.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import cast

import torch

from autopar.errors import RuleError
from autopar.graph.aliasing import storage_roots
from autopar.graph.graph import Block, Graph, Op, Ref
from autopar.ops.kernels import aten_targets, resolve

_NOT_BY_ITSELF = aten_targets("scaled_dot_product_attention.default lstm.input gru.input rnn_tanh.input rnn_relu.input")
"""Tagged as random, and not at every call: attention is where an argument says so, at which the pass that emits code looks; of
recurrent networks the dropout between layers is an operator of its own in a graph."""


@cache
def draws_random(target: str) -> bool:
    """Whether an operator draws random numbers at every call.

    >>> draws_random("aten.bernoulli.p"), draws_random("autopar.dropout"), draws_random("aten.add.Tensor")
    (True, True, False)
    """
    if target.startswith("autopar."):  # its kernels need not be loaded to say so
        return target == "autopar.dropout"
    return target not in _NOT_BY_ITSELF and torch.Tag.nondeterministic_seeded in _tags(target)


def _tags(target: str) -> Collection[torch.Tag]:
    """Those of an operator of torch's; none of any other."""
    try:
        return cast("Collection[torch.Tag]", getattr(resolve(target), "tags", ()))
    except RuleError:
        return ()


DROPOUT_ARGUMENT = {
    "autopar.dropout": 1,
    "aten.dropout.default": 1,
    "aten.native_dropout.default": 1,
    "aten.scaled_dot_product_attention.default": 4,
}
"""Position of the probability among the arguments."""


def without_dropout(op: Op) -> Op:
    """The same call, that drops nothing."""
    position = DROPOUT_ARGUMENT.get(op.target)
    if position is None:
        return op
    args = tuple(0.0 if i == position else arg for i, arg in enumerate(op.args))
    return replace(op, args=args, kwargs=tuple((k, 0.0 if k == "dropout_p" else v) for k, v in op.kwargs))


def is_attention(op: Op) -> bool:
    """Whether an operator is fused attention."""
    return op.target in ("aten.scaled_dot_product_attention.default", "autopar.attention")


def is_scores(op: Op) -> bool:
    """Whether an operator is the softmax over [samples, heads, rows, columns] of attention that is written out."""
    return op.target == "aten.softmax.int" and len(op.spec.shape) == 4 and op.args[1] in (-1, 3)


def has_written_attention(graph: Graph) -> bool:
    """Whether some attention is no operator of its own, so that a ring cannot run it."""
    return any(is_scores(op) for op in graph.ops)


def attention_heads(graph: Graph, operand: int = 0) -> tuple[int, ...]:
    """Head counts of the model's fused attentions: of the queries (``operand`` 0), of keys and values (1)."""
    shapes = [graph.spec(op.operands[operand]).shape for op in graph.ops if is_attention(op)]
    return tuple(sorted({shape[1] for shape in shapes if len(shape) == 4}))


def attention_sequences(graph: Graph) -> tuple[int, ...]:
    """Lengths that are split: of the queries and keys of the model's attentions, of the rows alone where it is written out.

    There keys are whole when scores are made, which may have columns besides (sinks).
    """
    found = {graph.spec(ref).shape[-2] for op in graph.ops if is_attention(op) for ref in op.operands[:2]}
    found |= {op.spec.shape[-2] for op in graph.ops if is_scores(op)}
    return tuple(sorted(found))


_SUMS = aten_targets("add.Tensor sub.Tensor")
_DROPOUT = "autopar.dropout"
_PRODUCTS = aten_targets("mm.default bmm.default matmul.default baddbmm.default einsum.default")
VIEWS = aten_targets(
    "view.default _unsafe_view.default reshape.default flatten.using_ints unflatten.int squeeze.default squeeze.dim squeeze.dims"
    " unsqueeze.default transpose.int t.default permute.default expand.default slice.Tensor select.int narrow.default"
    " alias.default detach.default split.Tensor split_with_sizes.default chunk.default unbind.int diagonal.default movedim.int"
    " unfold.default view_as.default expand_as.default"
)
"""Operators whose output lies in the storage of their first operand."""
_COPIES = aten_targets(
    "clone.default contiguous.default to.dtype _to_copy.default type_as.default cat.default stack.default pad.default"
    " constant_pad_nd.default repeat.default repeat_interleave.self_int roll.default flip.default tril.default triu.default"
)
_REDUCTIONS = aten_targets("mean.default mean.dim sum.default sum.dim_IntList cumsum.default")
_SCALED = aten_targets("add.Scalar sub.Scalar rsub.Scalar neg.default mul.Scalar div.Scalar")
_LINEAR = (VIEWS - {"aten.unfold.default"}) | _COPIES | _REDUCTIONS | _SUMS | _SCALED
SAVES_NOTHING = _LINEAR | aten_targets("rsub.Tensor zeros_like.default ones_like.default")
"""Operators whose backward needs neither what they read nor what they make."""
_OTHERS = aten_targets(
    "softmax.int _softmax.default log_softmax.int _log_softmax.default layer_norm.default native_layer_norm.default"
    " rms_norm.default group_norm.default instance_norm.default amax.default amin.default logsumexp.default var.correction"
    " std.correction linalg_vector_norm.default norm.ScalarOpt_dim index.Tensor index_select.default gather.default glu.default"
    " zeros_like.default ones_like.default prod.default"
)
_CHEAP = _LINEAR | _OTHERS
SAVES_OUTPUT = aten_targets(
    "exp.default tanh.default sigmoid.default sqrt.default rsqrt.default relu.default reciprocal.default sign.default"
    " amax.default amin.default logsumexp.default prod.default elu.default selu.default softmax.int _softmax.default"
    " log_softmax.int _log_softmax.default"
)
"""Operators whose backward needs what they make, and not what they read."""


def is_dear(op: Op) -> bool:
    """Whether an operator is kept whatever it reads and however large that is."""
    return op.target not in _SUMS and op.target not in _PRODUCTS and op.target != _DROPOUT and not _is_cheap(op.target)


def made_again(graph: Graph, block: Block, roots: Mapping[Ref, Ref] | None = None) -> frozenset[int]:
    """Positions in ``graph.block_ops(block)`` of the operators that backward makes again, as far as it needs them.

    Args:
        roots: for every value of the block the one whose storage it lies in; None: :func:`storage_roots` of it.
    """
    ops = graph.block_ops(block)
    where = storage_roots(ops, graph.spec) if roots is None else roots
    reads = [tuple(dict.fromkeys(where.get(ref, ref) for ref in op.operands)) for op in ops]
    again: dict[str, int] = {}
    of_parameters: set[str] = set()
    for i, op in enumerate(ops):
        if op.outputs and all(where.get(Ref(op.name, k)) != Ref(op.name, k) for k in range(len(op.outputs))):
            continue  # a view
        own = [ref for ref in reads[i] if not graph.is_prelude(ref)]
        if own and all(graph.is_parameter(ref) or ref.name in of_parameters for ref in own):
            of_parameters.add(op.name)
        if op.target in _PRODUCTS:
            weighs = any(graph.is_parameter(ref) or ref.name in of_parameters for ref in own)
            chosen = not weighs and op.spec.num_bytes > _bytes_of(graph, op.operands)
        elif op.target in _SUMS or op.target == _DROPOUT:
            chosen = any(ref.name in again for ref in own)
        else:
            chosen = _is_cheap(op.target)
        if chosen:
            again[op.name] = i
    return frozenset(_without_idle(graph, ops, reads, again).values())


def _without_idle(
    graph: Graph, ops: tuple[Op, ...], reads: list[tuple[Ref, ...]], again: Mapping[str, int]
) -> dict[str, int]:
    """Those of ``again`` but the groups that free nothing; ``reads``: of each operator the storages."""
    group = {name: name for name in again}

    def find(name: str) -> str:
        while group[name] != name:
            group[name] = group[group[name]]
            name = group[name]
        return name

    for name, i in again.items():
        for ref in reads[i]:
            if ref.name in group:
                group[find(ref.name)] = find(name)
    group_of = {name: find(name) for name in again}
    made: dict[str, set[Ref]] = {name: set() for name in group_of.values()}
    read: dict[str, set[Ref]] = {name: set() for name in made}
    kept: set[Ref] = set()  # what some operator keeps of what it reads
    for op, roots in zip(ops, reads, strict=True):
        own = group_of.get(op.name, "")
        keeps = _keeps_operands(graph, op)
        kept.update(roots if keeps else ())
        if own and op.target in SAVES_OUTPUT:
            made[own].update(Ref(op.name, k) for k in range(len(op.outputs)))
        for ref in roots:
            maker = group_of.get(ref.name, "")
            if maker and (keeps or maker != own):
                made[maker].add(ref)
            elif own and not maker and not graph.is_parameter(ref) and not graph.is_prelude(ref):
                read[own].add(ref)
    idle = {name for name in made if _bytes_of(graph, made[name]) <= _bytes_of(graph, read[name] - kept)}
    return {name: i for name, i in again.items() if group_of[name] not in idle}


def _bytes_of(graph: Graph, refs: Iterable[Ref]) -> int:
    return sum(graph.spec(ref).num_bytes for ref in refs)


def _keeps_operands(graph: Graph, op: Op) -> bool:
    """Whether backward of an operator needs what it reads: products do, fused attention, norms, most functions."""
    if op.target in _LINEAR or op.target in SAVES_OUTPUT or not any(spec.requires_grad for spec in op.outputs):
        return False
    if op.target == "aten.mul.Tensor":
        return sum(graph.spec(ref).requires_grad for ref in op.operands) > 1
    if op.target == "aten.div.Tensor":
        return any(graph.spec(ref).requires_grad for ref in op.operands[1:])
    return op.target.startswith("aten.") or "attention" in op.target or op.target == "autopar.linear_t"


@cache
def _is_cheap(target: str) -> bool:
    """Whether an operator is element-wise, or named above; one that draws random numbers is not.

    >>> _is_cheap("aten.gelu.default"), _is_cheap("aten.linear.default"), _is_cheap("autopar.all_gather")
    (True, False, False)
    """
    if target in _CHEAP or not target.startswith("aten."):
        return target in _CHEAP
    tags = _tags(target)
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
