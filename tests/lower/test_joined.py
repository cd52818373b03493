"""Batches that a model joins and takes apart again, and time before samples: ranks and micro-batches with whole samples give the
model's loss and gradients, and samples that do meet are found to."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.graph.interpreter import leaves, run
from autopar.rules.sample_order import by_sample
from autopar.tracing.trace import trace
from tests.support.close import assert_close
from tests.support.lower.against_model import check
from tests.support.small_models import model_of

pytestmark = pytest.mark.filterwarnings("ignore:.*_functional_collectives.*:FutureWarning")

Code = Callable[[Any, Tensor, dict[str, Tensor]], Tensor]


def model(code: Code) -> nn.Module:
    def forward(self: Any, x: Tensor, mask: Tensor, place: Tensor, tokens: Tensor) -> Tensor:
        h = self.inner(x)
        y = code(self, h, {"x": x, "mask": mask, "place": place, "tokens": tokens})
        return y.square().mean() if y.dim() else y

    torch.manual_seed(0)
    made = model_of(
        forward, inner=nn.Linear(8, 8), outer=nn.Linear(8, 8), row=nn.Parameter(torch.randn(8)), head=nn.Linear(8, 5),
        norm=nn.LayerNorm(8), batch_norm=nn.BatchNorm1d(8), conv=nn.Conv1d(8, 8, 3, padding=1),
        attention=nn.MultiheadAttention(8, 2), lstm=nn.LSTM(8, 8), blocks=nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
        heads=nn.MultiheadAttention(8, 2, batch_first=True), table=nn.Embedding(5, 8),
    )  # fmt: skip
    return made.double()


def batch(samples: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(samples, 6, 8, generator=generator, dtype=torch.float64),
        "mask": torch.rand(samples, 6, generator=generator) < 0.5,
        "place": torch.randint(0, 6, (samples,), generator=generator),
        "tokens": torch.randint(0, 5, (samples, 6), generator=generator),
    }


def simsiam(s: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    z1, z2 = s.norm(s.outer(torch.cat((h, h.flip(1))))).relu().chunk(2)
    p1, p2 = s.outer(torch.cat((z1, z2))).split(len(h))
    return F.cosine_similarity(p1, z2.detach(), -1).mean(1) + F.cosine_similarity(p2, z1.detach(), -1).mean(1)


def triplets(s: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    z = s.heads(*[torch.cat((h, h.flip(1), 2 * h))] * 3)[0]
    n = len(h)
    return (z[:n] - z[n : 2 * n]).square().sum(-1) + (1 - z[:n] + z[2 * n :]).relu().sum(-1)


def guidance(s: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    times = torch.cat((b["place"], b["place"])) + 1.0
    text = torch.cat((h[:, 0], s.row.expand(len(h), 8)))
    with_text, without = s.outer(torch.cat([h] * 2) * times[:, None, None] + text[:, None]).chunk(2)
    return without + 3.0 * (with_text - without)


def adversary(s: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    real = torch.cat((torch.ones(len(h)), torch.zeros(len(h))))
    scores = s.conv(torch.cat((b["x"], h)).transpose(1, 2)).mean((1, 2))
    return F.binary_cross_entropy_with_logits(scores, real)


def crops(s: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    """Two views in full and two halves, as in DINO: pieces of other lengths go through the backbone together."""
    wide = s.outer(torch.cat((h, h.flip(1)))).mean(1)
    narrow = s.outer(torch.cat((h[:, :3], h[:, 3:]))).mean(1)
    views = s.head(torch.cat((wide, narrow))).log_softmax(-1).chunk(4)
    teacher = s.head(torch.cat((wide, wide.tanh()))).softmax(-1).detach().chunk(4)
    return sum(-(t * v).sum(-1) for t in teacher[:2] for v in views[2:])  # type: ignore[return-value]


def interleaved(s: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    z = s.outer(torch.stack((h, h.flip(1))).flatten(0, 1)).view(2, len(h), 6, 8)
    return z[0] - z[1].detach()


def in_turn(s: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    z = s.outer(torch.stack((h, h.flip(1)), 1).flatten(0, 1))
    return z[0::2] - z[1::2].detach()


def flat_tokens(s: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    z = s.outer(torch.cat((h, h.flip(1))).flatten(0, 1)).relu().view(-1, 6, 8)
    masked = z * torch.cat((b["mask"], ~b["mask"]))[..., None]
    first, second = masked.chunk(2)
    return first - second


def time_first(s: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    z = s.blocks(s.lstm(h.transpose(0, 1))[0])
    z = s.attention(z, z, z, need_weights=False)[0]
    return F.cross_entropy(s.head(z).view(-1, 5), b["tokens"].t().reshape(-1), ignore_index=2)


def labels(s: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    z = s.head(torch.cat((h, h.flip(1))))
    return F.cross_entropy(z.flatten(0, 1), torch.cat((b["tokens"], b["tokens"].flip(1))).flatten(), ignore_index=1)


def preferences(s: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    tokens = torch.cat((b["tokens"], (b["tokens"] + 1) % 5))
    scores = s.head(s.table(tokens)).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1).sum(1)
    chosen, rejected = scores.split((len(h), len(h)))
    return -F.logsigmoid(chosen - rejected)


def repeated(s: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    z = s.outer(h.repeat(3, 1, 1)).view(3, len(h), 6, 8)
    return z.var(0) + z[1]


def noisy(s: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    noise = torch.zeros(2 * len(h), 6, 8)
    first, second = (s.outer(torch.cat((h, h.flip(1))) + noise) - noise).chunk(2)
    return first * second


def turned(s: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    """A spatial transformer."""
    grid = F.affine_grid(torch.eye(2, 3) + h[:, 0, :6].view(-1, 2, 3), [len(h), 1, 5, 4], align_corners=False)
    return F.grid_sample(b["x"][:, None], grid, align_corners=False)


def next_views(s: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    z = s.outer(torch.vstack((h, h.flip(1), 2 * h)))
    return z - torch.roll(z, len(h), 0).detach()


def joined(s: Any, h: Tensor) -> Tensor:
    """Two views of each sample, through a layer together."""
    return s.outer(torch.cat((h, h.flip(1))))


def chosen_queries(s: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    """Of each sample and head the three rows that are largest, as in Informer."""
    z = s.outer(h).view(len(h), 6, 2, 4).transpose(1, 2)
    best = z.sum(-1).topk(3).indices
    places = torch.arange(len(h))[:, None, None].expand_as(best), torch.arange(2)[:, None], best
    rest = z.mean(2, keepdim=True).expand_as(z).clone()
    rest[places] = z[places].cumsum(2)
    return rest


def modulated(s: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    """A convolution with weights of each sample's own, which stands in the channels, as in StyleGAN 2."""
    weights = s.outer(h).view(len(h), 6, 4, 2).transpose(1, 2).reshape(-1, 6, 2)
    return F.conv1d(h.reshape(1, -1, 8), weights, groups=len(h)).view(len(h), 4, 7)


