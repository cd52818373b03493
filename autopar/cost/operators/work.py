"""Counts the work of one operator on its operands: flops, bytes, and what its backward needs.

Counts are those of torch's eager kernels, one operator at a time. A product of matrices costs two flops for each multiply-add, and its
backward one such product for each operand with a gradient. The backward of fused attention computes the scores again (five products where
forward has two: Dao et al. 2022, FlashAttention). Views cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch

from autopar.cost.operators.matmul import PRODUCTS
from autopar.cost.operators.work_record import FLOAT, Product, Specs, Work, total, with_grad
from autopar.graph.graph import Op, Ref, TensorSpec
from autopar.graph.operator_kinds import SAVES_NOTHING, SAVES_OUTPUT, VIEWS
from autopar.hardware.device import KernelKind
from autopar.ops.kernels import aten_targets, region_of
from autopar.rules.moving_patterns import argument

__all__ = ["COLLECTIVES", "LINEAR", "VIEWS", "Product", "Specs", "Work", "operand_specs", "work"]

_SAVE_INPUT_NAMES = (
    "pow.Tensor_Scalar silu.default gelu.default abs.default log.default sin.default cos.default square.default"
    " leaky_relu.default hardtanh.default clamp.default softplus.default hardswish.default mish.default"
    " log_sigmoid.default erf.default"
)
_COLLECTIVE_NAMES = "all_reduce all_gather reduce_scatter all_to_all shard keep_on_first invariant_to_replicate"


_ZIGZAG_NAMES = "zigzag_shard zigzag_all_gather zigzag_reduce_scatter zigzag_all_to_all"
COLLECTIVES = frozenset(f"autopar.{name}" for name in (*_COLLECTIVE_NAMES.split(), *_ZIGZAG_NAMES.split()))
"""Changes of type; see ``rules.local_calls``."""

LINEAR = frozenset(("aten.linear.default", "autopar.linear_t"))
"""Products of activations and weights."""

FUNCTIONS = {
    "aten.tanh.default": "tanh",
    "aten.gelu.default": "gelu",
    **dict.fromkeys(aten_targets("silu.default sigmoid.default"), "silu"),
    "aten.exp.default": "exp",
    **dict.fromkeys(aten_targets("softmax.int _softmax.default log_softmax.int _log_softmax.default"), "softmax"),
    **dict.fromkeys(("autopar.cross_entropy_sum", "autopar.cross_entropy_vocabulary"), "softmax"),
    "aten.cross_entropy_loss.default": "softmax",
    **dict.fromkeys(aten_targets("layer_norm.default native_layer_norm.default rms_norm.default"), "norm"),
    "aten.pow.Tensor_Scalar": "pow",
}
"""Operators with an elementwise function that may take longer than its bytes; profiles measure the functions by these names."""

_PARTIAL_VIEWS = aten_targets("slice.Tensor select.int narrow.default")
_SAVE_INPUT = aten_targets(_SAVE_INPUT_NAMES)
_SAVE_CONDITION = {"aten.where.self": (0,), "aten.where.ScalarOther": (0,), "aten.where.ScalarSelf": (0,)}
_SAVE_CONDITION |= {"aten.masked_fill.Scalar": (1,), "aten.masked_fill.Tensor": (1,), "aten.index.Tensor": (1,)}
_SAVE_CONDITION |= {"aten.gather.default": (1,), "aten.index_select.default": (1,)}

_NOTHING = Work(launches=0)

_FACTORIES = ("aten.zeros", "aten.ones", "aten.full", "aten.empty", "aten.arange", "aten.new_", "aten.rand")


def work(op: Op, operands: Specs, kind: KernelKind = "cuda") -> Work:
    """Count the work of an operator.

    Args:
        op: the operator; ``op.outputs`` are the specs of its outputs on this rank.
        operands: the specs of ``op.operands`` on this rank.
        kind: the kind of the device's kernels; some kernels exist for one kind only.

    Returns:
        The work. An unknown operator counts as elementwise and as keeping its operands and output for backward, an upper bound.
    """
    if op.target in VIEWS:
        return _view(op, operands)
    maker = _SPECIAL.get(op.target)
    if op.target == "aten.einsum.default" and len(operands) != 2:
        maker = None  # not a product of two matrices
    op_work = maker(op, operands, kind) if maker else _elementwise(op, operands)
    if op_work.flops and op.spec.dtype.is_complex:
        op_work = _of_complex(op_work)
    if op.target in FUNCTIONS and operands:
        op_work = replace(op_work, function=FUNCTIONS[op.target], elements=operands[0].numel)
    for spec in op.outputs:
        if spec.requires_grad:
            return op_work
    return replace(
        op_work, backward_flops=0.0, backward_products=(), backward_matmuls=0, backward_bytes=0, backward_extra_bytes=0, backward_launches=0, saved=(),
        saves_output=False, saved_bytes=0, backward_workspace_bytes=0,
    )  # fmt: skip


COMPLEX = 4
"""Real products in one product of complex numbers, (a + bi)(c + di).

