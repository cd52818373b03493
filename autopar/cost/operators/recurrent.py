"""The work of recurrent networks: LSTM, GRU and plain ones, of several layers and directions."""

from __future__ import annotations

from typing import cast

import torch

from autopar.cost.operators.work_record import FLOAT, Specs, Work, argument, total, with_grad
from autopar.device import KernelKind
from autopar.graph.ir import Op, TensorSpec

_LINE_BYTES = 64


def recurrent(op: Op, operands: Specs, kind: KernelKind) -> Work:
    """Every row of the input meets each matrix of each layer and direction once.

    What meets the state does so one step of time after the other: a product of the samples and a kernel for the gates.
    """
    x = operands[0]
    matrices = [spec for spec in operands[3 if "lstm" in op.target else 2 :] if len(spec.shape) == 2]
    directions = 2 if argument(op, 7, "bidirectional", False) else 1
    networks = cast("int", argument(op, 4, "num_layers", 1)) * directions
    states = matrices[1 :: len(matrices) // networks]  # each has a matrix for its input, then one for its state
    rows = x.numel // max(x.shape[-1], 1)
    steps = x.shape[-2] if len(x.shape) == 2 or argument(op, 8, "batch_first", False) else x.shape[0]
    flops = 2.0 * rows * sum(spec.numel for spec in matrices)
    trained = sum(spec.requires_grad for spec in matrices)
    products = 1 + trained / max(len(matrices), 1)  # of the rows, and of the weights
    if kind == "cpu":
        kept, keeps_output = _kept_on_cpu(op, x, matrices, networks, directions, rows, steps)
    else:  # the library's own reserve: gates, state and output of each row
        kept = rows * sum(spec.shape[0] + 2 * spec.shape[1] for spec in states) * x.dtype.itemsize
        keeps_output = False
    moved = total(operands) + sum(spec.num_bytes for spec in op.outputs) + kept
    return Work(
        flops=flops,
        backward_flops=flops * products,
        matmuls=steps * len(states),
        backward_matmuls=int(steps * len(states) * products),
        smallest_dim=max(min([rows // max(steps, 1), *(spec.shape[1] for spec in matrices)]), 1),
        num_bytes=moved,
        backward_bytes=moved + kept + total(with_grad(operands)),
        launches=2 * steps * len(states),
        backward_launches=2 * steps * len(states),
        saved=tuple(range(len(operands))),
        saves_output=keeps_output,
        saved_bytes=kept,
    )


def _kept_on_cpu(
    op: Op, x: TensorSpec, matrices: list[TensorSpec], networks: int, directions: int, rows: int, steps: int
) -> tuple[int, bool]:
    """Bytes that torch's CPU networks keep beside their operands, and whether they keep their output.

    An LSTM without projections in a type of at most four bytes runs in oneDNN, any other as one call for each step.
    """
    each = len(matrices) // networks
    later = networks // directions - 1  # layers that read another's output, joined where there are two directions
    width = matrices[1].shape[1]
    size = x.dtype.itemsize
    joined = later * directions * width
    if "lstm" in op.target and each == 2 and x.dtype != torch.float64:
        inputs = matrices[::2]  # by whose matrices the states' are known
        found = sum(_one_dnn_bytes(spec.shape[1], spec.shape[0] // 4, rows, steps, size) for spec in inputs)
        own = networks if directions == 2 else networks - 1  # outputs of single networks; the last is the operator's
        return found + rows * size * (own * width + (joined if directions == 2 else 0)), directions == 1
    gates = {"lstm": 4, "gru": 3}.get(op.target.split(".")[1], 1)
    inner = matrices[0].shape[0] // gates
    by_step = {4: 6 * inner + width, 3: 7 * inner, 1: inner}[gates] + (inner if each == 3 else 0)
    first = width / max(steps, 1) if gates == 1 else 0.0  # the first state, which the output does not have
    return int(rows * size * (networks * (by_step + first) + joined + (directions - 1) * x.shape[-1])), False


def _one_dnn_bytes(inputs: int, width: int, rows: int, steps: int, size: int) -> int:
    """The workspace of one layer in one direction that oneDNN fills for training.

    Gates of every step; states and their gradients, in fp32, of every step and one before, for the layer and for its
    input: ``set_workspace_sizes`` in oneDNN's ``src/cpu/rnn/rnn_utils.hpp``. Rows are whole cache lines; a further one, which
    oneDNN adds to some long rows, is left out (3 % of 256 values).
    """
    wide, own = _row(max(inputs, width), size), _row(width, size)
    states = wide * (2 * size + 4 * FLOAT) + own * (2 * size + 3 * FLOAT)
    return int(rows * (_row(4 * width, size) * size + states * (1 + 1 / max(steps, 1))))


def _row(elements: int, size: int) -> int:
    line = _LINE_BYTES // size
    return -(-elements // line) * line
