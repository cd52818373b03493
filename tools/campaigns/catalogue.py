"""The steps of a random model, and the losses it can end in. What they draw comes from the builder."""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Any

import torch

from autopar.graph.graph import Ref
from autopar.ops.kernels import Form

if TYPE_CHECKING:
    from tools.campaigns.draw import Builder

SMOOTH = ("gelu", "silu", "tanh", "sigmoid", "sin", "cos", "square", "erf", "neg", "softplus", "mish", "exp", "clone")
KINKED = {
    "relu": (0.0,),
    "abs": (0.0,),
    "leaky_relu": (0.0,),
    "elu": (0.0,),
    "hardtanh": (-1.0, 1.0),
    "relu6": (0.0, 6.0),
}


class UnfitError(Exception):
    """A step that cannot be taken here."""


def need(condition: bool) -> None:
    if not condition:
        raise UnfitError


# --- contractions


def linear(b: Builder) -> None:
    x = b.pick(lambda s: len(s) > 1)
    inner, outer = b.shape(x)[-1], b.size()
    if b.flip():
        bias = b.parameter(outer) if b.flip() else None
        b.add(b.op("aten.linear.default", x, b.parameter(outer, inner), bias))
    else:
        bias = b.parameter(outer) if b.flip() else None
        b.add(b.op("autopar.linear_t", x, b.parameter(inner, outer), bias))


def matmul(b: Builder) -> None:
    x = b.pick(lambda s: len(s) > 1)
    shape = b.shape(x)
    other = [r for r in b.values if len(shape) > 2 and len(b.shape(r)) == len(shape)]
    other = [r for r in other if b.shape(r)[:-2] == shape[:-2] and b.shape(r)[-1] == shape[-1]]
    if not other or b.flip(3):
        weight = b.parameter(shape[-1], b.size())
        b.add(b.op("aten.mm.default" if len(shape) == 2 and b.flip() else "aten.matmul.default", x, weight))
        return
    y = b.op("aten.transpose.int", other[b.choose(len(other))], len(shape) - 2, len(shape) - 1)
    b.add(b.op("aten.bmm.default" if len(shape) == 3 and b.flip() else "aten.matmul.default", x, y))


def addmm(b: Builder) -> None:
    x = b.pick(lambda s: len(s) == 2)
    out = b.size()
    b.add(b.op("aten.addmm.default", b.parameter(out), x, b.parameter(b.shape(x)[-1], out)))


def einsum(b: Builder) -> None:
    x = b.pick(lambda s: len(s) == 3)
    if b.flip():
        b.add(b.op("aten.einsum.default", "bsk,btk->bst", (x, x)))
    else:
        b.add(b.op("aten.einsum.default", "bsk,kj->bsj", (x, b.parameter(b.shape(x)[-1], b.size()))))


def attention(b: Builder) -> None:
    x = b.pick(lambda s: len(s) == 3 and s[2] % 2 == 0)
    batch, length, width = b.shape(x)
    heads = (2, width, 1, 4)[b.choose(4)]
    need(width % heads == 0)
    depth = width // heads
    groups = heads // 2 if heads % 2 == 0 and b.flip(3) else heads
    kind = b.choose(5)

    def project(count: int) -> Ref:
        y = (
            x
            if count == heads and b.flip(3)
            else b.op("aten.linear.default", x, b.parameter(count * depth, width), None)
        )
        return b.op("aten.transpose.int", b.op("aten.view.default", y, (batch, length, count, depth)), 1, 2)

    q, k, v = project(heads), project(groups), project(groups)
    mask: Ref | None = None
    if kind == 2:
        need(batch == b.batch)
        shape = ((batch, 1, 1, length), (batch, 1, length, length), (batch, heads, length, length))[b.choose(3)]
        given = b.input(*shape[1:], kind="mask")
        first = torch.arange(length) == 0  # a query that sees no key has no defined result
        mask = b.op("aten.logical_or.default", given, b.buffer(first))
    elif kind == 3:
        mask = b.parameter(*((heads, length, length), (1, heads, 1, length), (length, length))[b.choose(3)])
    extra: dict[str, Any] = {"enable_gqa": True} if groups != heads else {}
    if b.flip(3):
        extra["scale"] = 0.3
    y = b.op("aten.scaled_dot_product_attention.default", q, k, v, mask, 0.0, kind in (1, 4), **extra)
    y = b.op("aten.clone.default", b.op("aten.transpose.int", y, 1, 2))
    b.add(b.op("aten.view.default", y, (batch, length, width)))