As BLAS counts them, a complex multiply-add has 8 flops where a real one has 2 (LAPACK Working Note 41: 6 for a complex multiplication, 2
for an addition).
"""


def _of_complex(work: Work) -> Work:
    """Return complex products as flops of the real dtype, at whose rate they are priced.

    They are priced by the efficiency curve, as complex kernels have other tiles.
    """
    times = replace(work, flops=COMPLEX * work.flops, backward_flops=COMPLEX * work.backward_flops)
    return replace(times, products=(), backward_products=())


def is_elementwise(op: Op) -> bool:
    """Return whether an operator's work depends only on the bytes of its operands and outputs, whatever their shapes."""
    return op.target not in VIEWS and op.target not in _SPECIAL and op.target != "autopar.opaque"


def _view(op: Op, operands: Specs) -> Work:
    """Return the work of a view: none forward; backward fills a full gradient of a part, and sums that of an expansion."""
    if not op.spec.requires_grad:
        return _NOTHING
    source, out = operands[0], op.spec
    if op.target in _PARTIAL_VIEWS and source.numel != out.numel:
        return Work(launches=0, backward_launches=2, backward_bytes=source.num_bytes + 2 * out.num_bytes)
    if source.numel != out.numel:
        return Work(launches=0, backward_launches=1, backward_bytes=source.num_bytes + out.num_bytes)
    return _NOTHING


def _elementwise(op: Op, operands: Specs) -> Work:
    target = op.target
    if target.startswith(_FACTORIES):
        return Work(num_bytes=total(op.outputs))
    if target in ("aten.to.dtype", "aten._to_copy.default") and operands and operands[0].dtype == op.spec.dtype:
        return _NOTHING
    gradients = with_grad(operands)
    saved, saves_output = _saved(op, operands)
    saved_bytes = sum(operands[i].num_bytes for i in saved) + (op.spec.num_bytes if saves_output else 0)
    output_bytes = total(op.outputs)
    return Work(
        num_bytes=total(operands) + output_bytes,
        backward_bytes=output_bytes + saved_bytes + total(gradients),
        backward_launches=len(gradients),
        saved=saved,
        saves_output=saves_output,
    )


def _saved(op: Op, operands: Specs) -> tuple[tuple[int, ...], bool]:
    """Return the positions of the operands that autograd keeps, and whether it keeps the output."""
    target = op.target
    if target in SAVES_NOTHING:
        return (), False
    if target in SAVES_OUTPUT:
        return (), True
    if target in _SAVE_INPUT:
        return (0,), False
    if target in _SAVE_CONDITION:
        return _SAVE_CONDITION[target], False
    if target in ("aten.mul.Tensor", "aten.div.Tensor") and len(operands) == 1:
        return (), False
    if target == "aten.mul.Tensor":
        return tuple(i for i in (0, 1) if operands[1 - i].requires_grad), False
    if target == "aten.div.Tensor":
        return (0, 1) if operands[1].requires_grad else (1,), False
    return tuple(i for i, spec in enumerate(operands) if _has_gradients(spec)), _has_gradients(op.spec)


def _has_gradients(spec: TensorSpec) -> bool:
    return spec.dtype.is_floating_point or spec.dtype.is_complex


def _cast(logits: TensorSpec) -> tuple[int, int]:
    """Return the bytes of logits in the dtype of their loss, and the bytes of the cast to it; 0 where they have that dtype."""
    full_bytes = logits.numel * max(FLOAT, logits.dtype.itemsize)
    return full_bytes, 0 if logits.dtype.itemsize >= FLOAT else logits.num_bytes + full_bytes


def _softmax_loss(op: Op, operands: Specs, kind: KernelKind) -> Work:
    """Return the work of cross_entropy_sum: a cast of half precision, log-softmax (kept), and the selected values.

    Of padded logits the real ones are copied, and their gradient back; a cast includes this copy.
    """
    full_bytes, cast_bytes = _cast(operands[0])
    is_padded = op.target == "autopar.cross_entropy_sum" and bool(argument(op, 4, "classes", 0))
    cast_bytes = cast_bytes or 2 * full_bytes * is_padded
    return Work(
        num_bytes=cast_bytes + 2 * full_bytes,
        backward_bytes=cast_bytes + 4 * full_bytes,
        launches=2 + (cast_bytes > 0),
        backward_launches=2 + (cast_bytes > 0) + is_padded,
        saved_bytes=full_bytes,
        workspace_bytes=full_bytes if cast_bytes else 0,
        backward_workspace_bytes=2 * full_bytes if cast_bytes else full_bytes,
    )


