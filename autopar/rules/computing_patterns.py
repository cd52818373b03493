"""Patterns of operators that compute and whose dims depend on literals of the call: products, attention, norms, reductions, losses.

Functions have the form that :mod:`autopar.rules.moving_patterns` describes.
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
    """to.dtype: linear unless the cast rounds, because rounded summands would not add up to the rounded sum."""
    source, target = operands[0].dtype, op.spec.dtype
    exact = source == target or (
        target.is_floating_point and (not source.is_floating_point or target.itemsize >= source.itemsize)
    )
    exact = exact or not (source.is_floating_point or target.is_floating_point)
    return same_dims(op, operands, linear=exact)


def fill(op: Op, operands: Specs) -> Pattern:
    """masked_fill.Scalar(x, mask, value), where.ScalarOther, where.ScalarSelf: linear if the number is 0."""
    pattern = pattern_of("x..., x... -> x...", op, operands)
    scalar, tensor = {
        "aten.masked_fill.Scalar": (2, 0),
        "aten.where.ScalarOther": (2, 1),
        "aten.where.ScalarSelf": (1, 1),
    }[op.target]
    return pattern if op.args[scalar] else replace(pattern, linear=((tensor,),))


# --- products ------------------------------------------------------------------------------------


def matmul(op: Op, operands: Specs) -> Pattern:
    """Products of matrices and vectors of any ranks: matmul, mv, dot."""
    left, right = (len(spec.shape) for spec in operands[:2])
    a_dims = "k+" if left == 1 else "n k+" if left == 2 else "b... n k+"
    b_dims = "k+" if right == 1 else "k+ m" if right == 2 else "b... k+ m"
    output_dims = " ".join(
        [*(["b..."] if max(left, right) > 2 else []), *(["n"] if left > 1 else []), *(["m"] if right > 1 else [])]
    )
    return pattern_of(f"{a_dims}, {b_dims} -> {output_dims}; linear 0, 1", op, operands)


def einsum(op: Op, operands: Specs) -> Pattern:
    """Einsum with an equation that names every dim.

    Raises:
        RuleError: the equation has an ellipsis.
    """
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
    """scaled_dot_product_attention(q, k, v, mask, dropout, causal): b and h are split, and s unless the attention is causal.

    If there are fewer key heads than query heads (``enable_gqa``) they are split together. Attention whose sequence another axis splits
    already (``autopar.attention_gathered``, ``autopar.attention_ring``) does not split s further.
    """
    rank = len(operands[0].shape)
    lead = ("b", "h") if rank == 4 else tuple(f"b{i}" for i in range(rank - 2))
    inputs = [
        aligned((*lead, *last), spec.shape)
        for spec, last in zip(operands, (("s", "e"), ("t", "e"), ("t", "f"), ("s", "t")), strict=False)
    ]
    keeps_rows = bool(argument(op, 5, "is_causal", False)) or op.target.startswith("autopar.attention_")
    return Pattern(
        inputs=tuple(inputs),
        outputs=(aligned((*lead, "s", "f"), op.spec.shape),),
        frozen=frozenset(("t", "e", "f", "s") if keeps_rows else ("t", "e", "f")),
        linear=((2,),),
        random=bool(argument(op, 4, "dropout_p", 0.0)),
    )


def convolution(op: Op, operands: Specs) -> Pattern:
    """conv1d, conv2d, conv3d and their transposes.

    The batch is split, and input and output channels unless they are grouped: :mod:`autopar.rules.other_kernels` splits groups. The weight
    is [out, in / groups, *window], or [in, out / groups, *window] if transposed.
    """
    groups = integer(op, 6, "groups", 1)
    num_space = len(operands[1].shape) - 2
    window = tuple(f"w{i}" for i in range(num_space))
    kernel = tuple(f"k{i}" for i in range(num_space))
    batch = ("b",) * (len(operands[0].shape) - num_space - 1)
    first_dim, second_dim = ("c", "o") if "transpose" in op.target else ("o", "c")
    inputs: list[Labels] = [(*batch, "c", *window), (first_dim, second_dim if groups == 1 else "", *kernel)]
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
    """Rows of a table [v, n] by ids: ids and n are split; :mod:`autopar.rules.other_kernels` splits v.

    Gradients that are scaled by the frequency of an id need the complete batch.
    """
    frequencies = argument(op, 3, "scale_grad_by_freq", False)
    return pattern_of(f"v^ n, b...{'^' if frequencies else ''} -> b... n; linear 0", op, operands)


def embedding_bag(op: Op, operands: Specs) -> Pattern:
    """Sum, mean or maximum of the rows of a table for each bag: bags and width are split, and the length of bags under a sum.

    Gradients that are scaled by the frequency of an id need the complete batch.
    """
    mode, frequencies = str(op.args[3]), bool(op.args[5])
    bags, length = "b^" if frequencies else "b", "k+" if mode == "sum" and not frequencies else "k^"
    linear = {"max": "", "sum": "; linear 0, 2"}.get(mode, "; linear 0")
    return pattern_of(f"v^ n, {bags} {length}, {bags} {length} -> {bags} n{linear}", op, operands)


def embedding_bag_ragged(op: Op, operands: Specs) -> Pattern:
    """Bags of different lengths: only the width is split, as offsets are positions among all ids."""
    linear = {"max": "", "sum": "; linear 0, 3"}.get(str(op.args[4]), "; linear 0")
    return pattern_of(f"v^ n, i^, o^, i^ -> b^ n{linear}", op, operands)


# --- norms ---------------------------------------------------------------------------------------


def layer_norm(op: Op, operands: Specs) -> Pattern:
    """Layer norm and RMS norm: normalised dims are not split."""
    labels = NAMES[: len(operands[0].shape)]
    num_outer = len(labels) - len(cast("tuple[int, ...]", argument(op, 1, "normalized_shape")))
    return Pattern(
        inputs=(labels, *(labels[num_outer:] for _ in operands[1:])),
        outputs=(labels,),
        frozen=frozenset(labels[num_outer:]),
    )


# --- reductions ------------------------------------------------------------------

_REDUCTIONS = {
    "aten.sum.default": "sum",
    "aten.sum.dim_IntList": "sum",
    "aten.mean.default": "mean",
    "aten.mean.dim": "mean",
    "autopar.partial_mean": "sum",
    "aten.count_nonzero.default": "count",
    "aten.count_nonzero.dim_IntList": "count",
}
"""Reductions that can be over a split dim, or that are linear, by target. A mean is over a split dim only as a partial mean."""


def reduction(op: Op, operands: Specs) -> Pattern:
    """sum(x, dims, keepdim), mean, amax and the like: a sum over a split dim is partial; the dims of other reductions are not split."""
    kind = _REDUCTIONS.get(op.target, "")
    rank = len(operands[0].shape)
    position = 2 if op.target in ("aten.norm.ScalarOpt_dim", "aten.linalg_vector_norm.default") else 1
    dims = dims_of(op, position, "dim", rank)
    labels = NAMES[:rank]
    reduced = frozenset(labels[dim] for dim in dims if dim < rank)
    output_labels = tuple("" if label in reduced else label for label in labels)
    if len(op.spec.shape) < rank:
        output_labels = tuple(filter(None, output_labels))
    return Pattern(
        inputs=(labels,),
        outputs=(output_labels,) * len(op.outputs),
        contracted=reduced if kind in ("sum", "count") else frozenset(),
        frozen=frozenset() if kind in ("sum", "count") else reduced,
        linear=((0,),) if kind in ("sum", "mean") else (),
    )


def histogram(op: Op, operands: Specs) -> Pattern:
    """histc(x, bins, min, max): the counts of parts of x add up if the bounds are given."""
    labels = NAMES[: len(operands[0].shape)]
    has_bounds = argument(op, 2, "min", 0) != argument(op, 3, "max", 0)
    return Pattern(
        inputs=(labels,),
        outputs=(("",),),
        contracted=frozenset(labels if has_bounds else ()),
        frozen=frozenset(() if has_bounds else labels),
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
"""The position of ``reduction`` among the arguments of each loss."""
LOSS_TARGETS = tuple(_ELEMENTWISE_LOSSES)


def loss(op: Op, operands: Specs) -> Pattern:
    """mse_loss(x, target, reduction) and the like: dims are contracted under a sum, and not split under a mean."""
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
    """cross_entropy_loss(logits [n, c, ...], target [n, ...], weight, reduction, ...): classes are not split.

    Raises:
        RuleError: targets are not class ids.
    """
    kind = integer(op, 3, "reduction", 1)
    logits = operands[0].shape
    if len(operands[1].shape) == len(logits):
        raise RuleError.unsupported(
            f"A cross entropy with targets of shape {operands[1].shape} that are no class ids",
            where=op.name,
            instead="Give class ids, or write it with log_softmax and a sum",
        )
    token_labels = NAMES[: len(logits) - 1]
    inputs: list[Labels] = [(*token_labels[:1], "c", *token_labels[1:]), token_labels]
    if isinstance(argument(op, 2, "weight"), Ref):
        inputs.append(("c",))
    return Pattern(
        inputs=tuple(inputs),
        outputs=(token_labels if kind == 0 else (),),
        contracted=frozenset(token_labels) if kind == 2 else frozenset(),
        frozen=frozenset(("c", *token_labels) if kind == 1 else ("c",)),
    )
