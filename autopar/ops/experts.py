"""A mixture of experts as one operator, on one device and split over an axis; emitted code calls it.

Every token goes to k of E experts, each of which is a gated (or plain) feed-forward layer:

    y[t] = sum over j of weights[t, j] * down[e] @ (act(gate[e] @ x[t]) * (up[e] @ x[t])),  e = indices[t, j]

No token is dropped, and experts without tokens get zero gradients. Shapes: hidden [tokens..., h]; weights and indices [tokens..., k];
gate and up [E, f, h]; down [E, h, f]; the result as hidden. gate_bias and up_bias [E, f] are added to the outputs of gate and up. Down
has no bias here, as parts that are split along f cannot each add it. ``gate`` and the biases may be None. ``form`` is the text of
:class:`autopar.ops.kernels.Form`. Rows are sorted by expert, so that each expert is one product.

The host waits for the device only in :func:`_read`, at most once a call: for the numbers of rows that a rank keeps or sends, or for the
rows of each expert if a loop runs over them. It never waits if all experts are on one rank and products are grouped (:func:`_is_grouped`).
A recomputation in backward waits again. ``autopar.cost.operators.operator_times`` prices this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, repeat
from typing import Any, NamedTuple, cast

import spmd_types
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar.ops.collectives import group
from autopar.ops.kernels import Form
from autopar.ops.plain import unknown


class _Weights(NamedTuple):
    """The weights of experts, [E, out, in], or of one expert, [out, in], whether they are stored transposed or not."""

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    form: Form

    @classmethod
    def of(
        cls, gate: Tensor | None, up: Tensor, down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, text: str
    ) -> _Weights:
        """Return the weights from the arguments of an operator; ``text`` is the form."""
        form = Form.parse(text)
        if form.is_transposed:
            gate, up, down = None if gate is None else gate.mT, up.mT, down.mT
        return cls(gate, up, down, gate_bias, up_bias, form)

    def each(self) -> Iterator[_Weights]:
        """Yield the weights of one expert after the other."""
        tensors = [repeat(None) if weight is None else weight.unbind(0) for weight in self[:5]]
        for gate, up, down, gate_bias, up_bias in zip(*tensors, strict=False):
            yield _Weights(gate, up, down, gate_bias, up_bias, self.form)

    def applied(self, rows: Tensor, product: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Tensor:
        """Return the output of the experts for ``rows``; ``product`` multiplies rows by a weight and adds a bias."""
        gate = None if self.gate is None else product(rows, self.gate, self.gate_bias)
        return product(self.form.between(gate, product(rows, self.up, self.up_bias)), self.down, None)


def experts(  # noqa: PLR0913, PLR0917  the arguments of the operator
    hidden: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    form: str,
) -> Tensor:
    """Return all experts on one rank.

    If ``gate``, ``up``, ``down`` and the biases are split along f, the result is a summand.

    Raises:
        UsageError: the activation is unknown.
    """
    own_weights = _Weights.of(gate, up, down, gate_bias, up_bias, form)
    if hidden.is_meta:
        return unknown(hidden.shape, hidden, weights, gate, up, down, gate_bias, up_bias)
    order, ends = _sorted(indices.reshape(-1), up.shape[0])
    rows = hidden.reshape(-1, hidden.shape[-1])[order // indices.shape[-1]]
    return _weighted_sum(_run_experts(rows, ends, None, own_weights), order, weights, hidden)


def experts_split(  # noqa: PLR0913, PLR0917  the arguments of the operator, and its axes
    hidden: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    form: str,
    axis: str,
    num_experts: int,
) -> Tensor:
    """Return the contribution of this rank's experts; ``gate``, ``up`` and ``down`` are S(0) on ``axis``, the other tensors R.

    Args:
        axis: the axis over which experts are split.
        num_experts: the number of experts over all ranks.

    Returns:
        A tensor of the shape of hidden, P: a pending sum. Nothing is sent.
    """
    if hidden.is_meta:
        return unknown(hidden.shape, hidden, weights, gate, up, down, gate_bias, up_bias)
    num_local, k = up.shape[0], indices.shape[-1]
    local_ids = indices.reshape(-1) - group(axis).rank() * num_local
    order, ends = _sorted(local_ids.masked_fill((local_ids < 0) | (local_ids >= num_local), num_local), num_local)
    counts = _counts(ends)  # read to leave out rows of other ranks' experts, which are ranks - 1 times as many
    choices = order[: sum(counts)]
    own_weights = _Weights.of(gate, up, down, gate_bias, up_bias, form)
    rows = _run_experts(hidden.reshape(-1, hidden.shape[-1])[choices // k], ends, counts, own_weights)
    return _scattered_sum(rows, choices, weights, hidden)


def experts_dispatch(  # noqa: PLR0913, PLR0917  the arguments of the operator, and its axes
    hidden: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    form: str,
    axis: str,
    num_experts: int,
) -> Tensor:
    """Send tokens to the ranks of their experts and back, by an all-to-all in each direction.

    Args:
        hidden, weights, indices: the tokens of this rank, S of one leading dim.
        gate, up, down: the experts of this rank, S(0).
        axis: the axis over which experts are split.
        num_experts: the number of experts over all ranks.

    Returns:
        The tokens of this rank, split like hidden. The number of rows sent depends on the routing.
    """
    if hidden.is_meta:
        return unknown(hidden.shape, hidden, weights, gate, up, down, gate_bias, up_bias)
    order, ends = _sorted(indices.reshape(-1), num_experts)
    tokens = order // indices.shape[-1]
    rows = _run_on_owners(hidden, tokens, ends, _Weights.of(gate, up, down, gate_bias, up_bias, form), group(axis))
    return _weighted_sum(rows, order, weights, hidden)


def experts_dispatch_split(  # noqa: PLR0913, PLR0917  the arguments of the operator, and its axes
    hidden: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    form: str,
    axis: str,
    num_experts: int,
    inner: str,
    parts: int,
) -> Tensor:
    """Do what :func:`experts_dispatch` does over ``axis``, for the experts of each rank that this rank of ``inner`` has.

    Args:
        hidden, weights, indices: the tokens of this rank on ``axis``; R on ``inner``.
        gate, up, down: the experts of this rank: S(0) on ``axis``, and each part S(0) on ``inner``.
        axis: the outer axis over which experts are split.
        num_experts: the number of experts over all ranks.
        inner: the axis that splits the experts of each rank further.
        parts: the number of ranks of ``inner``.

    Returns:
        A tensor of the shape of hidden, P on ``inner``: a pending sum.
    """
    if hidden.is_meta:
        return unknown(hidden.shape, hidden, weights, gate, up, down, gate_bias, up_bias)
    num_local, k = up.shape[0], indices.shape[-1]
    expert_ids = indices.reshape(-1)
    share = expert_ids // num_local  # the number of the part of the experts, over all ranks, that a choice is in
    ids_here = share // parts * num_local + expert_ids % num_local
    num_here = num_experts // parts
    order, ends = _sorted(ids_here.masked_fill(share % parts != group(inner).rank(), num_here), num_here)
    rows = _run_on_owners(hidden, order // k, ends, _Weights.of(gate, up, down, gate_bias, up_bias, form), group(axis))
    return _scattered_sum(rows, order[: rows.shape[0]], weights, hidden)


def _run_on_owners(hidden: Tensor, tokens: Tensor, ends: Tensor, weights: _Weights, pg: dist.ProcessGroup) -> Tensor:
    """Send rows to their experts on the ranks of ``pg``, run the experts, and send the results back.

    Args:
        hidden: the tokens of this rank.
        tokens: the token of each choice, sorted by expert; the first ``ends[-1]`` choices are sent.
        ends: where the rows of each expert of all ranks end, [experts of a rank * ranks].
        weights: the experts of this rank.
        pg: the ranks that the experts are split over.

    Returns:
        The results in the order of ``tokens``, [rows sent, h].
    """
    size, num_local = pg.size(), weights.up.shape[0]
    sent_counts = ends.diff(prepend=ends.new_zeros(1))
    received_counts = torch.empty_like(sent_counts)
    _all_to_all(received_counts, sent_counts, None, None, pg)
    sent_each, received_each = _read(torch.stack((sent_counts, received_counts)).view(2, size, num_local))
    sent, received = [sum(counts) for counts in sent_each], [sum(counts) for counts in received_each]
    rows = hidden.reshape(-1, hidden.shape[-1])[tokens[: sum(sent)]]
    rows = cast("Tensor", _Exchange.apply(rows, sent, received, pg))  # type: ignore[no-untyped-call]
    expert_ids = torch.arange(num_local, device=weights.up.device).repeat(size)
    expert_ids = expert_ids.repeat_interleave(received_counts, output_size=sum(received))
    by_expert, local_ends = _sorted(expert_ids, num_local)
    counts = [sum(of_ranks) for of_ranks in zip(*received_each, strict=True)]
    rows = _run_experts(rows[by_expert], local_ends, counts, weights)[_inverse(by_expert)]
    return cast("Tensor", _Exchange.apply(rows, received, sent, pg))  # type: ignore[no-untyped-call]


def _sorted(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the order of choices by expert, and where those of each expert end (int32).

    ``chosen`` is the expert of each choice, or ``num_experts`` for a choice of none of these.
    """
    values, order = chosen.sort(stable=True)
    expert_ids = torch.arange(num_experts, device=chosen.device, dtype=chosen.dtype)
    return order, torch.searchsorted(values, expert_ids, right=True, out_int32=True)


