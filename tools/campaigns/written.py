"""Models as people write them, without a library: each factory gives (model, example inputs).

They are no rows of the published table. ``python -m tools.campaigns.models --family "DiT by hand"`` runs one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Made = tuple[nn.Module, dict[str, Any]]


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _ids(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=_generator(seed))


def _reals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=_generator(seed))


class _Modulated(nn.Module):
    """A block whose norms are shifted, scaled and gated by a condition (adaLN-zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        batch, length, width = x.shape
        shift, scale, gate, shift2, scale2, gate2 = self.condition(c)[:, None].chunk(6, -1)
        y = self.first(x) * (1 + scale) + shift
        q, k, v = self.qkv(y).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + gate * self.out(y)
        return x + gate2 * self.mlp(self.second(x) * (1 + scale2) + shift2)


class Diffusion(nn.Module):
    """A diffusion transformer; noise, times and dropped labels are inputs, its noise schedule is a buffer."""

    kept: Tensor

    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.patches, self.times = nn.Conv2d(4, width, 2, 2), nn.Linear(16, width)
        self.labels = nn.Embedding(12, width)
        self.register_buffer("places", torch.randn(1, 16, width) * 0.02)
        self.register_buffer("kept", torch.linspace(0.999, 0.1, 1000), persistent=False)
        self.blocks = nn.ModuleList(_Modulated(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, 16)

    def forward(self, latents: Tensor, label: Tensor, time: Tensor, noise: Tensor, drop: Tensor) -> dict[str, Tensor]:
        kept = self.kept[time][:, None, None, None]
        x = self.patches(kept.sqrt() * latents + (1 - kept).sqrt() * noise).flatten(2).transpose(1, 2) + self.places
        waves = torch.exp(-math.log(1e4) * torch.arange(8, dtype=x.dtype) / 8) * time[:, None]
        label = torch.where(drop, torch.full_like(label, 11), label)
        c = self.times(torch.cat([waves.cos(), waves.sin()], -1)) + self.labels(label)
        for block in self.blocks:
            x = block(x, c)
        found = self.head(x).reshape(-1, 4, 4, 2, 2, 4).permute(0, 5, 1, 3, 2, 4).reshape(noise.shape)
        each = (found - noise).square().mean((1, 2, 3))
        return {"loss": each.mean(), "each": each.detach()}


def diffusion() -> Made:
    """Latents of 8 x 8, one label in two dropped."""
    batch = {"latents": _reals(8, 4, 8, 8), "label": _ids(11, 8), "time": _ids(1000, 8, seed=3)}
    return Diffusion(), batch | {"noise": _reals(8, 4, 8, 8, seed=2), "drop": _ids(2, 8, seed=5).bool()}


class Edges(nn.Module):
    """Attention over the edges of small graphs: gathered, normed where they end, added there."""

    def __init__(self, features: int = 8, width: int = 16) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(features, width) for _ in range(3))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        width = q.shape[-1]
        starts, ends = (places[..., None].expand(-1, -1, width) for places in (source, target))
        scores = (q.gather(1, ends) * k.gather(1, starts)).sum(-1) / math.sqrt(width)
        weights = torch.exp(scores - scores.amax(1, keepdim=True).detach())
        sums = weights.new_zeros(x.shape[:2]).scatter_add(1, target, weights)
        weights = weights / (sums.gather(1, target) + 1e-6)
        made = torch.zeros_like(q).scatter_add(1, ends, weights[..., None] * v.gather(1, starts))
        return functional.mse_loss(self.head(torch.relu(made)).mean(1).squeeze(-1), y)


def edges() -> Made:
    """Graphs of six nodes and ten edges."""
    places = {"source": _ids(6, 8, 10), "target": _ids(6, 8, 10, seed=2)}
    return Edges(), {"x": _reals(8, 6, 8), "y": _reals(8)} | places


class Bags(nn.Module):
    """Several rows of each table for a sample: their sum, mean and maximum, and a sum with factors."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.EmbeddingBag(64, width, mode="sum")
        self.second = nn.EmbeddingBag(32, width, mode="mean", padding_idx=0)
        self.third = nn.EmbeddingBag(16, width, mode="max")
        self.fourth = nn.EmbeddingBag(128, width, mode="sum")
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, width))
        self.top = nn.Sequential(nn.Linear(width + 10, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(
        self, dense: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, factors: Tensor, clicked: Tensor
    ) -> Tensor:
        bottom = self.bottom(dense)
        rows = [self.first(a), self.second(b), self.third(c), self.fourth(d, per_sample_weights=factors)]
        features = torch.stack([bottom, *rows], 1)
        row, column = torch.tril_indices(5, 5, -1)
        products = (features @ features.transpose(1, 2))[:, row, column]
        return functional.binary_cross_entropy_with_logits(
            self.top(torch.cat([bottom, products], 1)).squeeze(1), clicked
        )


def bags() -> Made:
    """Bags of three to five rows."""
    batch = {"dense": _reals(8, 13), "a": _ids(64, 8, 4), "b": _ids(32, 8, 3), "c": _ids(16, 8, 5)}
    more = {"d": _ids(128, 8, 4, seed=1), "factors": _reals(8, 4).abs(), "clicked": _ids(2, 8).float()}
    return Bags(), batch | more


class Depths(nn.Module):
    """A block for the four tokens of a text that a router chooses (mixture of depths)."""

    def __init__(self, rows: int = 32, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(rows, width), nn.Linear(width, rows)
        self.routers = nn.ModuleList(nn.Linear(width, 1) for _ in range(depth))
        blocks = (nn.TransformerEncoderLayer(width, 4, 32, 0.0, batch_first=True) for _ in range(depth))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for router, block in zip(self.routers, self.blocks, strict=True):
            weights, chosen = router(x).squeeze(-1).topk(4, dim=1)
            chosen, order = chosen.sort(1)
            weights = weights.gather(1, order).sigmoid()[..., None]
            places = chosen[..., None].expand(-1, -1, x.shape[-1])
            x = x.scatter_add(1, places, block(x.gather(1, places)) * weights)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def depths() -> Made:
    """Texts of eight tokens."""
    return Depths(), {"ids": _ids(32, 8, 8), "labels": _ids(32, 8, 8, seed=1)}


class Tagger(nn.Module):
    """Recurrent networks of two layers and directions, one step of a cell behind them."""

    def __init__(self, rows: int = 20, width: int = 16) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(rows, 12), nn.Linear(width, rows)
        self.first = nn.LSTM(12, width, 2, bidirectional=True, batch_first=True, dropout=0.1)
        self.second, self.cell = nn.GRU(2 * width, width, batch_first=True), nn.LSTMCell(width, width)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, _ = self.first(self.words(ids))
        x, ends = self.second(x)
        hidden, _ = self.cell(x[:, -1], (ends[0], torch.zeros_like(ends[0])))
        return functional.cross_entropy(self.head(x + hidden[:, None]).flatten(0, 1), labels.flatten())


def tagger() -> Made:
    """Texts of six tokens."""
    return Tagger(), {"ids": _ids(20, 8, 6), "labels": _ids(20, 8, 6, seed=1)}
