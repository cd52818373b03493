"""Models of one's own, as the processes that play the ranks import them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Ranker(nn.Module):
    """Takes a list of tensors beside one by position, and gives scores alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(32, 16), nn.Linear(16, 32), nn.Linear(32, 1, bias=False)
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens: Tensor, weights: list[Tensor]) -> Tensor:
        scores: Tensor = self.down(self.drop(functional.gelu(self.up(self.embed(tokens))))).squeeze(-1)
        return scores * weights[0] + weights[1]


def ranker() -> nn.Module:
    return Ranker()


def ranking_loss(scores: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (scores - 1.0).square().mean()


def examples() -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 32, (6, 5), generator=generator)
    return tokens, [torch.randn(6, 5, generator=generator) for _ in range(2)]


class Restless(Ranker):
    """Draws noise of its own, which one device and many do not share."""

    def forward(self, tokens: Tensor, weights: list[Tensor]) -> Tensor:
        return super().forward(tokens, weights) + torch.rand_like(weights[0])
