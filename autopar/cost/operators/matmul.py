"""Work of the operators with matrix products: linear layers, convolutions, attention, experts, recurrent networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import cast

import torch

from autopar.cost.operators.work_record import FLOAT, Product, Specs, Work, total, with_grad
from autopar.graph.graph import Op, TensorSpec
from autopar.hardware.device import KernelKind
from autopar.ops.kernels import takes_shapes
from autopar.rules.moving_patterns import argument
from autopar.rules.strategy import COUNT_AT, PARTS_AT

_LINE_BYTES = 64


def _product(
    op: Op, operands: Specs, flops: float, smallest: int, left: int, right: int, shape: Product | None = None
) -> Work:
    """Return the work of a product of operands ``left`` and ``right``; further operands (a bias) are added."""
    a, b = operands[left], operands[right]
    saved = tuple([i for i, other in ((left, b), (right, a)) if other.requires_grad])
    gradients = with_grad(operands)
    products = [spec for spec in (a, b) if spec.requires_grad]
    output_bytes = op.spec.num_bytes
    reads = sum([(b if spec is a else a).num_bytes + output_bytes for spec in products])
    back = tuple([g for g, spec in zip(shape.gradients, (a, b), strict=True) if spec.requires_grad]) if shape else ()
    return Work(
        flops=flops,
        products=(shape,) if shape else (),
        backward_products=back,
        matmuls=1,
        backward_matmuls=len(products),
        backward_flops=flops * len(products),
        smallest_dim=max(smallest, 1),
        num_bytes=total(operands) + output_bytes,
        backward_bytes=reads + total(gradients),
        backward_extra_bytes=output_bytes if len(gradients) > len(products) else 0,
        backward_launches=len(gradients),
        saved=saved,
    )


def _linear(op: Op, operands: Specs, kind: KernelKind) -> Work:
    contracted = operands[0].shape[-1]
    out = op.spec.numel
    width = max(op.spec.shape[-1], 1)
    shape = Product(1, out // width, width, contracted)
    return _product(op, operands, 2.0 * out * contracted, min(out // width, width, contracted), 0, 1, shape)


def _matmul(op: Op, operands: Specs, kind: KernelKind) -> Work:
    left, right = (1, 2) if len(operands) == 3 else (0, 1)
    contracted = operands[left].shape[-1]
    sides = (operands[left].shape[-2:-1] or (1,))[0], (operands[right].shape[-1:] or (1,))[0]
    count = op.spec.numel // max(sides[0] * sides[1], 1)
    shape = Product(count, *sides, contracted)
    return _product(op, operands, 2.0 * op.spec.numel * contracted, min(contracted, *sides), left, right, shape)


def _einsum(op: Op, operands: Specs, kind: KernelKind) -> Work:
    terms = cast("str", op.args[0]).replace(" ", "").partition("->")[0].split(",")
    sizes = {c: n for term, spec in zip(terms, operands, strict=True) for c, n in zip(term, spec.shape, strict=True)}
    return _product(op, operands, 2.0 * prod(sizes.values()), min(sizes.values()), 0, 1)


def _convolution(op: Op, operands: Specs, kind: KernelKind) -> Work:
    weight = operands[1]
    contracted = weight.numel // weight.shape[0]
    out = op.spec.numel
    smallest = min(weight.shape[0], contracted, out // weight.shape[0])
    shape = Product(1, out // weight.shape[0], weight.shape[0], contracted)
    return _product(op, operands, 2.0 * out * contracted, smallest, 0, 1, shape)


def _transposed(op: Op, operands: Specs, kind: KernelKind) -> Work:
    """Return the work of a transposed convolution: each input element meets a window of the weight [in, out / groups, ...]."""
    source, weight = operands[0], operands[1]
    contracted = weight.numel // weight.shape[0]
    smallest = min(weight.shape[0], contracted, source.numel // weight.shape[0])
    return _product(op, operands, 2.0 * source.numel * contracted, smallest, 0, 1)


def _attention(op: Op, operands: Specs, kind: KernelKind) -> Work:
    """Return the work of attention; fused attention keeps q, k, v, the output and a row statistic, and a causal mask halves it.

    Of a sequence that is split over an axis, the slowest rank counts. Gathered, the last rank sees all keys; in a ring, whose order is
    balanced, each rank sees half of them.

    Without flash kernels a ring multiplies in float32, and gathered columns have a mask that is made on each call.

    On a CPU there is no fused kernel with dropout, for a mask with a gradient, for values of another width than the queries, or without a
    dim of heads. The full scores are computed there, and the probabilities kept.
    """
    query, key = operands[0], operands[1]
    rows, columns = query.shape[-2], key.shape[-2] * cast("int", argument(op, 99, "ranks", 1))
    scores = query.numel // query.shape[-1] * columns
    flops = 2.0 * scores * (query.shape[-1] + op.spec.shape[-1])
    if op.target == "autopar.attention_ring":
        flops *= (columns + 1) / (2 * columns) if argument(op, 5, "is_causal", False) else 1.0
    elif argument(op, 5, "is_causal", False) and rows == columns:
        flops *= (rows + 1) / (2 * rows)
    statistic = query.numel // query.shape[-1] * FLOAT
    passes = (total(operands) + op.spec.num_bytes, 3 * total(operands) + 2 * op.spec.num_bytes)
    common = Work(
        flops=flops, smallest_dim=min(rows, columns, query.shape[-1]), is_attention=True, num_bytes=passes[0], backward_bytes=passes[1],
        backward_launches=2, saved=tuple(range(len(operands))), saves_output=True, saved_bytes=statistic,
    )  # fmt: skip
    if op.target in _SPLIT and not _is_fused_in_blocks(op, operands, kind):
        if op.target == "autopar.attention_ring":  # scores of one rank's columns at a time, in fp32 or better
            scores_bytes = scores * FLOAT
            block = rows * scores_bytes // columns if rows < columns else scores_bytes
            return replace(
                common, is_attention=False, dtype="float64" if query.dtype == torch.float64 else "float32",
                backward_flops=2.5 * flops, num_bytes=passes[0] + 6 * scores_bytes, backward_bytes=passes[1] + 10 * scores_bytes,
                workspace_bytes=3 * block, backward_workspace_bytes=5 * block,
            )  # fmt: skip
        mask = rows * columns * (1 + query.dtype.itemsize)  # the mask, and its copy that is added to the scores
        repeated = 0  # repeated keys and values, one for each query head
        if argument(op, 99, "enable_gqa", False):
            repeated = scores * (query.shape[-1] + op.spec.shape[-1]) // rows * query.dtype.itemsize
        common = replace(
            common, num_bytes=passes[0] + 2 * repeated, backward_bytes=passes[1] + 2 * repeated,
            saved_bytes=statistic + repeated, workspace_bytes=mask, backward_workspace_bytes=mask,
        )  # fmt: skip
    elif op.target == "autopar.attention_ring" or (op.target in _SPLIT and kind == "cpu"):
        blocks = cast("int", argument(op, 99, "ranks", 2))  # gathered: earlier columns and the rank's own
        return replace(_in_blocks(op, operands, common, blocks), backward_flops=2.5 * flops)
    if kind == "cpu" and not _is_fused_on_cpu(op, operands):
        return _written_out(op, operands, common, 2.0 * scores * (query.shape[-1] + op.spec.shape[-1]))
    return replace(common, backward_flops=2.5 * flops)


_SPLIT = frozenset({"autopar.attention_ring", "autopar.attention_gathered"})
"""Attention over a split sequence, computed by blocks of columns; gathered on a GPU, by one kernel."""


def _is_fused_in_blocks(op: Op, operands: Specs, kind: KernelKind) -> bool:
    """Return whether a fused kernel computes it, or its blocks, as :mod:`autopar.ops.sequence` decides."""
    query, value = operands[0], operands[2]
    is_whole = op.target == "autopar.attention_gathered" and kind == "cuda"  # one kernel, which has dropout too
    drops = bool(argument(op, 4, "dropout_p", 0.0)) and not is_whole
    if len(operands) > 3 or drops or len(query.shape) != 4:
        return False
    return takes_shapes(kind, query.dtype, query.shape[-1], value.shape[-1])


def _in_blocks(op: Op, operands: Specs, fused: Work, blocks: int) -> Work:
    """Return the work of fused attention on one block of columns after the other (:mod:`autopar.ops.flash`).

    Forward merges each further block into a sum in fp32 or better: the sum is read and written, the block's output is read, cast and read
    again. Backward adds each block's gradients to sums in fp32 or better.
    """
    wide = 8 if operands[0].dtype == torch.float64 else FLOAT
    out, sums = op.spec.numel * wide, sum([spec.numel for spec in operands[:3]]) * wide
    return replace(
        fused, num_bytes=fused.num_bytes + 4 * out * (blocks - 1), backward_bytes=fused.backward_bytes + 3 * sums * blocks,
        launches=1 + _MERGE * (blocks - 1), backward_launches=2 + _ADD * blocks, workspace_bytes=2 * out,
        backward_workspace_bytes=2 * sums,
    )  # fmt: skip


_MERGE, _ADD = 7, 4
"""The number of kernels of each further block forward (attention and six to merge) and of each block backward (attention and three sums).
"""


def _is_fused_on_cpu(op: Op, operands: Specs) -> bool:
    """Return whether torch's fused CPU kernel computes it (``sdp_utils_cpp.cpp``)."""
    query, value = operands[0], operands[2]
    masks_learn = any(mask.requires_grad for mask in operands[3:])
    if argument(op, 4, "dropout_p", 0.0) or masks_learn:
        return False
    return len(query.shape) == 4 and query.shape[-1] == value.shape[-1]


