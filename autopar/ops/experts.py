"""A mixture of experts as one operator, on one device and split over an axis: called by emitted code.

Every token goes to k of E experts, each a gated (or plain) feed-forward layer of its own:

    y[t] = sum over j of weights[t, j] * down[e] @ (act(gate[e] @ x[t]) * (up[e] @ x[t])),  e = indices[t, j]

No token is dropped, whatever the routing; experts without tokens get zero gradients. Shapes: hidden
[tokens..., h]; weights and indices [tokens..., k]; gate and up [E, f, h]; down [E, h, f]; the result is as
hidden. ``gate`` None: no gate. ``gate_bias`` and ``up_bias`` [E, f] are added to what gate and up give; None: none. A bias of
``down`` is no part of the operator, as its parts split along f could not each add it. ``form`` is the name of the activation and
what :class:`autopar.ops.kernels.Form` knows besides. Rows are sorted by expert, so that each expert is one product.

The host waits for the device in :func:`_read` alone, at most once a call: for the sizes of what a rank keeps or
sends, or for the rows of each expert where a loop runs over them. All experts of one rank wait for nothing where the
products are grouped (:func:`_is_grouped`). Whoever recomputes a block in backward waits again.
``autopar.cost.operators.operator_times`` prices this.
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


class _Held(NamedTuple):
    """The weights of experts, [E, out, in], or of one of them, [out, in], whatever way they are stored."""

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    form: Form

    @classmethod
    def of(
        cls, gate: Tensor | None, up: Tensor, down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, text: str
    ) -> _Held:
        form = Form.parse(text)
        if form.is_transposed:
            gate, up, down = None if gate is None else gate.mT, up.mT, down.mT
        return cls(gate, up, down, gate_bias, up_bias, form)

    def each(self) -> Iterator[_Held]:
        """Those of one expert after the other."""
        tensors = [repeat(None) if held is None else held.unbind(0) for held in self[:5]]
        for gate, up, down, gate_bias, up_bias in zip(*tensors, strict=False):
            yield _Held(gate, up, down, gate_bias, up_bias, self.form)

    def applied(self, rows: Tensor, product: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Tensor:
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
    """All experts on one rank, or (``gate``, ``up``, ``down``, their biases split along f) a summand of what they give.

    Raises:
        UsageError: an unknown activation.
    """
    held = _Held.of(gate, up, down, gate_bias, up_bias, form)
    if hidden.is_meta:
        return unknown(hidden.shape, hidden, weights, gate, up, down, gate_bias, up_bias)
    order, ends = _sorted(indices.reshape(-1), up.shape[0])
    rows = hidden.reshape(-1, hidden.shape[-1])[order // indices.shape[-1]]
    return _combined(_grouped(rows, ends, None, held), order, weights, hidden)


def experts_split(  # noqa: PLR0913, PLR0917  the arguments of the operator, and where it stands
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
    """The own experts' part of the result; ``gate``, ``up`` and ``down`` are S(0) on ``axis``, the rest R.

    Args:
        num_experts: of all ranks.

    Returns:
        As hidden, P: a pending sum. Nothing is sent.
    """
    if hidden.is_meta:
        return unknown(hidden.shape, hidden, weights, gate, up, down, gate_bias, up_bias)
    own, k = up.shape[0], indices.shape[-1]
    chosen = indices.reshape(-1) - group(axis).rank() * own
    order, ends = _sorted(chosen.masked_fill((chosen < 0) | (chosen >= own), own), own)
    counts = _counts(ends)  # not kept without reading: rows of others' experts would be ranks - 1 times the own ones
    mine = order[: sum(counts)]
    held = _Held.of(gate, up, down, gate_bias, up_bias, form)
    rows = _grouped(hidden.reshape(-1, hidden.shape[-1])[mine // k], ends, counts, held)
    return _summed(rows, mine, weights, hidden)


def experts_dispatch(  # noqa: PLR0913, PLR0917  the arguments of the operator, and where it stands
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
    """Tokens travel to the ranks of their experts and back, by all-to-all in both directions.

    Args:
        hidden, weights, indices: this rank's tokens, S of one leading dim.
        gate, up, down: this rank's experts, S(0).
        num_experts: of all ranks.

    Returns:
        This rank's tokens, split as hidden. As many rows are sent as the routing asks for.
    """
    if hidden.is_meta:
        return unknown(hidden.shape, hidden, weights, gate, up, down, gate_bias, up_bias)
    order, ends = _sorted(indices.reshape(-1), num_experts)
    tokens = order // indices.shape[-1]
    rows = _travelled(hidden, tokens, ends, _Held.of(gate, up, down, gate_bias, up_bias, form), group(axis))
    return _combined(rows, order, weights, hidden)


def experts_dispatch_split(  # noqa: PLR0913, PLR0917  the arguments of the operator, and where it stands
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
    """As :func:`experts_dispatch` over ``axis``, for the share of each rank's experts that this rank of ``inner`` has.

    Args:
        hidden, weights, indices: this rank's tokens on ``axis``; R on ``inner``.
        gate, up, down: this rank's experts: S(0) on ``axis``, and each part S(0) on ``inner``.
        num_experts: of all ranks.
        parts: ranks of ``inner``.

    Returns:
        As hidden, P on ``inner``: a pending sum.
    """
    if hidden.is_meta:
        return unknown(hidden.shape, hidden, weights, gate, up, down, gate_bias, up_bias)
    own, k = up.shape[0], indices.shape[-1]
    chosen = indices.reshape(-1)
    share = chosen // own  # which share of the experts a choice falls into, over all ranks
    local = share // parts * own + chosen % own
    num_here = num_experts // parts
    order, ends = _sorted(local.masked_fill(share % parts != group(inner).rank(), num_here), num_here)
    rows = _travelled(hidden, order // k, ends, _Held.of(gate, up, down, gate_bias, up_bias, form), group(axis))
    return _summed(rows, order[: rows.shape[0]], weights, hidden)


def _travelled(hidden: Tensor, tokens: Tensor, ends: Tensor, held: _Held, pg: dist.ProcessGroup) -> Tensor:
    """Rows to their experts on the ranks of ``pg``, through them, and back into their order.

    Args:
        tokens: of each choice, sorted by expert; of these the first ``ends[-1]`` travel.
        ends: where the rows of each expert of all ranks end, [experts of a rank * ranks].

    Returns:
        [rows that travel, h].
    """
    size, own = pg.size(), held.up.shape[0]
    wanted = ends.diff(prepend=ends.new_zeros(1))
    given = torch.empty_like(wanted)
    _all_to_all(given, wanted, None, None, pg)
    there, here = _read(torch.stack((wanted, given)).view(2, size, own))
    sent, received = [sum(counts) for counts in there], [sum(counts) for counts in here]
    rows = hidden.reshape(-1, hidden.shape[-1])[tokens[: sum(sent)]]
    rows = cast("Tensor", _Exchange.apply(rows, sent, received, pg))  # type: ignore[no-untyped-call]
    local = torch.arange(own, device=held.up.device).repeat(size).repeat_interleave(given, output_size=sum(received))
    by_expert, own_ends = _sorted(local, own)
    counts = [sum(of_ranks) for of_ranks in zip(*here, strict=True)]
    rows = _grouped(rows[by_expert], own_ends, counts, held)[_inverse(by_expert)]
    return cast("Tensor", _Exchange.apply(rows, received, sent, pg))  # type: ignore[no-untyped-call]


def _sorted(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Choices in the order of their experts, and where those of each expert end (int32); ``num_experts``: of none."""
    values, order = chosen.sort(stable=True)
    numbers = torch.arange(num_experts, device=chosen.device, dtype=chosen.dtype)
    return order, torch.searchsorted(values, numbers, right=True, out_int32=True)


