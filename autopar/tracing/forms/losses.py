"""Losses and means as sums over samples divided by counts, so that batches can be split and weighted right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from autopar.graph.graph import Argument, Input, Op, Ref, TensorSpec
from autopar.ops import plain
from autopar.ops.kernels import aten_targets
from autopar.tracing.builder import Builder, Call, Value
from autopar.tracing.forms.basic import Handler, cast_to, generic, view_to

_NONE, _MEAN, _SUM = 0, 1, 2
_HALVES = (torch.float16, torch.bfloat16)


def _cross_entropy(builder: Builder, call: Call) -> Value:
    """cross_entropy_loss by class indices -> ``autopar.cross_entropy_sum`` over the count of targets."""
    given = call.bound()
    target = given["target"]
    assert isinstance(target, Ref)
    if builder.specs[target].dtype.is_floating_point:
        return _soft(builder, call, _in_one_dtype(builder, call).bound())
    if given["reduction"] == _NONE:
        return generic(builder, _in_one_dtype(builder, call))
    return _of_classes(builder, call, given)


def _of_classes(builder: Builder, call: Call, given: dict[str, Argument]) -> Ref:
    """A cross entropy by class indices, summed or its mean; ``given``: arguments of cross_entropy_loss in order."""
    if isinstance(given["weight"], Ref):
        return _weighted(builder, call, given)
    return _token_loss(builder, call, given)


def _soft(builder: Builder, call: Call, given: dict[str, Argument]) -> Value:
    """A cross entropy with probabilities of classes: what log_softmax gives, weighted by them; a mean is over its rows."""
    logits, target, weight, smoothing = (given[key] for key in ("self", "target", "weight", "label_smoothing"))
    assert isinstance(logits, Ref) and isinstance(target, Ref) and isinstance(smoothing, float)
    shape = builder.shape(logits)
    dim = min(1, len(shape) - 1)
    if smoothing:
        kept = builder.make(call, "aten.mul.Scalar", target, 1 - smoothing)
        target = builder.make(call, "aten.add.Scalar", kept, smoothing / shape[dim])
    logs = builder.make(call, "aten.log_softmax.int", logits, dim)
    if isinstance(weight, Ref):
        factors = view_to(builder, call, weight, (shape[dim], *(1,) * (len(shape) - dim - 1)))
        logs = builder.make(call, "aten.mul.Tensor", logs, factors)
    terms = builder.make(call, "aten.mul.Tensor", logs, target)
    each = builder.make(call, "aten.sum.dim_IntList", terms, (dim,))
    each = builder.make(call, "aten.neg.default", each, name="each_loss")
    return each if given["reduction"] == _NONE else _reduced(builder, call, each)


def _reduced(builder: Builder, call: Call, each: Ref) -> Ref:
    """The mean or sum of losses, as the call asks for."""
    reduction = "aten.mean.default" if call.bound()["reduction"] == _MEAN else "aten.sum.default"
    return builder.make(call, reduction, each, name="loss")


def _weighted(builder: Builder, call: Call, given: dict[str, Argument]) -> Ref:
    """Classes have weights: the summed loss, divided for a mean by the weights of all targets that count.

    All of it in the logits' dtype, float32 where that is half: the weights are often a buffer in float32, and sums over tokens
    are made in no half, as those without weights.
    """
    logits, target, weight = given["self"], given["target"], given["weight"]
    assert isinstance(logits, Ref) and isinstance(target, Ref) and isinstance(weight, Ref)
    dtype = builder.specs[logits].dtype
    dtype = torch.float32 if dtype in _HALVES else dtype
    weight = cast_to(builder, call, weight, dtype)
    given = given | {"self": cast_to(builder, call, logits, dtype), "weight": weight}
    values = tuple(_SUM if name == "reduction" else value for name, value in given.items())
    total = builder.emit(call, "aten.cross_entropy_loss.default", values, TensorSpec(shape=(), dtype=dtype))
    if given["reduction"] == _SUM:
        return total
    valid = builder.make(call, "aten.ne.Scalar", target, given["ignore_index"], name="valid")
    nothing = builder.make(call, "aten.zeros_like.default", target)
    known = builder.make(call, "aten.where.self", valid, target, nothing)
    table = view_to(builder, call, weight, (builder.shape(weight)[0], 1))
    column = builder.make(call, "aten.embedding.default", table, known)
    found = view_to(builder, call, column, builder.shape(target))
    counted = builder.make(call, "aten.mul.Tensor", found, valid)
    count = builder.make(call, "aten.sum.default", counted, name="count")
    return builder.make(call, "aten.div.Tensor", total, count, name="loss")


def _in_one_dtype(builder: Builder, call: Call) -> Call:
    """The call with the weights of classes in the dtype of its input, as torch asks of the kernels (and not of fake tensors)."""
    given = call.bound()
    source, weight = given["self"], given["weight"]
    assert isinstance(source, Ref)
    if not isinstance(weight, Ref):
        return call
    weight = cast_to(builder, call, weight, builder.specs[source].dtype)
    return replace(call, args=tuple((given | {"weight": weight}).values()), kwargs={})


def _nll(builder: Builder, call: Call) -> Value:
    """nll_loss of log_softmax is the cross entropy of what the log_softmax was taken of, with weights of classes too."""
    given = call.bound()
    source = given["self"]
    assert isinstance(source, Ref)
    logits = _logits(builder, call, source)
    if logits is None or given["reduction"] == _NONE:
        return generic(builder, _in_one_dtype(builder, call))
    loss = _of_classes(builder, call, given | {"self": logits, "label_smoothing": 0.0})
    return (loss, None) if len(call.outputs) > 1 else loss


def _logits(builder: Builder, call: Call, source: Ref) -> Ref | None:
    """What ``source`` is the log_softmax of, over classes; rows may have been flattened between."""
    shape = builder.shape(source)
    dim = min(1, len(shape) - 1)
    producer = builder.producers.get(source.name)
    is_flat = producer is not None and producer.target == "aten.view.default"
    if producer is not None and is_flat and dim == len(shape) - 1:
        inner = producer.operands[0]
        if builder.shape(inner)[-1] != shape[-1]:
            return None
        producer, dim = builder.producers.get(inner.name), len(builder.shape(inner)) - 1
    if producer is None or producer.target not in ("aten.log_softmax.int", "aten._log_softmax.default"):
        return None
    if producer.args[1] != dim:
        return None
    return view_to(builder, call, producer.operands[0], shape) if is_flat else producer.operands[0]


def _token_loss(builder: Builder, call: Call, given: dict[str, Argument]) -> Ref:
    logits, target, ignore, smoothing = (given[key] for key in ("self", "target", "ignore_index", "label_smoothing"))
    assert isinstance(logits, Ref) and isinstance(target, Ref)
    logits, target = _unflattened(builder, *_classes_last(builder, call, logits, target))
    half = call.spec.dtype in _HALVES
    scalar = TensorSpec(shape=(), dtype=torch.float32 if half else call.spec.dtype)
    total = builder.emit(call, "autopar.cross_entropy_sum", (logits, target, ignore, smoothing), scalar)
    if given["reduction"] == _SUM:
        return total
    valid = builder.make(call, "aten.ne.Scalar", target, ignore, name="valid")
    count = builder.make(call, "aten.sum.default", valid, name="count")
    number = builder.make(call, "aten.to.dtype", count, scalar.dtype, name="count_as_float")
    return builder.make(call, "aten.div.Tensor", total, number, name="loss")


def _classes_last(builder: Builder, call: Call, logits: Ref, target: Ref) -> tuple[Ref, Ref]:
    """Logits ``[N, C, d...]`` as ``[N, d..., C]``."""
    shape = builder.shape(logits)
    if len(shape) <= 2:
        return logits, target
    order = (0, *range(2, len(shape)), 1)
    spec = TensorSpec(shape=tuple(shape[d] for d in order), dtype=builder.specs[logits].dtype)
    producer = builder.producers.get(logits.name)
    if producer is not None and producer.target == "aten.transpose.int" and len(shape) == 3:
        inner = producer.operands[0]
        if sorted((producer.args[1], producer.args[2])) == [1, 2]:  # type: ignore[type-var]
            return inner, target
    return builder.emit(call, "aten.permute.default", (logits, order), spec, name="classes_last"), target


def _unflattened(builder: Builder, logits: Ref, target: Ref) -> tuple[Ref, Ref]:
    """Both without the views that flatten tokens, where they agree."""
    origins = []
    for ref in (logits, target):
        producer = builder.producers.get(ref.name)
        origins.append(producer.operands[0] if producer is not None and producer.target == "aten.view.default" else ref)
    rows, labels = builder.shape(origins[0]), builder.shape(origins[1])
    if rows[:-1] == labels and rows[-1:] == builder.shape(logits)[-1:]:
        return origins[0], origins[1]
    return logits, target


def _elementwise(builder: Builder, call: Call) -> Value:
    """A loss with a ``reduction``: the losses of all elements (or samples), then mean or sum."""
    given = call.bound()
    if given["reduction"] == _NONE:
        return generic(builder, call)
    given["reduction"] = _NONE
    if call.target in ("aten.mse_loss.default", "aten.l1_loss.default"):
        error = builder.make(call, "aten.sub.Tensor", given["self"], given["target"], name="error")
        if call.target == "aten.mse_loss.default":
            each = builder.make(call, "aten.pow.Tensor_Scalar", error, 2, name="squared_error")
        else:
            each = builder.make(call, "aten.abs.default", error, name="absolute_error")
    else:
        named = {a.name: given.pop(a.name) for a in call.overload._schema.arguments if a.kwarg_only}
        each = builder.make(call, call.target, *given.values(), name="each_loss", **named)
    assert builder.specs[each].numel > 0, "a loss over no elements"
    return _reduced(builder, call, each)


_SCALES = aten_targets("mul.Tensor mul.Scalar div.Tensor div.Scalar neg.default")
_ADDS = aten_targets("add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar")


def over_samples(builder: Builder, loss: Ref, inputs: Sequence[Input], batch_size: int) -> Ref:
    """The same loss as a sum over samples.

    Terms that depend on no sample (a penalty on weights, a learned variance, a number) become means of themselves over the batch,
    of which every micro-batch and every data rank takes its part.
    """
    of_samples = {leaf.name for leaf in inputs if leaf.batch_dim is not None}
    for op in builder.ops:
        if any(ref.name in of_samples for ref in op.operands):
            of_samples.add(op.name)

    def spread(op: Op, term: Argument) -> Argument:
        spec = TensorSpec(shape=(batch_size,), dtype=op.spec.dtype)
        if isinstance(term, Ref):
            flows = builder.specs[term].requires_grad
            each = replace(spec, requires_grad=flows)
            rows = emit(op, "aten.expand.default", (term, spec.shape), each)
        else:
            assert isinstance(term, int | float | complex), term
            rows, flows = Ref(builder.unique("term")), False
            builder.specs[rows], builder.values[rows] = spec, torch.full((1,), term, dtype=spec.dtype)
        return emit(op, "aten.mean.default", (rows,), replace(op.spec, requires_grad=flows))

    def emit(op: Op, target: str, args: tuple[Argument, ...], spec: TensorSpec) -> Ref:
        name = builder.unique(op.name)
        return builder.append(replace(op, name=name, target=target, args=args, kwargs=(), outputs=(spec,)))

    def summed(ref: Ref) -> Ref:
        op = builder.producers.get(ref.name)
        if op is None or op.spec.shape or op.target not in _ADDS | _SCALES:
            return ref
        own = [i for i, a in enumerate(op.args[:2]) if isinstance(a, Ref) and a.name in of_samples]
        if op.target in _SCALES and len(own) > 1:
            return ref
        args = list(op.args)
        for i in own:
            args[i] = summed(cast("Ref", args[i]))
        if op.target in _SCALES:
            target = op.target
        else:
            target = op.target.replace(".Scalar", ".Tensor")
            args[:2] = [a if i in own else spread(op, a) for i, a in enumerate(args[:2])]
        if tuple(args) == op.args:
            return ref
        return builder.append(replace(op, name=builder.unique(op.name), target=target, args=tuple(args)))

    return summed(loss)


def _add(builder: Builder, call: Call) -> Value:
    """Zeros plus x, in the shape and dtype of x, is x."""
    first, second = call.args[:2]
    if call.kwargs.get("alpha", 1) == 1:
        for zero, other in ((first, second), (second, first)):
            if _is_zero(builder, zero) and isinstance(other, Ref):
                spec = builder.specs[other]
                if (spec.shape, spec.dtype) == (call.spec.shape, call.spec.dtype):
                    return other
    return generic(builder, call)


def _scatter_add(builder: Builder, call: Call) -> Value:
    """Into zeros: ``autopar.scatter_sum``, of which parts of the source are summands."""
    given = call.bound()
    zeros, index, source, dim = given["self"], given["index"], given["src"], given["dim"]
    if not _is_zero(builder, zeros) or not isinstance(dim, int) or not call.spec.shape:
        return generic(builder, call)
    shape = call.spec.shape
    return builder.emit(call, "autopar.scatter_sum", (index, source, dim % len(shape), shape), call.spec)


def _is_zero(builder: Builder, value: Argument) -> bool:
    known = builder.values.get(value) if isinstance(value, Ref) else None
    return known is not None and not bool(known.any())


LOSSES: dict[str, Handler] = {
    "aten.cross_entropy_loss.default": _cross_entropy,
    **dict.fromkeys(aten_targets("nll_loss_nd.default nll_loss.default nll_loss_forward.default"), _nll),
    **dict.fromkeys(
        aten_targets(
            "mse_loss.default l1_loss.default smooth_l1_loss.default huber_loss.default"
            " binary_cross_entropy_with_logits.default binary_cross_entropy.default soft_margin_loss.default"
            " poisson_nll_loss.default margin_ranking_loss.default hinge_embedding_loss.default"
            " cosine_embedding_loss.default triplet_margin_loss.default kl_div.default multi_margin_loss.default"
            " multilabel_margin_loss.default"
        ),
        _elementwise,
    ),
    "aten.add.Tensor": _add,
    "aten.scatter_add.default": _scatter_add,
}
"""Handlers of losses, and of the sums that losses and means are made of, by target as traced."""


@torch.library.custom_op("autopar::ctc_losses", mutates_args=())
def _exported(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """What stands in an exported graph for :func:`autopar.ops.plain.ctc_losses`."""
    return plain.ctc_losses(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)


@_exported.register_fake
def _(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])
