"""What ranks compute in ``eval()``, of a model that does much else in training."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.runtime.parallel_model import ParallelModel
from autopar.verification.rank_pool import WorkerPool
from tests.support.close import assert_close
from tests.support.distributed.layouts import on_ranks
from tests.support.distributed.plans import estimated
from tests.support.distributed.subjects import OwnSubject

WIDTH = 8


class Branch(nn.Module):
    """Attention and a hidden layer that a sample may lose, beside a moving average of its weights' size."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Buffer(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.mul_(0.5).add_(self.out.weight.detach().abs().mean())
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        found = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0)
        found = self.scale * self.out(found.transpose(1, 2).flatten(2))
        if not self.training:
            return x + found
        kept = x.new_empty(len(x), 1, 1).bernoulli_(0.5)
        return x + found * kept.div_(0.5)


class Sometimes(nn.Module):
    """A second loss and masks by chance in training; in ``eval()`` as well draws that decide nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Branch() for _ in range(4))
        self.last, self.other = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = x * (torch.rand_like(x) < 2.0)
        x = x * (torch.rand_like(x) < 0.7) if self.training else x
        for layer in self.layers:
            x = layer(x)
        scores = self.last(x.mean(1))
        loss = functional.cross_entropy(scores, y)
        if self.training:
            loss = loss + 0.5 * functional.cross_entropy(self.other(x.mean(1)), y)
        return {"loss": loss, "scores": scores}


def examples(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(count, 4, WIDTH, generator=generator)
    return {"x": x, "y": torch.randint(0, 3, (count,), generator=generator)}


SUBJECT = OwnSubject(Sometimes, examples)


def looked_at(parallel: ParallelModel, batch: dict[str, Tensor]) -> dict[str, Any]:
    """A step, and then what ``eval()`` gives of a whole batch and of a smaller one, with the state that it is of."""
    trained = parallel.train_step(batch).item()
    losses = [parallel.evaluate(part).item() for part in (batch, {name: value[:5] for name, value in batch.items()})]
    scores = parallel.predict(batch)["scores"]
    return {"trained": trained, "losses": losses, "scores": scores, "state": parallel.full_state_dict()}


@pytest.mark.parametrize(
    "pins",
    [("dp_shard=4", "zero=3"), ("tp=2", "dp_shard=2", "zero=1"), ("pp=2", "tp=2"), ("pp=2", "dp_replicate=2")],
    ids=" x ".join,
)
def test_what_training_alone_does_is_left_out(pool: WorkerPool, pins: tuple[str, ...]) -> None:
    graph = SUBJECT.trace(global_batch_size=8)
    plan = estimated(graph, cluster="cpu:1x4", global_batch_size=8, pins=pins)
    batch = SUBJECT.make_batch(8, seed=1)
    model = SUBJECT.build()
    for found in on_ranks(pool, looked_at, SUBJECT, plan, graph, batch):
        model.load_state_dict(found["state"])
        with torch.no_grad():
            wanted = [model.eval()(**{name: value[:count] for name, value in batch.items()}) for count in (8, 5)]
        assert found["losses"] == pytest.approx([one["loss"].item() for one in wanted], rel=1e-5)
        assert abs(found["trained"] - found["losses"][0]) > 1e-2
        assert_close(found["scores"], wanted[0]["scores"])
