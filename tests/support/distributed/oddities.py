"""Odd models that ranks import by name, and subjects of them."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.distributed.subjects import OwnSubject, texts
from tests.support.lower import unusual as u
from tests.support.small_models import model_of

SAMPLES, TOKENS, WIDTH = 4, 16, 32
"""Of :func:`masked`."""


def layers(*parts: Callable[[], nn.Module], count: int = 4) -> nn.ModuleList:
    """As many layers, each of these parts in turn."""
    return nn.ModuleList(nn.Sequential(*(part() for part in parts)) for _ in range(count))


LINEAR, NORM = partial(nn.Linear, 8, 8), partial(nn.LayerNorm, 8)


def routers() -> nn.Module:
    """Routers that branch on values, in layers that a pipeline can part."""
    return nn.Sequential(*layers(NORM, u.Router))


def choosy() -> nn.Module:
    """A router one of whose experts gets no token."""
    router = u.Router()
    with torch.no_grad():
        router.gate.bias[2] = -50.0
    return router


class Above(nn.Module):
    """A layer for those samples whose first number is above a limit; where there are none, no gradient goes back."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit, self.layer = limit, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > self.limit).nonzero()[:, 0]
        out = torch.zeros_like(x)
        return out.index_add(0, rows, self.layer(x[rows])) if rows.numel() else out