def _inverse(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=order.device)
    return places


def _read(counts: Tensor) -> Any:
    """Whole numbers of the device as nested lists: here alone the host waits for it."""
    return counts.tolist()


def _counts(ends: Tensor) -> list[int]:
    return [end - begin for begin, end in pairwise([0, *_read(ends)])]


def _grouped(rows: Tensor, ends: Tensor, counts: list[int] | None, held: _Held) -> Tensor:
    """The experts on rows that are sorted by expert; [rows, h].

    Args:
        ends: where the rows of each expert end; the last one is the number of rows.
        counts: rows of each expert, where the host knows them.
    """
    rows = rows.to(held.up.dtype)
    if rows.shape[0] and all(_is_grouped(weight) for weight in held[:3] if weight is not None):
        return held.applied(rows, lambda x, w, bias: _product(x, w, bias, ends))
    counts = _counts(ends) if counts is None else counts
    made: list[Tensor] = []
    for piece, own in zip(torch.split(rows, counts), held.each(), strict=True):
        if piece.shape[0] or (not made and not rows.shape[0]):  # one runs on no rows, so that all get a gradient
            made.append(own.applied(piece, F.linear))
    return torch.cat(made)


_GROUPED_MAJORS, _FILLS_EMPTY_FROM = (9, 10), 10
_GROUPED_ALIGNMENT, _MOST_GROUPS = 8, 1023  # elements of bfloat16 in 16 bytes; what the kernel takes


