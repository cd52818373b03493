"""Handlers of losses, which become sums over samples or tokens divided by counts.

In this form a batch can be split over ranks and micro-batches: sums and counts of its parts add up to those of the batch. Means
of the means of the parts would weight the parts wrongly if their counts differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from autopar.graph.graph import Argument, Input, Op, Ref, TensorSpec
from autopar.ops import plain
from autopar.ops.kernels import aten_targets
from autopar.tracing.builder import Builder, Call, Value
from autopar.tracing.forms.basic import Handler, cast_to, expanded, generic, view_to

_NONE, _MEAN, _SUM = 0, 1, 2
"""The values of the argument ``reduction`` in torch's operators."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which losses of ``dtype`` are added up: half precision is too coarse for sums over tokens."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _cross_entropy(builder: Builder, call: Call) -> Value:
    """Handle cross_entropy_loss with class indices or with class probabilities as targets."""
    given = call.bound()
    if builder.specs[given["target"]].dtype.is_floating_point:
        return _soft(builder, call, _in_one_dtype(builder, call).bound())
    if given["reduction"] == _NONE:
        return generic(builder, _in_one_dtype(builder, call))
    return _of_classes(builder, call, given)


def _of_classes(builder: Builder, call: Call, given: dict[str, Any]) -> Ref:
    """Emit the sum or mean of cross entropies with class indices; ``given`` has the arguments of cross_entropy_loss in order."""
    emit = _token_loss if given["weight"] is None else _weighted
    return emit(builder, call, given)


def _soft(builder: Builder, call: Call, given: dict[str, Any]) -> Value:
    """Emit a cross entropy with class probabilities as targets: the log_softmax weighted by these. A mean is over the rows."""
    logits, target, weight, smoothing = (given[key] for key in ("self", "target", "weight", "label_smoothing"))
    shape = builder.shape(logits)
    dim = min(1, len(shape) - 1)
    if smoothing:
        scaled = builder.make(call, "aten.mul.Scalar", target, 1 - smoothing)
        target = builder.make(call, "aten.add.Scalar", scaled, smoothing / shape[dim])
    log_probs = builder.make(call, "aten.log_softmax.int", logits, dim)
    if isinstance(weight, Ref):
        factors = view_to(builder, call, weight, (shape[dim], *(1,) * (len(shape) - dim - 1)))
        log_probs = builder.make(call, "aten.mul.Tensor", log_probs, factors)
    terms = builder.make(call, "aten.mul.Tensor", log_probs, target)
    losses = builder.make(call, "aten.sum.dim_IntList", terms, (dim,))
    losses = builder.make(call, "aten.neg.default", losses, name="each_loss")
    return losses if given["reduction"] == _NONE else _reduced(builder, call, losses)


def _reduced(builder: Builder, call: Call, losses: Ref) -> Ref:
    """Emit the mean or the sum of losses, as the call's ``reduction`` says."""
    reduction = "aten.mean.default" if call.bound()["reduction"] == _MEAN else "aten.sum.default"
    return builder.make(call, reduction, losses, name="loss")


def _weighted(builder: Builder, call: Call, given: dict[str, Any]) -> Ref:
    """Emit a cross entropy with class weights: the weighted sum, which a mean divides by the sum of the weights of its targets.

    It is computed in the dtype of the logits, or in float32 if that is float16 or bfloat16. The weights are often a float32 buffer,
    and sums over tokens are never computed in half precision, as in the case without weights.
    """
    logits, target = given["self"], given["target"]
    dtype = _wide(builder.specs[logits].dtype)
    weight = cast_to(builder, call, given["weight"], dtype)
    summed = given | {"self": cast_to(builder, call, logits, dtype), "weight": weight, "reduction": _SUM}
    spec = TensorSpec(shape=(), dtype=dtype)
    total = builder.emit(call, "aten.cross_entropy_loss.default", tuple(summed.values()), spec)
    if given["reduction"] == _SUM:
        return total
    valid = builder.make(call, "aten.ne.Scalar", target, given["ignore_index"], name="valid")
    zeros = builder.make(call, "aten.zeros_like.default", target)
    classes = builder.make(call, "aten.where.self", valid, target, zeros)  # the ignored index is no row of the table
    table = view_to(builder, call, weight, (builder.shape(weight)[0], 1))
    column = builder.make(call, "aten.embedding.default", table, classes)
    target_weights = view_to(builder, call, column, builder.shape(target))
    valid_weights = builder.make(call, "aten.mul.Tensor", target_weights, valid)
    count = builder.make(call, "aten.sum.default", valid_weights, name="count")
    return builder.make(call, "aten.div.Tensor", total, count, name="loss")


