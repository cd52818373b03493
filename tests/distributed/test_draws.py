"""Models that draw random numbers in every step are compared with one device, which draws the same."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.verification.against_one_device import verify
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed.plans import estimated
from tests.support.distributed.subjects import OwnSubject

LENGTH, WIDTH = 4, 8


class Masked(nn.Module):
    """A masked autoencoder: layers see half of the tokens of a sample, by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        order = torch.rand(x.shape[:2]).argsort(1)[:, : LENGTH // 2]
        index = order[..., None].expand(-1, -1, WIDTH)
        seen = x.gather(1, index)
        for layer in self.layers:
            seen = seen + self.drop(layer(seen)).relu()
        hidden = torch.ones_like(x[..., 0]).scatter(1, order, 0.0)
        found = self.last(torch.zeros_like(x).scatter(1, index, seen))
        return ((found - x).square().mean(-1) * hidden).sum() / hidden.sum()


class Diffusion(nn.Module):
    """Noise of a strength that each sample draws, a latent that is drawn, and layers that a sample may lose, behind dropout of channels
    and alpha dropout, whose masks are operators of the graph, and an opaque layer with dropout of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Embedding(10, WIDTH)
        self.mean, self.spread = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drops = nn.ModuleList((nn.Dropout1d(0.3), nn.FeatureAlphaDropout(0.2), nn.AlphaDropout(0.2), Branching()))

    def forward(self, x: Tensor) -> Tensor:
        times, noise = torch.randint(0, 10, (len(x),)), torch.randn_like(x)
        share = (times / 10.0)[:, None, None]
        found = (1.0 - share) * x + share * noise + self.times(times)[:, None]
        spread = self.spread(found)
        found = self.mean(found) + torch.randn_like(spread) * (0.5 * spread).exp()
        for layer, drop in zip(self.layers, self.drops, strict=True):
            found = found + drop(layer(found).tanh()) * x.new_empty(len(x), 1, 1).bernoulli_(0.7).div(0.7)
        return (found - noise).square().mean()


class Branching(nn.Module):
    """Reads a value, so that it is not traced."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout1d(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x) * 2 if bool((x.detach() > 100).any()) else self.drop(x)


def examples(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(count, LENGTH, WIDTH, generator=generator)}


@pytest.mark.parametrize("model", [Masked, Diffusion])
@pytest.mark.parametrize(
    "pins",
    [("dp_shard=4", "zero=3"), ("tp=2", "dp_shard=2"), ("tp=4",), ("pp=2", "tp=2"), ("pp=2", "dp_replicate=2")],
    ids=" x ".join,
)
def test_ranks_draw_their_parts_of_what_one_device_draws(pool: WorkerPool, model: Any, pins: tuple[str, ...]) -> None:
    subject = OwnSubject(model, examples)
    graph = subject.trace(global_batch_size=8)
    plan = estimated(graph, cluster="cpu:1x4", global_batch_size=8, pins=pins)
    report = verify(subject, plan, graph, steps=2, pool=pool)
    report.check()
    assert report.is_within
    assert len(set(report.reference_losses)) == 2
