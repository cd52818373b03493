"""Models whose buffers change in training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Remembering(nn.Module):
    """Spectral norm, a step counter and, with ``statistics``, batch norm (one module twice) and a mean over samples."""

    def __init__(self, statistics: bool) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16, bias=False))
        self.norm = nn.BatchNorm1d(16) if statistics else nn.LayerNorm(16)
        self.last = nn.Linear(16, 16, bias=False)
        self.statistics = statistics
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.norm(self.first(x))
        y = self.last(torch.nn.functional.gelu(y))
        with torch.no_grad():
            self.steps += 1
            if self.statistics:
                self.mean.mul_(0.9).add_((y * y).mean(0), alpha=0.1)
        if self.statistics:
            y = self.norm(y) + self.mean
        scale = 1 + 1 / (1 + self.steps.float())
        return {"loss": (scale * torch.sigmoid(2 * y + 1) * y).mean()}


@dataclass(frozen=True)
class RememberingSubject:
    """Makes one and its batches."""

    statistics: bool

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return Remembering(self.statistics)

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = False) -> dict[str, Tensor]:
        return {"x": torch.randn(batch_size, 8, generator=torch.Generator().manual_seed(seed))}
