"""Handlers of what layers call: products, dropout, attention, indexing, random draws, norms, recurrent networks and embeddings."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from string import ascii_letters
from typing import Any

import torch

from autopar.graph.graph import Argument, Ref
from autopar.ops.kernels import aten_targets
from autopar.tracing.builder import Builder, Call, Value, broadcast
from autopar.tracing.constants import allows_all, is_causal
from autopar.tracing.forms.basic import Handler, detached, generic, slice_of, view_to
from autopar.tracing.forms.losses import scattered_by_sample


def _addmm(builder: Builder, call: Call) -> Value:
    """Emit addmm with a weight parameter and a bias vector as a linear with the weight as [in, out]."""
    bias, source, weight = call.args
    is_unscaled = call.kwargs.get("beta", 1) == 1 and call.kwargs.get("alpha", 1) == 1
    if not is_unscaled or not _is_weight(builder, weight) or len(builder.shape(bias)) != 1:
        return generic(builder, call)
    return builder.emit(call, "autopar.linear_t", (source, weight, bias))


def _mm(builder: Builder, call: Call) -> Value:
    """Emit a product with a weight parameter, or with its transpose, as a linear."""
    source, weight = call.args
    if isinstance(weight, Ref) and len(builder.shape(weight)) == 2:
        producer = builder.producers.get(weight.name)
        if producer is not None and producer.target == "aten.transpose.int" and _is_weight(builder, producer.args[0]):
            return builder.emit(call, "aten.linear.default", (source, producer.args[0], None))
        if _is_weight(builder, weight):
            return builder.emit(call, "autopar.linear_t", (source, weight, None))
    return generic(builder, call)


def _is_weight(builder: Builder, ref: Argument) -> bool:
    """Return whether an argument is a parameter of rank 2."""
    return isinstance(ref, Ref) and ref.name in builder.parameters and len(builder.shape(ref)) == 2


def _linear(builder: Builder, call: Call) -> Value:
    """Emit a linear with all of its arguments given."""
    source, weight, *bias = call.args
    return builder.emit(call, "aten.linear.default", (source, weight, bias[0] if bias else None))


def _weight_norm(builder: Builder, call: Call) -> Value:
    """Emit the weight ``v * (g / |v|)``, in which the norm is over all dims but ``dim``. The norm itself must not be read."""
    given = call.bound()
    direction, length, dim = given["v"], given["g"], given["dim"]
    rank = len(builder.shape(direction))
    others = tuple(d for d in range(rank) if d != dim % rank)
    norm = builder.make(call, "aten.linalg_vector_norm.default", direction, 2, others, True, name="norm")
    scale = builder.make(call, "aten.div.Tensor", view_to(builder, call, length, builder.shape(norm)), norm)
    weight = builder.make(call, "aten.mul.Tensor", direction, scale)
    return (weight, None) if len(call.outputs) > 1 else weight


def _einsum(builder: Builder, call: Call) -> Value:
    """Emit an einsum with letters in place of an ellipsis, if the ellipsis stands for the same dims in all operands."""
    equation, operands, *_ = call.bound().values()
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    shapes = [builder.shape(ref) for ref in operands]
    ellipses = [
        shape[term.index(".") : len(shape) - len(term.partition("...")[2])]
        for term, shape in zip(terms, shapes, strict=True)
        if "..." in term
    ]
    if not ellipses or any(dims != ellipses[0] for dims in ellipses):
        return generic(builder, call)
    letters = "".join([c for c in ascii_letters if c not in equation][: len(ellipses[0])])
    if not arrow:  # the implicit result has the letters that occur once, in alphabetical order
        used = left.replace(",", "").replace("...", "")
        right = "..." + "".join(sorted(c for c in set(used) if used.count(c) == 1))
    explicit = f"{left}->{right}".replace("...", letters)
    return builder.emit(call, call.target, (explicit, operands))


def _kron(builder: Builder, call: Call) -> Value:
    """Emit a Kronecker product as a product of views, in which each dim of the result has the elements of two dims."""
    rank = len(call.spec.shape)
    shapes = [(1,) * (rank - len(builder.shape(ref))) + builder.shape(ref) for ref in call.operands]
    first, second = (
        view_to(builder, call, ref, tuple(n for size in shape for n in ((size, 1) if i == 0 else (1, size))))
        for i, (ref, shape) in enumerate(zip(call.operands, shapes, strict=True))
    )
    return view_to(builder, call, builder.make(call, "aten.mul.Tensor", first, second), call.spec.shape)


def _dropout(builder: Builder, call: Call) -> Value:
    """Emit ``autopar.dropout`` for dropout and native_dropout, or nothing if no element is dropped."""
    source, p, training = call.args
    result = source if training is False or p == 0 else _dropped_out(builder, call, source, p)
    return (result, None) if call.target == "aten.native_dropout.default" else result


def _dropped_out(builder: Builder, call: Call, source: Argument, p: Argument) -> Ref:
    """Emit ``autopar.dropout(source, p, salt)``. The salt numbers the dropouts of a graph, so that they draw independent numbers."""
    builder.salts += 1
    return builder.emit(call, "autopar.dropout", (source, p, builder.salts - 1), call.spec)


def _attention(builder: Builder, call: Call) -> Value:
    """Emit the attention with all arguments given.

    A causal mask becomes ``is_causal=True``, and a mask that allows everything is dropped.
    """
    given = call.bound()
    mask, causal = given["attn_mask"], given["is_causal"]
    if isinstance(mask, Ref) and not causal:
        value = builder.lazies.get(mask) or builder.known(mask)
        if value is not None and mask not in builder.masks:
            builder.masks[mask] = (is_causal(value, builder.shape(mask)), allows_all(value))
        causal, is_trivial = builder.masks.get(mask, (False, False))
        mask = None if causal or is_trivial else mask
    args = (given["query"], given["key"], given["value"], mask, given["dropout_p"], causal)
    kwargs = {"scale": given["scale"], "enable_gqa": given["enable_gqa"]}
    return builder.emit(call, call.target, args, call.spec, kwargs=kwargs)


def _index(builder: Builder, call: Call) -> Value:
    """Emit ``x[i, j, ...]`` as a view if each index is the range of its dim, broadcast along a separate dim of the result in order."""
    source, indices = call.bound().values()
    if (chosen := _rows_of_each(builder, call, source, indices)) is not None:
        # rows of each sample, x[arange(n), i], are a gather along dim 1, whose samples are independent
        return view_to(builder, call, builder.make(call, "aten.gather.default", source, *chosen), call.spec.shape)
    shape = builder.shape(source)
    values = [builder.values.get(index) if isinstance(index, Ref) else None for index in indices]
    rank = len(call.spec.shape) - (len(shape) - len(indices))
    dims: list[int] = []
    for size, value in zip(shape, values, strict=False):
        is_numbers = value is not None and value.dtype != torch.bool and value.numel() == size != 1
        if value is None or not is_numbers or not torch.equal(value.flatten(), torch.arange(size)):
            return generic(builder, call)
        lead = rank - value.dim()
        dims.append(lead + next(d for d, n in enumerate(value.shape) if n > 1))
    if dims != sorted(set(dims)) or prod(call.spec.shape) != prod(shape):
        return generic(builder, call)
    return view_to(builder, call, source, call.spec.shape)


def _put_in_each(builder: Builder, call: Call) -> Value:
    """Write ``x[arange(n), i] = value``, into rows of each sample, as a scatter along dim 1, whose samples are independent."""
    given = call.bound()
    source, indices, value = given["self"], given["indices"], given["values"]
    chosen = None if given["accumulate"] else _rows_of_each(builder, call, source, indices)
    if chosen is None:
        return _put_where(builder, call)
    dim, index = chosen
    full = (*_broadcast_shape(builder, indices), *builder.shape(source)[dim + 1 :])
    if builder.shape(value) != full:
        value = builder.make(call, "aten.expand.default", value, full)
    rows = view_to(builder, call, value, builder.shape(index))
    return builder.emit(call, "aten.scatter.src", (source, dim, index, rows))


def _put_where(builder: Builder, call: Call) -> Value:
    """Write ``x[mask] = value`` as a choice between ``value`` and ``x`` where all places get the same value, else by sample if it can be."""
    given = call.bound()
    source, indices, value = given["self"], given["indices"], given["values"]
    masks = [index for index in indices if isinstance(index, Ref)]
    if given["accumulate"] or len(masks) != 1 or builder.specs[masks[0]].dtype != torch.bool:
        return generic(builder, call)
    dims = len(call.spec.shape)
    num_behind = dims - indices.index(masks[0]) - len(builder.shape(masks[0]))  # indices may end in None
    first, behind = builder.shape(value)[: -num_behind or dims], builder.shape(value)[-num_behind or dims :]
    mask = view_to(builder, call, masks[0], builder.shape(masks[0]) + (1,) * num_behind)
    if any(size != 1 for size in first):
        is_of_rows = indices[0] == masks[0] and behind == call.spec.shape[dims - num_behind :]
        by_sample = scattered_by_sample(builder, call, source, mask, value) if is_of_rows else None
        return by_sample or generic(builder, call)
    return builder.emit(call, "aten.where.self", (mask, view_to(builder, call, value, behind), source))


def _rows_of_each(builder: Builder, call: Call, source: Ref, indices: tuple[Argument, ...]) -> tuple[int, Ref] | None:
    """Return the dim and the index of a gather of the rows at ``[arange(n), ..., i]``; None if the indices are no such.

    Each index before i is the range of its own dim, as in ``[arange(n)[:, None, None], arange(h)[:, None], i]`` with i [n, h, k].
    """
    refs = [index for index in indices if isinstance(index, Ref)]
    dim = len(refs) - 1
    if dim < 1 or any(index is None for index in indices[: dim + 1]):
        return None
    shape, spec = builder.shape(source), builder.specs[refs[dim]]
    if refs[dim] in builder.values or spec.dtype != torch.int64 or spec.shape[:dim] != shape[:dim]:
        return None
    rank = len(spec.shape)
    for number, (ref, size) in enumerate(zip(refs[:dim], shape, strict=False)):
        value = builder.values.get(ref)
        column = torch.arange(size).view(*(1,) * number, size, *(1,) * (rank - number - 1))
        if value is None or value.dim() > rank or not torch.equal(value[(None,) * (rank - value.dim())], column):
            return None
    if _broadcast_shape(builder, indices) != spec.shape:
        return None
    rest = shape[dim + 1 :]
    index = builder.make(call, "aten.remainder.Scalar", refs[dim], shape[dim])  # an index may count from the end
    index = view_to(builder, call, index, (*shape[:dim], prod(spec.shape[dim:]), *(1,) * len(rest)))
    if rest:
        index = builder.make(call, "aten.expand.default", index, (*builder.shape(index)[: dim + 1], *rest))
    return dim, index


def _broadcast_shape(builder: Builder, indices: tuple[Argument, ...]) -> tuple[int, ...]:
    """Return the shape to which all indices are broadcast."""
    return broadcast(*(builder.shape(index) for index in indices if isinstance(index, Ref)))


_SAMPLERS = frozenset(
    ["bernoulli", "binomial", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "normal_functional",
     "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "uniform"]
)  # fmt: skip
"""Random operators whose gradient torch defines as zero. Others, such as rrelu, have a gradient."""


def random_call(builder: Builder, call: Call) -> Value:
    """Handle an operator that draws random numbers: its operands are detached if its gradient is zero."""
    if call.target.split(".")[1].rstrip("_") not in _SAMPLERS:
        return generic(builder, call)
    args = tuple(detached(builder, call, arg) if isinstance(arg, Ref) else arg for arg in call.args)
    kwargs = {key: value for key, value in call.kwargs.items() if key != "generator"}
    return generic(builder, replace(call, args=args, kwargs=kwargs, grad=False))


def _batch_norm(builder: Builder, call: Call) -> Value:
    """Emit a batch norm in training, whose statistics are those of the whole batch even if ranks share its samples.

    New running statistics are outputs of the operator. The statistics that torch returns for its backward must not be read.
    """
    given = call.bound()
    if not given["training"]:
        return generic(builder, call)
    if "running_mean" in given:
        specs = [spec for spec in (call.outputs[0], *call.outputs[3:]) if spec is not None]
        assert len(specs) == 3, call.target
        args = tuple(
            given[key] for key in ("input", "running_mean", "running_var", "weight", "bias", "momentum", "eps")
        )
        normalized = builder.emit(call, "autopar.batch_norm_running", args, *specs, detached=(1, 2))
        return (normalized, None, None, Ref(normalized.name, 1), Ref(normalized.name, 2))
    args = (given["input"], given["weight"], given["bias"], given["eps"])
    return (builder.emit(call, "autopar.batch_norm", args, call.spec), *(None,) * (len(call.outputs) - 1))


def _batch_norm_at_rest(builder: Builder, call: Call) -> Value:
    """Emit a batch norm in ``eval()`` mode, which only reads its running statistics, so that its samples are independent."""
    given = call.bound()
    names = ("input", "weight", "bias", "running_mean", "running_var")
    args = (*(given[name] for name in names), False, given["momentum"], given["eps"], False)
    normalized = builder.emit(call, "aten.batch_norm.default", args, call.spec)
    return (normalized, *(None,) * (len(call.outputs) - 1))


_MODES = ("sum", "mean", "max")
"""Modes of torch's embedding bags by number."""

