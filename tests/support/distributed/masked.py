"""A model whose gradient shows what dropout left, as workers import it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.distributed.subjects import HfSubject

SAMPLES, TOKENS, WIDTH = 4, 16, 32


class Masked(nn.Module):
    """Every token of a batch has a row of its own in the table, whose gradient is what dropout left of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SAMPLES * TOKENS, WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        heads = x.detach().unflatten(-1, (4, 8)).transpose(1, 2)
        seen = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return functional.dropout(x + 1e-3 * seen.transpose(1, 2).flatten(2), 0.5).mean()


class MaskedSubject(HfSubject):
    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return Masked()

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = True) -> dict[str, Tensor]:
        return {"input_ids": torch.arange(batch_size * TOKENS).view(batch_size, TOKENS)}