class Sparing(u.Around):
    """One that some samples pass, and one that none does: what stands before that learns nothing, though another branches there."""

    def __init__(self) -> None:
        some, none = partial(Above, 0.0), partial(Above, 0.8)
        super().__init__(
            lambda: nn.ModuleList([*layers(NORM, some, count=1), *layers(NORM, some, LINEAR, none, count=1)])
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.inner:
            x = x + layer(x).tanh()
        return F.cross_entropy(self.last(x), y)


class Rolls(nn.Linear):
    """Rolls by a number that it reads from the whole batch, which no trace follows; sums in what it calls float32."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x).float()
        total += x.roll(int(x.mean(0).argmax()), -1)
        return super().forward(total)


def rolling() -> nn.Module:
    """One of them after a layer."""
    return nn.Sequential(LINEAR(), Rolls(8, 8))


class Shared(u.Around):
    """Four layers; the second and the last read the same weights beside their own."""

    def __init__(self) -> None:
        super().__init__(lambda: layers(NORM, LINEAR))
        self.shared = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for number, layer in enumerate(self.inner):
            x = x + layer(x).tanh()
            if number % 2:
                x = x + self.shared(x).tanh()
        return F.cross_entropy(self.last(x), y)


class Summed(u.Around):
    """Two parameters that are added as other shapes: what one backward of a view leaves lies in the memory of the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = (nn.Parameter(torch.randn(64)) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x @ (self.near.view(8, 8) + self.far.view(8, 8)), y)


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
        norm, other = nn.BatchNorm1d(8), nn.BatchNorm1d(8, affine=False)
        frozen = nn.Sequential(LINEAR(), other, nn.Dropout(0.5), Force(), nn.Dropout(0.5))
        super().__init__(lambda: nn.Sequential(LINEAR(), norm, nn.ReLU(), frozen))
        for one in (norm, other):
            one.running_mean.normal_()
            one.running_var.uniform_(0.5, 2.0)
        norm.eval()
        frozen.eval()


class Checkpointed(u.Around):
    """Two layers that recompute by torch's older way, a function with a backward of its own."""

    def __init__(self) -> None:
        super().__init__(lambda: layers(LINEAR, nn.Tanh, count=2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.inner:
            x = x + checkpoint(layer, x, use_reentrant=True)
        return F.cross_entropy(self.last(x), y)


def _turn(self: nn.Module, z: Tensor) -> Tensor:
    """A product of complex numbers, whose weight is a real parameter of pairs."""
    made = z @ torch.view_as_complex(self.pairs)
    return z + made * torch.sigmoid(made.abs())


def spectral() -> nn.Module:
    """Layers on a spectrum, so that complex numbers go from stage to stage."""
    loss = lambda self, x, y: F.cross_entropy(torch.fft.ifft(self.layers(torch.fft.fft(x))).real, y)
    pairs = (nn.Parameter(0.3 * torch.randn(8, 8, 2)) for _ in range(4))
    return model_of(loss, layers=nn.Sequential(*(model_of(_turn, pairs=each) for each in pairs)))


class Passing(u.Around):
    """Four layers; what the first makes of its result only the last reads: numbers of columns, a mask, values without a
    gradient, values of which it reads the sign alone, and some whose dims of length 1 have the strides of others."""

    def __init__(self) -> None:
        super().__init__(lambda: layers(NORM, LINEAR))
        self.table = nn.Embedding(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        layers = self.inner
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
        super().__init__(lambda: layers(NORM, LINEAR))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        *before, last = self.inner
        for layer in before:
            x = x + layer(x).tanh()
        x = x.detach()
        return F.cross_entropy(self.last(x + last(x).tanh()), y)


class Frozen(u.Around):
    """Four layers, of which the first two stay as they are, and so does what stands before them."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(*layers(LINEAR, nn.Tanh)))
        for part in (self.first, *self.inner[:2]):
            part.requires_grad_(requires_grad=False)


class Indexed(u.Around):
    """Parameters that never learn: places, a mask, and nothing at all."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(8, 8))
        kept = torch.arange(8).flip(0), torch.arange(8) < 6
        self.places, self.mask = (nn.Parameter(part, requires_grad=False) for part in kept)
        self.nothing = nn.Parameter(torch.zeros(0, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inner = self.inner(self.first(x))[:, self.places] * self.mask + self.nothing.sum()
        return F.cross_entropy(self.last(inner), y)


def _sinks(self: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
    scores = q @ k.transpose(-1, -2) / 2.0
    columns = self.sinks.view(1, 2, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, columns], -1).softmax(-1)[..., :-1]
    found = self.out((weights @ v).transpose(1, 2).flatten(-2))
    return F.cross_entropy(found.flatten(0, 1), y.flatten())


def sinks() -> nn.Module:
    """Attention written out, whose softmax has a column more than there are keys."""
    return model_of(_sinks, **{name: LINEAR() for name in ("q", "k", "v", "out")}, sinks=nn.Parameter(torch.randn(2)))


PATCHES = 3


def _pictures(self: nn.Module, x: Tensor, pictures: Tensor) -> Tensor:
    inner = self.table(x)
    parts = torch.cat([self.token.expand(len(x), -1, -1), pictures], 1) + self.places.view(1, -1, 8)  # one gradient
    parts = self.layers[0](parts)
    seen = torch.cat(list(parts[:, 1:] + parts[:, :1]))  # of each picture by itself, as LLaVA has them
    inner = inner.masked_scatter((x == 7)[..., None].expand_as(inner), seen)
    for layer in self.layers[1:]:
        inner = inner + layer(inner).tanh()
    return F.cross_entropy(self.last(inner).flatten(0, 1), x.flatten())


def pictures() -> nn.Module:
    """Parts of a picture stand at the places of one token, as in models of images and text."""
    token, places = (nn.Parameter(torch.randn(shape)) for shape in ((1, 1, 8), (8 * PATCHES + 8,)))
    return model_of(
        _pictures, table=nn.Embedding(8, 8), token=token, places=places, layers=layers(NORM, LINEAR), last=LINEAR()
    )


def with_places(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randint(0, 7, (size, 8), generator=generator)
    for sample in x:
        sample[torch.randperm(8, generator=generator)[:PATCHES]] = 7
    return {"x": x, "pictures": torch.randn(size, PATCHES, 8, generator=generator)}


def _masked(self: nn.Module, input_ids: Tensor) -> Tensor:
    x = self.table(input_ids)
    heads = x.detach().unflatten(-1, (4, 8)).transpose(1, 2)
    seen = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return F.dropout(x + 1e-3 * seen.transpose(1, 2).flatten(2), 0.5).mean()


def masked() -> nn.Module:
    """Every token of a batch has a row of its own in the table, whose gradient is what dropout left of it."""
    return model_of(_masked, table=nn.Embedding(SAMPLES * TOKENS, WIDTH))


def places(size: int, _: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": torch.arange(size * TOKENS).view(size, TOKENS)}


MASKED = OwnSubject(masked, places)


class Remembering(nn.Module):
    """Spectral norm, a step counter and, with ``statistics``, batch norm (one module twice) and a mean over samples."""

    def __init__(self, statistics: bool) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16, bias=False))
        self.norm = nn.BatchNorm1d(16) if statistics else nn.LayerNorm(16)
        self.last = nn.Linear(16, 16, bias=False)
        self.statistics = statistics
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.norm(self.first(x))
        y = self.last(F.gelu(y))
        with torch.no_grad():
            self.steps += 1
            if self.statistics:
                self.mean.mul_(0.9).add_((y * y).mean(0), alpha=0.1)
        if self.statistics:
            y = self.norm(y) + self.mean
        scale = 1 + 1 / (1 + self.steps.float())
        return {"loss": (scale * torch.sigmoid(2 * y + 1) * y).mean()}


def vectors(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 8, generator=generator)}


REMEMBERING, WITHOUT_STATISTICS = (OwnSubject(partial(Remembering, given), vectors) for given in (True, False))


def _choosing(self: nn.Module, x: Tensor) -> Tensor:
    """On one device ``choice`` has no gradient and no weight decay, and the second half of ``first`` one of zeros."""
    y, z = self.first(x).chunk(2, -1)
    places = (y @ self.choice + z).topk(4).indices
    return self.last(y.gather(1, places)).square().mean()


def choosing() -> nn.Module:
    return model_of(_choosing, first=nn.Linear(8, 32), choice=nn.Parameter(torch.randn(16, 16)), last=nn.Linear(4, 1))


CHOOSING = OwnSubject(choosing, vectors)


def _counting(self: nn.Module, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Adds up a mean over all elements, a sum over samples, one over the tokens that count, and a product of means over samples."""
    x = self.embed(input_ids)
    x = x + self.down(F.gelu(self.up(x)))
    valid = (labels >= 0).to(x.dtype)
    of_tokens = (x.square().mean(-1) * valid).sum() / valid.sum()
    of_samples = (x.mean((1, 2)) - 0.5).square().sum() / 10
    shares = valid.mean(0) * (x.abs().mean(-1)).mean(0)
    return x.square().mean() + of_samples + of_tokens + shares.sum()


def counting() -> nn.Module:
    return model_of(_counting, embed=nn.Embedding(96, 32), up=nn.Linear(32, 64), down=nn.Linear(64, 32))


def counted(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    batch = texts(size, generator)
    return {name: batch[name] for name in ("input_ids", "labels")}


COUNTING = OwnSubject(counting, counted)


def _convolved(self: nn.Module, x: Tensor) -> Tensor:
    """A convolution with a batch norm, ``times`` over."""
    for _ in range(self.times):
        x = x + F.relu(self.norm(self.conv(x)))
    return x


class Residual(nn.Module):
    """Batch norms of all kinds: of the input, called twice, a cumulative average, frozen, synchronized, of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.stem = nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 8, 1, bias=False)
        norms = (nn.BatchNorm2d(8), nn.BatchNorm2d(8, momentum=None), nn.BatchNorm2d(8).eval(), nn.SyncBatchNorm(8))
        self.layers = nn.ModuleList(
            model_of(_convolved, conv=nn.Conv2d(8, 8, 3, padding=1, bias=False), norm=norm, times=2 - i % 2)
            for i, norm in enumerate(norms)
        )
        self.last, self.head = nn.BatchNorm1d(8, affine=False), nn.Linear(8, 6)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.stem(self.given(images))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.last(x.mean((2, 3))))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits, "map": x}


class Routed(nn.Module):
    """A loss beside the loss that takes means over the batch in its middle, and a batch norm without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.route, self.down = nn.Conv2d(4, 8, 3), nn.Linear(8, 4), nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = F.gelu(self.up(images)).flatten(2).transpose(1, 2)
        shares = self.route(x).softmax(-1)
        balance = (shares.mean((0, 1)) * (shares > 0.25).to(x.dtype).mean((0, 1))).sum() * 4
        spread = (x.square().mean((0, 1)) + 1).log().sum()
        logits = self.down(self.norm((x * shares.amax(-1, keepdim=True)).sum(1)))
        return {"loss": F.cross_entropy(logits, labels) + balance + 0.1 * spread, "logits": logits}


def images(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Of another mean and deviation in each batch."""
    drawn = torch.randn(size, 4, 6, 6, generator=generator, dtype=torch.float64) * generator.initial_seed() + 1
    return {"images": drawn, "labels": torch.randint(6, (size,), generator=generator)}


def in_double(kind: type[nn.Module]) -> nn.Module:
    return kind().double()


MEETING = {kind: OwnSubject(partial(in_double, kind), images) for kind in (Residual, Routed)}


def rows(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(size, 6, 8, generator=generator)
    return {"x": x, "y": torch.randint(0, 8, (size, 6), generator=generator)}


_AROUND = [Sparing, Shared, Summed, Resting, Checkpointed, Passing, Unread, Frozen, Indexed]
UNUSUAL = {
    "pairs": OwnSubject(partial(u.Pairs, "contrastive"), u.drawn_pairs), "sinks": OwnSubject(sinks, rows),
    "pictures": OwnSubject(pictures, with_places),
    **{kind.__name__.lower(): OwnSubject(kind, u.drawn) for kind in (*_AROUND, spectral)},
    **{inner.__name__: OwnSubject(partial(u.Around, inner), u.drawn) for inner in (routers, choosy, rolling)},
}  # fmt: skip
"""By name: a contrastive loss with a scalar parameter; attention with a column more than keys; parts of pictures among tokens; branches on values, one never
taken, and two that give no gradient for some samples or for all; numbers read from the batch; weights of two layers; sums of weights; parts in
``eval()``; recompute; complex numbers; all kinds of values between layers; no gradient back to the first layers; frozen ones; parameters that
are no numbers."""
