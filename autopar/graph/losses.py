"""Losses as sums over samples divided by counts, so that batches can be split and weighted right."""

from __future__ import annotations

from math import prod

import torch

from autopar.graph.builder import Builder, Call, Value, broadcast
from autopar.graph.canonical import Handler, generic
from autopar.graph.ir import Argument, Ref, TensorSpec

_NONE, _MEAN, _SUM = 0, 1, 2


def _cross_entropy(builder: Builder, call: Call) -> Value:
    """cross_entropy_loss by class indices -> ``autopar.cross_entropy_sum`` over the count of targets."""
    given = call.bound()
    target = given["target"]
    assert isinstance(target, Ref)
    by_class = not builder.specs[target].dtype.is_floating_point
    if not by_class or given["weight"] is not None or given["reduction"] == _NONE:
        return generic(builder, call)
    ignore, smoothing = given["ignore_index"], given["label_smoothing"]
    return _token_loss(builder, call, given["self"], target, ignore, smoothing, given["reduction"])


def _nll(builder: Builder, call: Call) -> Value:
    """nll_loss of log_softmax is the cross entropy of what the log_softmax was taken of."""
    given = call.bound()
    source, target = given["self"], given["target"]
    assert isinstance(source, Ref) and isinstance(target, Ref)
    producer = builder.producers.get(source.name)
    if (
        producer is None
        or producer.target not in ("aten.log_softmax.int", "aten._log_softmax.default")
        or given["weight"] is not None
        or given["reduction"] == _NONE
        or producer.args[1] != min(1, len(builder.shape(source)) - 1)
    ):
        return generic(builder, call)
    loss = _token_loss(builder, call, producer.args[0], target, given["ignore_index"], 0.0, given["reduction"])
    return (loss, None) if len(call.outputs) > 1 else loss


def _token_loss(
    builder: Builder,
    call: Call,
    logits: Argument,
    target: Ref,
    ignore: Argument,
    smoothing: Argument,
    reduction: Argument,
) -> Ref:
    assert isinstance(logits, Ref)
    logits, target = _unflattened(builder, *_classes_last(builder, call, logits, target))
    half = call.spec.dtype in (torch.float16, torch.bfloat16)
    scalar = TensorSpec(shape=(), dtype=torch.float32 if half else call.spec.dtype)
    total = builder.emit(call, "autopar.cross_entropy_sum", (logits, target, ignore, smoothing), scalar)
    if reduction == _SUM:
        return total
    targets = builder.specs[target]
    valid = builder.emit(
        call, "aten.ne.Scalar", (target, ignore), TensorSpec(shape=targets.shape, dtype=torch.bool), name="valid"
    )
    count = builder.emit(call, "aten.sum.default", (valid,), TensorSpec(shape=(), dtype=torch.int64), name="count")
    number = builder.emit(call, "aten.to.dtype", (count, scalar.dtype), scalar, name="count_as_float")
    return builder.emit(call, "aten.div.Tensor", (total, number), scalar, name="loss")


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
    """A loss with a ``reduction``: the elementwise loss, then mean or sum."""
    given = call.bound()
    reduction = given.pop("reduction")
    if reduction == _NONE:
        return generic(builder, call)
    source = given["self"]
    assert isinstance(source, Ref)
    shapes = [builder.shape(value) for value in given.values() if isinstance(value, Ref)]
    spec = TensorSpec(shape=broadcast(*shapes), dtype=call.spec.dtype)
    if call.target == "aten.mse_loss.default":
        error = builder.emit(call, "aten.sub.Tensor", (source, given["target"]), spec, name="error")
        each = builder.emit(call, "aten.pow.Tensor_Scalar", (error, 2), spec, name="squared_error")
    elif call.target == "aten.l1_loss.default":
        error = builder.emit(call, "aten.sub.Tensor", (source, given["target"]), spec, name="error")
        each = builder.emit(call, "aten.abs.default", (error,), spec, name="absolute_error")
    else:
        position = [a.name for a in call.overload._schema.arguments].index("reduction")
        names = [a.name for a in call.overload._schema.arguments]
        args = tuple(_NONE if name == "reduction" else given[name] for name in names)
        assert args[position] == _NONE
        each = builder.emit(call, call.target, args, spec, name="each_loss")
    scalar = TensorSpec(shape=(), dtype=call.spec.dtype)
    assert prod(spec.shape) > 0, "a loss over no elements"
    target = "aten.mean.default" if reduction == _MEAN else "aten.sum.default"
    return builder.emit(call, target, (each,), scalar, name="loss")


LOSSES: dict[str, Handler] = {
    "aten.cross_entropy_loss.default": _cross_entropy,
    "aten.nll_loss_nd.default": _nll,
    "aten.nll_loss.default": _nll,
    "aten.nll_loss_forward.default": _nll,
    "aten.mse_loss.default": _elementwise,
    "aten.l1_loss.default": _elementwise,
    "aten.smooth_l1_loss.default": _elementwise,
    "aten.huber_loss.default": _elementwise,
    "aten.binary_cross_entropy_with_logits.default": _elementwise,
    "aten.binary_cross_entropy.default": _elementwise,
}
