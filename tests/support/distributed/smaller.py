"""Batches of fewer samples than the plan's: what ranks make of them, and models whose losses count samples in several ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.runtime.parallel_model import ParallelModel
from autopar.verification.reference import loss_of
from tests.support.distributed.subjects import HfSubject

Batch = Mapping[str, Tensor]


def trained(parallel: ParallelModel, batches: Sequence[Batch], called: bool) -> list[dict[str, Any]]:
    """Of each batch the loss of training and of evaluation, and the gradients; ``called``: the caller calls backward."""
    found = []
    for batch in batches:
        for parameter in parallel.parameters():
            parameter.grad = None
        loss = loss_of(parallel(**batch)) if called else parallel.train_step(batch)
        if called:
            loss.backward()
        losses = loss.item(), parallel.evaluate(batch).item()
        found.append({"losses": losses, "gradients": parallel.full_gradients()})
    return found


def on_one_device(subject: HfSubject, batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """What one device makes of each batch."""
    model = subject.build()
    found = []
    for batch in batches:
        model.zero_grad()
        output = model(**batch)
        loss = output if isinstance(output, Tensor) else output["loss"]
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({"losses": (loss.item(), loss.item()), "gradients": {n: g.clone() for n, g in gradients.items()}})
    return found


class Counting(nn.Module):
    """Adds up a mean over all elements, a sum over samples, one over the tokens that count, and a product of means over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(96, 32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = x + self.down(functional.gelu(self.up(x)))
        valid = (labels >= 0).to(x.dtype)
        of_tokens = (x.square().mean(-1) * valid).sum() / valid.sum()
        of_samples = (x.mean((1, 2)) - 0.5).square().sum() / 10
        shares = valid.mean(0) * (x.abs().mean(-1)).mean(0)
        return x.square().mean() + of_samples + of_tokens + shares.sum()


class CountingSubject(HfSubject):
    def build(self) -> nn.Module:
        torch.manual_seed(3)
        return Counting()

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = True) -> dict[str, Tensor]:
        batch = HfSubject.make_batch(self, batch_size, seed=seed, padded=padded)
        return {name: batch[name] for name in ("input_ids", "labels")}