def _split_softmax_loss(op: Op, operands: Specs, kind: KernelKind) -> Work:
    """Return the work of cross_entropy_vocabulary: maximum, difference, exponential in place (kept), sum; one product backward."""
    logits = operands[0]
    full_bytes, cast_bytes = _cast(logits)
    return Work(
        num_bytes=2 * logits.num_bytes + 4 * full_bytes,
        backward_bytes=2 * full_bytes + cast_bytes,
        launches=12,
        backward_launches=4 + (cast_bytes > 0),
        saved_bytes=full_bytes,
        backward_workspace_bytes=full_bytes if cast_bytes else 0,
    )


def _ctc(op: Op, operands: Specs, kind: KernelKind) -> Work:
    """Return the work of ctc_losses: log-probabilities of each prefix of the labels with blanks, by time and sample (kept).

    Backward computes as many for suffixes, and a gradient of all classes (torch: ``ctc_loss_backward``).
    """
    log_probs, targets = operands[:2]
    time, samples, _ = log_probs.shape
    prefixes = time * samples * (2 * targets.shape[-1] + 1) * log_probs.dtype.itemsize
    return Work(
        num_bytes=3 * prefixes,
        backward_bytes=5 * prefixes + 2 * log_probs.num_bytes,
        backward_launches=3,
        saved=(0, 1, 2, 3),
        saves_output=True,
        saved_bytes=prefixes,
        backward_workspace_bytes=prefixes,
    )


def _norm(op: Op, operands: Specs, kind: KernelKind) -> Work:
    x, out = operands[0], op.spec
    gradients = with_grad(operands)
    rows = x.numel // max(x.shape[-1], 1)
    return Work(
        num_bytes=x.num_bytes + out.num_bytes,
        backward_bytes=2 * x.num_bytes + out.num_bytes + (x.num_bytes if x.requires_grad else 0),
        backward_launches=min(len(gradients), 2),
        saved=(0,),
        saved_bytes=2 * rows * FLOAT,
    )


def _embedding(op: Op, operands: Specs, kind: KernelKind) -> Work:
    """Return the work of a look-up; backward fills a gradient of the full table and adds the rows."""
    table, ids = operands[0], operands[1]
    passes = 2 if op.target == "aten.embedding.default" else 4
    masks = 0 if op.target == "aten.embedding.default" else ids.num_bytes + ids.numel
    return Work(
        num_bytes=ids.num_bytes + passes * op.spec.num_bytes,
        backward_bytes=table.num_bytes + (passes + 1) * op.spec.num_bytes,
        launches=1 if passes == 2 else 6,
        backward_launches=2,
        saved=(1,),
        saved_bytes=masks,
    )


def _bag(op: Op, operands: Specs, kind: KernelKind) -> Work:
    """Return the work of an embedding bag: one kernel reads and adds rows; backward fills a full gradient and adds the rows.

    It keeps the ids and the bag of each, the row of each value under a maximum, and the factors of rows.
    """
    table, ids = operands[0], operands[1]
    read = ids.numel * table.shape[-1] * table.dtype.itemsize
    rows = ids.numel * torch.int64.itemsize
    is_split = op.target == "autopar.embedding_bag_vocabulary"
    masks = rows + 2 * ids.numel * (1 + table.dtype.itemsize) if is_split else 0
    chosen = op.spec.numel * torch.int64.itemsize if "max" in op.args else 0
    saved = tuple(i for i in range(1, len(operands)))
    return Work(
        num_bytes=ids.num_bytes + read + op.spec.num_bytes + 2 * masks,
        backward_bytes=table.num_bytes + 2 * read + op.spec.num_bytes + rows,
        launches=8 if is_split else 2,
        backward_launches=2,
        saved=saved,
        saved_bytes=rows + masks + chosen,
    )


def _over_data(op: Op, operands: Specs, kind: KernelKind) -> Work:
    """Return the work of a change of type over the data axes: a copy into or out of rank order."""
    full_bytes = max(operands[0].num_bytes, op.spec.num_bytes)
    return Work(
        num_bytes=2 * full_bytes, backward_bytes=2 * full_bytes, backward_launches=1, workspace_bytes=full_bytes
    )


