"""Strategies that call another operator on local shapes (:mod:`autopar.ops.sharded`); patterns of experts, pooling and channel norms.

These strategies are offered besides those of the pattern of an operator. Axis ``batch`` is not a group of ranks, as it also stands for
micro-batches. Strategies that depend on the rank are therefore not offered there.

Functions have the forms of ``PatternMaker`` and ``MoreStrategies`` in :mod:`autopar.rules.table`.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from autopar.errors import RuleError
from autopar.graph.graph import Op
from autopar.ops.kernels import Form, region_of
from autopar.plan.mesh import I, P, R, S, Type
from autopar.rules.computing_patterns import reduction
from autopar.rules.grammar import Pattern, divides, invariant, pattern_of, replicate
from autopar.rules.local_calls import BATCH
from autopar.rules.moving_patterns import NAMES, Specs, argument, integer, same_dims
from autopar.rules.strategy import FORM_AT, GATHERED, RING, Strategy

SEQUENCE_AXIS = "cp"
"""The only axis on which split dims may be in zig-zag order."""

EXPERT_TARGETS = frozenset(("autopar.experts_split", "autopar.experts_dispatch", "autopar.experts_dispatch_split"))
"""The operators that run a mixture whose experts are split over ranks."""


def embedding_vocabulary(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """embedding(weight, ids) with split rows: ids of other ranks give zeros, and the sum is pending."""
    if not (argument(op, 3, "scale_grad_by_freq", False) or argument(op, 4, "sparse", False)):
        yield from _vocabulary("autopar.embedding_vocabulary", operands, 0, P, axis, size)


def bag_vocabulary(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """embedding_bag(weight, ids, weights) with split rows: ids of other ranks do not count, and the sum is pending."""
    if op.args[3] != "max" and not op.args[5]:
        yield from _vocabulary("autopar.embedding_bag_vocabulary", operands, 0, P, axis, size)


def cross_entropy_vocabulary(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """cross_entropy_sum(logits, target) with split classes: the vocabulary-parallel loss of Megatron."""
    classes, loss = len(operands[0].shape) - 1, I if op.spec.requires_grad else R
    yield from _vocabulary("autopar.cross_entropy_vocabulary", operands, classes, loss, axis, size)


def _vocabulary(target: str, operands: Specs, dim: int, output: Type, axis: str, size: Fraction) -> Iterator[Strategy]:
    """Yield the strategy that splits the vocabulary, which is ``dim`` of the first operand, and calls ``target``."""
    if axis != BATCH and divides(operands[0].shape[dim], size):
        inputs = (S(dim), *(R for _ in operands[1:]))
        yield Strategy(name="vocabulary", inputs=inputs, outputs=(output,), work=1 / size, target=target)


def opaque(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """Yield a region of untraced code, which runs on complete tensors, or on axis ``batch`` on a part of the samples if these are independent.

    If its backward is not linear (because it clips gradients, for example), pending sums of gradients must not pass through it.
    """
    region = region_of(str(op.args[0]))
    has_gradient = any(spec.requires_grad for spec in operands)
    if has_gradient and axis != BATCH:
        yield invariant(operands, op.outputs)
    if not has_gradient or region.is_linear_backward:
        yield replicate(operands, op.outputs)
    if axis != BATCH or region.splits is None:
        return
    input_dims, output_dims = region.splits
    lengths = [operands[i].shape[d] for i, d in enumerate(input_dims) if d is not None]
    lengths += [spec.shape[d] for spec, d in zip(op.outputs, output_dims, strict=True)]
    if all(length * size.denominator % size.numerator == 0 for length in lengths):
        state_types = (R,) * (len(operands) - len(input_dims))
        yield Strategy(
            name="split samples",
            inputs=(*(R if d is None else S(d) for d in input_dims), *state_types),
            outputs=tuple(S(d) for d in output_dims),
            work=1 / size,
            random=True,
        )


def partial_mean(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """Yield a mean over a split dim: the local sum over the global count, which is a pending sum."""
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
    """Return a mixture of experts (hidden, weights, indices, gate, up, down, gate_bias, up_bias, form): its inner width f is contracted.

    If gate and up are interleaved in one tensor, :func:`experts` splits their pairs instead.
    """
    form = Form.parse(str(op.args[FORM_AT]))
    f_dim, pair_dim = ("f^", "g^") if form.is_interleaved else ("f+", "f+")
    up, down = f"{pair_dim} h^", f"h^ {f_dim}"
    if form.is_transposed:
        up, down = f"h^ {pair_dim}", f"{f_dim} h^"
    weight_dims = f"e^ {up}, e^ {up}, e^ {down}, e^ {pair_dim}, e^ {pair_dim}"
    return pattern_of(f"b... h^, b... k+, b... k+, {weight_dims} -> b... h^; linear 1", op, operands)


def experts(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """Yield a mixture of experts with split experts, or with split pairs of interleaved gate and up.

    Under *experts* every rank has all tokens and computes what its experts contribute, a pending sum. Under *dispatch d* tokens are split
    along dim d and travel to the ranks of their experts and back: k rows for each token in both directions, and as many for gradients.

    If experts are spread over data ranks already, the experts of each rank are split once more. Under *experts* tokens then travel between
    the data ranks that hold the same part, and under *dispatch* over both axes at once.
    """
    if axis in (BATCH, SEQUENCE_AXIS):  # parameters are complete on both
        return
    form = Form.parse(str(op.args[FORM_AT]))
    if form.is_interleaved:
        down, *biases = operands[4:]
        if divides(down.shape[1 if form.is_transposed else 2], size):
            weight_types = (S(2), S(1)) if form.is_transposed else (S(1), S(2))
            inputs = (R, R, R, *weight_types, *(S(1) for _ in biases))
            yield Strategy(name="split f", inputs=inputs, outputs=(P,), work=1 / size)
    if not divides(operands[-1].shape[0], size):
        return
    split_by_expert = (S(0),) * (len(operands) - 3)
    is_spread = op.target == "autopar.experts_dispatch"
    yield Strategy(
        name="experts",
        inputs=(R, R, R, *split_by_expert),
        outputs=(P,),
        work=1 / size,
        target="autopar.experts_dispatch_split" if is_spread else "autopar.experts_split",
    )
    for dim, length in enumerate(operands[0].shape[:-1]):
        if divides(length, size):
            yield Strategy(
                name=f"dispatch {dim}",
                inputs=(S(dim), S(dim), S(dim), *split_by_expert),
                outputs=(S(dim),),
                work=1 / size,
                target="autopar.experts_dispatch",
            )


def convolution_groups(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """Yield a convolution of groups of channels, split by groups: each rank has all channels of its groups, and their weights.

    On axis ``batch`` the groups are samples, which stand in the channels: ``conv2d(x.view(1, n * c, h, w), weights, groups=n)``.
    """
    groups, rank = integer(op, 6, "groups", 1), len(operands[0].shape)
    channels = S(rank - len(operands[1].shape) + 1)
    # On cp dims may be in zig-zag order, in two chunks a rank; no chunk may cut a group.
    chunks = 2 * size if axis == SEQUENCE_AXIS else size
    is_of_samples = channels.dim == 0 or operands[0].shape[0] == 1
    if divides(groups, chunks) and (axis != BATCH or is_of_samples):
        inputs = (channels, *(S(0) for _ in operands[1:]))
        yield Strategy(name="split groups", inputs=inputs, outputs=(channels,), work=1 / size)


def attention_sequence(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """Attention whose queries are split along the sequence.

    ``gather``: keys and values are complete. The change from S to R gathers them, and its backward scatters their gradients. A causal mask
    begins at the first query of the rank. Without a causal mask this is ``split s`` of the pattern.

    ``ring``: keys and values are split too and go round the ring. Every split dim is in zig-zag order (:mod:`autopar.rules.strategy`).
    """
    rank = len(operands[0].shape)
    if axis == BATCH:
        return
    rows, sequence = operands[0].shape[-2], S(rank - 2)
    is_causal = bool(argument(op, 5, "is_causal", False))
    if not divides(rows, size) or (is_causal and operands[1].shape[-2] != rows):
        return
    is_random = bool(argument(op, 4, "dropout_p", 0.0))

    def strategy(name: str, target: str, keys: Type, *masks: Type) -> Strategy:
        inputs = (sequence, keys, keys, *masks)
        return Strategy(name=name, inputs=inputs, outputs=(sequence,), work=1 / size, target=target, random=is_random)

    if is_causal:
        yield strategy("gather", GATHERED, R)
    columns, chunks = operands[1].shape[-2], 2 * size.numerator
    if axis != SEQUENCE_AXIS or rank != 4 or rows % chunks or columns % chunks:
        return
    if any(not m.shape or m.shape[-1] != columns for m in operands[3:]):
        return
    masks = (S(len(m.shape) - 2) if len(m.shape) > 1 and m.shape[-2] == rows else R for m in operands[3:])
    yield strategy("ring", RING, sequence, *masks)


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
"""The number of dims of space by target."""


def window(op: Op, operands: Specs) -> Pattern:
    """Pooling and resampling: samples and channels are split, dims of space are not."""
    is_linear = any(name in op.target for name in _LINEAR)
    return same_dims(op, operands, range(-WINDOW_TARGETS[op.target], 0), linear=is_linear)


def channel_norm(op: Op, operands: Specs) -> Pattern:
    """Batch, instance and group norm of x [samples, channels, *space], whose weight, bias and statistics have the channels.

    ``aten.batch_norm`` has known statistics and is elementwise but for the channels. The dims over which the others take statistics are not
    split.

    Raises:
        RuleError: an instance norm has running statistics.
    """
    if op.target == "aten.instance_norm.default" and not argument(op, 5, "use_input_stats", True):
        raise RuleError.unsupported(
            "An instance norm with running statistics", where=op.name, instead="Leave track_running_stats out"
        )
    labels = NAMES[: len(operands[0].shape)]
    samples, channels, space = labels[:1], labels[1:2], labels[2:]
    frozen = {
        "aten.batch_norm.default": (),
        "aten.instance_norm.default": space,
        "aten.group_norm.default": (*channels, *space),
    }.get(op.target, (*samples, *space))
    return Pattern(
        inputs=(labels, *(channels for _ in operands[1:])),
        outputs=(labels, *(channels for _ in op.outputs[1:])),
        frozen=frozenset(frozen),
    )


def total_statistics(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """Yield a sum over samples, pending over all data ranks, each of which has all its samples in one micro-batch."""
    if axis == BATCH and operands[0].dtype.is_floating_point:
        yield Strategy(name="statistics", inputs=(P,), outputs=(R,), target="autopar.total")


def batch_statistics(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """Batch norm with split samples or space: two all-reduces of one number for each channel give the statistics of the complete batch.

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
