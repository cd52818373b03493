"""A mixture of experts for one's own model: what autopar splits as a whole, by tokens, width or experts.

    >>> moe = Experts(num_experts=4, hidden=8, ffn=16)
    >>> router = torch.nn.Linear(8, 4, bias=False)
    >>> x = torch.randn(2, 5, 8)
    >>> weights, indices = router(x).softmax(-1).topk(2)
    >>> moe(x, weights, indices).shape
    torch.Size([2, 5, 8])

The router is the model's own: any operators that give each token k weights and k expert numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.errors import UsageError
from autopar.ops import experts as expert_ops


@torch.library.custom_op("autopar::experts", mutates_args=())
def _exported(
    hidden: Tensor, weights: Tensor, indices: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """What stands in an exported graph for :func:`experts`."""
    return expert_ops.experts(hidden, weights, indices, gate, up, down, activation)


@_exported.register_fake
def _(
    hidden: Tensor, weights: Tensor, indices: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, activation: str
) -> Tensor:
    return torch.empty_like(hidden)


def experts(
    hidden: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    activation: str = "silu",
) -> Tensor:
    """Each token through its experts: one operator with a rule when traced, ordinary PyTorch when run.

    Args:
        hidden: [tokens..., h].
        weights: [tokens..., k], of each token's experts; differentiable.
        indices: [tokens..., k], integers: which experts.
        gate, up: [E, f, h]; ``gate`` None: experts without a gate.
        down: [E, h, f].
        activation: one of ``autopar.ops.experts.ACTIVATIONS``.

    Returns:
        As hidden: sum over a token's experts of weight * down(act(gate x) * (up x)), no token dropped.

    Raises:
        UsageError: shapes that do not fit together, or an unknown activation.
    """
    e, f, h = up.shape
    fits = (
        hidden.shape[-1] == h
        and tuple(down.shape) == (e, h, f)
        and (gate is None or gate.shape == up.shape)
        and weights.shape == indices.shape
        and weights.shape[:-1] == hidden.shape[:-1]
    )
    if not fits or activation not in expert_ops.ACTIVATIONS:
        raise UsageError(
            "The tensors given to the experts do not fit together",
            expected="hidden [tokens, h], weights and indices [tokens, k], gate and up [E, f, h], down [E, h, f]",
            got=", ".join(str(tuple(x.shape)) for x in (hidden, weights, indices, up, down)) + f", {activation}",
            fix=f"Pass such shapes, and one of the activations {', '.join(expert_ops.ACTIVATIONS)}",
        )
    if torch.compiler.is_exporting():
        result: Tensor = torch.ops.autopar.experts(hidden, weights, indices, gate, up, down, activation)
        return result
    return expert_ops.experts(hidden, weights, indices, gate, up, down, activation)


class Experts(nn.Module):
    """Gated feed-forward experts with their weights in three tensors.

    Args:
        num_experts: E.
        hidden: h, width of the tokens.
        ffn: f, width inside an expert.
        activation: see :func:`experts`.
        gated: False: ``down(act(up x))``.
    """

    def __init__(
        self, *, num_experts: int, hidden: int, ffn: int, activation: str = "silu", gated: bool = True
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate = nn.Parameter(torch.empty(num_experts, ffn, hidden)) if gated else None
        self.up = nn.Parameter(torch.empty(num_experts, ffn, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, ffn))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``torch.nn.Linear`` begins, for each expert."""
        for weight in self.parameters():
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, hidden: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        return experts(hidden, weights, indices, self.gate, self.up, self.down, self.activation)
