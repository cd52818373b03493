"""Strategies that call something else than the operator on local shapes (:mod:`autopar.ops.sharded`), those on images among them.

An operator of the table may have, besides the strategies of its pattern, further ones from here.
The axis ``batch`` is no group of ranks (micro-batches lie on it too), so that nothing which has to
know its rank is offered there.

Functions are like those of :mod:`autopar.rules.moving_patterns`.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from autopar.errors import RuleError
from autopar.graph.graph import Op
from autopar.ops.kernels import Form, region_of
from autopar.plan.mesh import I, P, R, S
from autopar.rules.computing_patterns import reduction
from autopar.rules.grammar import Pattern, divides, invariant, pattern_of, replicate
from autopar.rules.local_calls import BATCH
from autopar.rules.moving_patterns import NAMES, Specs, argument, same_dims
from autopar.rules.strategy import FORM_AT, GATHERED, RING, Strategy

SEQUENCE_AXIS = "cp"
"""The one axis that may be in zig-zag order."""

EXPERT_TARGETS = frozenset(("autopar.experts_split", "autopar.experts_dispatch", "autopar.experts_dispatch_split"))
"""What runs a mixture whose experts are split over the axis."""


def embedding_vocabulary(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """embedding(weight, ids) with the rows of the table split: foreign ids give zeros, the sum is pending."""
    if axis == BATCH or not divides(operands[0].shape[0], size):
        return
    if argument(op, 3, "scale_grad_by_freq", False) or argument(op, 4, "sparse", False):
        return
    yield Strategy(
        name="vocabulary", inputs=(S(0), R), outputs=(P,), work=1 / size, target="autopar.embedding_vocabulary"
    )


def bag_vocabulary(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """embedding_bag(weight, ids, weights) with the rows of the table split: foreign ids count nothing, the sum is pending."""
    if axis == BATCH or not divides(operands[0].shape[0], size) or op.args[3] == "max" or op.args[5]:
        return
    others = (R,) * (len(operands) - 1)
    target = "autopar.embedding_bag_vocabulary"
    yield Strategy(name="vocabulary", inputs=(S(0), *others), outputs=(P,), work=1 / size, target=target)


def cross_entropy_vocabulary(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """cross_entropy_sum(logits, target) with the classes split: Megatron's vocabulary-parallel loss."""
    shape = operands[0].shape
    if axis == BATCH or not divides(shape[-1], size):
        return
    yield Strategy(
        name="vocabulary",
        inputs=(S(len(shape) - 1), R),
        outputs=(I if op.spec.requires_grad else R,),
        work=1 / size,
        target="autopar.cross_entropy_vocabulary",
    )


