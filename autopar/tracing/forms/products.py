"""Weight norm, einsum, and products with a weight in one form: ``aten.linear(x, w, b)`` or, for a weight [in, out], ``autopar.linear_t``."""

from __future__ import annotations

from string import ascii_letters

from autopar.graph.graph import Argument, Ref, TensorSpec
from autopar.tracing.builder import Builder, Call, Value
from autopar.tracing.forms.basic import Handler, generic, view_to


def _addmm(builder: Builder, call: Call) -> Value:
    bias, source, weight = call.args
    plain = call.kwargs.get("beta", 1) == 1 and call.kwargs.get("alpha", 1) == 1
    if not plain or not _is_weight(builder, weight) or len(builder.shape(bias)) != 1:
        return generic(builder, call)
    return builder.emit(call, "autopar.linear_t", (source, weight, bias))


def _mm(builder: Builder, call: Call) -> Value:
    source, weight = call.args
    if isinstance(weight, Ref) and len(builder.shape(weight)) == 2:
        producer = builder.producers.get(weight.name)
        if producer is not None and producer.target == "aten.transpose.int" and _is_weight(builder, producer.args[0]):
            return builder.emit(call, "aten.linear.default", (source, producer.args[0], None))
        if _is_weight(builder, weight):
            return builder.emit(call, "autopar.linear_t", (source, weight, None))
    return generic(builder, call)


def _is_weight(builder: Builder, ref: Argument) -> bool:
    return isinstance(ref, Ref) and ref.name in builder.parameters and len(builder.shape(ref)) == 2


def _linear(builder: Builder, call: Call) -> Value:
    source, weight, *bias = call.args
    return builder.emit(call, "aten.linear.default", (source, weight, bias[0] if bias else None))


def _weight_norm(builder: Builder, call: Call) -> Value:
    """The weight ``v * (g / |v|)``, the norm over all dims but one; nobody may read the norm."""
    given = call.bound()
    direction, length, dim = given["v"], given["g"], given["dim"]
    assert isinstance(direction, Ref) and isinstance(length, Ref) and isinstance(dim, int)
    shape, dtype = builder.shape(direction), builder.specs[direction].dtype
    others = tuple(d for d in range(len(shape)) if d != dim % len(shape))
    small = TensorSpec(shape=tuple(1 if d in others else n for d, n in enumerate(shape)), dtype=dtype)
    norm = builder.emit(call, "aten.linalg_vector_norm.default", (direction, 2, others, True), small, name="norm")
    scale = builder.emit(call, "aten.div.Tensor", (view_to(builder, call, length, small.shape), norm), small)
    weight = builder.emit(call, "aten.mul.Tensor", (direction, scale), TensorSpec(shape=shape, dtype=dtype))
    return (weight, None) if len(call.outputs) > 1 else weight


def _einsum(builder: Builder, call: Call) -> Value:
    """The equation with letters for the dims that dots stand for, where these are equal in all operands."""
    equation, operands, *_ = call.args
    assert isinstance(equation, str) and isinstance(operands, tuple)
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    shapes = [builder.shape(ref) for ref in operands]
    hidden = [
        shape[term.index(".") : len(shape) - len(term.partition("...")[2])]
        for term, shape in zip(terms, shapes, strict=True)
        if "..." in term
    ]
    if not hidden or any(dims != hidden[0] for dims in hidden):
        return generic(builder, call)
    letters = "".join([c for c in ascii_letters if c not in equation][: len(hidden[0])])
    if not arrow:
        used = left.replace(",", "").replace("...", "")
        right = "..." + "".join(sorted(c for c in set(used) if used.count(c) == 1))
    written = f"{left}->{right}".replace("...", letters)
    return builder.emit(call, call.target, (written, operands))


PRODUCTS: dict[str, Handler] = {
    "aten.addmm.default": _addmm,
    "aten.mm.default": _mm,
    "aten.matmul.default": _mm,
    "aten.linear.default": _linear,
    "aten._weight_norm.default": _weight_norm,
    "aten._weight_norm_interface.default": _weight_norm,
    "aten.einsum.default": _einsum,
}
