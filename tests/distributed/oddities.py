"""Subjects that ranks import by name: branches on values, losses over pairs of samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lower import unusual as u


class Layers(u.Around):
    """Routers that branch on values, in layers that a pipeline can part."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), u.Router()) for _ in range(4))))


class Rolls(nn.Module):
    """Rolls by a number that it reads from the whole batch, which no trace follows; sums in what it calls float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x).float()
        total += x.roll(int(x.mean(0).argmax()), -1)
        return self.inner(total)  # type: ignore[no-any-return]


class Rolling(u.Around):
    """One of them after a layer."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(8, 8), Rolls()))


class Shared(u.Around):
    """Four layers; the second and the last read the same weights beside their own."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(4)))
        self.shared = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for number, layer in enumerate(cast("nn.ModuleList", self.inner)):
            x = x + layer(x).tanh()
            if number % 2:
                x = x + self.shared(x).tanh()
        return F.cross_entropy(self.last(x), y)


_MODELS = {"pairs": partial(u.Pairs, "contrastive"), "routers": Layers, "rolls": Rolling, "shared": Shared}


@dataclass(frozen=True)
class UnusualSubject:
    """``kind``: pairs (a contrastive loss with a scalar parameter), routers, rolls, or shared (weights of two layers)."""

    kind: str

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return _MODELS[self.kind]()

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = False) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        example = u.pairs() if self.kind == "pairs" else u.batch()
        return {
            name: torch.randn(batch_size, *x.shape[1:]) if x.is_floating_point() else torch.randint(0, 4, (batch_size,))
            for name, x in example.items()
        }