def opaque(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """A region of unknown code: whole on every rank of an axis, or its samples split where they were seen to be apart.

    Where its backward is not linear (it clips gradients, say) a pending sum of gradients must not pass.
    """
    region = region_of(str(op.args[0]))
    flows = any(spec.requires_grad for spec in operands)
    if flows and axis != BATCH:
        yield invariant(operands, op.outputs)
    if not flows or region.is_linear_backward:
        yield replicate(operands, op.outputs)
    if axis != BATCH or region.splits is None:
        return
    inside, outside = region.splits
    split = [(operands[i].shape[d], d) for i, d in enumerate(inside) if d is not None]
    split += [(spec.shape[d], d) for spec, d in zip(op.outputs, outside, strict=True)]
    if all(length * size.denominator % size.numerator == 0 for length, _ in split):
        state = (R,) * (len(operands) - len(inside))
        yield Strategy(
            name="split samples",
            inputs=(*(R if d is None else S(d) for d in inside), *state),
            outputs=tuple(S(d) for d in outside),
            work=1 / size,
            random=True,
        )


def partial_mean(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """Mean over a split dim: the local sum over the global count, a pending sum."""
    pattern = reduction(op, operands)
    for position, label in enumerate(pattern.inputs[0]):
        if label in pattern.frozen and divides(operands[0].shape[position], size):
            yield Strategy(
                name=f"split {label}",
                inputs=(S(position),),
                outputs=(P,),
                work=1 / size,
                target="autopar.partial_mean",
            )


def experts_pattern(op: Op, operands: Specs) -> Pattern:
    """A mixture of experts (hidden, weights, indices, gate, up, down, gate_bias, up_bias, form), whose width is summed over.

    Where gate and up lie in one tensor their pairs are split by :func:`experts`.
    """
    form = Form.parse(str(op.args[FORM_AT]))
    inside, pairs = ("f^", "g^") if form.is_interleaved else ("f+", "f+")
    up, down = f"{pairs} h^", f"h^ {inside}"
    if form.is_transposed:
        up, down = f"h^ {pairs}", f"{inside} h^"
    held = f"e^ {up}, e^ {up}, e^ {down}, e^ {pairs}, e^ {pairs}"
    return pattern_of(f"b... h^, b... k+, b... k+, {held} -> b... h^; linear 1", op, operands)


def experts(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """A mixture of experts with the experts split, or the pairs of what gate and up give.

    *experts*: every rank sees all tokens and computes what its experts add, a pending sum; nothing moves
    inside. *dispatch d*: tokens are split along dim d and travel to the ranks of their experts and back, k
    rows for each token in both directions (as many again for the gradients); how many leave a rank is in
    the routing, priced as if it were even.

    Of experts that are spread over data ranks already each rank's share is split once more: under *experts* tokens go
    to the data ranks that hold the same part of a share, under *dispatch* over both axes at once.
    """
    if axis in (BATCH, SEQUENCE_AXIS):  # parameters are whole on both
        return
    form = Form.parse(str(op.args[FORM_AT]))
    if form.is_interleaved:
        down, *biases = operands[4:]
        if divides(down.shape[1 if form.is_transposed else 2], size):
            split = (S(2), S(1)) if form.is_transposed else (S(1), S(2))
            inputs = (R, R, R, *split, *(S(1) for _ in biases))
            yield Strategy(name="split f", inputs=inputs, outputs=(P,), work=1 / size)
    if not divides(operands[-1].shape[0], size):
        return
    owned = (S(0),) * (len(operands) - 3)
    is_spread = op.target == "autopar.experts_dispatch"
    yield Strategy(
        name="experts",
        inputs=(R, R, R, *owned),
        outputs=(P,),
        work=1 / size,
        target="autopar.experts_dispatch_split" if is_spread else "autopar.experts_split",
    )
    for dim, length in enumerate(operands[0].shape[:-1]):
        if divides(length, size):
            yield Strategy(
                name=f"dispatch {dim}",
                inputs=(S(dim), S(dim), S(dim), *owned),
                outputs=(S(dim),),
                work=1 / size,
                target="autopar.experts_dispatch",
            )


def attention_sequence(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """Attention whose queries are split along the sequence.

    ``gather``: keys and values whole (the change S to R gathers them, its backward scatters their gradients); a causal
    mask begins at this rank's first query. Without a causal mask it is ``split s`` of the pattern.
    ``ring``: keys and values are split too and go round; every split dim is in zig-zag order (see ``rules.apply``).
    """
    rank = len(operands[0].shape)
    if axis == BATCH or op.target in (GATHERED, RING) or size.denominator != 1:
        return
    rows, sequence = operands[0].shape[-2], S(rank - 2)
    causal = bool(argument(op, 5, "is_causal", False))
    if not divides(rows, size) or (causal and operands[1].shape[-2] != rows):
        return
    random = bool(argument(op, 4, "dropout_p", 0.0))
    if causal:
        yield Strategy(
            name="gather",
            inputs=(sequence, R, R),
            outputs=(sequence,),
            work=1 / size,
            target=GATHERED,
            random=random,
        )
    columns, ranks = operands[1].shape[-2], size.numerator
    if axis != SEQUENCE_AXIS or rank != 4:
        return
    if rows % (2 * ranks) or columns % (2 * ranks):
        return
    if any(not m.shape or m.shape[-1] != columns for m in operands[3:]):
        return
    masks = tuple(S(len(m.shape) - 2) if len(m.shape) > 1 and m.shape[-2] == rows else R for m in operands[3:])
    yield Strategy(
        name="ring",
        inputs=(sequence, sequence, sequence, *masks),
        outputs=(sequence,),
        work=1 / size,
        target=RING,
        random=random,
    )


_POOLS = ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
_RESAMPLED = (
    ("nearest", 1),
    ("nearest", 2),
    ("nearest", 3),
    ("linear", 1),
    ("bilinear", 2),
    ("bicubic", 2),
    ("trilinear", 3),
)
_LINEAR = ("avg_pool", "upsample")
WINDOW_TARGETS: dict[str, int] = {
    **{f"aten.{name}{n}d.default": n for name in _POOLS for n in (1, 2, 3)},
    **{f"aten.max_pool{n}d_with_indices.default": n for n in (2, 3)},
    **{f"aten.upsample_{name}{n}d.vec": n for name, n in _RESAMPLED},
}
"""Dims of space by target."""


def window(op: Op, operands: Specs) -> Pattern:
    """Pooling and resampling: every channel of every sample by itself, space stays whole."""
    is_linear = any(name in op.target for name in _LINEAR)
    return same_dims(op, operands, range(-WINDOW_TARGETS[op.target], 0), linear=is_linear)


def channel_norm(op: Op, operands: Specs) -> Pattern:
    """Batch, instance and group norm of x [samples, channels, *space]; weight, bias and statistics have the channels.

    A batch norm reads statistics of the batch, unless they are at rest (``aten.batch_norm``): then it is elementwise.

    Raises:
        RuleError: an instance norm with running statistics.
    """
    if op.target == "aten.instance_norm.default" and not argument(op, 5, "use_input_stats", True):
        raise RuleError.unsupported(
            "An instance norm with running statistics", where=op.name, instead="Leave track_running_stats out"
        )
    labels = NAMES[: len(operands[0].shape)]
    samples, channels, space = labels[:1], labels[1:2], labels[2:]
    whole = {
        "aten.batch_norm.default": (),
        "aten.instance_norm.default": space,
        "aten.group_norm.default": (*channels, *space),
    }.get(op.target, (*samples, *space))
    return Pattern(
        inputs=(labels, *(channels for _ in operands[1:])),
        outputs=(labels, *(channels for _ in op.outputs[1:])),
        frozen=frozenset(whole),
    )


def total_statistics(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """A pending sum over samples, over all of the data ranks, each of which has all its samples in one micro-batch."""
    if axis == BATCH and operands[0].dtype.is_floating_point:
        yield Strategy(name="statistics", inputs=(P,), outputs=(R,), target="autopar.total")


def batch_statistics(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """Samples, or a dim of space, split: two all-reduces of one number a channel give the statistics of the whole.

    On axis ``batch`` the ranks are those of the data axes, and each has all its samples in one micro-batch.
    """
    for dim, length in enumerate(operands[0].shape):
        if dim != 1 and divides(length, size):
            yield Strategy(
                name="statistics" if dim == 0 else f"statistics {NAMES[dim]}",
                inputs=(S(dim), *(R for _ in operands[1:])),
                outputs=(S(dim), *(R for _ in op.outputs[1:])),
                work=1 / size,
                target=op.target,
            )
