"""A custom operator with a sharding rule of one line, and one without, which autopar finds by itself.

python examples/custom_op.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autopar

HIDDEN, FFN, LABELS = 64, 256, 10


@torch.library.custom_op("example::fused_mlp", mutates_args=())
def fused_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute an MLP in one kernel: x [b, s, k], up [f, k], down [n, f]; gives [b, s, n]."""
    return torch.relu(x @ up.t()) @ down.t()


@fused_mlp.register_fake
def _(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], down.shape[0])


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, up, down = ctx.saved_tensors
    hidden = x @ up.t()
    inner = (gradient @ down) * (hidden > 0)
    return (
        inner @ up,
        torch.einsum("bsf,bsk->fk", inner, x),
        torch.einsum("bsn,bsf->nf", gradient, torch.relu(hidden)),
    )


fused_mlp.register_autograd(_backward, setup_context=_keep)


# Nothing says how this one is split: autopar runs it on small parts at planning time.
@torch.library.custom_op("example::squash", mutates_args=())
def squash(x: Tensor) -> Tensor:
    """Map each element into (-1, 1)."""
    return x * torch.rsqrt(1 + x * x)


squash.register_fake(torch.empty_like)
squash.register_autograd(
    lambda ctx, gradient: gradient * torch.rsqrt(1 + ctx.saved_tensors[0] ** 2) ** 3,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Model(nn.Module):
    """Tokens to labels through two fused MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ParameterList(nn.Parameter(torch.randn(FFN, HIDDEN) / 8) for _ in range(2))
        self.down = nn.ParameterList(nn.Parameter(torch.randn(HIDDEN, FFN) / 16) for _ in range(2))
        self.head = nn.Linear(HIDDEN, LABELS)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + fused_mlp(x, up, down)
        x = squash(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def main() -> autopar.Plan:
    """Declare the rule, which is checked by execution, and plan the model on two ranks with tp=2."""
    # b, s and n are split freely; f+ is summed over, so that up split by rows and down by columns is one strategy
    # (Megatron's MLP); k^ stays whole, since the result is not linear in it.
    autopar.register_rule("example::fused_mlp", "b s k^, f+ k^, n f+ -> b s n; linear 2")
    batch = {"x": torch.randn(4, 16, HIDDEN), "labels": torch.randint(0, LABELS, (4, 16))}
    plan = autopar.estimate(Model(), example_inputs=batch, cluster="cpu:1x2", global_batch_size=8, pins=["tp=2"])
    print(plan)
    for note in plan.notes:
        print("note:", note)
    return plan


if __name__ == "__main__":
    main()
