"""Random modules, traced: what a person writes, with operators in place, buffers, tied weights and several losses."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.graph.graph import Graph
from autopar.nn import Experts
from autopar.tracing.trace import trace
from tests.support.small_models import evaluate
from tools.campaigns.catalogue import UnfitError
from tools.campaigns.draw import Choose, value_of

KINDS = (
    "linear", "gelu_", "in place", "slice", "norm", "heads", "tied", "dropout", "buffer", "experts", "channels", "noise",
    "mask", "cumulative",
)  # fmt: skip
ROWS, LENGTH = 8, 4


class Module(nn.Module):
    """What a list of (kind, number) says, on tokens [batch, length] and reals [batch, length, width]."""

    def __init__(self, width: int, steps: list[tuple[str, int]], losses: int) -> None:
        super().__init__()
        self.width, self.steps, self.losses = width, steps, losses
        self.table = nn.Embedding(ROWS, width)
        self.layers = nn.ModuleList(self._layer(kind) for kind, _ in steps)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.head = nn.Linear(width, ROWS, bias=losses > 1)
        if losses == 1:
            self.head.weight = self.table.weight

    def _layer(self, kind: str) -> nn.Module:
        width = self.width
        match kind:
            case "linear" | "slice" | "in place":
                return nn.Linear(width, width, bias=kind != "slice")
            case "norm":
                return nn.LayerNorm(width, eps=1e-2)
            case "heads":
                return nn.Linear(width, 3 * width)
            case "experts":
                return nn.ModuleList((nn.Linear(width, 4, bias=False), Experts(num_experts=4, hidden=width, ffn=6)))
            case "channels":
                return nn.GroupNorm(2, LENGTH, eps=1e-2)
            case _:
                return nn.Identity()

    def forward(self, ids8_1: Tensor, x_2: Tensor, labels8_3: Tensor) -> dict[str, Tensor]:
        x = self.table(ids8_1) + x_2
        for (kind, number), layer in zip(self.steps, self.layers, strict=True):
            x = self._step(x, kind, number, layer)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels8_3.flatten())
        if self.losses > 1:
            loss = loss + 0.1 * F.mse_loss(x, x_2)
        if self.losses > 2:
            loss = loss + 0.01 * torch.logsumexp(logits, -1).pow(2).mean()
        return {"loss": loss, "logits": logits}

    def _step(self, x: Tensor, kind: str, number: int, layer: nn.Module) -> Tensor:
        match kind:
            case "linear" | "norm" | "channels":
                return layer(x)
            case "gelu_":
                return (F.gelu(x), torch.tanh_(x * 1.5), F.silu(x + 1, inplace=True))[number % 3]
            case "in place":
                y = layer(x)
                y += x
                y.mul_(0.5).add_(x, alpha=0.25)
                return y
            case "slice":
                y = x.clone()
                at = number % self.width
                y[..., at:] = layer(x)[..., at:]
                y[:, 0] *= 2
                return y
            case "heads":
                q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in layer(x).chunk(3, -1))
                y = F.scaled_dot_product_attention(q, k, v, is_causal=number % 2 == 0)
                return x + y.transpose(1, 2).flatten(2)
            case "tied":
                return x + F.linear(torch.sin(x) @ self.table.weight.t(), self.table.weight.t())
            case "dropout":
                return F.dropout(x, 0.5, training=True)
            case "buffer":
                return x * self.get_buffer("scale")
            case "experts":
                router, experts = layer.children()
                weights, indices = router(x).softmax(-1).topk(1 + number % 2)
                return x + experts(x, weights, indices)
            case "noise":
                keep = torch.rand((x.shape[0], 1, 1), dtype=x.dtype) if number % 2 else torch.rand_like(x)
                return x * (0.5 + keep)
            case "mask":
                return x.masked_fill_(torch.ones(LENGTH, self.width, dtype=torch.bool).triu(number % 3), 0.3) * 1.0
            case _:
                return x.cumsum(1)


def draw_traced(choose: Choose, batch: int) -> tuple[Graph, Graph]:
    """A module traced at the whole batch and, half the time, at a part of it.

    Raises:
        UnfitError: nothing to differentiate.
        TraceError: it cannot be traced; the message says why.
    """
    width = (4, 8)[choose(2)]
    steps = [(KINDS[choose(len(KINDS))], choose(4)) for _ in range(1 + choose(5))]
    losses = 1 + choose(3)
    part = batch // (1, 2)[choose(2)]
    model = Module(width, steps, losses).double()
    whole, traced = (_known(_traced(model, n), model) for n in (batch, part))
    if [(op.name, op.target) for op in whole.ops] != [(op.name, op.target) for op in traced.ops]:
        raise UnfitError("another model at another number of samples")
    if not {"dropout", "noise"} & {kind for kind, _ in steps}:
        _check_trace(model, whole, batch)
    return whole, traced


def _batch(batch: int, width: int) -> dict[str, Tensor]:
    shapes = {"ids8_1": (batch, LENGTH), "x_2": (batch, LENGTH, width), "labels8_3": (batch, LENGTH)}
    return {name: value_of(name, shape) for name, shape in shapes.items()}


def _traced(model: Module, batch: int) -> Graph:
    given = _batch(batch, model.width)
    return trace(model, (), given)


def _known(graph: Graph, model: nn.Module) -> Graph:
    """With the values of buffers in it."""
    return replace(
        graph,
        buffers=tuple(
            replace(b, fqn="", value=b.value if b.value is not None else model.get_buffer(b.fqn)) for b in graph.buffers
        ),
    )


def _check_trace(model: Module, graph: Graph, batch: int) -> None:
    """The graph computes what the module does.

    Raises:
        AutoparError: it does not.
    """
    given = _batch(batch, model.width)
    parameters = {fqn: p.detach().clone().requires_grad_() for fqn, p in model.named_parameters()}
    found = evaluate(graph, given, parameters)
    expected = model(**given)["loss"]
    names = sorted(parameters)
    got = torch.autograd.grad(found, [parameters[n] for n in names], allow_unused=True)
    try:
        wanted = torch.autograd.grad(expected, [model.get_parameter(n) for n in names], allow_unused=True)
    except RuntimeError as error:  # it writes in place to what its own backward needs
        raise UnfitError("torch does not differentiate the module itself") from error
    same = all(_same(a, b) for a, b in zip((found, *got), (expected, *wanted), strict=True))
    if not same:
        raise AutoparError("A traced module computes something else than the module", got=model.steps)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    a, b = (torch.zeros(()) if x is None else x for x in (a, b))
    return bool(torch.allclose(a, b, rtol=1e-8, atol=1e-10))
