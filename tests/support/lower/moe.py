"""Test help: a small mixture of experts written with autopar.nn, traced."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.graph.graph import Graph
from autopar.nn import Experts
from autopar.tracing.trace import trace


class Layer(nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.experts = Experts(num_experts=4, hidden=16, ffn=8, activation="gelu", gated=gated)

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, weights / weights.sum(-1, keepdim=True), indices)


class Mixture(nn.Module):
    """Two layers, one with and one without gates; tokens keep their batch and sequence dims."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList([Layer(True), Layer(False)])
        self.head = nn.Linear(16, 64, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def mixture_graph() -> Graph:
    with torch.device("meta"):
        model = Mixture()
    ids = torch.zeros((4, 8), dtype=torch.int64)
    return trace(model, (), {"input_ids": ids, "labels": ids})