def _is_grouped(weight: Tensor) -> bool:
    """Whether torch multiplies rows by all experts' weights [E, out, in] in one kernel, and leaves offsets on the device.

    In bfloat16 on NVIDIA GPUs of compute capability 9 and 10; elsewhere ``_grouped_mm`` copies its offsets to the host
    and loops, as done here. Its kernel loads 16 bytes at a time.
    """
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16 or torch.version.hip is not None:
        return False
    strides = sorted(weight.stride()[1:])
    is_aligned = strides[0] == 1 and not any(n % _GROUPED_ALIGNMENT for n in (*weight.shape[1:], strides[1]))
    return (
        hasattr(torch, "_grouped_mm")
        and is_aligned
        and weight.storage_offset() % _GROUPED_ALIGNMENT == 0
        and weight.shape[0] <= _MOST_GROUPS
        and torch.cuda.get_device_capability(weight.device)[0] in _GROUPED_MAJORS
    )


class _Product(torch.autograd.Function):
    """``rows[i] @ weight[e].T`` for the rows of each expert, all in one kernel.

    torch's own backward gives weights of experts without rows what the kernel leaves there, on capability 10 not zeros
    (pytorch/pytorch issue 172439), and does not take gradients that are expanded.
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
    """Whether the gradient of an expert without rows has to be filled: a pass over all of them, spared where it can be."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _FILLS_EMPTY_FROM


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    found = cast("Tensor", _Product.apply(rows.contiguous(), weight, ends))  # type: ignore[no-untyped-call]
    if bias is None:
        return found
    numbers = torch.arange(rows.shape[0], device=rows.device, dtype=ends.dtype)
    return found + bias[torch.searchsorted(ends, numbers, right=True)]


def _summed(rows: Tensor, mine: Tensor, weights: Tensor, hidden: Tensor) -> Tensor:
    """The weighted sum of each token's experts that are here, from rows of the choices ``mine``."""
    rows = rows * weights.reshape(-1)[mine].unsqueeze(-1)
    total = torch.zeros_like(hidden.reshape(-1, hidden.shape[-1]), dtype=rows.dtype)
    return total.index_add(0, mine // weights.shape[-1], rows).to(hidden.dtype).view(hidden.shape)


def _combined(rows: Tensor, order: Tensor, weights: Tensor, hidden: Tensor) -> Tensor:
    """The weighted sum of each token's experts, from rows in the order ``order`` of (token, choice)."""
    weighted = rows * weights.reshape(-1)[order].unsqueeze(-1)
    k = weights.shape[-1]
    return weighted[_inverse(order)].view(-1, k, rows.shape[-1]).sum(1).to(hidden.dtype).view(hidden.shape)


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of a group, ``sent`` to each in rank order; backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], pg: dist.ProcessGroup) -> Tensor:
        ctx.counts, ctx.pg = (sent, received), pg
        return _exchange(rows, sent, received, pg)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.counts
        return _exchange(gradients[0], received, sent, ctx.pg), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], pg: dist.ProcessGroup) -> Tensor:
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    _all_to_all(result, rows.contiguous(), received, sent, pg)
    return result


def _all_to_all(
    result: Tensor, given: Tensor, received: list[int] | None, sent: list[int] | None, pg: dist.ProcessGroup
) -> None:
    """``dist.all_to_all_single``; among fake ranks, which send nothing, each sends here what it gets from here.

    So the counts are defined, and as even over ranks as the routing of this rank's own tokens.
    """
    if _is_fake(pg):
        result.copy_(given)
    else:
        dist.all_to_all_single(result, given, received, sent, group=pg)


def _is_fake(pg: dist.ProcessGroup) -> bool:
    try:
        return bool(dist.get_backend(pg) == "fake")
    except ValueError:  # a group among threads, which no job knows
        return False


spmd_types.register_local_autograd_function(_Exchange)
spmd_types.register_local_autograd_function(_Product)