def _in_one_dtype(builder: Builder, call: Call) -> Call:
    """Return the call with the class weights in the dtype of its input, which torch's kernels require but fake tensors do not."""
    given = call.bound()
    if given["weight"] is None:
        return call
    weight = cast_to(builder, call, given["weight"], builder.specs[given["self"]].dtype)
    return replace(call, args=tuple((given | {"weight": weight}).values()), kwargs={})


def _nll(builder: Builder, call: Call) -> Value:
    """Handle nll_loss: of a log_softmax it is the cross entropy of the operand of the log_softmax, else a mean or sum of losses."""
    given = call.bound()
    source, target, ignore = given["self"], given["target"], given["ignore_index"]
    logits = _logits(builder, call, source)
    if given["reduction"] == _NONE or (logits is None and given["weight"] is not None):
        return generic(builder, _in_one_dtype(builder, call))
    if logits is not None:
        loss = _of_classes(builder, call, given | {"self": logits, "label_smoothing": 0.0})
    else:
        losses = cast_to(builder, call, source, _wide(call.spec.dtype)), target, None, _NONE, ignore
        each = builder.make(call, "aten.nll_loss_nd.default", *losses, name="each_loss")
        total = builder.make(call, "aten.sum.default", each, name="loss")
        loss = total if given["reduction"] == _SUM else _of_valid(builder, call, total, target, ignore)
    return (loss, None) if len(call.outputs) > 1 else loss


def _logits(builder: Builder, call: Call, source: Ref) -> Ref | None:
    """Return the operand of the log_softmax over classes that ``source`` is, possibly after a view that flattens rows; else None."""
    shape = builder.shape(source)
    dim = min(1, len(shape) - 1)
    producer = builder.producers.get(source.name)
    is_flat = producer is not None and producer.target == "aten.view.default"
    if producer is not None and is_flat and dim == len(shape) - 1:
        inner = producer.operands[0]
        if builder.shape(inner)[-1] != shape[-1]:
            return None
        producer, dim = builder.producers.get(inner.name), len(builder.shape(inner)) - 1
    names = ("aten.log_softmax.int", "aten._log_softmax.default")
    if producer is None or producer.target not in names or producer.args[1] != dim:
        return None
    return view_to(builder, call, producer.operands[0], shape) if is_flat else producer.operands[0]


def _token_loss(builder: Builder, call: Call, given: dict[str, Any]) -> Ref:
    """Emit a cross entropy without class weights: ``autopar.cross_entropy_sum``, which a mean divides by the count of valid targets."""
    target, ignore = given["target"], given["ignore_index"]
    logits, target = _unflattened(builder, _classes_last(builder, call, given["self"]), target)
    scalar = TensorSpec(shape=(), dtype=_wide(call.spec.dtype))
    total = builder.emit(call, "autopar.cross_entropy_sum", (logits, target, ignore, given["label_smoothing"]), scalar)
    return total if given["reduction"] == _SUM else _of_valid(builder, call, total, target, ignore)


def _of_valid(builder: Builder, call: Call, total: Ref, target: Ref, ignore: Argument) -> Ref:
    """Divide a sum of losses by the number of targets that are not ignored."""
    valid = builder.make(call, "aten.ne.Scalar", target, ignore, name="valid")
    count = builder.make(call, "aten.sum.default", valid, name="count")
    number = builder.make(call, "aten.to.dtype", count, builder.specs[total].dtype, name="count_as_float")
    return builder.make(call, "aten.div.Tensor", total, number, name="loss")


def _classes_last(builder: Builder, call: Call, logits: Ref) -> Ref:
    """Return logits ``[N, C, d...]`` as ``[N, d..., C]``."""
    rank = len(builder.shape(logits))
    if rank <= 2:
        return logits
    producer = builder.producers.get(logits.name)
    if (
        rank == 3
        and producer is not None
        and producer.target == "aten.transpose.int"
        and {*producer.args[1:]} == {1, 2}
    ):
        return producer.operands[0]
    return builder.make(call, "aten.permute.default", logits, (0, *range(2, rank), 1), name="classes_last")