_DENSE = "embeddings with sparse=True get dense gradients here: train them with an optimizer for such"


def _recurrent(builder: Builder, call: Call) -> Value:
    """Emit a recurrent network. If it has dropout between its layers, each layer becomes a call with ``autopar.dropout`` between them.

    In this form recomputation draws the same random numbers again, and each part of a batch draws independent ones.
    """
    given = call.bound()
    num_layers, dropout = given["num_layers"], given["dropout"]
    states = given["hx"] if isinstance(given["hx"], tuple) else (given["hx"],)
    # final states have the shapes of the initial ones; an export of torch 2.11 gives them another rank
    call = replace(call, outputs=(call.spec, *(builder.specs[state] for state in states)))
    if not (dropout and given["train"] and num_layers > 1):
        return generic(builder, replace(call, args=tuple((given | {"dropout": 0.0}).values()), kwargs={}))
    x, parameters = given["input"], given["params"]
    directions, num_weights = 2 if given["bidirectional"] else 1, len(parameters) // num_layers
    final_states: list[list[Ref]] = [[] for _ in states]
    for layer in range(num_layers):
        first = layer * directions
        initial = tuple(slice_of(builder, call, state, 0, first, first + directions) for state in states)
        own: dict[str, Any] = {
            "input": x,
            "hx": initial if len(initial) > 1 else initial[0],
            "params": parameters[layer * num_weights : (layer + 1) * num_weights],
            "num_layers": 1,
            "dropout": 0.0,
        }
        args = tuple((given | own).values())
        x = builder.emit(call, call.target, args, call.spec, *(builder.specs[ref] for ref in initial))
        for i, finals in enumerate(final_states):
            finals.append(Ref(x.name, i + 1))
        if layer < num_layers - 1:
            x = _dropped_out(builder, call, x, dropout)
    return (x, *(builder.make(call, "aten.cat.default", tuple(finals), 0) for finals in final_states))


