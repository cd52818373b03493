"""Subjects that ranks import by name: branches on values, losses over pairs of samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.lower import unusual as u


class Layers(u.Around):
    """Routers that branch on values, in layers that a pipeline can part."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), u.Router()) for _ in range(4))))


@dataclass(frozen=True)
class UnusualSubject:
    """``kind``: pairs (a contrastive loss with a scalar parameter) or routers."""

    kind: str

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return u.Pairs("contrastive") if self.kind == "pairs" else Layers()

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = False) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        example = u.pairs() if self.kind == "pairs" else u.batch()
        return {
            name: torch.randn(batch_size, *x.shape[1:]) if x.is_floating_point() else torch.randint(0, 4, (batch_size,))
            for name, x in example.items()
        }