APART = (
    simsiam, triplets, guidance, adversary, crops, interleaved, in_turn, flat_tokens, time_first, labels, preferences,
    repeated, noisy, turned, next_views, chosen_queries, modulated,
)  # fmt: skip
APART_BY_NAME = {code.__name__: code for code in APART} | {
    "kronecker": lambda s, h, b: torch.kron(h, s.row[:4].view(2, 2))
}


@pytest.mark.parametrize("code", APART_BY_NAME.values(), ids=APART_BY_NAME)
def test_joined_batches_are_split_by_sample(code: Code) -> None:
    graph = autopar.trace(model(code), example_inputs=batch(), global_batch_size=8, precision="fp64")
    assert not graph.mixing
    check(model(code), batch(), ["dp_shard=2", "num_micro_batches=2", "tp=2"], graph=graph)


def in_batch_negatives(s: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    z = F.normalize(s.outer(torch.cat((h, h.flip(1)))).mean(1), dim=-1)
    n = len(h)
    scores = (z @ z.t()).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return F.cross_entropy(scores, torch.cat((torch.arange(n, 2 * n), torch.arange(n))))


def statistics(s: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    first, second = s.batch_norm(torch.cat((h, h.flip(1))).transpose(1, 2)).chunk(2)
    return first - second


MEET: dict[str, Code] = {
    "in-batch negatives": in_batch_negatives,
    "mixup": lambda s, h, b: s.outer(torch.cat((h, h.flip(0)))).chunk(2)[0] * s.outer(h.flip(0)),
    "the next sample, by a roll of all elements": lambda s, h, b: h * s.outer(h.roll(6 * 8)),
    "first rows": lambda s, h, b: joined(s, h)[:2],
    "last rows": lambda s, h, b: joined(s, h)[2:],
    "every other row": lambda s, h, b: joined(s, h)[::2],
    "neighbouring samples, not two views of one": lambda s, h, b: joined(s, h).view(len(h), 2, 6, 8).diff(dim=1),
    "the order of samples beside that of views": lambda s, h, b: (
        joined(s, h) * torch.stack((h, 2 * h), 1).flatten(0, 1)
    ),
}


@pytest.mark.parametrize("code", [*MEET.values(), statistics], ids=[*MEET, "statistics, which are totalled"])
def test_samples_that_meet_among_joined_batches_are_found(code: Code) -> None:
    graph = autopar.trace(model(code), example_inputs=batch(), global_batch_size=8, precision="fp64")
    assert bool(graph.mixing) == (code is not statistics)
    check(model(code), batch(), ["dp_shard=2"], graph=graph)


def _returning(self: Any, x: Tensor) -> dict[str, Tensor]:
    """Joined rows and one batch of them beside the loss."""
    z = self.outer(torch.cat((self.inner(x), x)).tanh())
    first, second = z.chunk(2)
    return {"loss": (first - second).square().mean(), "rows": z, "first": first, "sums": z.sum(-1)}


def test_outputs_have_their_rows_as_the_model_gives_them() -> None:
    own = model_of(_returning, inner=nn.Linear(8, 8), outer=nn.Linear(8, 8))
    graph = autopar.trace(own, example_inputs={"x": batch()["x"]}, global_batch_size=8)
    assert not graph.mixing and not graph.exact and graph.outputs is not None
    for samples in (2, 6):
        x = torch.randn(samples, 6, 8)
        wanted = own(x)
        larger, _ = by_sample(trace(own, (x,), exact=True))
        env = leaves(larger, {"x": x}, dict(own.named_parameters()), {})
        run((*larger.prelude, *larger.ops), env)
        run(graph.outputs.ops_at(samples), env)
        for leaf in graph.outputs.leaves:
            assert leaf.ref is not None, leaf
            assert_close(env[leaf.ref].detach(), wanted[leaf.name].detach())
