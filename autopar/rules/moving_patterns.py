"""Patterns of operators that move data: views, slices, joins, indexing and factories.

The grammar cannot describe them, as their dims depend on literals of the call. Each function takes an operator and the specs of its
operands and returns the :class:`~autopar.rules.grammar.Pattern` of the call. It raises :class:`~autopar.errors.RuleError` for a call that
no pattern describes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch

from autopar.errors import RuleError
from autopar.graph.aliasing import dim_groups
from autopar.graph.graph import Argument, Op, Ref, TensorSpec
from autopar.ops.kernels import aten_targets
from autopar.plan.mesh import Type
from autopar.rules.grammar import Labels, Pattern

Specs = tuple[TensorSpec, ...]
"""The specs of the operands of a call, in order."""
NAMES: Labels = tuple(f"d{i}" for i in range(64))
"""Labels of dims by position, for operators that keep the order of dims."""


def argument(op: Op, position: int, name: str, default: Argument = None) -> Argument:
    """Return an argument of a call by position or by name."""
    if position < len(op.args):
        return op.args[position]
    return next((value for key, value in op.kwargs if key == name), default)


def integer(op: Op, position: int, name: str, default: int = 0) -> int:
    """Return an integer argument of a call by position or by name."""
    return cast("int", argument(op, position, name, default))


def dims_of(op: Op, position: int, name: str, rank: int, default: Argument = None) -> tuple[int, ...]:
    """Return a dim or a list of dims among the arguments, as numbers from 0; all dims if it is None or empty."""
    value = argument(op, position, name, default)
    if value is None or value == ():
        return tuple(range(rank))
    dims = value if isinstance(value, tuple) else (value,)
    return tuple(cast("int", dim) % max(rank, 1) for dim in dims)


def same_dims(op: Op, operands: Specs, frozen: Iterable[int] = (), *, linear: bool = True) -> Pattern:
    """Return the pattern of a call whose operands and outputs all have the same dims.

    Without further arguments it is that of ``autopar.total``, and of pixel_shuffle and pixel_unshuffle, where a label is the outermost part
    of a dim.

    Args:
        op: the call.
        operands: its operands, all of one rank.
        frozen: the dims that cannot be split.
        linear: whether the operator is jointly linear in all operands.
    """
    labels = NAMES[: len(operands[0].shape)]
    return Pattern(
        inputs=(labels,) * len(operands),
        outputs=(labels,) * len(op.outputs),
        frozen=frozenset(labels[dim] for dim in frozen),
        linear=(tuple(range(len(operands))),) if linear else (),
    )


def aligned(labels: Labels, shape: tuple[int, ...]) -> Labels:
    """Return the labels of a tensor that broadcasts: they are aligned to the right, and a dim of size 1 has the empty label."""
    return tuple(
        label if length > 1 else "" for label, length in zip(labels[len(labels) - len(shape) :], shape, strict=True)
    )


# --- views ---------------------------------------------------------------------------------------


def view(op: Op, operands: Specs) -> Pattern:
    """View and unsqueeze: dims fall into groups of equal products.

    Of each group only the outermost dim larger than one is split, on both sides.
    """
    before, after = operands[0].shape, op.spec.shape
    labels, results = [""] * len(before), [""] * len(after)
    if operands[0].numel:
        for input_dims, output_dims in dim_groups(before, after):
            source = next((i for i in input_dims if before[i] > 1), None)
            target = next((j for j in output_dims if after[j] > 1), None)
            if source is not None and target is not None:
                labels[source] = results[target] = NAMES[source]
    return Pattern(inputs=(tuple(labels),), outputs=(tuple(results),), linear=((0,),))


def permute(op: Op, operands: Specs) -> Pattern:
    """Transpositions and permutations: labels move with their dims."""
    rank = len(operands[0].shape)
    order = list(range(rank))
    if op.target.startswith("aten.permute"):
        order = list(dims_of(op, 1, "dims", rank))
    elif rank > 1:
        a, b = integer(op, 1, "dim0"), integer(op, 2, "dim1")
        order[a], order[b] = order[b], order[a]
    return Pattern(inputs=(NAMES[:rank],), outputs=(tuple(NAMES[i] for i in order),), linear=((0,),))


def repeat(op: Op, operands: Specs) -> Pattern:
    """Repeat: only dims that are repeated once are split."""
    before, after = operands[0].shape, op.spec.shape
    num_new = len(after) - len(before)
    results = tuple("" if j < num_new or before[j - num_new] != after[j] else NAMES[j] for j in range(len(after)))
    return Pattern(inputs=(results[num_new:],), outputs=(results,), linear=((0,),))


def expand(op: Op, operands: Specs) -> Pattern:
    """Expand: a new or enlarged dim is split in the output only, as every rank makes its part of the copies."""
    pattern = repeat(op, operands)
    return replace(pattern, outputs=(tuple(label or f"e{j}" for j, label in enumerate(pattern.outputs[0])),))


def one_hot(op: Op, operands: Specs) -> Pattern:
    """One-hot: the new last dim of classes is not split."""
    labels = NAMES[: len(operands[0].shape)]
    return Pattern(inputs=(labels,), outputs=((*labels, ""),))


def repeat_interleave(op: Op, operands: Specs) -> Pattern:
    """repeat_interleave with a number, of a vector or along a dim: the copies of an element stay on its rank."""
    if len(operands[0].shape) > 1 and argument(op, 2, "dim") is None:
        raise RuleError.unsupported(
            "A repeat_interleave of more than a vector without a dim", where=op.name, instead="Give it dim="
        )
    return same_dims(op, operands)


def recurrent(op: Op, operands: Specs) -> Pattern:
    """LSTM, GRU and plain recurrent networks: samples are independent; time, widths and layers are not split.

    The dropout between layers is a separate operator of the graph.
    """
    num_states = 2 if "lstm" in op.target else 1
    if len(operands[0].shape) < 3:
        return unsplit(op, operands)
    state = ("", "b", "")
    x = ("b", "", "") if argument(op, 8, "batch_first", False) else state
    parameters = tuple(("",) * len(spec.shape) for spec in operands[1 + num_states :])
    return Pattern(inputs=(x, *(state,) * num_states, *parameters), outputs=(x, *(state,) * num_states))


# --- slices and joins ----------------------------------------------------------------------------


def take(op: Op, operands: Specs) -> Pattern:
    """slice(x, dim, start, end, step), select(x, dim, index): ``dim`` is not split unless a slice takes all of it."""
    before, after = operands[0].shape, op.spec.shape
    dim = integer(op, 1, "dim") % len(before)
    if before == after:
        return same_dims(op, operands)
    pattern = same_dims(op, operands, (dim,))
    labels = pattern.inputs[0]
    return pattern if len(after) == len(before) else replace(pattern, outputs=(labels[:dim] + labels[dim + 1 :],))


def cat(op: Op, operands: Specs) -> Pattern:
    """Concatenation: the other dims are split, and the result is partial if all operands are. Empty tensors of one dim add nothing."""
    rank = len(op.spec.shape)
    joined = tuple(i for i, spec in enumerate(operands) if spec.shape != (0,) or rank == 1)
    if any(len(operands[i].shape) != rank for i in joined):
        raise RuleError.unsupported(
            f"Joining tensors of different ranks ({[s.shape for s in operands]})",
            where=op.name,
            instead="Reshape them first",
        )
    labels = NAMES[:rank]
    return Pattern(
        inputs=tuple(labels if i in joined else ("",) for i in range(len(operands))),
        outputs=(labels,),
        frozen=frozenset((labels[integer(op, 1, "dim") % rank],)),
        linear=(joined,),
    )


def stack(op: Op, operands: Specs) -> Pattern:
    """Stack: the new dim is not split."""
    dim = integer(op, 1, "dim") % len(op.spec.shape)
    pattern = same_dims(op, operands)
    labels = pattern.inputs[0]
    return replace(pattern, outputs=((*labels[:dim], "", *labels[dim:]),))


def paste(op: Op, operands: Specs) -> Pattern:
    """slice_scatter(x, source, dim, ...), select_scatter(x, source, dim, index): the other dims are split."""
    labels = NAMES[: len(op.spec.shape)]
    dim = integer(op, 2, "dim") % len(labels)
    source = labels[:dim] + labels[dim + 1 :] if len(operands[1].shape) < len(labels) else labels
    return Pattern(inputs=(labels, source), outputs=(labels,), frozen=frozenset((labels[dim],)), linear=((0, 1),))


def change_over_data(op: Op, operands: Specs) -> Pattern:
    """Return a change of type over the data axes: it is linear, and other axes do not split the dims that it splits or gathers."""
    kinds = (Type.from_text(cast("str", argument(op, i, ""))) for i in (1, 2))
    return same_dims(op, operands, [kind.dim for kind in kinds if kind.is_split])


def pad(op: Op, operands: Specs) -> Pattern:
    """Read padding, also constant_pad_nd: dims that are padded are not split."""
    constant = op.target.startswith("aten.constant_pad_nd")
    rank = len(operands[0].shape)
    widths = cast("tuple[int, ...]", argument(op, 1, "pad"))
    padded = [rank - 1 - i // 2 for i, width in enumerate(widths) if width]
    value = argument(op, 2, "value", 0) if constant else argument(op, 3, "value")
    linear = not constant and argument(op, 2, "mode", "constant") != "constant"
    return same_dims(op, operands, padded, linear=linear or not value)


# --- dims that are not split ----------------------------------------------------------------------

_LINEAR = aten_targets("cumsum.default flip.default roll.default diff.default fft_fftn.default fft_ifftn.default")
_WHOLE_DIM: dict[str, tuple[int, str, int | None]] = {
    "aten.softmax.int": (1, "dim", None),
    "aten._softmax.default": (1, "dim", None),
    "aten.log_softmax.int": (1, "dim", None),
    "aten._log_softmax.default": (1, "dim", None),
    "aten.cumsum.default": (1, "dim", None),
    "aten.cumprod.default": (1, "dim", None),
    "aten.logcumsumexp.default": (1, "dim", None),
    "aten.glu.default": (1, "dim", -1),
    "aten.flip.default": (1, "dims", None),
    "aten.roll.default": (2, "dims", None),
    "aten.topk.default": (2, "dim", -1),
    "aten.sort.default": (1, "dim", -1),
    "aten.sort.stable": (2, "dim", -1),
    "aten.argsort.default": (1, "dim", -1),
    "aten.diff.default": (2, "dim", -1),
    "aten.fft_fftn.default": (2, "dim", None),
    "aten.fft_ifftn.default": (2, "dim", None),
}
"""By target: position, name and default of the argument that gives the dims which are not split (default None: all dims)."""
WHOLE_DIM_TARGETS = tuple(_WHOLE_DIM)


def whole_dim(op: Op, operands: Specs) -> Pattern:
    """softmax(x, dim), cumsum, topk, sort, flip, roll and the like: every dim but ``dim`` is split.

    Further operands (``prepend`` of diff) have the same dims.
    """
    rank = len(operands[0].shape)
    position, name, default = _WHOLE_DIM[op.target]
    dims = dims_of(op, position, name, rank, default)
    return same_dims(op, operands, [dim for dim in dims if dim < rank], linear=op.target in _LINEAR)


def triangle(op: Op, operands: Specs) -> Pattern:
    """tril(x, diagonal), triu: the last two dims are not split."""
    return same_dims(op, operands, (-2, -1))


# --- indexing ------------------------------------------------------------------------------------


def index(op: Op, operands: Specs) -> Pattern:
    """x[None or index, ...]: the dims of x without an index and the dims of the indices are split."""
    indices = cast("tuple[Argument, ...]", argument(op, 1, "indices"))
    if any(not spec.dtype.is_floating_point and spec.dtype.itemsize == 1 for spec in operands[1:]):
        raise RuleError.unsupported(
            f"{op.target} with a mask as index", where=op.name, instead="Use torch.where, or an index of positions"
        )
    rank = len(operands[0].shape)
    indexed = [dim for dim, item in enumerate(indices) if isinstance(item, Ref)]
    sizes = torch.broadcast_shapes(*(spec.shape for spec in operands[1:]))  # type: ignore[no-untyped-call]
    index_labels = aligned(tuple(f"j{k}" for k in range(len(sizes))), sizes)
    adjacent = indexed == list(range(indexed[0], indexed[0] + len(indexed)))
    start = indexed[0] if adjacent else 0
    other_labels = [NAMES[dim] for dim in range(rank) if dim not in indexed]
    return Pattern(
        inputs=(NAMES[:rank], *(aligned(index_labels, spec.shape) for spec in operands[1:])),
        outputs=((*other_labels[:start], *index_labels, *other_labels[start:]),),
        frozen=frozenset(NAMES[dim] for dim in indexed),
        linear=((0,),),
    )


def index_select(op: Op, operands: Specs) -> Pattern:
    """x[:, index]: the other dims and the index are split."""
    labels = NAMES[: len(operands[0].shape)]
    dim = integer(op, 1, "dim") % len(labels)
    return Pattern(
        inputs=(labels, ("j0",) * len(operands[1].shape)),
        outputs=((*labels[:dim], "j0", *labels[dim + 1 :]),),
        frozen=frozenset((labels[dim],)),
        linear=((0,),),
    )


def gather(op: Op, operands: Specs) -> Pattern:
    """Gather: dims that have one size in x and index are split, and ``dim`` of the index."""
    shape, index_shape = operands[0].shape, operands[1].shape
    dim = integer(op, 1, "dim") % max(len(shape), 1)
    labels = ["g" if i == dim else NAMES[i] if shape[i] == index_shape[i] else "" for i in range(len(shape))]
    results = ["j" if i == dim else labels[i] for i in range(len(shape))]
    return Pattern(
        inputs=(tuple(labels), tuple(results)), outputs=(tuple(results),), frozen=frozenset(("g",)), linear=((0,),)
    )


def scatter(op: Op, operands: Specs) -> Pattern:
    """Scatter of a tensor or a number, and the kinds that add: dims that have one size in all operands are split, except ``dim``."""
    x = operands[0].shape
    dim = integer(op, 1, "dim") % max(len(x), 1)
    labels = tuple(NAMES[i] if i != dim and all(s.shape[i] == x[i] for s in operands) else "" for i in range(len(x)))
    linear = ((0, 2),) if len(operands) == 3 else ()
    return Pattern(inputs=(labels,) * len(operands), outputs=(labels,), linear=linear)


def scatter_sum(op: Op, operands: Specs) -> Pattern:
    """``autopar.scatter_sum``: ``dim`` of index and source is contracted, as their elements are added up."""
    shape, dim = op.spec.shape, integer(op, 2, "dim")
    labels = tuple(
        "" if i == dim or any(s.shape[i] != shape[i] for s in operands) else NAMES[i] for i in range(len(shape))
    )
    same = operands[0].shape == operands[1].shape
    inputs = tuple(NAMES[i] if i == dim and same else label for i, label in enumerate(labels))
    return Pattern(
        inputs=(inputs,) * 2, outputs=(labels,), contracted=frozenset((NAMES[dim],) if same else ()), linear=((1,),)
    )


def spectra(op: Op, operands: Specs) -> Pattern:
    """stft, istft: the dim of the signals is split, if there is one; a window is whole."""
    has_signals = len(operands[0].shape) > (2 if op.target == "aten.istft.default" else 1)

    def labels(spec: TensorSpec, lead: Labels) -> Labels:
        return (*lead, *("",) * (len(spec.shape) - len(lead)))

    first = NAMES[:has_signals]
    windows = tuple(labels(spec, ()) for spec in operands[1:])
    return Pattern(inputs=(labels(operands[0], first), *windows), outputs=(labels(op.spec, first),), linear=((0,),))


def index_put(op: Op, operands: Specs) -> Pattern:
    """x[None or index, ...] = value: the dims of x without an index are split; none where an index is a mask."""
    *indexed, value = operands
    if any(spec.dtype == torch.bool for spec in indexed):
        return unsplit(op, operands)
    read = index(op, tuple(indexed))
    kept = {name for name in read.inputs[0] if name not in read.frozen}
    places = tuple(name if name in kept else "" for name in read.outputs[0])
    places = places[len(places) - len(value.shape) :]
    x = tuple(name if name in kept else "" for name in read.inputs[0])
    indices = tuple(("",) * len(spec.shape) for spec in indexed[1:])
    values = tuple(name if size > 1 else "" for name, size in zip(places, value.shape, strict=True))
    return Pattern(inputs=(x, *indices, values), outputs=(x,), linear=((0, len(operands) - 1),))


def unsplit(op: Op, operands: Specs) -> Pattern:
    """No dim is split: values that are put at the places of a mask, and calls of which nothing is known."""
    inputs, outputs = (tuple(("",) * len(spec.shape) for spec in specs) for specs in (operands, op.outputs))
    return Pattern(inputs=inputs, outputs=outputs)


# --- factories -----------------------------------------------------------------------------------


def factory(op: Op, operands: Specs) -> Pattern:
    """full, zeros, ones, empty, new_*: every dim is split, as all values are equal."""
    return Pattern(inputs=tuple(("",) * len(spec.shape) for spec in operands), outputs=(NAMES[: len(op.spec.shape)],))


def random_factory(op: Op, operands: Specs) -> Pattern:
    """rand, randn, randint: every dim is split, as values are independent."""
    return replace(factory(op, operands), random=True)


def random_order(op: Op, operands: Specs) -> Pattern:
    """randperm: every rank draws the same permutation."""
    return replace(whole_factory(op, operands), random=True)


def whole_factory(op: Op, operands: Specs) -> Pattern:
    """arange, eye and the like: no dim is split, as a value depends on its position."""
    splittable = factory(op, operands)
    return replace(splittable, frozen=frozenset(splittable.outputs[0]))