def _unflattened(builder: Builder, logits: Ref, target: Ref) -> tuple[Ref, Ref]:
    """Return logits and target as they were before views that flatten their tokens, if these shapes fit each other."""
    origins = []
    for ref in (logits, target):
        producer = builder.producers.get(ref.name)
        origins.append(producer.operands[0] if producer is not None and producer.target == "aten.view.default" else ref)
    rows, labels = builder.shape(origins[0]), builder.shape(origins[1])
    if rows[:-1] == labels and rows[-1:] == builder.shape(logits)[-1:]:
        return origins[0], origins[1]
    return logits, target


def _elementwise(builder: Builder, call: Call) -> Value:
    """Emit a loss with a ``reduction`` as the losses of all elements (or samples) followed by their mean or sum."""
    given = call.bound()
    if given["reduction"] == _NONE:
        return generic(builder, call)
    given["reduction"] = _NONE
    if call.target in ("aten.mse_loss.default", "aten.l1_loss.default"):
        error = builder.make(call, "aten.sub.Tensor", given["self"], given["target"], name="error")
        if call.target == "aten.mse_loss.default":
            losses = builder.make(call, "aten.pow.Tensor_Scalar", error, 2, name="squared_error")
        else:
            losses = builder.make(call, "aten.abs.default", error, name="absolute_error")
    else:
        kwargs = {a.name: given.pop(a.name) for a in call.overload._schema.arguments if a.kwarg_only}
        losses = builder.make(call, call.target, *given.values(), name="each_loss", **kwargs)
    assert builder.specs[losses].numel > 0, "a loss over no elements"
    return _reduced(builder, call, losses)


def _square(builder: Builder, call: Call) -> Value:
    """Emit a square as a power, as ``run_decompositions`` would.

    A handler makes the decomposition unnecessary, which would trace the program again for each loss that ends in a square.
    """
    return builder.emit(call, "aten.pow.Tensor_Scalar", (call.args[0], 2))


def _with_all_arguments(builder: Builder, call: Call) -> Value:
    """Emit an operator of autopar with all arguments given by position."""
    return builder.emit(call, call.target.removesuffix(".default"), tuple(call.bound().values()))


_SCALES = aten_targets("mul.Tensor mul.Scalar div.Tensor div.Scalar neg.default")
"""Operators that are linear in one operand, if no other operand depends on samples."""
_ADDS = aten_targets("add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar")
"""Operators that are linear in all operands together."""


def over_samples(builder: Builder, loss: Ref, inputs: Sequence[Input], batch_size: int) -> Ref:
    """Rewrite a loss so that all of its terms are sums or means over samples, and return the new loss.

    A term that depends on no sample, such as a weight penalty, a learned variance or a number, becomes the mean over the batch of
    equal values, of which each micro-batch and each data rank computes its part.

    Args:
        builder: Has the operators of the loss; the new operators are appended.
        loss: The scalar loss.
        inputs: The inputs of the graph.
        batch_size: The number of samples in the example batch.
    """
    of_samples = {leaf.name for leaf in inputs if leaf.batch_dim is not None}
    for op in builder.ops:
        if any(ref.name in of_samples for ref in op.operands):
            of_samples.add(op.name)

    def as_mean(op: Op, term: Argument) -> Argument:
        """Return the mean over the batch of a term that depends on no sample."""
        spec = TensorSpec(shape=(batch_size,), dtype=op.spec.dtype)
        if isinstance(term, Ref):
            requires_grad = builder.specs[term].requires_grad
            rows = emit(op, "aten.expand.default", (term, spec.shape), replace(spec, requires_grad=requires_grad))
        else:
            assert isinstance(term, int | float | complex), term
            rows, requires_grad = Ref(builder.unique("term")), False
            builder.specs[rows], builder.values[rows] = spec, torch.full((1,), term, dtype=spec.dtype)
        return emit(op, "aten.mean.default", (rows,), replace(op.spec, requires_grad=requires_grad))

    def emit(op: Op, target: str, args: tuple[Argument, ...], spec: TensorSpec) -> Ref:
        name = builder.unique(op.name)
        return builder.append(replace(op, name=name, target=target, args=args, kwargs=(), outputs=(spec,)))

    def rewritten(ref: Ref) -> Ref:
        """Return a scalar that depends on samples, with means in place of the terms that do not."""
        op = builder.producers.get(ref.name)
        if op is None or op.spec.shape or op.target not in _ADDS | _SCALES:
            return ref
        positions = [i for i, a in enumerate(op.args[:2]) if isinstance(a, Ref) and a.name in of_samples]
        if op.target in _SCALES and len(positions) > 1:
            return ref
        args = list(op.args)
        for i in positions:
            args[i] = rewritten(cast("Ref", args[i]))
        if op.target in _SCALES:
            target = op.target
        else:
            target = op.target.replace(".Scalar", ".Tensor")
            args[:2] = [a if i in positions else as_mean(op, a) for i, a in enumerate(args[:2])]
        if tuple(args) == op.args:
            return ref
        return builder.append(replace(op, name=builder.unique(op.name), target=target, args=tuple(args)))

    return rewritten(loss)


