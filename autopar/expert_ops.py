"""A mixture of experts as one operator, on one device and split over an axis: called by emitted code.

Every token goes to k of E experts, each a gated (or plain) feed-forward layer of its own:

    y[t] = sum over j of weights[t, j] * down[e] @ (act(gate[e] @ x[t]) * (up[e] @ x[t])),  e = indices[t, j]

No token is dropped, whatever the routing; experts without tokens get zero gradients. Shapes: hidden
[tokens..., h]; weights and indices [tokens..., k]; gate and up [E, f, h]; down [E, h, f]; the result is as
hidden. ``gate`` None: no gate. Rows are sorted by expert, so that each expert is one product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import spmd_types
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar.errors import UsageError
from autopar.ops import group

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
ACTIVATIONS = tuple(_ACTIVATIONS)
"""Names of the functions that an expert may apply."""


def experts(
    hidden: Tensor, weights: Tensor, indices: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """All experts on one rank, or (``gate``, ``up``, ``down`` split along f) a summand of what they give.

    Raises:
        UsageError: an unknown activation.
    """
    if activation not in _ACTIVATIONS:
        raise UsageError("an expert's activation is known", value=repr(activation), remedy=", ".join(ACTIVATIONS))
    if hidden.is_meta:
        return _shape_of(hidden, weights, gate, up, down)
    chosen = indices.reshape(-1)
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=up.shape[0]).tolist()
    rows = hidden.reshape(-1, hidden.shape[-1])[order // indices.shape[-1]]
    return _combined(_grouped(rows, counts, gate, up, down, activation), order, weights, hidden)


def experts_split(  # noqa: PLR0913, PLR0917  the arguments of the operator, and where it stands
    hidden: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    activation: str,
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
        return _shape_of(hidden, weights, gate, up, down)
    own, k = up.shape[0], indices.shape[-1]
    chosen = indices.reshape(-1) - group(axis).rank() * own
    mine = ((chosen >= 0) & (chosen < own)).nonzero().squeeze(-1)
    mine = mine[chosen[mine].argsort(stable=True)]
    counts = torch.bincount(chosen[mine], minlength=own).tolist()
    flat = hidden.reshape(-1, hidden.shape[-1])
    rows = _grouped(flat[mine // k], counts, gate, up, down, activation)
    rows = rows * weights.reshape(-1)[mine].unsqueeze(-1)
    total = torch.zeros_like(flat, dtype=rows.dtype).index_add(0, mine // k, rows)
    return total.to(hidden.dtype).view(hidden.shape)


def experts_dispatch(  # noqa: PLR0913, PLR0917  the arguments of the operator, and where it stands
    hidden: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    activation: str,
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
        return _shape_of(hidden, weights, gate, up, down)
    chosen = indices.reshape(-1)
    order = chosen.argsort(stable=True)
    rows = hidden.reshape(-1, hidden.shape[-1])[order // indices.shape[-1]]
    wanted = torch.bincount(chosen, minlength=num_experts)
    return _combined(_travelled(rows, wanted, gate, up, down, activation, group(axis)), order, weights, hidden)


def experts_dispatch_split(  # noqa: PLR0913, PLR0917  the arguments of the operator, and where it stands
    hidden: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    activation: str,
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
        return _shape_of(hidden, weights, gate, up, down)
    own, k = up.shape[0], indices.shape[-1]
    share = indices.reshape(-1) // own  # which share of the experts a choice falls into, over all ranks
    mine = (share % parts == group(inner).rank()).nonzero().squeeze(-1)
    local = share[mine] // parts * own + indices.reshape(-1)[mine] % own
    order = local.argsort(stable=True)
    mine = mine[order]
    flat = hidden.reshape(-1, hidden.shape[-1])
    wanted = torch.bincount(local, minlength=num_experts // parts)
    rows = _travelled(flat[mine // k], wanted, gate, up, down, activation, group(axis))
    rows = rows * weights.reshape(-1)[mine].unsqueeze(-1)
    total = torch.zeros_like(flat, dtype=rows.dtype).index_add(0, mine // k, rows)
    return total.to(hidden.dtype).view(hidden.shape)


def _travelled(
    rows: Tensor,
    wanted: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    activation: str,
    pg: dist.ProcessGroup,
) -> Tensor:
    """Rows to their experts on the ranks of ``pg``, through them, and back into their order.

    Args:
        rows: [rows, h], sorted by expert.
        wanted: how many each expert of all ranks gets from here, [experts of a rank * ranks].
    """
    size, own = pg.size(), up.shape[0]
    given = torch.empty_like(wanted)
    dist.all_to_all_single(given, wanted, group=pg)
    sent, received = wanted.view(size, own).sum(1).tolist(), given.view(size, own).sum(1).tolist()
    rows = cast("Tensor", _Exchange.apply(rows, sent, received, pg))  # type: ignore[no-untyped-call]
    local = torch.arange(own, device=up.device).repeat(size).repeat_interleave(given)
    by_expert = local.argsort(stable=True)
    rows = _grouped(rows[by_expert], given.view(size, own).sum(0).tolist(), gate, up, down, activation)
    rows = rows[by_expert.argsort()]
    return cast("Tensor", _Exchange.apply(rows, received, sent, pg))  # type: ignore[no-untyped-call]


def _grouped(
    rows: Tensor, counts: Sequence[int], gate: Tensor | None, up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """The experts on rows that are sorted by expert, ``counts`` rows each; [rows, h]."""
    act = _ACTIVATIONS[activation]
    pieces = torch.split(rows.to(up.dtype), list(counts))
    gates = [None] * len(pieces) if gate is None else gate.unbind(0)
    made: list[Tensor] = []
    for piece, g, u, d in zip(pieces, gates, up.unbind(0), down.unbind(0), strict=True):
        if piece.shape[0] or (not made and not rows.shape[0]):  # one runs on no rows, so that all get a gradient
            x = F.linear(piece, u)
            made.append(F.linear(act(x) if g is None else act(F.linear(piece, g)) * x, d))
    return torch.cat(made)


def _combined(rows: Tensor, order: Tensor, weights: Tensor, hidden: Tensor) -> Tensor:
    """The weighted sum of each token's experts, from rows in the order ``order`` of (token, choice)."""
    weighted = rows * weights.reshape(-1)[order].unsqueeze(-1)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=order.device)
    k = weights.shape[-1]
    return weighted[places].view(-1, k, rows.shape[-1]).sum(1).to(hidden.dtype).view(hidden.shape)


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
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=pg)
    return result


class _Shape(torch.autograd.Function):
    """What an operator gives on meta tensors: how many rows an expert has is in the values alone."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *others: Tensor | None) -> Tensor:
        ctx.specs = [None if x is None else (x.shape, x.dtype) for x in (hidden, *others)]
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(None if s is None else gradients[0].new_empty(s[0], dtype=s[1]) for s in ctx.specs)


spmd_types.register_local_autograd_function(_Exchange)
spmd_types.register_local_autograd_function(_Shape)


def _shape_of(hidden: Tensor, *others: Tensor | None) -> Tensor:
    return cast("Tensor", _Shape.apply(hidden, *others))  # type: ignore[no-untyped-call]
