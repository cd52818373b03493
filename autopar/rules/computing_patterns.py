"""Patterns of operators that compute and whose dims depend on literals: products, attention, norms, sums.

Functions are like those of :mod:`autopar.rules.moving_patterns`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from autopar.errors import RuleError
from autopar.graph.graph import Op, Ref
from autopar.rules.grammar import Labels, Pattern, pattern_of
from autopar.rules.moving_patterns import NAMES, Specs, aligned, argument, dims_of, integer, same_dims

# --- elementwise ---------------------------------------------------------------------------------


def cast_dtype(op: Op, operands: Specs) -> Pattern:
    """to.dtype, _to_copy: a partial sum passes unless the cast rounds, which would differ from one device."""
    source, target = operands[0].dtype, op.spec.dtype
    exact = source == target or (
        target.is_floating_point and (not source.is_floating_point or target.itemsize >= source.itemsize)
    )
    exact = exact or not (source.is_floating_point or target.is_floating_point)
    return same_dims(op, operands, linear=exact)


def fill(op: Op, operands: Specs) -> Pattern:
    """masked_fill.Scalar(x, mask, value), where.ScalarOther, where.ScalarSelf: linear where the scalar is 0."""
    pattern = pattern_of("x..., x... -> x...", op, operands)
    scalar, tensor = {
        "aten.masked_fill.Scalar": (2, 0),
        "aten.where.ScalarOther": (2, 1),
        "aten.where.ScalarSelf": (1, 1),
    }[op.target]
    return pattern if op.args[scalar] else replace(pattern, linear=((tensor,),))


# --- products ------------------------------------------------------------------------------------


def matmul(op: Op, operands: Specs) -> Pattern:
    """Products of matrices and vectors by their ranks: matmul, mv, dot."""
    left, right = (len(spec.shape) for spec in operands[:2])
    a = "k+" if left == 1 else "n k+" if left == 2 else "b... n k+"
    b = "k+" if right == 1 else "k+ m" if right == 2 else "b... k+ m"
    c = " ".join(
        [*(["b..."] if max(left, right) > 2 else []), *(["n"] if left > 1 else []), *(["m"] if right > 1 else [])]
    )
    return pattern_of(f"{a}, {b} -> {c}; linear 0, 1", op, operands)


def einsum(op: Op, operands: Specs) -> Pattern:
    """An equation without ellipses."""
    equation = cast("str", op.args[0]).replace(" ", "")
    if "..." in equation:
        raise RuleError(
            f"The dots of the equation '{equation}' stand for different dims",
            where=op.source or op.name,
            fix="Write the equation with a name for every dim",
        )
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = left.replace(",", "")
        right = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    repeated = {c for term in terms for c in term if term.count(c) > 1}
    return Pattern(
        inputs=tuple(tuple(term) for term in terms),
        outputs=(tuple(right),),
        contracted=frozenset("".join(terms)) - frozenset(right) - repeated,
        frozen=frozenset(repeated),
        linear=tuple((i,) for i in range(len(operands))),
    )


def attention(op: Op, operands: Specs) -> Pattern:
    """scaled_dot_product_attention(q, k, v, mask, dropout, causal): b and h are split, s unless causal.

    Fewer key heads than query heads (``enable_gqa``) are split together with them. Attention that is
    split along the sequence on another axis already (``autopar.attention_gathered``, ``_ring``) keeps s.
    """
    rank = len(operands[0].shape)
    lead = ("b", "h") if rank == 4 else tuple(f"b{i}" for i in range(rank - 2))

    inputs = [
        aligned((*lead, *last), spec.shape)
        for spec, last in zip(operands, (("s", "e"), ("t", "e"), ("t", "f"), ("s", "t")), strict=False)
    ]
    whole = bool(argument(op, 5, "is_causal", False)) or op.target.startswith("autopar.attention_")
    return Pattern(
        inputs=tuple(inputs),
        outputs=(aligned((*lead, "s", "f"), op.spec.shape),),
        frozen=frozenset(("t", "e", "f", "s") if whole else ("t", "e", "f")),
        linear=((2,),),
        random=bool(argument(op, 4, "dropout_p", 0.0)),
    )


def convolution(op: Op, operands: Specs) -> Pattern:
    """conv1d/2d/3d, transposed ones and convolution, not transposed: batch, and channels in and out unless grouped.

    The weight is [out, in / groups, *window], of a transposed one [in, out / groups, *window].
    """
    general = op.target == "aten.convolution.default"
    groups = integer(op, 8 if general else 6, "groups", 1)
    if general and argument(op, 6, "transposed", False):
        raise RuleError.unsupported(
            f"Splitting the transposed {op.target}",
            where=op.name,
            instead="Make the module that calls it opaque (opaque=[...])",
        )
    space = len(operands[1].shape) - 2
    window = tuple(f"w{i}" for i in range(space))
    kernel = tuple(f"k{i}" for i in range(space))
    batch = ("b",) * (len(operands[0].shape) - space - 1)
    first, second = ("c", "o") if "transpose" in op.target else ("o", "c")
    inputs: list[Labels] = [(*batch, "c", *window), (first, second if groups == 1 else "", *kernel)]
    if len(operands) == 3:
        inputs.append(("o",))
    frozen = {*window, *kernel} | (set() if groups == 1 else {"c", "o"})
    added = (2,) * (len(operands) - 2)
    return Pattern(
        inputs=tuple(inputs),
        outputs=((*batch, "o", *window),),
        contracted=frozenset(("c",)) if groups == 1 else frozenset(),
        frozen=frozenset(frozen),
        linear=((0, *added), (1, *added)),
    )


def embedding(op: Op, operands: Specs) -> Pattern:
    """Rows of a table [v, n] by ids: ids and n are split; v: see :mod:`autopar.rules.other_kernels`.

    Gradients scaled by how often an id stands in the batch need the whole batch.
    """
    frequencies = argument(op, 3, "scale_grad_by_freq", False)
    return pattern_of(f"v^ n, b...{'^' if frequencies else ''} -> b... n; linear 0", op, operands)


def embedding_bag(op: Op, operands: Specs) -> Pattern:
    """Sum, mean or maximum of a table's rows for each bag: bags and width are split, and under a sum the bag's length.

    Gradients scaled by how often an id stands in the batch need the whole batch.
    """
    mode, frequencies = str(op.args[3]), bool(op.args[5])
    bags, length = "b^" if frequencies else "b", "k+" if mode == "sum" and not frequencies else "k^"
    linear = {"max": "", "sum": "; linear 0, 2"}.get(mode, "; linear 0")
    return pattern_of(f"v^ n, {bags} {length}, {bags} {length} -> {bags} n{linear}", op, operands)


def embedding_bag_ragged(op: Op, operands: Specs) -> Pattern:
    """Bags of different lengths: where one begins tells its place among all ids, so that only the width is split."""
    linear = {"max": "", "sum": "; linear 0, 3"}.get(str(op.args[4]), "; linear 0")
    return pattern_of(f"v^ n, i^, o^, i^ -> b^ n{linear}", op, operands)


# --- norms ---------------------------------------------------------------------------------------


def layer_norm(op: Op, operands: Specs) -> Pattern:
    """Layer norm, native or not, and RMS norm: the normalised dims stay whole."""
    rank = len(operands[0].shape)
    kept = rank - len(cast("tuple[int, ...]", argument(op, 1, "normalized_shape")))
    labels = NAMES[:rank]
    statistics = (*labels[:kept], *("",) * (rank - kept))
    return Pattern(
        inputs=(labels, *(labels[kept:] for _ in operands[1:])),
        outputs=(labels, *(statistics for _ in op.outputs[1:])),
        frozen=frozenset(labels[kept:]),
    )


# --- sums and what is like them ------------------------------------------------------------------

_REDUCTIONS = {
    "aten.sum.default": "sum",
    "aten.sum.dim_IntList": "sum",
    "aten.mean.default": "mean",
    "aten.mean.dim": "mean",
    "autopar.partial_mean": "sum",
    "aten.count_nonzero.default": "count",
    "aten.count_nonzero.dim_IntList": "count",
}
_WHOLE_NAMES = (
    "amax.default amin.default max.default min.default max.dim min.dim argmax.default argmin.default"
    " any.default any.dim any.dims all.default all.dim all.dims prod.default prod.dim_int logsumexp.default"
    " var.correction var.dim std.correction std.dim var_mean.correction median.default norm.ScalarOpt_dim"
    " linalg_vector_norm.default"
)
_WHOLE_REDUCTIONS = tuple(f"aten.{name}" for name in _WHOLE_NAMES.split())
REDUCTION_TARGETS = (*_REDUCTIONS, *_WHOLE_REDUCTIONS)


def reduction(op: Op, operands: Specs) -> Pattern:
    """sum(x, dims, keepdim), mean, amax and their like: a sum over a split dim is partial, the others whole."""
    kind = _REDUCTIONS.get(op.target, "")
    rank = len(operands[0].shape)
    position = 2 if op.target in ("aten.norm.ScalarOpt_dim", "aten.linalg_vector_norm.default") else 1
    listed = op.target.endswith((".default",)) and op.target not in (
        "aten.amax.default", "aten.amin.default", "aten.argmax.default", "aten.argmin.default", "aten.logsumexp.default",
        "aten.linalg_vector_norm.default",
    )  # fmt: skip
    dims = tuple(range(rank)) if listed else dims_of(op, position, "dim", rank)
    labels = NAMES[:rank]
    reduced = frozenset(labels[dim] for dim in dims if dim < rank)
    if len(op.spec.shape) == rank:
        right: Labels = tuple("" if label in reduced else label for label in labels)
    else:
        right = tuple(label for label in labels if label not in reduced)
    return Pattern(
        inputs=(labels,),
        outputs=(right,) * len(op.outputs),
        contracted=reduced if kind in ("sum", "count") else frozenset(),
        frozen=frozenset() if kind in ("sum", "count") else reduced,
        linear=((0,),) if kind in ("sum", "mean") else (),
    )


def histogram(op: Op, operands: Specs) -> Pattern:
    """histc(x, bins, min, max): counts add up over parts of x, when the bounds are given."""
    labels = frozenset(NAMES[: len(operands[0].shape)])
    given = argument(op, 2, "min", 0) != argument(op, 3, "max", 0)
    return Pattern(
        inputs=(NAMES[: len(operands[0].shape)],),
        outputs=(("",),),
        contracted=labels if given else frozenset(),
        frozen=frozenset() if given else labels,
    )


# --- losses --------------------------------------------------------------------------------------

_ELEMENTWISE_LOSSES = {
    "aten.mse_loss.default": 2,
    "aten.l1_loss.default": 2,
    "aten.smooth_l1_loss.default": 2,
    "aten.huber_loss.default": 2,
    "aten.binary_cross_entropy.default": 3,
    "aten.soft_margin_loss.default": 2,
    "aten.binary_cross_entropy_with_logits.default": 4,
}
LOSS_TARGETS = tuple(_ELEMENTWISE_LOSSES)


def loss(op: Op, operands: Specs) -> Pattern:
    """mse_loss(x, target, reduction) and its like: a sum is contracted, a mean is not split."""
    reduction_kind = integer(op, _ELEMENTWISE_LOSSES[op.target], "reduction", 1)
    if reduction_kind == 0:
        return pattern_of("x..., x..., x..., x... -> x...", op, operands)
    labels = NAMES[: max(len(spec.shape) for spec in operands)]
    names = frozenset(labels)
    return Pattern(
        inputs=tuple(aligned(labels, spec.shape) for spec in operands),
        outputs=((),),
        contracted=names if reduction_kind == 2 else frozenset(),
        frozen=names if reduction_kind == 1 else frozenset(),
    )


def cross_entropy(op: Op, operands: Specs) -> Pattern:
    """cross_entropy_loss(logits [n, c, ...], target [n, ...], weight, reduction, ...); classes stay whole."""
    kind = integer(op, 3, "reduction", 1)
    logits = operands[0].shape
    if len(operands[1].shape) == len(logits):
        raise RuleError.unsupported(
            f"A cross entropy with targets of shape {operands[1].shape} that are no class ids",
            where=op.name,
            instead="Give class ids, or write it with log_softmax and a sum",
        )
    rest = NAMES[: len(logits) - 1]
    inputs: list[Labels] = [(*rest[:1], "c", *rest[1:]), rest]
    if isinstance(argument(op, 2, "weight"), Ref):
        inputs.append(("c",))
    return Pattern(
        inputs=tuple(inputs),
        outputs=(rest if kind == 0 else (),),
        contracted=frozenset(rest) if kind == 2 else frozenset(),
        frozen=frozenset(("c", *rest) if kind == 1 else ("c",)),
    )
