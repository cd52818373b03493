"""A model that returns logits, and losses of them, as workers import them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar import api


class Tagger(nn.Module):
    """Gives logits alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(32, 16), nn.Linear(16, 32), nn.Linear(32, 6)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(functional.gelu(self.hidden(self.embed(tokens))))}


def tagging_loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output["logits"].flatten(0, 1), batch["tags"].flatten(), ignore_index=-100)


@dataclass(frozen=True)
class TaggerSubject:
    dtype: torch.dtype = torch.float32

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return Tagger().to(self.dtype)

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = False) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tags = torch.randint(0, 6, (batch_size, 5), generator=generator)
        tags[0, 1:] = -100
        return {"tokens": torch.randint(0, 32, (batch_size, 5), generator=generator), "tags": tags}


def doubled(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return 2.0 * tagging_loss(output, batch)


def parallelized(precision: str, pins: list[str]) -> tuple[float, dict[str, Tensor]]:
    """A search and one step in float32 or float64."""
    subject = TaggerSubject(torch.float32 if precision == "fp32" else torch.float64)
    batch = subject.make_batch(8, seed=1)
    parallel = api.parallelize(
        subject.build(),
        cluster="cpu:1x4",
        example_inputs=batch,
        pins=pins,
        precision=precision,  # type: ignore[arg-type]
        loss_fn=tagging_loss,
    )
    return parallel.train_step(batch).item(), parallel.full_gradients()
