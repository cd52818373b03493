"""Models of one's own that return logits, and losses of them, as workers import them."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar import api
from tests.support.distributed.subjects import OwnSubject


class Tagger(nn.Module):
    """Gives logits alone, times what stands in a list beside the tokens."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(32, 16), nn.Linear(16, 32), nn.Linear(32, 6)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, weights: Sequence[Tensor] = (), scale: float = 1.0) -> dict[str, Tensor]:
        logits = scale * self.head(self.drop(functional.gelu(self.hidden(self.embed(tokens)))))
        for weight in weights:
            logits = logits * weight[..., None]
        return {"logits": logits}


class Restless(Tagger):
    """Draws noise of its own, which one device and many do not share."""

    def forward(self, tokens: Tensor, weights: Sequence[Tensor] = (), scale: float = 1.0) -> dict[str, Tensor]:
        return super().forward(tokens, [*weights, torch.rand_like(weights[0])], scale)


def tagging_loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output["logits"].flatten(0, 1), batch["tags"].flatten(), ignore_index=-100)


def doubled(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return 2.0 * tagging_loss(output, batch)


def distance(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return (output["logits"] - 1.0).square().mean()


def tagged(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    tags = torch.randint(0, 6, (size, 5), generator=generator)
    tags[0, 1:] = -100
    return {"tokens": torch.randint(0, 32, (size, 5), generator=generator), "tags": tags}


def tagger(dtype: torch.dtype) -> nn.Module:
    return Tagger().to(dtype)


TAGGERS = {dtype: OwnSubject(partial(tagger, dtype), tagged) for dtype in (torch.float32, torch.float64)}


def dropping() -> nn.Module:
    return Tagger(0.5)


def examples() -> tuple[Tensor, list[Tensor], float]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 32, (6, 5), generator=generator)
    return tokens, [torch.randn(6, 5, generator=generator) for _ in range(2)], 0.5


def parallelized(precision: str, pins: list[str]) -> tuple[float, dict[str, Tensor]]:
    """A search and one step in float32 or float64."""
    subject = TAGGERS[torch.float32 if precision == "fp32" else torch.float64]
    batch = subject.make_batch(8, seed=1)
    options = {"precision": precision, "loss_fn": tagging_loss, "pins": pins, "cluster": "cpu:1x4"}
    parallel = api.parallelize(subject.build(), example_inputs=batch, **options)
    return parallel.train_step(batch).item(), parallel.full_gradients()
