"""Models written by hand for the table of families: each factory gives (model, example inputs)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.nn import Experts

Made = tuple[nn.Module, dict[str, Any]]


class _Double(nn.Module):
    """Two convolutions with group norm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(2, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.second(functional.relu(self.norm(self.first(x)))))


class UNet(nn.Module):
    """Down and up again; what a level makes on the way down is read on the way up, over all stages between."""

    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.enter = _Double(3, width)
        self.down = nn.ModuleList(_Double(a, b) for a, b in pairwise(widths))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.up = nn.ModuleList(_Double(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, pixels: Tensor, target: Tensor) -> dict[str, Tensor]:
        x = self.enter(pixels)
        kept = []
        for level in self.down:
            kept.append(x)
            x = level(functional.max_pool2d(x, 2))
        for grow, level, skip in zip(reversed(self.grow), reversed(self.up), reversed(kept), strict=True):
            x = level(torch.cat([skip, grow(x)], dim=1))
        return {"loss": functional.binary_cross_entropy_with_logits(self.head(x), target), "mask": x}


def unet() -> Made:
    """A U-Net on images of 16 x 16."""
    return UNet(), {"pixels": torch.randn(2, 3, 16, 16), "target": torch.rand(2, 1, 16, 16)}


class Recommender(nn.Module):
    """As DLRM: embedding tables, an MLP on dense features, products of all pairs of features, an MLP on top."""

    pairs: Tensor

    def __init__(self, tables: tuple[int, ...] = (1024, 512, 96), width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for rows in tables)
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        features = len(tables) + 1
        row, column = torch.tril_indices(features, features, offset=-1)
        self.register_buffer("pairs", row * features + column, persistent=False)
        self.top = nn.Sequential(nn.Linear(width + len(row), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, ids: Tensor, clicked: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        rows = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([bottom, *rows], dim=1)
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        found = self.top(torch.cat([bottom, products[:, self.pairs]], dim=1))
        return functional.binary_cross_entropy_with_logits(found.squeeze(1), clicked)


def recommender() -> Made:
    """Three tables, the smallest of 96 rows."""
    ids = torch.randint(0, 96, (64, 3), generator=torch.Generator().manual_seed(0))
    return Recommender(), {"dense": torch.randn(64, 13), "ids": ids, "clicked": torch.rand(64)}


class Perceptron(nn.Module):
    """A plain MLP."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = torch.relu(layer(x))
        logits = self.head(x)
        return functional.cross_entropy(logits, target), logits


def perceptron() -> Made:
    """Five classes."""
    target = torch.randint(0, 5, (16,), generator=torch.Generator().manual_seed(0))
    return Perceptron(), {"x": torch.randn(16, 32), "target": target}


class _Routed(nn.Module):
    """A softmax router and experts of :mod:`autopar.nn`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = Experts(num_experts=4, hidden=width, ffn=16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights, indices = self.router(y).softmax(-1).topk(2)
        return x + self.experts(y, weights / weights.sum(-1, keepdim=True), indices)


class Mixture(nn.Module):
    """Tokens through layers of experts, no attention."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(_Routed(width) for _ in range(depth))
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def mixture() -> Made:
    """Four experts, two for a token, samples of 8 tokens."""
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, 64, (16, 8), generator=generator) for _ in range(2))
    return Mixture(), {"ids": ids, "labels": labels}