def _opaque(op: Op, operands: Specs, kind: KernelKind) -> Work:
    """Return the work of a region of unknown code: the counts of one run, scaled by its input, and elementwise work."""
    region = region_of(str(op.args[0]))
    share = max(1, sum(spec.numel for spec in operands[: len(cast("tuple[object, ...]", op.args[1]))])) / region.numel
    moved = total(operands) + total(op.outputs)
    return Work(
        flops=region.flops * share,
        backward_flops=region.backward_flops * share,
        num_bytes=moved + int(region.saved_bytes * share),
        backward_bytes=2 * moved + int(region.saved_bytes * share),
        launches=1 + len(region.parameters),
        backward_launches=1 + 2 * len(region.parameters),
        saved=tuple(range(len(operands))),
        saved_bytes=int(region.saved_bytes * share),
    )


def _dropout(op: Op, operands: Specs, kind: KernelKind) -> Work:
    """Return the work of dropout, which keeps its mask, one byte an element.

    It is one kernel each way on a GPU; on a CPU three forward and two backward (draw, product, scale).
    """
    x = operands[0]
    if kind != "cpu":
        num_bytes = 2 * x.num_bytes + x.numel
        return Work(num_bytes=num_bytes, backward_bytes=num_bytes, saved_bytes=x.numel)
    return Work(
        num_bytes=4 * x.num_bytes + 2 * x.numel,
        backward_bytes=4 * x.num_bytes + x.numel,
        launches=3,
        backward_launches=2,
        saved_bytes=x.numel,
        workspace_bytes=x.num_bytes,
    )


def _change_of_type(op: Op, operands: Specs, kind: KernelKind) -> Work:
    """Return the copies of a change of type: into and out of rank order along an inner dim, and into zig-zag order."""
    in_order = op.target not in ("autopar.all_gather", "autopar.reduce_scatter") or op.args[2] == 0
    if in_order and not op.target.startswith("autopar.zigzag_"):
        return _NOTHING
    full_bytes = max(operands[0].num_bytes, op.spec.num_bytes)
    back = op.args[-1] != "I"  # an all-gather to I slices its gradient
    return Work(
        num_bytes=2 * full_bytes,
        backward_bytes=2 * full_bytes * back,
        backward_launches=int(back),
        workspace_bytes=full_bytes,
    )


def _sum(op: Op, operands: Specs, kind: KernelKind) -> Work:
    return Work(
        num_bytes=operands[0].num_bytes + op.spec.num_bytes, backward_bytes=op.spec.num_bytes, backward_launches=1
    )


def _mean(op: Op, operands: Specs, kind: KernelKind) -> Work:
    """Return the work of a sum; backward divides its expanded gradient, which writes a full one (torch: ``mean_backward``)."""
    sum_work = _sum(op, operands, kind)
    return replace(sum_work, backward_bytes=sum_work.backward_bytes + operands[0].num_bytes)


def _power(op: Op, operands: Specs, kind: KernelKind) -> Work:
    """Return the work of a power; backward is a power of what was kept, times exponent, times gradient (torch: ``pow_backward``)."""
    base = _elementwise(op, operands)
    if not base.backward_launches:
        return base
    size = op.spec.num_bytes
    return replace(
        base, backward_bytes=base.backward_bytes + 4 * size, backward_launches=3, backward_workspace_bytes=size
    )


_SPECIAL: dict[str, Callable[[Op, Specs, KernelKind], Work]] = {
    **PRODUCTS,
    **dict.fromkeys(("autopar.cross_entropy_sum", "aten.cross_entropy_loss.default"), _softmax_loss),
    "autopar.cross_entropy_vocabulary": _split_softmax_loss,
    **dict.fromkeys(
        ("aten.layer_norm.default", "aten.rms_norm.default", "aten.native_layer_norm.default", "aten.group_norm.default", "aten.instance_norm.default", "aten.batch_norm.default", "autopar.batch_norm", "autopar.batch_norm_running"), _norm
    ),
    **dict.fromkeys(("aten.embedding.default", "autopar.embedding_vocabulary"), _embedding),
    **dict.fromkeys(("autopar.embedding_bag", "autopar.embedding_bag_ragged", "autopar.embedding_bag_vocabulary"), _bag),
    "autopar.ctc_losses": _ctc,
    "autopar.opaque": _opaque,
    "autopar.change_over_data": _over_data,
    **dict.fromkeys(("autopar.dropout", "aten.dropout.default", "aten.native_dropout.default"), _dropout),
    **dict.fromkeys(("aten.mean.default", "aten.mean.dim", "autopar.partial_mean"), _mean),
    **dict.fromkeys(("aten.sum.default", "aten.sum.dim_IntList"), _sum),
    **dict.fromkeys(("aten.pow.Tensor_Scalar", "aten.square.default", "aten.rsqrt.default"), _power),
    **dict.fromkeys(COLLECTIVES, _change_of_type),
}  # fmt: skip


def operand_specs(op: Op, specs: Callable[[Ref], TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the specs of an operator's operands."""
    return tuple(specs(ref) for ref in op.operands)
