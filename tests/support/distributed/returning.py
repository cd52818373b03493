"""Models that return more than a loss, and what ranks find of it; imported on every rank, by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from autopar import api
from autopar.errors import UsageError
from autopar.graph.graph import Graph
from autopar.runtime.parallel_model import ParallelModel
from autopar.verification.reference import loss_of
from tests.support.distributed.mixtures import Model as Mixture
from tests.support.said import said

VOCABULARY, LENGTH = 30, 8


class Block(nn.Module):
    """A layer of a transformer as nanoGPT writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).split(16, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(functional.gelu(self.up(x))))


class Base(nn.Module):
    """Tied weights and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(LENGTH, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def states(self, idx: Tensor) -> list[Tensor]:
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))
        found = [x]
        for block in self.blocks:
            found.append(block(found[-1]))
        return found


def loss_from(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Pair(Base):
    """``logits, loss``, as nanoGPT returns them."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.head(self.states(idx)[-1])
        return logits, None if targets is None else loss_from(logits, targets)


class Named(NamedTuple):
    """Of an inner structure."""

    first: Tensor
    counts: tuple[int, str, None]


@dataclass
class Result:
    """A class of one's own."""

    loss: Tensor
    logits: Tensor
    inner: Named
    more: dict[str, Any]


class Metrics(Base):
    """Predictions, an accuracy, states of early layers, a head that the loss does not read, counts, inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(16, 3)

    def forward(self, idx: Tensor, targets: Tensor) -> Result:
        states = self.states(idx)
        logits = self.head(states[-1])
        with torch.no_grad():
            guess = logits.argmax(-1)
            accuracy = (guess == targets).float().sum() / targets.numel()
        more = {
            "guess": guess, "accuracy": accuracy, "top": logits.softmax(-1).topk(3), "states": states[:2],
            "extra": self.extra(states[1].mean(1)), "again": self.head(states[-1][:, -1]),
            "flat": logits.view(idx.shape[0] * idx.shape[1], -1), "idx": idx, "samples": idx.shape[0],
        }  # fmt: skip
        return Result(loss_from(logits, targets), logits, Named(states[0], (3, "kept", None)), more)


class Scores(Base):
    """Logits alone: the loss is a function beside it."""

    def forward(self, idx: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.states(idx)[-1])}


def beside(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return loss_from(output["logits"], batch["targets"])


class Experts(Mixture):
    """A mixture that returns its logits."""

    def forward(self, idx: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits, auxiliary = self.scores(idx)
        return {"loss": loss_from(logits, targets), "logits": logits, "auxiliary": auxiliary}


BUILDERS: dict[str, Any] = {
    "pair": Pair, "metrics": Metrics, "scores": Scores, "experts": lambda: Experts(2, False, False),
}  # fmt: skip


@dataclass(frozen=True)
class Returning:
    """One of them, with random weights."""

    kind: str

    def build(self) -> nn.Module:
        torch.manual_seed(3)
        model: nn.Module = BUILDERS[self.kind]()
        return model.train()

    def make_batch(self, samples: int, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        idx, targets = torch.randint(0, VOCABULARY, (2, samples, LENGTH), generator=generator)
        targets[0, : LENGTH // 2] = -1
        return {"idx": idx, "targets": targets}

    def trace(self) -> Graph:
        loss_fn = beside if self.kind == "scores" else None
        return api.trace(self.build(), example_inputs=self.make_batch(4), loss_fn=loss_fn, name=self.kind)


def plain(value: Any) -> Any:
    """Without classes that would have to be sent, DTensors whole."""
    if isinstance(value, Tensor):
        return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    names = [field.name for field in fields(value)] if is_dataclass(value) else getattr(value, "_fields", None)
    if names is not None:
        return {"class": type(value).__name__} | {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def predicted(parallel: ParallelModel, batches: Sequence[dict[str, Tensor]], own: bool = False) -> list[dict[str, Any]]:
    """What a rank finds of each batch: complete, kept split, of its own samples, and that nothing has changed by it."""
    return [_predicted(parallel, batch, own) for batch in batches]


def _predicted(parallel: ParallelModel, batch: dict[str, Tensor], own: bool) -> dict[str, Any]:
    before = parallel.evaluate(batch).item()
    found = {"complete": plain(parallel.predict(batch)), "split": plain(parallel.predict(batch, gather=False))}
    if own:
        mine = {name: value[parallel.samples.start : parallel.samples.stop] for name, value in batch.items()}
        found["own"] = plain(parallel.predict(mine))
    parallel.eval()
    found["called"] = plain(parallel(**batch))
    parallel.train()
    found["losses"] = (before, parallel.evaluate(batch).item(), parallel.train_step(batch).item())
    found["samples"] = (parallel.samples.start, parallel.samples.stop)
    return found


def called(parallel: ParallelModel, batch: dict[str, Tensor]) -> dict[str, Any]:
    """What a rank is given in training, and the gradients of its loss; then with those of a step on top."""
    output = parallel(**batch)
    loss_of(output).backward()
    with torch.no_grad():
        silent = plain(parallel(**batch))
    found = {"output": plain(output), "silent": silent, "gradients": parallel.full_gradients()}
    parallel.train_step(batch)
    return found | {"twice": parallel.full_gradients()}


def read_in_training(parallel: ParallelModel, batch: dict[str, Tensor]) -> dict[str, Any]:
    """What a rank is told that reads outputs of a training call, or makes one a part of its loss."""
    output = parallel(**batch)
    return {
        "read": said(UsageError, lambda: output.more["accuracy"] + 1),
        "stacked": said(UsageError, lambda: torch.stack([output.more["guess"]])),
        "shown": repr(output.more["accuracy"]),
        "added": said(UsageError, lambda: output.logits.sum().backward()),
        "inputs": output.more["idx"].requires_grad,
    }


def placements(parallel: ParallelModel, batch: dict[str, Tensor]) -> list[str]:
    """How the logits lie on the mesh where they stay split."""
    logits = parallel.predict(batch, gather=False).logits
    return [f"S({p.dim})" if isinstance(p, Shard) else "R" if p.is_replicate() else "P" for p in logits.placements]
