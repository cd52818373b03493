"""Patterns of operators on images and their like, [samples, channels, *space]: pooling, resampling, norms.

Functions are like those of :mod:`autopar.rules.patterns.moving`.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from autopar.errors import RuleError
from autopar.graph.graph import Op
from autopar.plan.mesh import P, R, S
from autopar.rules.grammar import Labels, Pattern
from autopar.rules.patterns.moving import NAMES, Specs, argument, integer
from autopar.rules.patterns.other_kernels import divides
from autopar.rules.strategy import Communication, Strategy

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
    space = WINDOW_TARGETS[op.target]
    rank = len(operands[0].shape)
    labels = NAMES[:rank]
    return Pattern(
        inputs=(labels,),
        outputs=(labels,) * len(op.outputs),
        frozen=frozenset(labels[rank - space :]),
        linear=((0,),) if any(name in op.target for name in _LINEAR) else (),
    )


def shuffle(op: Op, operands: Specs) -> Pattern:
    """Pattern of pixel_shuffle and pixel_unshuffle: every dim is the outermost of what it becomes."""
    labels = NAMES[: len(operands[0].shape)]
    return Pattern(inputs=(labels,), outputs=(labels,), linear=((0,),))


def transposed_convolution(op: Op, operands: Specs) -> Pattern:
    """Samples, and channels in and out unless grouped; the weight is [in, out / groups, *window]."""
    groups = integer(op, 6, "groups", 1)
    space = len(operands[1].shape) - 2
    width, kernel = tuple(f"w{i}" for i in range(space)), tuple(f"k{i}" for i in range(space))
    batch = ("b",) * (len(operands[0].shape) - space - 1)
    inputs: list[Labels] = [(*batch, "c", *width), ("c", "o" if groups == 1 else "", *kernel)]
    if len(operands) == 3:
        inputs.append(("o",))
    added = (2,) * (len(operands) - 2)
    return Pattern(
        inputs=tuple(inputs),
        outputs=((*batch, "o", *width),),
        contracted=frozenset(("c",)) if groups == 1 else frozenset(),
        frozen=frozenset({*width, *kernel} | (set() if groups == 1 else {"c", "o"})),
        linear=((0, *added), (1, *added)),
    )


def instance_norm(op: Op, operands: Specs) -> Pattern:
    """Every sample and channel by itself; weight and bias have the channels."""
    if not argument(op, 5, "use_input_stats", True):
        raise RuleError.unsupported(
            "An instance norm with running statistics", where=op.name, instead="Leave track_running_stats out"
        )
    labels = NAMES[: len(operands[0].shape)]
    return Pattern(
        inputs=(labels, *(labels[1:2] for _ in operands[1:])), outputs=(labels,), frozen=frozenset(labels[2:])
    )


def batch_norm(op: Op, operands: Specs) -> Pattern:
    """Channels alone split freely: x is [samples, channels, *space], weight and bias have the channels."""
    labels = NAMES[: len(operands[0].shape)]
    return Pattern(
        inputs=(labels, *(labels[1:2] for _ in operands[1:])),
        outputs=(labels,),
        frozen=frozenset({*labels[:1], *labels[2:]}),
    )


def batch_norm_at_rest(op: Op, operands: Specs) -> Pattern:
    """Elementwise but for the channels that weight, bias, mean and variance have."""
    plain = batch_norm(op, operands)
    return Pattern(inputs=plain.inputs, outputs=plain.outputs)


def batch_norm_running(op: Op, operands: Specs) -> Pattern:
    """As :func:`batch_norm`, with running mean and variance among operands and results, by channels."""
    plain = batch_norm(op, operands)
    channels = NAMES[1:2]
    return Pattern(inputs=plain.inputs, outputs=(*plain.outputs, channels, channels), frozen=plain.frozen)


def total(op: Op, operands: Specs) -> Pattern:
    """A value as it is; a sum over samples comes out whole by :func:`total_statistics`."""
    labels = NAMES[: len(op.spec.shape)]
    return Pattern(inputs=(labels,), outputs=(labels,), linear=((0,),))


def total_statistics(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """A pending sum over samples, over all of the data ranks, each of which has all its samples in one micro-batch."""
    if axis == "batch" and operands[0].dtype.is_floating_point:
        moved = (Communication(kind="all_reduce", num_bytes=operands[0].num_bytes),)
        yield Strategy(name="statistics", inputs=(P,), outputs=(R,), target="autopar.total", communication=moved)


def batch_statistics(op: Op, operands: Specs, axis: str, size: Fraction) -> Iterator[Strategy]:
    """Samples, or a dim of space, split: two all-reduces of one number a channel give the statistics of the whole.

    On axis ``batch`` the ranks are those of the data axes, and each has all its samples in one micro-batch.
    """
    shape = operands[0].shape
    num_bytes = shape[1] * max(4, operands[0].dtype.itemsize)
    moved: tuple[Communication, ...] = (Communication(kind="all_reduce", num_bytes=num_bytes),) * 2
    if op.spec.requires_grad:
        moved += (Communication(kind="all_reduce", num_bytes=num_bytes, backward=True),) * 2
    for dim in (d for d in range(len(shape)) if d != 1):
        if divides(shape[dim], size):
            yield Strategy(
                name="statistics" if dim == 0 else f"statistics {NAMES[dim]}",
                inputs=(S(dim), *(R for _ in operands[1:])),
                outputs=(S(dim), *(R for _ in op.outputs[1:])),
                work=1 / size,
                target=op.target,
                communication=moved,
            )
