"""Models that draw random numbers in every step, or do what ``eval()`` leaves out, against one device that does."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.graph.graph import Graph
from autopar.runtime.parallel_model import ParallelModel
from autopar.verification.against_one_device import verify
from autopar.verification.rank_pool import WorkerPool
from tests.support.close import assert_close
from tests.support.distributed.layouts import on_ranks
from tests.support.distributed.plans import estimated
from tests.support.distributed.subjects import OwnSubject
from tests.support.small_models import model_of

LENGTH, WIDTH = 4, 8


def _masked(self: Any, x: Tensor) -> Tensor:
    """A masked autoencoder: layers see half of the tokens of a sample, by chance."""
    order = torch.rand(x.shape[:2]).argsort(1)[:, : LENGTH // 2]
    index = order[..., None].expand(-1, -1, WIDTH)
    seen = x.gather(1, index)
    for layer in self.layers:
        seen = seen + layer(seen).relu()
    hidden = torch.ones_like(x[..., 0]).scatter(1, order, 0.0)
    found = self.last(torch.zeros_like(x).scatter(1, index, seen))
    return ((found - x).square().mean(-1) * hidden).sum() / hidden.sum()


def _diffusion(self: Any, x: Tensor) -> Tensor:
    """Noise of a strength that each sample draws, a latent that is drawn, and layers that a sample may lose."""
    times, noise = torch.randint(0, 10, (len(x),)), torch.randn_like(x)
    share = (times / 10.0)[:, None, None]
    found = (1.0 - share) * x + share * noise + self.times(times)[:, None]
    spread = self.spread(found)
    found = self.last(found) + torch.randn_like(spread) * (0.5 * spread).exp()
    for layer, drop in zip(self.layers, self.drops, strict=True):
        found = found + drop(layer(found).tanh()) * x.new_empty(len(x), 1, 1).bernoulli_(0.7).div(0.7)
    return (found - noise).square().mean()


def _branching(self: Any, x: Tensor) -> Tensor:
    """Reads a value, so that it is not traced."""
    return self.drop(x) * 2 if bool((x.detach() > 100).any()) else self.drop(x)


def model(forward: Callable[..., Tensor]) -> nn.Module:
    """Dropout of channels and alpha dropout, whose masks are operators of the graph; an opaque layer with its own."""
    own = model_of(_branching, drop=nn.Dropout1d(0.3))
    drops = nn.ModuleList((nn.Dropout1d(0.3), nn.FeatureAlphaDropout(0.2), nn.AlphaDropout(0.2), own))
    layers, last = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, WIDTH)
    more = {"times": nn.Embedding(10, WIDTH), "spread": nn.Linear(WIDTH, WIDTH), "drops": drops}
    return model_of(forward, layers=layers, last=last, **(more if forward is _diffusion else {}))


def examples(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(count, LENGTH, WIDTH, generator=generator)}


@cache
def traced(subject: OwnSubject) -> Graph:
    return subject.trace(global_batch_size=8)


MASKED, DIFFUSION = (OwnSubject(partial(model, forward), examples) for forward in (_masked, _diffusion))


@pytest.mark.parametrize(("subject", "pins"), [
    *((MASKED, pins) for pins in ("dp_shard=4 zero=3", "tp=4", "pp=2 dp_replicate=2")),
    *((DIFFUSION, pins) for pins in ("tp=2 dp_shard=2", "pp=2 tp=2")),
])  # fmt: skip
def test_ranks_draw_their_parts_of_what_one_device_draws(pool: WorkerPool, subject: OwnSubject, pins: str) -> None:
    graph = traced(subject)
    plan = estimated(graph, cluster="cpu:1x4", global_batch_size=8, pins=pins.split())
    report = verify(subject, plan, graph, steps=2, pool=pool)
    report.check()
    assert report.is_within
    assert len(set(report.reference_losses)) == 2


# --- what ``eval()`` leaves out


def _branch(self: Any, x: Tensor) -> Tensor:
    """Attention and a hidden layer that a sample may lose, beside a moving average of its weights' size."""
    if self.training:
        self.scale.mul_(0.5).add_(self.out.weight.detach().abs().mean())
    q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
    found = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0)
    found = self.scale * self.out(found.transpose(1, 2).flatten(2))
    return x + (found * x.new_empty(len(x), 1, 1).bernoulli_(0.5).div_(0.5) if self.training else found)


def branch() -> nn.Module:
    qkv, out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
    return model_of(_branch, qkv=qkv, out=out, scale=nn.Buffer(torch.tensor(1.0)))


def _sometimes(self: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """A second loss and masks by chance in training; in ``eval()`` as well draws that decide nothing."""
    x = x * (torch.rand_like(x) < 2.0)
    x = self.layers(x * (torch.rand_like(x) < 0.7) if self.training else x)
    scores = self.last(x.mean(1))
    loss = functional.cross_entropy(scores, y)
    if self.training:
        loss = loss + 0.5 * functional.cross_entropy(self.other(x.mean(1)), y)
    return {"loss": loss, "scores": scores}


def sometimes() -> nn.Module:
    parts = {name: nn.Linear(WIDTH, 3) for name in ("last", "other")}
    return model_of(_sometimes, layers=nn.Sequential(*(branch() for _ in range(4))), **parts)


def labelled(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(count, 4, WIDTH, generator=generator)
    return {"x": x, "y": torch.randint(0, 3, (count,), generator=generator)}


SUBJECT = OwnSubject(sometimes, labelled)


def looked_at(parallel: ParallelModel, batch: dict[str, Tensor]) -> dict[str, Any]:
    """A step, and then what ``eval()`` gives of a whole batch and of a smaller one, with the state that it is of."""
    trained = parallel.train_step(batch).item()
    losses = [parallel.evaluate(part).item() for part in (batch, {name: value[:5] for name, value in batch.items()})]
    scores = parallel.predict(batch)["scores"]
    return {"trained": trained, "losses": losses, "scores": scores, "state": parallel.full_state_dict()}


@pytest.mark.parametrize("pins", ["dp_shard=4 zero=3", "tp=2 dp_shard=2 zero=1", "pp=2 dp_replicate=2"])
def test_what_training_alone_does_is_left_out(pool: WorkerPool, pins: str) -> None:
    graph = traced(SUBJECT)
    plan = estimated(graph, cluster="cpu:1x4", global_batch_size=8, pins=pins.split())
    batch = SUBJECT.make_batch(8, seed=1)
    model = SUBJECT.build()
    for found in on_ranks(pool, looked_at, SUBJECT, plan, graph, batch):
        model.load_state_dict(found["state"])
        with torch.no_grad():
            wanted = [model.eval()(**{name: value[:count] for name, value in batch.items()}) for count in (8, 5)]
        assert found["losses"] == pytest.approx([one["loss"].item() for one in wanted], rel=1e-5)
        assert abs(found["trained"] - found["losses"][0]) > 1e-2
        assert_close(found["scores"], wanted[0]["scores"])