def _inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return inverse


def _read(counts: Tensor) -> Any:
    """Return integers on the device as nested lists. This is the only place where the host waits for it."""
    return counts.tolist()


def _counts(ends: Tensor) -> list[int]:
    """Return the number of rows of each expert."""
    return [end - begin for begin, end in pairwise([0, *_read(ends)])]


def _run_experts(rows: Tensor, ends: Tensor, counts: list[int] | None, weights: _Weights) -> Tensor:
    """Run experts on rows that are sorted by expert; return [rows, h].

    Args:
        rows: the rows.
        ends: where the rows of each expert end; the last number is that of all rows.
        counts: the rows of each expert, if the host knows them.
        weights: the experts.
    """
    rows = rows.to(weights.up.dtype)
    if rows.shape[0] and all(_is_grouped(weight) for weight in weights[:3] if weight is not None):
        return weights.applied(rows, lambda x, w, bias: _product(x, w, bias, ends))
    counts = _counts(ends) if counts is None else counts
    results: list[Tensor] = []
    for part, expert in zip(torch.split(rows, counts), weights.each(), strict=True):
        # without any rows the first expert runs on none, so that all weights get a zero gradient
        if part.shape[0] or (not results and not rows.shape[0]):
            results.append(expert.applied(part, F.linear))
    return torch.cat(results)