def _embedding(builder: Builder, call: Call) -> Value:
    """Emit an embedding with a dense gradient, because gradients are summed over ranks and sharded as dense tensors."""
    given = call.bound()
    if not given["sparse"]:
        return generic(builder, call)
    _note_dense(builder)
    args = tuple(given[key] for key in ("weight", "indices", "padding_idx", "scale_grad_by_freq"))
    return builder.emit(call, call.target, args)


def _note_dense(builder: Builder) -> None:
    """Tell the user once that sparse gradients become dense."""
    if _DENSE not in builder.notes:
        builder.notes.append(_DENSE)


def _bags(builder: Builder, call: Call) -> Value:
    """Emit an embedding bag. Bags of one length become the rows of a matrix of ids, [bags, length]; others keep their offsets."""
    given = call.bound()
    weight, ids, offsets, weights = (given[key] for key in ("weight", "indices", "offsets", "per_sample_weights"))
    padding = given.get("padding_idx")
    if given["sparse"]:
        _note_dense(builder)
    # This overload counts a negative padding index from the end. In the others it means that there is none.
    if call.target == "aten.embedding_bag.padding_idx" and padding is not None:
        padding %= builder.shape(weight)[0]
    literals = (_MODES[given["mode"]], -1 if padding is None else padding, given["scale_grad_by_freq"])
    length = _bag_length(builder, offsets, builder.shape(ids)[0], call.spec.shape[0])
    if length:
        shape = (call.spec.shape[0], length)
        id_weights = view_to(builder, call, weights, shape) if isinstance(weights, Ref) else None
        args = (weight, view_to(builder, call, ids, shape), id_weights, *literals)
        bags = builder.emit(call, "autopar.embedding_bag", args, call.spec)
    else:
        ragged = (weight, ids, offsets, weights, *literals, given["include_last_offset"])
        bags = builder.emit(call, "autopar.embedding_bag_ragged", ragged, call.spec)
    return (bags, *(None for _ in call.outputs[1:]))


