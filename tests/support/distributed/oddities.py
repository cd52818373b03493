"""Subjects that ranks import by name: branches on values, losses over pairs of samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.lower import unusual as u


class Layers(u.Around):
    """Routers that branch on values, in layers that a pipeline can part."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), u.Router()) for _ in range(4))))


class Rolls(nn.Module):
    """Rolls by a number that it reads from the whole batch, which no trace follows; sums in what it calls float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x).float()
        total += x.roll(int(x.mean(0).argmax()), -1)
        return self.inner(total)  # type: ignore[no-any-return]


class Rolling(u.Around):
    """One of them after a layer."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(8, 8), Rolls()))


class Shared(u.Around):
    """Four layers; the second and the last read the same weights beside their own."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(4)))
        self.shared = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for number, layer in enumerate(cast("nn.ModuleList", self.inner)):
            x = x + layer(x).tanh()
            if number % 2:
                x = x + self.shared(x).tanh()
        return F.cross_entropy(self.last(x), y)


class Force(nn.Module):
    """The gradient of an energy, which training differentiates again."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return force


class Resting(u.Around):
    """Layers with frozen batch norms, a part in ``eval()`` that would drop, and a region in it."""

    def __init__(self) -> None:
        frozen = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False), nn.Dropout(0.5), Force(), nn.Dropout(0.5)
        )
        super().__init__(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), frozen))
        inner = cast("nn.Sequential", self.inner)
        for norm in (inner[1], frozen[1]):
            cast("Tensor", norm.running_mean).normal_()
            cast("Tensor", norm.running_var).uniform_(0.5, 2.0)
        inner[1].eval()
        frozen.eval()


class Checkpointed(u.Around):
    """Two layers that recompute by torch's older way, a function with a backward of its own."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for layer in cast("nn.ModuleList", self.inner):
            x = x + checkpoint(layer, x, use_reentrant=True)
        return F.cross_entropy(self.last(x), y)


class Turn(nn.Module):
    """A product of complex numbers, whose weight is a real parameter of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Parameter(0.3 * torch.randn(8, 8, 2))

    def forward(self, z: Tensor) -> Tensor:
        made = z @ torch.view_as_complex(self.pairs)
        return z + made * torch.sigmoid(made.abs())


class Spectral(nn.Module):
    """Layers on a spectrum, so that complex numbers go from stage to stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Turn() for _ in range(4)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.fft.ifft(self.layers(torch.fft.fft(x))).real, y)


class Passing(u.Around):
    """Four layers; what the first makes of its result only the last reads: numbers of columns, a mask, values without a
    gradient, values of which it reads the sign alone, and some whose dims of length 1 have the strides of others."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(4)))
        self.table = nn.Embedding(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        layers = cast("nn.ModuleList", self.inner)
        x = x + layers[0](x).tanh()
        column, mask, still, wave = x.argmax(-1), x > 0.0, x.detach().sin(), x.cos()
        turned = (2.0 * x).unflatten(-1, (1, 8)).transpose(-2, -1)
        for layer in layers[1:]:
            x = x + layer(x).tanh()
        x = x + self.table(column) * still + torch.where(mask, x, 0.5 * x) * turned.flatten(-2)
        return F.cross_entropy(self.last(x * (wave > 0.0)), y)


class Unread(u.Around):
    """Four layers, of which the last one reads what the one before made, without a gradient."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(4)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        *before, last = cast("nn.ModuleList", self.inner)
        for layer in before:
            x = x + layer(x).tanh()
        x = x.detach()
        return F.cross_entropy(self.last(x + last(x).tanh()), y)


class Frozen(u.Around):
    """Four layers, of which the first two stay as they are, and so does what stands before them."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))))
        inner = cast("nn.Sequential", self.inner)
        for part in (self.first, inner[0], inner[1]):
            part.requires_grad_(requires_grad=False)


class Sinks(nn.Module):
    """Attention written out, whose softmax has a column more than there are keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.sinks = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / 2.0
        columns = self.sinks.view(1, 2, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, columns], -1).softmax(-1)[..., :-1]
        found = self.out((weights @ v).transpose(1, 2).flatten(-2))
        return F.cross_entropy(found.flatten(0, 1), y.flatten())


@dataclass(frozen=True)
class SinksSubject:
    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return Sinks()

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = False) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(batch_size, 6, 8, generator=generator)
        return {"x": x, "y": torch.randint(0, 8, (batch_size, 6), generator=generator)}


_MODELS = {"pairs": partial(u.Pairs, "contrastive"), "routers": Layers, "rolls": Rolling, "shared": Shared}
_MODELS |= {"resting": Resting, "checkpointed": Checkpointed, "spectral": Spectral}
_MODELS |= {"passing": Passing, "unread": Unread, "frozen": Frozen}


@dataclass(frozen=True)
class UnusualSubject:
    """``kind``: pairs (a contrastive loss with a scalar parameter), routers, rolls, shared (weights of two layers), resting (parts in
    ``eval()``), checkpointed, spectral (complex numbers), passing (all kinds of values between layers), unread (no gradient goes
    back to the first layers), or frozen (the first layers)."""

    kind: str

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return _MODELS[self.kind]()

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = False) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        example = u.pairs() if self.kind == "pairs" else u.batch()
        return {
            name: torch.randn(batch_size, *x.shape[1:]) if x.is_floating_point() else torch.randint(0, 4, (batch_size,))
            for name, x in example.items()
        }
