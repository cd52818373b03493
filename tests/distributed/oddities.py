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


_MODELS = {"pairs": lambda: u.Pairs("contrastive"), "routers": Layers, "rolls": Rolling}


@dataclass(frozen=True)
class UnusualSubject:
    """``kind``: pairs (a contrastive loss with a scalar parameter), routers or rolls."""

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
