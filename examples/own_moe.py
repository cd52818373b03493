"""A mixture of experts of one's own: routed by the model, split by autopar. No process group, no GPU.

Run: ``python examples/own_moe.py``; train with the plan as examples/train_gpt2.py does.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.nn import Experts


class Mixture(nn.Module):
    """Two of eight experts for each token, and an auxiliary loss that keeps them busy alike."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, 8, bias=False)
        self.experts = Experts(num_experts=8, hidden=hidden, ffn=2 * hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(-1)
        weights, indices = shares.topk(2)
        used = functional.one_hot(indices, 8).float().mean((0, 1, 2))  # over all tokens of the global batch
        return x + self.experts(x, weights, indices), 8 * (used * shares.mean((0, 1))).sum()


class Model(nn.Module):
    """Embedding, mixtures, head and loss."""

    def __init__(self, *, layers: int = 2, hidden: int = 64, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Mixture(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, auxiliary = self.embed(ids), torch.zeros((), device=ids.device)
        for layer in self.layers:
            x, one = layer(x)
            auxiliary = auxiliary + one
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.01 * auxiliary


def main() -> autopar.Plan:
    """Return a plan whose experts stand on four data ranks, two on each."""
    ids = torch.randint(0, 256, (2, 32))
    with torch.device("meta"):
        model = Model()
    return autopar.search(
        model,
        example_inputs={"ids": ids, "labels": ids},
        cluster="cpu:1x4",
        global_batch_size=16,
        pins=["ep=4", "tp=1", "pp=1"],
    )


if __name__ == "__main__":
    print(main())
