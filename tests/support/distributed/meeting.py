"""Models whose samples meet inside of a step, in batches of several sizes, trained and then evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import UsageError
from autopar.runtime.parallel_model import ParallelModel

Batch = Mapping[str, Tensor]
RATE = 0.1


class Layer(nn.Module):
    """A convolution with a batch norm, ``times`` over."""

    def __init__(self, norm: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.conv, self.norm, self.times = nn.Conv2d(8, 8, 3, padding=1, bias=False), norm, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + functional.relu(self.norm(self.conv(x)))
        return x


class Residual(nn.Module):
    """Batch norms of all kinds: of the input, called twice, a cumulative average, frozen, synchronized, of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.stem = nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 8, 1, bias=False)
        norms = (nn.BatchNorm2d(8), nn.BatchNorm2d(8, momentum=None), nn.BatchNorm2d(8).eval(), nn.SyncBatchNorm(8))
        self.layers = nn.ModuleList([Layer(norm, times=2 - i % 2) for i, norm in enumerate(norms)])
        self.last, self.head = nn.BatchNorm1d(8, affine=False), nn.Linear(8, 6)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.stem(self.given(images))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.last(x.mean((2, 3))))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits, "map": x}


class Routed(nn.Module):
    """A loss beside the loss that takes means over the batch in its middle, and a batch norm without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.route, self.down = nn.Conv2d(4, 8, 3), nn.Linear(8, 4), nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = functional.gelu(self.up(images)).flatten(2).transpose(1, 2)
        shares = self.route(x).softmax(-1)
        balance = (shares.mean((0, 1)) * (shares > 0.25).to(x.dtype).mean((0, 1))).sum() * 4
        spread = (x.square().mean((0, 1)) + 1).log().sum()
        logits = self.down(self.norm((x * shares.amax(-1, keepdim=True)).sum(1)))
        return {"loss": functional.cross_entropy(logits, labels) + balance + 0.1 * spread, "logits": logits}


@dataclass(frozen=True)
class MeetingSubject:
    """Makes one and its batches, in float64."""

    kind: type[nn.Module]

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.kind().double()

    def make_batch(self, batch_size: int, *, seed: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(seed)
        images = torch.randn(batch_size, 4, 6, 6, generator=drawn, dtype=torch.float64) * seed + 1
        return {"images": images, "labels": torch.randint(6, (batch_size,), generator=drawn)}


def on_ranks(parallel: ParallelModel, steps: Sequence[Batch], rests: Sequence[Batch]) -> dict[str, Any]:
    """Steps of gradient descent, and then what ``eval()`` makes of ``rests``; what is refused is its error."""
    found = dict[str, Any](steps=[], rests=[])
    optimizer = torch.optim.SGD(parallel.parameters(), lr=RATE)
    for batch in steps:
        optimizer.zero_grad()
        try:
            loss = parallel.train_step(batch)
        except UsageError as error:
            found["steps"].append(str(error))
            continue
        found["steps"].append((loss.detach().clone(), parallel.full_gradients()))
        optimizer.step()
    before = parallel.full_state_dict()
    parallel.eval()
    for batch in rests:
        try:
            found["rests"].append((parallel.evaluate(batch), parallel(**batch)))
        except UsageError as error:
            found["rests"].append(str(error))
    found["state"] = parallel.full_state_dict()
    assert all(torch.equal(value, before[name]) for name, value in found["state"].items())
    return found


def on_one_device(subject: MeetingSubject, steps: Sequence[Batch], rests: Sequence[Batch]) -> dict[str, Any]:
    """The same of one device."""
    model, found = subject.build(), dict[str, Any](steps=[], rests=[])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch in steps:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found["steps"].append((loss.detach(), gradients))
        optimizer.step()
    found["state"] = {name: value.clone() for name, value in model.state_dict().items()}
    if isinstance(model, Residual):
        model.eval()
    with torch.no_grad():
        for batch in rests:
            output = model(**batch)
            found["rests"].append((output["loss"], output))
    return found
