"""Hand-written mixtures of experts, with ``autopar.nn``, that ranks import by name."""

from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.graph.graph import Graph
from autopar.nn import Experts
from autopar.tracing.trace import trace
from tests.support.distributed.subjects import OwnSubject


class Layer(nn.Module):
    """A mixture with an auxiliary loss over all tokens; ``skewed``: one expert gets no token, one gets them all."""

    def __init__(self, top_k: int, skewed: bool, *, gated: bool) -> None:
        super().__init__()
        self.top_k, self.skewed = top_k, skewed
        self.router = nn.Linear(16, 4, bias=False)
        self.experts = Experts(num_experts=4, hidden=16, ffn=8, activation="gelu", gated=gated)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x)
        if self.skewed:
            scores = scores + torch.tensor([50.0, 0.0, 0.0, -50.0])
        shares = scores.softmax(-1)
        weights, indices = shares.topk(self.top_k)
        used = functional.one_hot(indices, 4).float().mean((0, 1, 2))
        return x + self.experts(x, weights, indices), 4 * (used * shares.mean((0, 1))).sum()


class Model(nn.Module):
    """Two layers, one with and one without gates; tokens keep their batch and sequence dims."""

    def __init__(self, top_k: int, skewed: bool, balanced: bool) -> None:
        super().__init__()
        self.balanced = balanced
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Layer(top_k, skewed, gated=gated) for gated in (True, False))
        self.head = nn.Linear(16, 64, bias=False)

    def scores(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        x, auxiliary = self.embed(input_ids), torch.zeros(())
        for layer in self.layers:
            x, one = layer(x)
            auxiliary = auxiliary + one
        return self.head(x), auxiliary

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits, auxiliary = self.scores(input_ids)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss + auxiliary if self.balanced else loss


def tokens(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Five of each sample: not to be divided by the ranks."""
    ids, labels = (torch.randint(0, 64, (size, 5), generator=generator) for _ in range(2))
    labels[: size // 3, 2:] = -100
    return {"input_ids": ids, "labels": labels}


@cache
def mixture(top_k: int = 2, *, skewed: bool = False, balanced: bool = False) -> OwnSubject:
    return OwnSubject(partial(Model, top_k, skewed, balanced), tokens)


@cache
def mixture_graph() -> Graph:
    """Of four samples of eight tokens, without weights."""
    with torch.device("meta"):
        model = Model(top_k=2, skewed=False, balanced=False)
    ids = torch.zeros((4, 8), dtype=torch.int64)
    return trace(model, (), {"input_ids": ids, "labels": ids})