def convolution(b: Builder) -> None:
    x = b.pick(lambda s: len(s) in (3, 4))
    shape = b.shape(x)
    space = len(shape) - 2
    groups = shape[1] if b.flip(4) else 1
    out = shape[1] if groups > 1 else b.size()
    bias = b.parameter(out) if b.flip() else None
    weight = b.parameter(out, shape[1] // groups, *(3,) * space)
    stride = 1 + b.choose(2)
    b.add(b.op(f"aten.conv{space}d.default", x, weight, bias, (stride,) * space, (1,) * space, (1,) * space, groups))


def embedding(b: Builder) -> None:
    rows, width = (8, 4, 6)[b.choose(3)], b.size()
    ids = b.input(*[b.size() for _ in range(b.choose(3))], kind=f"ids{rows}")
    b.add(b.op("aten.embedding.default", b.parameter(rows, width), ids, b.choose(3) - 1))


def positions(b: Builder) -> None:
    x = b.pick(lambda s: len(s) > 2)
    length, width = b.shape(x)[-2:]
    table = b.op("aten.embedding.default", b.parameter(length, width), b.buffer(torch.arange(length)))
    b.add(b.op("aten.add.Tensor", x, table))


# --- one by one


def unary(b: Builder) -> None:
    x = b.pick()
    kinds = (*SMOOTH, *KINKED)
    name = kinds[b.choose(len(kinds))]
    b.away_from(x, *KINKED.get(name, ()))
    b.add(b.op(f"aten.{name}.default", x))


def scalar(b: Builder) -> None:
    x = b.pick()
    name = ("mul", "add", "sub", "div", "rsub", "pow")[b.choose(6)]
    target = "aten.pow.Tensor_Scalar" if name == "pow" else f"aten.{name}.Scalar"
    b.add(b.op(target, x, 2 if name == "pow" else (0.5, -1.5, 2.0)[b.choose(3)]))


def binary(b: Builder) -> None:
    x = b.pick()
    shape = b.shape(x)
    if b.flip(3):
        tail = [1 if b.flip(4) else n for n in shape[1:]]
        y = b.parameter(*tail[b.choose(len(tail) + 1) :])
    else:
        y = b.pick(lambda s: len(s) == len(shape) and s[0] == shape[0] and _broadcasts(s[1:], shape[1:]))
    if b.flip():
        x, y = y, x
    kind = b.choose(9)
    if kind < 5:
        name = ("add.Tensor", "mul.Tensor", "sub.Tensor", "rsub.Tensor", "atan2.default")[kind]
        if (
            name == "atan2.default"
        ):  # at zero the sign of zero counts, which dropout by a product and by a choice differ in
            b.away_from(x, 0.0)
            b.away_from(y, 0.0)
        extra = {"alpha": 2} if name.startswith(("add", "sub")) and b.flip(4) else {}
        b.add(b.op(f"aten.{name}", x, y, **extra))
    elif kind == 5:
        b.add(b.op("aten.div.Tensor", x, b.op("aten.add.Scalar", b.op("aten.square.default", y), 1.0)))
    elif kind == 6:
        b.away_from(b.op("aten.sub.Tensor", x, y), 0.0)
        b.add(b.op(f"aten.{('maximum', 'minimum')[b.choose(2)]}.default", x, y))
    elif kind == 7:
        b.add(b.op("aten.lerp.Scalar", x, b.op("aten.add.Tensor", x, y), 0.3))
    else:
        b.add(b.op("aten.addcmul.default", x, y, y, value=0.5))


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(n == m or 1 in (n, m) for n, m in zip(a, b, strict=True))


def masked(b: Builder) -> None:
    x = b.pick(lambda s: s[0] == b.batch)
    shape = b.shape(x)
    mask = b.input(*(1 if b.flip(4) else n for n in shape[1:]), kind="mask")
    kind = b.choose(4)
    if kind == 0:
        b.add(b.op("aten.masked_fill.Scalar", x, mask, (0.0, -1.5)[b.choose(2)]))
    elif kind == 1:
        b.add(b.op("aten.where.self", mask, x, b.op("aten.sin.default", x)))
    elif kind == 2:
        b.add(b.op("aten.where.ScalarOther", mask, x, (0.0, 2.5)[b.choose(2)]))
    else:
        b.add(b.op("aten.mul.Tensor", x, b.op("aten.to.dtype", mask, torch.float64)))


def compared(b: Builder) -> None:
    """A truth value of live data, which has no gradient, chooses."""
    x = b.pick()
    b.away_from(x, 0.137)
    chosen = b.op(f"aten.{('gt', 'le')[b.choose(2)]}.Scalar", x, 0.137)
    if b.flip():
        b.add(b.op("aten.where.self", chosen, x, b.op("aten.cos.default", x)))
    else:
        b.add(b.op("aten.mul.Tensor", x, b.op("aten.to.dtype", chosen, torch.float64)))


def detached(b: Builder) -> None:
    x = b.pick()
    b.add(b.op("aten.mul.Tensor", x, b.op("aten.detach.default", b.op("aten.sigmoid.default", x))))


# --- norms and what runs along a dim


def layer_norm(b: Builder) -> None:
    x = b.pick(lambda s: len(s) > 1 and s[-1] > 1)
    count = 2 if b.rank(x) > 2 and b.flip(4) else 1
    dims = b.shape(x)[-count:]
    kind = b.choose(4)
    if kind == 3:
        b.add(b.op("aten.rms_norm.default", x, dims, b.parameter(*dims), 1e-2))
        return
    weight = b.parameter(*dims) if kind < 2 else None
    bias = b.parameter(*dims) if kind == 0 else None
    b.add(b.op("aten.layer_norm.default", x, dims, weight, bias, 1e-2))


def group_norm(b: Builder) -> None:
    x = b.pick(lambda s: len(s) > 2)
    channels = b.shape(x)[1]
    groups = 2 if channels % 2 == 0 else 1
    b.add(b.op("aten.group_norm.default", x, groups, b.parameter(channels), b.parameter(channels), 1e-2))


def batch_norm(b: Builder) -> None:
    x = b.pick(lambda s: len(s) > 1 and s[0] == b.batch)
    channels = b.shape(x)[1]
    affine = b.flip()
    weight, bias = (b.parameter(channels), b.parameter(channels)) if affine else (None, None)
    b.add(b.op("autopar.batch_norm", x, weight, bias, 1e-1))


def instance_norm(b: Builder) -> None:
    x = b.pick(lambda s: len(s) > 2 and s[2] > 1)
    channels = b.shape(x)[1]
    weight, bias = b.parameter(channels), b.parameter(channels)
    b.add(b.op("aten.instance_norm.default", x, weight, bias, None, None, True, 0.1, 1e-1, False))


# --- what draws random numbers


def dropout(b: Builder) -> None:
    x = b.pick()
    b.add(b.op("autopar.dropout", x, (0.25, 0.5, 0.75)[b.choose(3)], b.count))


def noise(b: Builder) -> None:
    """Numbers drawn in the shape of live data, with no gradient of their own."""
    x = b.pick(lambda s: s[0] == b.batch)
    kind = b.choose(5)
    if kind == 0:
        drawn = b.op("aten.rand_like.default", b.op("aten.detach.default", x))
    elif kind == 1:
        drawn = b.op("aten.bernoulli.p", b.op("aten.detach.default", x), 0.5)
    elif kind == 2:
        drawn = b.op("aten.randn.default", b.shape(x), dtype=torch.float64)
    elif kind == 3:  # a number for each sample
        drawn = b.op("aten.rand.default", (b.batch, *(1,) * (b.rank(x) - 1)), dtype=torch.float64)
    else:  # the same for all samples
        drawn = b.op("aten.rand.default", b.shape(x)[1:], dtype=torch.float64)
    b.add(b.op(f"aten.{('mul', 'add')[b.choose(2)]}.Tensor", x, drawn))


def experts(b: Builder) -> None:
    x = b.pick(lambda s: len(s) in (2, 3))
    hidden, number, inner = b.shape(x)[-1], (4, 2, 8)[b.choose(3)], b.size()
    logits = b.op("aten.linear.default", x, b.parameter(number, hidden), None)
    b.apart(logits, b.rank(x) - 1)
    scores = b.op("aten.softmax.int", logits, b.rank(x) - 1)
    chosen = b.op("aten.topk.default", scores, 1 + b.choose(2), b.rank(x) - 1)
    is_gated, is_biased, is_transposed = b.flip(), b.flip(), b.flip()
    is_interleaved = is_gated and b.flip()
    outer = (1 + is_interleaved) * inner
    up, down, gate = (number, outer, hidden), (number, hidden, inner), (number, inner, hidden)
    if is_transposed:
        up, down, gate = ((n, width, height) for n, height, width in (up, down, gate))
    has_gate = is_gated and not is_interleaved
    held = (b.parameter(*gate) if has_gate else None, b.parameter(*up), b.parameter(*down))
    biases = (
        b.parameter(number, inner) if has_gate and is_biased else None,
        b.parameter(number, outer) if is_biased else None,
    )
    form = Form(
        activation=("silu", "gelu", "tanh")[b.choose(3)],
        limit=1.0 if is_gated and b.flip() else inf,
        shift=float(is_gated and b.flip()),
        is_transposed=is_transposed,
        is_interleaved=is_interleaved,
    )
    b.add(b.op("autopar.experts", x, chosen, Ref(chosen.name, 1), *held, *biases, str(form)))


def along(b: Builder) -> None:
    x = b.pick(lambda s: len(s) > 1)
    dim = b.dim(x)
    kind = b.choose(8)
    if kind < 5:
        b.add(
            b.op(
                f"aten.{('softmax.int', 'log_softmax.int', 'cumsum.default', 'logcumsumexp.default', 'cumprod.default')[kind]}",
                x,
                dim,
            )
        )
    elif kind == 5:
        b.add(b.op("aten.flip.default", x, (dim,)))
    elif kind == 6:
        b.add(b.op("aten.roll.default", x, (1,), (dim,)))
    else:
        need(b.shape(x)[dim] % 2 == 0)
        b.add(b.op("aten.glu.default", x, dim))


def ordered(b: Builder) -> None:
    x = b.pick(lambda s: len(s) > 1)
    dim = b.dim(x)
    b.apart(x, dim)
    kind = b.choose(3)
    if kind == 0:
        values = b.op("aten.topk.default", x, 1 + b.choose(b.shape(x)[dim]), dim)
        where = Ref(values.name, 1)
        b.add(values, b.op("aten.gather.default", b.op("aten.sin.default", x), dim, where))
    elif kind == 1:
        b.add(b.op("aten.sort.default", x, dim))
    else:
        b.add(b.op("aten.max.dim", x, dim, True))


def reduced(b: Builder) -> None:
    x = b.pick(lambda s: len(s) > 1)
    dim, keep = b.dim(x), b.flip()
    kind = b.choose(7)
    if kind in (0, 1):
        dims = (dim,) if b.flip() else tuple(range(min(dim, b.rank(x) - 1), b.rank(x)))
        b.add(b.op(("aten.sum.dim_IntList", "aten.mean.dim")[kind], x, dims, keep))
    elif kind == 2:
        b.apart(x, dim)
        b.add(b.op("aten.amax.default", x, (dim,), keep))
    elif kind == 3:
        b.add(b.op("aten.logsumexp.default", x, (dim,), keep))
    elif kind == 4:
        need(b.shape(x)[dim] > 1)
        b.add(b.op("aten.var.correction", x, (dim,), correction=b.choose(2), keepdim=keep))
    elif kind == 5:
        b.add(b.op("aten.prod.dim_int", x, dim, keep))
    else:
        need(b.shape(x)[dim] > 1)
        variance = b.op("aten.var_mean.correction", x, (dim,), correction=0, keepdim=keep)
        b.add(variance, Ref(variance.name, 1))


# --- data moved about


def view(b: Builder) -> None:
    x = b.pick()
    shape = b.shape(x)
    if b.flip():
        need(len(shape) > 1)
        dim = b.choose(len(shape) - 1)
        new = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
    else:
        dim = b.choose(len(shape))
        part = (2, 3, 4)[b.choose(3)]
        length = shape[dim] // (b.batch if dim == 0 else 1)
        need(length % part == 0 and len(shape) < 5)
        new = (*shape[:dim], shape[dim] // part, part, *shape[dim + 1 :])
    b.add(b.op("aten.view.default", x, new))


def permuted(b: Builder) -> None:
    x = b.pick(lambda s: len(s) > 2)
    rank = b.rank(x)
    if b.flip():
        order = list(range(1, rank))
        shift = 1 + b.choose(rank - 1)
        b.add(b.op("aten.permute.default", x, (0, *order[shift:], *order[:shift])))
    else:
        b.add(b.op("aten.transpose.int", x, 1 + b.choose(rank - 1), rank - 1))


def samples_inside(b: Builder) -> None:
    """Something happens while samples do not stand first."""
    x = b.pick(lambda s: len(s) > 2)
    other = 1 + b.choose(b.rank(x) - 2)
    y = b.op("aten.transpose.int", x, 0, other)
    kind = b.choose(4)
    if kind == 0:
        y = b.op("aten.linear.default", y, b.parameter(b.size(), b.shape(y)[-1]), None)
    elif kind == 1:
        y = b.op("aten.cumsum.default", y, 0)
    elif kind == 2:
        y = b.op("aten.softmax.int", y, b.rank(y) - 1)
    else:
        y = b.op("aten.mul.Tensor", y, b.parameter(b.shape(y)[0], *(1,) * (b.rank(y) - 1)))
    b.add(b.op("aten.transpose.int", y, 0, other))


def taken(b: Builder) -> None:
    x = b.pick(lambda s: len(s) > 1)
    dim = b.dim(x)
    length = b.shape(x)[dim]
    if b.flip(4) and b.rank(x) > 2:
        b.add(b.op("aten.select.int", x, dim, b.choose(length)))
        return
    start = b.choose(length)
    stop = length - b.choose(length - start)
    b.add(b.op("aten.slice.Tensor", x, dim, start, stop, 1 + b.choose(2)))


def joined(b: Builder) -> None:
    x = b.pick(lambda s: len(s) > 1)
    dim, shape = b.dim(x), b.shape(x)
    y = b.pick(lambda s: len(s) == len(shape) and s[:dim] == shape[:dim] and s[dim + 1 :] == shape[dim + 1 :])
    if b.flip(3) and b.shape(y) == shape:
        b.add(b.op("aten.stack.default", (x, y), dim))
    else:
        b.add(b.op("aten.cat.default", (x, y), dim))


def parted(b: Builder) -> None:
    x = b.pick(lambda s: len(s) > 1)
    dim = b.dim(x)
    length = b.shape(x)[dim]
    need(length > 1)
    kind = b.choose(3)
    if kind < 2:
        middle = (1, (length + 1) // 2)[kind]
        parts = [b.op("aten.slice.Tensor", x, dim, *span) for span in ((0, middle), (middle, length))]
    else:
        need(b.rank(x) > 2)
        parts = [b.op("aten.select.int", x, dim, index) for index in (0, 1)]
    b.add(*parts)


def padded(b: Builder) -> None:
    x = b.pick(lambda s: len(s) > 1)
    width = (1, b.choose(3))
    if b.flip(3) and b.rank(x) == 3 and b.shape(x)[-1] > 2:
        b.add(b.op("aten.pad.default", x, width, ("reflect", "replicate")[b.choose(2)]))
    else:
        value = (0.0, 1.5)[b.choose(2)]
        more = (0, 1) if b.rank(x) > 2 and b.flip() else ()
        b.add(b.op("aten.constant_pad_nd.default", x, (*width, *more), value))


def unsqueezed(b: Builder) -> None:
    x = b.pick(lambda s: len(s) < 5)
    shape = b.shape(x)
    dim = 1 + b.choose(len(shape))
    y = b.op("aten.unsqueeze.default", x, dim)
    kind = b.choose(3)
    if kind == 1:
        y = b.op("aten.expand.default", y, (*shape[:dim], b.size(), *shape[dim:]))
    elif kind == 2:
        y = b.op("aten.repeat.default", y, (1,) * dim + (2,) + (1,) * (len(shape) - dim))
    b.add(y)


def squeezed(b: Builder) -> None:
    x = b.pick(lambda s: 1 in s[1:])
    shape = b.shape(x)
    dim = shape[1:].index(1) + 1
    b.add(b.op("aten.view.default", x, (*shape[:dim], *shape[dim + 1 :])))


def indexed(b: Builder) -> None:
    x = b.pick(lambda s: len(s) > 1)
    dim = b.dim(x)
    length, kind = b.shape(x)[dim], b.choose(4)
    if kind < 2:
        at = b.buffer(torch.arange(b.size()) * 2 % length)
        if kind == 0:
            b.add(b.op("aten.index_select.default", x, dim, at))
        else:
            b.add(b.op("aten.index.Tensor", x, (*(None,) * dim, at)))
        return
    need(b.shape(x)[0] == b.batch)
    tail = list(b.shape(x)[1:])
    if kind == 2:
        tail[dim - 1] = b.size()
        b.add(b.op("aten.gather.default", x, dim, b.input(*tail, kind=f"ids{length}")))
    else:
        b.add(
            b.op("aten.scatter_add.default", x, dim, b.input(*tail, kind=f"ids{length}"), b.op("aten.sin.default", x))
        )


def triangle(b: Builder) -> None:
    x = b.pick(lambda s: len(s) > 2)
    b.add(b.op(f"aten.{('tril', 'triu')[b.choose(2)]}.default", x, b.choose(3) - 1))


def made(b: Builder) -> None:
    """Constants of the shape of live data."""
    x = b.pick(lambda s: s[0] == b.batch)
    kind = b.choose(3)
    if kind == 0:
        ones = b.op("aten.new_ones.default", x, b.shape(x))
    elif kind == 1:
        ones = b.op("aten.full.default", b.shape(x), 0.5, dtype=torch.float64)
    else:
        ones = b.op("aten.full_like.default", x, 2.0)
    b.add(b.op("aten.add.Tensor", x, ones))


STEPS = (
    linear, unary, binary, scalar, view, attention, layer_norm, matmul, permuted, taken, joined, reduced, along, embedding,
    positions, masked, compared, detached, group_norm, ordered, samples_inside, parted, padded, unsqueezed, squeezed,
    indexed, triangle, made, convolution, einsum, addmm, linear, binary, attention, view, experts, batch_norm, instance_norm, dropout, noise,
)  # fmt: skip


# --- losses


def square_sum(b: Builder, x: Ref) -> Ref:
    return b.op("aten.sum.default", b.op("aten.mul.Tensor", x, x))


def mean(b: Builder, x: Ref) -> Ref:
    return b.op("aten.mean.default", b.op("aten.sin.default", x))


def squared_error(b: Builder, x: Ref) -> Ref:
    if b.shape(x)[0] != b.batch:
        return square_sum(b, x)
    target = b.input(*b.shape(x)[1:])
    if b.flip():
        return b.op("aten.mse_loss.default", x, target, 2)
    return b.op("aten.mean.default", b.op("aten.mse_loss.default", x, target, 0))


def cross_entropy(b: Builder, x: Ref) -> Ref:
    shape = b.shape(x)
    if shape[0] != b.batch or len(shape) < 2 or shape[-1] < 2:
        return mean(b, x)
    classes = shape[-1]
    if b.flip(3):
        classes = (8, 6)[b.choose(2)]
        x = b.op("aten.linear.default", x, b.parameter(classes, shape[-1]), None)
    labels = b.input(*shape[1:-1], kind=f"labels{classes}")
    if b.flip(3):
        count = prod(shape[:-1])
        flat = b.op("aten.view.default", x, (count, classes))
        rows = b.op("aten.view.default", labels, (count,))
        total = b.op("aten.cross_entropy_loss.default", flat, rows, None, 2, -100, 0.0)
    else:
        total = b.op("autopar.cross_entropy_sum", x, labels, -100, (0.0, 0.1)[b.choose(2)])
    counted = b.op("aten.sum.default", b.op("aten.ne.Scalar", labels, -100))
    return b.op("aten.div.Tensor", total, b.op("aten.to.dtype", counted, torch.float64))


LOSSES = (square_sum, mean, squared_error, cross_entropy)