def _written_out(op: Op, operands: Specs, fused: Work, flops: float) -> Work:
    """Return the work of ``_scaled_dot_product_attention_math``, where a causal mask saves nothing.

    It keeps in fp32 scaled queries and keys, and the probabilities; with dropout also the noise, the probabilities after dropout, and the
    values.
    """
    query, key = operands[0], operands[1]
    scores_bytes = query.numel // query.shape[-1] * key.shape[-2] * FLOAT
    drops = bool(argument(op, 4, "dropout_p", 0.0))
    return replace(
        fused, is_attention=False, flops=flops, backward_flops=2 * flops, num_bytes=fused.num_bytes + 6 * scores_bytes, backward_bytes=fused.backward_bytes + 6 * scores_bytes,
        launches=8, backward_launches=8, saved=() if drops else (2,), saves_output=False,
        saved_bytes=(3 if drops else 1) * scores_bytes + sum(spec.numel for spec in operands[: 3 if drops else 2]) * FLOAT,
        workspace_bytes=scores_bytes,
    )  # fmt: skip


def _experts(op: Op, operands: Specs, kind: KernelKind) -> Work:
    """Return the work of a mixture: rows sorted by expert, two or three products for each expert, a weighted sum for each token.

    The number of rows is that of even routing: all choices of the rank's tokens, or the share of its experts in all choices where it has
    some experts and every token (``experts_split``, and ``_dispatch_split`` on its inner axis). It keeps the rows and the values between
    products.
    """
    hidden, weights, _, *parameters = operands
    matrices = [spec for spec in parameters if len(spec.shape) == 3]
    num_experts, width = parameters[0].shape[0], hidden.shape[-1]
    up_width = sum([spec.numel for spec in matrices[:-1]]) // (num_experts * width)  # the outputs of gate and up
    rows = float(weights.numel)
    if op.target == "autopar.experts_split":
        rows *= num_experts / cast("int", op.args[COUNT_AT])
    elif op.target == "autopar.experts_dispatch_split":
        rows /= cast("int", op.args[PARTS_AT])
    down_width = matrices[-1].numel // (num_experts * width)
    flops = 2.0 * rows * width * (up_width + down_width)
    row_bytes, inner_bytes = (int(rows * n * parameters[0].dtype.itemsize) for n in (width, down_width))
    gated = up_width > down_width
    products = 1 + sum(spec.requires_grad for spec in matrices) / len(matrices)  # of the rows, and of the weights
    moved = 5 * row_bytes + (6 if gated else 3) * inner_bytes
    biases = len(parameters) - len(matrices)
    return Work(
        flops=flops,
        backward_flops=flops * products,
        matmuls=len(matrices) * num_experts,
        backward_matmuls=int(len(matrices) * num_experts * products),
        smallest_dim=max(min(int(rows / num_experts), down_width, width), 1),
        num_bytes=moved + total(parameters) + hidden.num_bytes,
        backward_bytes=2 * moved + biases * inner_bytes + 2 * total(parameters) + hidden.num_bytes,
        launches=12 + (len(matrices) + 2) * num_experts,
        backward_launches=12 + (2 * len(matrices) + 2 + biases) * num_experts,
        saved=(1,),
        saved_bytes=2 * row_bytes + (4 if gated else 2) * inner_bytes + 3 * 8 * int(rows),
        workspace_bytes=2 * row_bytes,
        backward_workspace_bytes=2 * row_bytes + 2 * inner_bytes,
    )


