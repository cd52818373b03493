"""A mixture of experts for user models, which autopar can split by tokens, by width or by experts.

    >>> moe = Experts(num_experts=4, hidden=8, ffn=16)
    >>> router = torch.nn.Linear(8, 4, bias=False)
    >>> x = torch.randn(2, 5, 8)
    >>> weights, indices = router(x).softmax(-1).topk(2)
    >>> moe(x, weights, indices).shape
    torch.Size([2, 5, 8])

The router belongs to the model: it may be any operators that give each token k weights and the numbers of k experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.errors import UsageError
from autopar.ops import experts as expert_ops
from autopar.ops.kernels import Form

_exported = torch.library.custom_op("autopar::experts", expert_ops.experts, mutates_args=())
"""The custom operator that represents :func:`experts` in an exported graph."""


@_exported.register_fake
def _(hidden: Tensor, *others: Tensor | str | None) -> Tensor:
    return torch.empty_like(hidden)


def experts(  # noqa: PLR0913  the tensors of a mixture
    hidden: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    activation: str = "silu",
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Pass each token through its experts. A trace sees one operator with a sharding rule; otherwise it runs as ordinary PyTorch.

    Args:
        hidden: the tokens, [tokens..., h].
        weights: the weight of each token's experts, [tokens..., k]; differentiable.
        indices: the numbers of each token's experts, [tokens..., k]; integers.
        gate, up: [E, f, h]. Experts have no gate if ``gate`` is None.
        down: [E, h, f].
        activation: one of ``autopar.ops.kernels.ACTIVATIONS``, or any other text of :class:`autopar.ops.kernels.Form`, such as
            ``silu alpha=1.702 limit=7.0 shift=1.0``. If it says that weights are transposed, they are [E, h, f] and [E, f, h]. If it
            says that they are interleaved, ``up`` holds gate and up as [E, 2f, h].
        gate_bias, up_bias: [E, f], laid out like gate and up; None for no bias.
        down_bias: [E, h]; None for no bias.

    Returns:
        A tensor of the shape of ``hidden``: the sum over a token's experts of weight * down(act(gate x) * (up x)). No token is dropped.

    Raises:
        UsageError: the shapes do not fit together, or the activation is unknown.
    """
    form = Form.parse(activation)
    e, pairs, h = (up.mT if form.is_transposed else up).shape
    f = pairs // 2 if form.is_interleaved else pairs
    fits = (
        hidden.shape[-1] == h
        and tuple(down.shape) == ((e, f, h) if form.is_transposed else (e, h, f))
        and (gate is None or (gate.shape == up.shape and not form.is_interleaved))
        and (gate_bias is None or (gate is not None and tuple(gate_bias.shape) == (e, f)))
        and (up_bias is None or tuple(up_bias.shape) == (e, pairs))
        and (down_bias is None or tuple(down_bias.shape) == (e, h))
        and weights.shape == indices.shape
        and weights.shape[:-1] == hidden.shape[:-1]
    )
    if not fits:
        raise UsageError(
            "The tensors given to the experts do not fit together",
            expected="hidden [tokens, h], weights and indices [tokens, k], gate and up [E, f, h], down [E, h, f], biases [E, f] and [E, h]",
            got=", ".join(str(tuple(x.shape)) for x in (hidden, weights, indices, up, down)) + f", {activation}",
            fix="Pass such shapes",
        )
    run = torch.ops.autopar.experts if torch.compiler.is_exporting() else expert_ops.experts
    output: Tensor = run(hidden, weights, indices, gate, up, down, gate_bias, up_bias, str(form))
    if down_bias is None:
        return output
    dense_weights = weights.new_zeros((*weights.shape[:-1], e)).scatter_add(-1, indices, weights)  # [tokens..., E]
    return output + (dense_weights @ down_bias.to(weights.dtype)).to(output.dtype)


class Experts(nn.Module):
    """Gated feed-forward experts, whose weights are three tensors over all experts.

    Args:
        num_experts: the number of experts, E.
        hidden: the width of the tokens, h.
        ffn: the width inside an expert, f.
        activation: see :func:`experts`.
        gated: whether experts have a gate; without one they compute ``down(act(up x))``.
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
        """Initialise the weights of each expert as ``torch.nn.Linear`` does."""
        for weight in self.parameters():
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, hidden: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        return experts(hidden, weights, indices, self.gate, self.up, self.down, self.activation)