_GROUPED_MAJORS, _FILLS_EMPTY_FROM = (9, 10), 10
"""The major compute capabilities with a grouped kernel; the first one that leaves gradients of experts without rows unset."""
_GROUPED_ALIGNMENT, _MOST_GROUPS = 8, 1023
"""Elements of bfloat16 in the 16 bytes that the kernel loads at a time; the most groups that it accepts."""


def _is_grouped(weight: Tensor) -> bool:
    """Return whether torch multiplies rows by the weights [E, out, in] of all experts in one kernel, with offsets on the device.

    It does in bfloat16 on NVIDIA GPUs of compute capability 9 and 10. Elsewhere ``_grouped_mm`` copies its offsets to the host and loops,
    as this module does. The kernel loads 16 bytes at a time.
    """
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16 or torch.version.hip is not None:
        return False
    strides = sorted(weight.stride()[1:])
    is_aligned = strides[0] == 1 and not any(n % _GROUPED_ALIGNMENT for n in (*weight.shape[1:], strides[1]))
    return (
        is_aligned
        and weight.storage_offset() % _GROUPED_ALIGNMENT == 0
        and weight.shape[0] <= _MOST_GROUPS
        and torch.cuda.get_device_capability(weight.device)[0] in _GROUPED_MAJORS
    )