# --- recurrent networks


def recurrent(op: Op, operands: Specs, kind: KernelKind) -> Work:
    """Return the work of a recurrent network: each input row meets each matrix of each layer and direction once.

    The products with the state are sequential: each time step has a product of the samples and a kernel for the gates.
    """
    x = operands[0]
    matrices = [spec for spec in operands[3 if "lstm" in op.target else 2 :] if len(spec.shape) == 2]
    directions = 2 if argument(op, 7, "bidirectional", False) else 1
    networks = cast("int", argument(op, 4, "num_layers", 1)) * directions
    states = matrices[1 :: len(matrices) // networks]  # each network has a matrix for its input, then one for its state
    rows = x.numel // max(x.shape[-1], 1)
    steps = x.shape[-2] if len(x.shape) == 2 or argument(op, 8, "batch_first", False) else x.shape[0]
    flops = 2.0 * rows * sum(spec.numel for spec in matrices)
    trained = sum(spec.requires_grad for spec in matrices)
    products = 1 + trained / max(len(matrices), 1)  # of the rows, and of the weights
    if kind == "cpu":
        kept_bytes, keeps_output = _kept_on_cpu(op, x, matrices, networks, directions, rows, steps)
    else:  # the library's reserve: gates, state and output of each row
        kept_bytes = rows * sum(spec.shape[0] + 2 * spec.shape[1] for spec in states) * x.dtype.itemsize
        keeps_output = False
    moved = total(operands) + sum(spec.num_bytes for spec in op.outputs) + kept_bytes
    return Work(
        flops=flops,
        backward_flops=flops * products,
        matmuls=steps * len(states),
        backward_matmuls=int(steps * len(states) * products),
        smallest_dim=max(min([rows // max(steps, 1), *(spec.shape[1] for spec in matrices)]), 1),
        num_bytes=moved,
        backward_bytes=moved + kept_bytes + total(with_grad(operands)),
        launches=2 * steps * len(states),
        backward_launches=2 * steps * len(states),
        saved=tuple(range(len(operands))),
        saves_output=keeps_output,
        saved_bytes=kept_bytes,
    )


def _kept_on_cpu(
    op: Op, x: TensorSpec, matrices: list[TensorSpec], networks: int, directions: int, rows: int, steps: int
) -> tuple[int, bool]:
    """Return the bytes that torch's CPU networks keep besides their operands, and whether they keep their output.

    An LSTM without projections in a dtype of at most four bytes runs in oneDNN, any other network as one call for each step.
    """
    per_network = len(matrices) // networks
    # ``later``: layers that read another layer's output, concatenated where there are two directions.
    later = networks // directions - 1
    width = matrices[1].shape[1]
    size = x.dtype.itemsize
    joined = later * directions * width
    if "lstm" in op.target and per_network == 2 and x.dtype != torch.float64:
        inputs = matrices[::2]  # their shapes determine those of the state matrices
        workspace = sum(_one_dnn_bytes(spec.shape[1], spec.shape[0] // 4, rows, steps, size) for spec in inputs)
        # Outputs of single networks; the last one is the operator's output.
        count = networks if directions == 2 else networks - 1
        return workspace + rows * size * (count * width + (joined if directions == 2 else 0)), directions == 1
    gates = {"lstm": 4, "gru": 3}.get(op.target.split(".")[1], 1)
    inner = matrices[0].shape[0] // gates
    by_step = {4: 6 * inner + width, 3: 7 * inner, 1: inner}[gates] + (inner if per_network == 3 else 0)
    first = width / max(steps, 1) if gates == 1 else 0.0  # the first state, which is not in the output
    return int(rows * size * (networks * (by_step + first) + joined + (directions - 1) * x.shape[-1])), False


def _one_dnn_bytes(inputs: int, width: int, rows: int, steps: int, size: int) -> int:
    """Return the workspace of one layer in one direction that oneDNN fills for training, in bytes.

    It has the gates of every step, and the states and their gradients in fp32, of every step and one before, for the layer and for its
    input: ``set_workspace_sizes`` in oneDNN's ``src/cpu/rnn/rnn_utils.hpp``. Rows are whole cache lines. The additional line of some long
    rows is left out (3 % of 256 values).
    """
    input_row, state_row = _row(max(inputs, width), size), _row(width, size)
    states = input_row * (2 * size + 4 * FLOAT) + state_row * (2 * size + 3 * FLOAT)
    return int(rows * (_row(4 * width, size) * size + states * (1 + 1 / max(steps, 1))))


def _row(elements: int, size: int) -> int:
    line = _LINE_BYTES // size
    return -(-elements // line) * line


PRODUCTS: dict[str, Callable[[Op, Specs, KernelKind], Work]] = {
    **dict.fromkeys(("aten.linear.default", "autopar.linear_t"), _linear),
    **dict.fromkeys(
        ("aten.mm.default", "aten.bmm.default", "aten.matmul.default", "aten.addmm.default", "aten.baddbmm.default"), _matmul
    ),
    "aten.einsum.default": _einsum,
    **dict.fromkeys(
        (*(f"aten.conv{n}d.{form}" for n in (1, 2, 3) for form in ("default", "padding")), "aten.convolution.default"),
        _convolution,
    ),
    **dict.fromkeys(
        ("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input"), _transposed
    ),
    **dict.fromkeys(
        ("aten.scaled_dot_product_attention.default", "autopar.attention", "autopar.attention_gathered", "autopar.attention_ring"), _attention
    ),
    **dict.fromkeys(
        ("autopar.experts", "autopar.experts_split", "autopar.experts_dispatch", "autopar.experts_dispatch_split"), _experts
    ),
    **dict.fromkeys((f"aten.{name}.input" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")), recurrent),
}  # fmt: skip
"""The function that counts each operator's work, by target."""
