"""Models that a trace has trouble with: branches on values, state in Python, gradients of their own, pairs of samples."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Router(nn.Module):
    """Experts in a loop over those that have tokens, as people write them by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(8.0 * x) / 8.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Clipped(torch.autograd.Function):
    """Its backward is not linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clamp(-0.01, 0.01)


class ClippedApart(Clipped):
    """With a forward that has no context, and so may be called by itself, as any function."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass


class Marked(torch.autograd.Function):
    """A product of each sample whose gradients are doubled; the second factor gets none if a first number is -10."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.einsum("bi,bij->bj", x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        doubled = 2.0 * gradients[0]
        of_weight = None if (x[:, 0] == -10.0).any() else torch.einsum("bi,bj->bij", x, doubled)
        return torch.einsum("bj,bij->bi", doubled, weight), of_weight


class Square(torch.autograd.Function):
    """Its backward is what autograd would do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2.0 * ctx.saved_tensors[0] * gradients[0]


class Around(nn.Module):
    """A classifier with something in its middle."""

    def __init__(self, inner: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(8, 8), inner(), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.inner(self.first(x))), y)


class TopBranch(Around):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.sum() > 0:
            x = 2.0 * x
        return super().forward(x, y)


class InPlace(Around):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2.0)
        return super().forward(x, y)


class ShapeNumber(Around):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x.reshape(int(x.shape[0]), 2, 4).flatten(1), y)


class Asserts(Around):
    """Numbers that depend on values, but that assertions alone look at."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        largest = y.max().item()
        assert largest < 4
        assert largest + 1 >= 0
        return super().forward(x, y)


class Clamps(Around):
    """Changes a parameter in its forward pass."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.last.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x, y)


class Yields(Around):
    def forward(self, x: Tensor, y: Tensor) -> Iterator[Tensor]:
        yield super().forward(x, y)


class Nested(Around):
    """Several outputs, the loss among them."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.last(self.first(x))
        return {"logits": (logits, [x]), "loss": F.cross_entropy(logits, y)}


class Pairs(nn.Module):
    """Two towers whose loss looks at all pairs of a batch: ``kind`` contrastive, covariance or counted."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.left, self.right = nn.Linear(8, 16), nn.Linear(8, 16)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        u, v = F.gelu(self.left(x)), F.gelu(self.right(z)) * self.scale.exp()
        if self.kind == "contrastive":
            logits = F.normalize(u, dim=-1) @ F.normalize(v, dim=-1).t() * self.scale.exp()
            numbers = torch.arange(len(logits))
            return (F.cross_entropy(logits, numbers) + F.cross_entropy(logits.t(), numbers)) / 2
        if self.kind == "covariance":
            centred = u - u.mean(0)
            covariance = centred.t() @ centred / (len(u) - 1)
            spread = F.relu(1.0 - torch.sqrt(u.var(dim=0) + 1e-4)).mean()
            return F.mse_loss(u, v) + spread + covariance.pow(2).sum() / 16
        return (u - v).pow(2).sum() / len(u)


def drawn(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 8, generator=generator), "y": torch.randint(0, 4, (size,), generator=generator)}


def drawn_pairs(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randn(size, 8, generator=generator) for name in ("x", "z")}


def batch() -> dict[str, Tensor]:
    return drawn(8, torch.Generator().manual_seed(1))


def pairs() -> dict[str, Tensor]:
    return drawn_pairs(8, torch.Generator().manual_seed(1))