def _add(builder: Builder, call: Call) -> Value:
    """Handle an addition: the sum of zeros and x is x if it has the shape and the dtype of x."""
    first, second = call.args[:2]
    if call.kwargs.get("alpha", 1) == 1:
        for zero, other in ((first, second), (second, first)):
            if _is_zero(builder, zero) and isinstance(other, Ref):
                spec = builder.specs[other]
                if (spec.shape, spec.dtype) == (call.spec.shape, call.spec.dtype):
                    return other
    return generic(builder, call)


def _scatter_add(builder: Builder, call: Call) -> Value:
    """Emit scatter_add into zeros as ``autopar.scatter_sum``, to which each part of the source contributes a partial sum."""
    given = call.bound()
    shape = call.spec.shape
    if not _is_zero(builder, given["self"]) or not shape:
        return generic(builder, call)
    args = (given["index"], given["src"], given["dim"] % len(shape), shape)
    return builder.emit(call, "autopar.scatter_sum", args, call.spec)


def _masked_scatter(builder: Builder, call: Call) -> Value:
    """Emit a masked_scatter by sample where it is one of whole rows of samples."""
    return scattered_by_sample(builder, call, *call.operands) or generic(builder, call)


def scattered_by_sample(builder: Builder, call: Call, x: Ref, mask: Ref, source: Ref) -> Ref | None:
    """Emit a masked_scatter of whole rows of samples, as of images into the places of a text, by sample; None if it is no such.

    The values are the rows of all samples in order, such as [samples * patches, width] for x [samples, tokens, width]. A step refuses
    samples with more or fewer places than values (:func:`autopar.ops.plain.masked_scatter_by_sample`).
    """
    shape, places, rows = call.spec.shape, builder.shape(mask), builder.shape(source)
    is_by_sample = len(places) == len(shape) > 1 and places[0] == shape[0] and bool(rows)
    if not is_by_sample or builder.specs[source].numel >= call.spec.numel or rows[0] % shape[0]:
        return None
    values = view_to(builder, call, source, (shape[0], rows[0] // shape[0], *rows[1:]))
    full = expanded(builder, call, mask, replace(builder.specs[mask], shape=shape))
    return builder.emit(call, "autopar.masked_scatter_by_sample", (x, full, values))


def _is_zero(builder: Builder, argument: Argument) -> bool:
    """Return whether an argument is a constant tensor of zeros."""
    value = builder.values.get(argument) if isinstance(argument, Ref) else None
    return value is not None and not bool(value.any())


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
    "aten.square.default": _square,
    **dict.fromkeys(("autopar.experts.default", "autopar.ctc_losses.default"), _with_all_arguments),
    "aten.add.Tensor": _add,
    "aten.scatter_add.default": _scatter_add,
    "aten.masked_scatter.default": _masked_scatter,
}
"""Handlers of losses, of operators of autopar, of sums that begin with zeros, and of values of each sample, by target as traced."""


@torch.library.custom_op("autopar::ctc_losses", mutates_args=())
def _exported(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """Register :func:`autopar.ops.plain.ctc_losses` as an operator, so that an exported program keeps it as one call."""
    return plain.ctc_losses(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)


@_exported.register_fake
def _(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])