class _Product(torch.autograd.Function):
    """``rows[i] @ weight[e].T`` for the rows of each expert, in one kernel.

    For experts without rows, the backward of torch returns uninitialised memory as gradient of the weights, which is not zero on capability
    10 (pytorch/pytorch issue 172439). It also refuses expanded gradients.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        return torch._grouped_mm(rows, weight.transpose(-2, -1), offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, ends = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        to_rows = torch._grouped_mm(gradient, weight, offs=ends) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return to_rows, None, None
        to_weight = torch._grouped_mm(gradient.t(), rows, offs=ends)
        if _leaves_empty(weight.device):
            is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0
            to_weight.masked_fill_(is_empty[:, None, None], 0)
        return to_rows, to_weight, None


def _leaves_empty(device: torch.device) -> bool:
    """Return whether the gradients of experts without rows must be set to zero, which is a pass over all weights."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _FILLS_EMPTY_FROM


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Return the products of rows and weights of their experts, with the biases added."""
    product = cast("Tensor", _Product.apply(rows.contiguous(), weight, ends))  # type: ignore[no-untyped-call]
    if bias is None:
        return product
    positions = torch.arange(rows.shape[0], device=rows.device, dtype=ends.dtype)
    return product + bias[torch.searchsorted(ends, positions, right=True)]


def _scattered_sum(rows: Tensor, choices: Tensor, weights: Tensor, hidden: Tensor) -> Tensor:
    """Return the weighted sum over the experts of each token that are on this rank, from the rows of ``choices``."""
    rows = rows * weights.reshape(-1)[choices].unsqueeze(-1)
    total = torch.zeros_like(hidden.reshape(-1, hidden.shape[-1]), dtype=rows.dtype)
    return total.index_add(0, choices // weights.shape[-1], rows).to(hidden.dtype).view(hidden.shape)


def _weighted_sum(rows: Tensor, order: Tensor, weights: Tensor, hidden: Tensor) -> Tensor:
    """Return the weighted sum over the experts of each token, from rows in the order ``order`` of (token, choice)."""
    weighted = rows * weights.reshape(-1)[order].unsqueeze(-1)
    k = weights.shape[-1]
    return weighted[_inverse(order)].view(-1, k, rows.shape[-1]).sum(1).to(hidden.dtype).view(hidden.shape)


class _Exchange(torch.autograd.Function):
    """Sends rows to the ranks of a group, ``sent`` of them to each in rank order; backward returns the gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], pg: dist.ProcessGroup) -> Tensor:
        ctx.counts, ctx.pg = (sent, received), pg
        return _exchange(rows, sent, received, pg)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.counts
        return _exchange(gradients[0], received, sent, ctx.pg), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], pg: dist.ProcessGroup) -> Tensor:
    """Send rows to the ranks of a group, and return those received, both in rank order."""
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    _all_to_all(result, rows.contiguous(), received, sent, pg)
    return result


def _all_to_all(
    result: Tensor, rows: Tensor, received: list[int] | None, sent: list[int] | None, pg: dist.ProcessGroup
) -> None:
    """Run ``dist.all_to_all_single``. Among fake ranks, which send nothing, this rank receives what it sends.

    Counts are then defined, and are as even over ranks as the routing of the tokens of this rank.
    """
    if _is_fake(pg):
        result.copy_(rows)
    else:
        dist.all_to_all_single(result, rows, received, sent, group=pg)


def _is_fake(pg: dist.ProcessGroup) -> bool:
    """Return whether the ranks of a group are fake."""
    try:
        return bool(dist.get_backend(pg) == "fake")
    except ValueError:  # a group among threads, which torch.distributed does not know
        return False


spmd_types.register_local_autograd_function(_Exchange)
spmd_types.register_local_autograd_function(_Product)