def _bag_length(builder: Builder, offsets: Ref, num_ids: int, num_bags: int) -> int:
    """Return the common length of all bags; 0 if they differ in length or their offsets are not constant."""
    value = builder.values.get(offsets)
    if value is None or not num_bags or num_ids % num_bags:
        return 0
    length = num_ids // num_bags
    starts = value.expand(builder.shape(offsets))[:num_bags]
    return length if torch.equal(starts, torch.arange(num_bags, dtype=starts.dtype) * length) else 0


LAYERS: dict[str, Handler] = {
    "aten.addmm.default": _addmm,
    **dict.fromkeys(aten_targets("mm.default matmul.default"), _mm),
    "aten.linear.default": _linear,
    **dict.fromkeys(aten_targets("_weight_norm.default _weight_norm_interface.default"), _weight_norm),
    "aten.einsum.default": _einsum,
    "aten.kron.default": _kron,
    **dict.fromkeys(aten_targets("native_dropout.default dropout.default"), _dropout),
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.index.Tensor": _index,
    "aten.index_put.default": _put_in_each,
    **dict.fromkeys(
        aten_targets("_native_batch_norm_legit_functional.default _native_batch_norm_legit.no_stats"), _batch_norm
    ),
    "aten._native_batch_norm_legit_no_training.default": _batch_norm_at_rest,
    **dict.fromkeys(aten_targets("lstm.input gru.input rnn_tanh.input rnn_relu.input"), _recurrent),
    "aten.embedding.default": _embedding,
    **dict.fromkeys(aten_targets("embedding_bag.padding_idx embedding_bag.default _embedding_bag.default"), _bags),
}
"""Handlers by target as traced."""
