"""Calls of every operator in the table, small enough to run, with sizes that split over 2 and 4 ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.graph.graph import Op, Ref, TensorSpec, map_refs
from autopar.graph.operator_kinds import draws_random
from autopar.ops.kernels import resolve
from autopar.rules.table import RuleTable

OUTSIDE = frozenset((
    # calls whose result is not defined (uninitialised memory) or that draw numbers without an operand
    "aten.empty_like.default", "aten.empty.memory_format", "aten.new_empty.default",
    # a region is code of a model, a change over data runs on other ranks: tests/lower/test_opaque.py runs both in programs
    "autopar.opaque", "autopar.change_over_data",
))  # fmt: skip


def spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype, requires_grad=tensor.requires_grad)


@dataclass(frozen=True)
class Example:
    """One call and its operands."""

    op: Op
    operands: tuple[Tensor, ...]

    @property
    def needs_other_axis(self) -> bool:
        """Operators that an earlier axis made run on ranks of that axis."""
        return "other" in (*self.op.args, *(value for _, value in self.op.kwargs))


class Maker:
    """Draws operands and writes calls; tensors among the arguments become references in order."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def real(self, *shape: int, grad: bool = True) -> Tensor:
        """In (0.1, 0.9), where every function of the table is smooth and monotone enough."""
        x = torch.rand(shape, dtype=torch.float64, generator=self.generator) * 0.8 + 0.1
        return x.requires_grad_(grad)

    def whole(self, *shape: int, high: int = 7) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def truth(self, *shape: int) -> Tensor:
        return torch.randint(0, 2, shape, generator=self.generator) > 0

    def call(self, target: str, *args: object, **kwargs: object) -> Example:
        operands: list[Tensor] = []

        def write(value: object) -> object:
            if isinstance(value, Tensor):
                operands.append(value)
                return Ref(f"x{len(operands)}")
            return tuple(write(item) for item in value) if isinstance(value, (tuple, list)) else value

        written = tuple(write(arg) for arg in args)
        named = tuple((key, write(value)) for key, value in kwargs.items())
        op = Op(name="call", target=target, args=written, kwargs=named, outputs=())
        assert all(map_refs(arg, lambda ref: ref) == arg for arg in written)
        return Example(op, tuple(operands))


def elementwise(table: RuleTable, make: Maker) -> Iterator[Example]:
    """A call for each operator whose line is elementwise, arguments filled in by its schema."""
    for target, rule in table.rules.items():
        if target in OUTSIDE or not rule.line.startswith(("x... ->", "x..., x...")):
            continue
        if "n k+" in rule.line or target.startswith("autopar."):
            continue
        schema = resolve(target)._schema
        constant = draws_random(target) and target != "aten._standard_gamma.default"
        grad = not constant and "floor_divide" not in target
        integer = "bitwise" in target or "__" in target
        shapes = iter([(4, 1, 8), (4, 8), (1, 4, 8)])
        plain = {"bool": True, "str": "none", "int": 6}
        plain |= dict.fromkeys(("number", "float", "Optional[number]"), 2 if integer else 0.5)
        args: list[object] = []
        for argument in schema.arguments:
            kind = str(argument.type)
            if kind == "Tensor":
                shape = next(shapes)
                boolean = argument.name in ("condition", "mask")
                args.append(
                    make.truth(*shape) if boolean else make.whole(*shape) if integer else make.real(*shape, grad=grad)
                )
            elif argument.kwarg_only or argument.default_value is not None:
                break
            elif kind in plain:
                args.append(plain[kind])
            elif "Optional[Tensor]" in kind:
                args.append(make.real(4, 8))
            else:
                break
        kwargs = {"rounding_mode": "floor"} if target.endswith("Tensor_mode") else {}
        if target in ("aten.masked_fill.Tensor", "aten.fill.Tensor"):
            args[-1] = make.real()
        if target == "aten.randint_like.low_dtype":
            args[-1] = 9
        if target == "aten.acosh.default":  # defined from one on
            args[0] = make.real(4, 1, 8).detach().add(1).requires_grad_()
        yield make.call(target, *args, **kwargs)


def on_reals(make: Maker, *calls: tuple[Any, ...]) -> Iterator[Example]:
    """By the name of an operator (of its overload ``default`` unless it is named), the shape of its operand, or a list of them for
    several, and what else it is given."""
    for name, shapes, *rest in calls:
        operands = [make.real(*shape) for shape in (shapes if isinstance(shapes, list) else [shapes])]
        yield make.call(f"aten.{name}" if "." in name else f"aten.{name}.default", *operands, *rest)


def moved(make: Maker) -> Iterator[Example]:
    """Views, slices, joins, indexing and factories."""
    c, r, w = make.call, make.real, make.whole
    yield from on_reals(
        make, ("view", (4, 8, 4), (4, 32)), ("view", (1, 4, 1, 8), (4, 8)), ("view", (8, 32), (8, 4, 8)),
        ("view", (4, 1, 8), (1, 32)), ("view", (2, 4, 3), (8, 3, 1)),
    )  # fmt: skip
    yield c("aten.view.default", w(4, 8), (4, 1, 1, 8))
    yield from on_reals(
        make, ("unsqueeze", (4, 8), 1), ("transpose.int", (4, 8, 3), 1, 2), ("permute", (4, 8, 3), (2, 0, -2)),
        ("expand", (8, 1, 4), (4, 8, 4, 4)),
    )  # fmt: skip
    yield c("aten.expand.default", w(1, 8), (4, 8))
    yield c("aten.repeat.default", r(4, 8), (2, 1, 3))
    yield c("aten.one_hot.default", w(4, 8, high=3), 3)
    yield from on_reals(
        make, ("repeat_interleave.self_int", (8,), 2), ("repeat_interleave.self_int", (4, 8), 3, 1),
        ("slice.Tensor", (4, 8), 1, 2, 6), ("slice.Tensor", (4, 8), 0, 0, 4), ("slice.Tensor", (4, 8), 1, 0, 8, 2),
        ("select.int", (4, 8, 4), 1, 3),
    )  # fmt: skip
    yield c("aten.cat.default", (r(4, 8), r(4, 4)), 1)
    yield c("aten.cat.default", (r(4, 8), r(4, 8)), -1)
    yield c("aten.cat.default", (r(0), r(4, 8), r(4, 8)), 1)
    yield from on_reals(make, ("slice_scatter", [(4, 8), (4, 4)], 1, 2, 6), ("select_scatter", [(4, 8), (4,)], 1, 3))
    yield c("aten.stack.default", (r(4, 8), r(4, 8)), 1)
    yield c("aten.pad.default", r(4, 8), (0, 1), "constant", None)
    yield c("aten.pad.default", w(4, 8), (0, 1), "constant", -100.0)
    yield from on_reals(make, ("constant_pad_nd", (4, 8), (1, 0), 0.0), ("tril", (4, 8, 8), 1), ("triu", (4, 8, 8)))
    yield c("aten.index.Tensor", r(4, 8, 4), (None, w(4, 1), w(8, high=4)))
    yield c("aten.index.Tensor", r(4, 8, 4), (w(4, high=4), None, w(4, high=4)))
    yield c("aten.index.Tensor", r(8, 4), (w(4, 8),))
    yield c("aten.index_put.default", r(4, 8), (w(4, high=4), None), r(4, 8), True)
    yield c("aten.index_put.default", r(4, 8, 4), (None, torch.tensor([1, 5, 2])), r(3, 1))
    yield c("aten.index_put.default", r(4, 8, 4), (torch.tensor([1, 2]), None, torch.tensor([3, 0])), r(2, 8))
    yield c("aten.index_put.default", r(4, 8), (make.truth(4, 8),), r())
    yield c("aten.index_select.default", r(4, 8), 1, w(4))
    yield c("aten.gather.default", r(4, 8), 1, w(4, 4))
    yield c("aten.gather.default", r(8, 8), 1, w(4, 4))
    yield c("aten.scatter.src", r(4, 8), 1, w(4, 8, high=999).argsort(1), r(4, 8))
    yield c("aten.scatter.value", r(4, 8), 1, w(4, 8), 0.5)
    yield c("aten.scatter_add.default", r(4, 8), 1, w(4, 4), r(4, 4))
    yield c("aten.scatter_reduce.two", r(4, 8), 1, w(4, 8), r(4, 8), "sum")
    for name, *sizes in (("full", (4, 8), 0.5), ("zeros", (4, 8)), ("ones", (4, 8)), ("scalar_tensor", 2.0)):
        yield c(f"aten.{name}.default", *sizes)
    for name, *sizes in (("new_zeros", (4, 8)), ("new_ones", (4, 8)), ("new_full", (4, 8), 3)):
        yield c(f"aten.{name}.default", w(4), *sizes)
    for name, *numbers in (
        ("arange.default", 8), ("arange.start", 2, 10), ("arange.start_step", 0, 16, 2), ("eye.default", 4), ("eye.m", 4, 8),
        ("linspace.default", 0.0, 1.0, 8), ("rand.default", (4, 8)), ("randn.default", (4, 8)),
        ("randint.default", 9, (4, 8)), ("randint.low", 2, 9, (4, 8)), ("normal.float_float", 0.5, 2.0, (4, 8)),
        ("randperm.default", 8),
    ):  # fmt: skip
        yield c(f"aten.{name}", *numbers)
    yield c("aten.multinomial.default", make.real(4, 8, grad=False), 3)


def whole(make: Maker) -> Iterator[Example]:
    """Operators along a dim that stays whole, and casts."""
    c, r, w = make.call, make.real, make.whole
    yield c("aten.to.dtype", r(4, 8), torch.float64)
    for dtype in (torch.float64, torch.bool, torch.int32):
        yield c("aten.to.dtype", w(4, 8), dtype)
    for value in (-1e9, 0.0):
        yield c("aten.masked_fill.Scalar", r(4, 8), make.truth(1, 8), value)
    yield c("aten.where.Scalar", torch.eye(4, 8) > 0.5, 0.5, 2.0)
    for value in (0.0, 1.0):
        yield c("aten.where.ScalarOther", make.truth(4, 8), r(4, 8), value)
    for value in (0.0, 1.0):
        yield c("aten.where.ScalarSelf", make.truth(4, 8), value, r(4, 8))
    yield from on_reals(
        make, ("softmax.int", (4, 8), 1), ("log_softmax.int", (4, 8), -1), ("_softmax", (4, 8), 1, False),
        ("_log_softmax", (4, 8), 1, False), ("cumsum", (4, 8), 1),
    )  # fmt: skip
    yield c("aten.cumsum.default", w(4, 8), -1)
    yield from on_reals(
        make, ("cumprod", (4, 8), 1), ("logcumsumexp", (4, 8), 1), ("glu", (4, 8)), ("flip", (4, 8), (1,)),
        ("roll", (4, 8), (1,), (1,)), ("topk", (4, 8), 2), ("sort", (4, 8), 1),
    )  # fmt: skip
    yield c("aten.sort.stable", r(4, 8), stable=True, dim=1)
    yield from on_reals(make, ("argsort", (4, 8), 1), ("diff", (4, 8)))
    yield c("aten.diff.default", w(4, 8), 1, -1, w(4, 1))
    norm = "linalg_vector_norm"
    yield from on_reals(make, (norm, (4, 8), 2, (1,), True), (norm, (4, 8), 2, (1,)), (norm, (4, 8)))
    yield c("autopar.dropout", r(4, 8), 0.5)
    yield from on_reals(
        make, ("fft_fftn", (4, 8, 4), None, (1, 2)), ("fft_ifftn", (4, 8, 4), None, (1, 2)), ("view_as_complex", (4, 8, 2)),
    )  # fmt: skip
    yield c("aten.view_as_real.default", torch.complex(r(4, 8, grad=False), r(4, 8, grad=False)).requires_grad_())
    yield c("aten.im2col.default", r(4, 8, 6, 6), (3, 3), (1, 1), (1, 1), (1, 1))
    yield c("aten.col2im.default", r(4, 8, 4), (4, 4), (2, 2), (1, 1), (0, 0), (2, 2))


def reductions(make: Maker) -> Iterator[Example]:
    """Sums, means, extrema."""
    c, r, w = make.call, make.real, make.whole
    yield c("aten.prod.default", r(4, 8, grad=False).add(0.6).requires_grad_())
    for name in ("sum", "mean", "max", "min", "argmax", "argmin", "amax", "amin", "median"):
        yield c(f"aten.{name}.default", r(4, 8))
    yield c("aten.sum.default", make.truth(4, 8))
    yield c("aten.sum.default", w(4, 8))
    yield from on_reals(make, ("sum.dim_IntList", (4, 8, 4), (1, -1), True), ("sum.dim_IntList", (4, 8), None))
    yield c("aten.sum.dim_IntList", r(4, 8), (0,), dtype=torch.float64)
    yield from on_reals(make, ("mean.dim", (4, 8, 4), (1, -1), True), ("mean.dim", (4, 8), (-1,)))
    yield c("aten.mean.dim", r(4, 8), (-1,), True, dtype=torch.float64)
    yield c("autopar.partial_mean", r(4, 8), (1,), True, 16)
    yield from on_reals(
        make, ("amax", (4, 8), (1,), True), ("amin", (4, 8), (1,), True), ("max.dim", (4, 8), 1), ("min.dim", (4, 8), 1),
        ("argmax", (4, 8), 1, True), ("argmin", (4, 8), 1),
    )  # fmt: skip
    for name, one in (("any", True), ("all", False)):  # one element decides
        x = torch.full((4, 8), not one)
        x[0, 0] = one
        for overload, *rest in (("default",), ("dim", 1, True), ("dims", (1,), True)):
            yield c(f"aten.{name}.{overload}", x, *rest)
    yield from on_reals(make, ("prod.dim_int", (4, 8), 1), ("logsumexp", (4, 8), (1,)))
    for name in ("var", "std", "var_mean"):
        yield c(f"aten.{name}.correction", r(4, 8), (1,), correction=1)
    yield from on_reals(
        make, ("var.dim", (4, 8), (1,), True, True), ("std.dim", (4, 8), (1,), True, True),
        ("norm.ScalarOpt_dim", (4, 8), 2, (1,), True),
    )  # fmt: skip
    yield c("aten.histc.default", w(4, 8).double(), 4, 0, 7)
    yield c("aten.histc.default", r(4, 8, grad=False), 4)
    yield c("aten.count_nonzero.default", w(4, 8))
    yield c("aten.count_nonzero.dim_IntList", w(4, 8), (1,))


def products(make: Maker) -> Iterator[Example]:
    """Matrix products, attention, convolutions, norms."""
    c, r = make.call, make.real
    yield from on_reals(make, ("linear", [(4, 8, 12), (8, 12), (8,)]), ("linear", [(4, 12), (8, 12)], None))
    yield c("aten.linear.default", r(4, 12, grad=False), r(8, 12))
    yield c("autopar.linear_t", r(4, 4, 8), r(8, 12), r(12))
    yield c("autopar.linear_t", r(4, 8), r(8, 12), None)
    yield from on_reals(
        make, ("mm", [(4, 8), (8, 12)]), ("bmm", [(4, 8, 4), (4, 4, 12)]), ("addmm", [(12,), (4, 8), (8, 12)]),
    )  # fmt: skip
    yield c("aten.addmm.default", r(4, 12), r(4, 8), r(8, 12), beta=0.5, alpha=2.0)
    yield from on_reals(
        make, ("baddbmm", [(4, 1, 12), (4, 8, 4), (4, 4, 12)]), ("outer", [(4,), (8,)]), ("mv", [(4, 8), (8,)]),
        ("dot", [(8,), (8,)]), ("matmul", [(4,), (4,)]), ("matmul", [(4,), (4, 8)]), ("matmul", [(4,), (4, 4, 8)]),
        ("matmul", [(4, 8), (8,)]), ("matmul", [(4, 8, 4), (4,)]), ("matmul", [(4, 8), (8, 4)]),
        ("matmul", [(4, 8, 4), (4, 8)]), ("matmul", [(4, 1, 8, 4), (8, 4, 8)]), ("matmul", [(8, 4), (4, 4, 8)]),
    )  # fmt: skip
    for equation, *shapes in (
        ("bik,bkj->bij", (4, 8, 4), (4, 4, 8)), ("ik,kj,j->i", (4, 8), (8, 4), (4,)), ("ik,kj", (4, 8), (8, 4)),
        ("iik->ik", (4, 4, 8)),
    ):  # fmt: skip
        yield c("aten.einsum.default", equation, tuple(r(*shape) for shape in shapes))
    attention = "aten.scaled_dot_product_attention.default"
    q, k, v = (4, 8, 8, 4), (4, 8, 12, 4), (4, 8, 12, 8)
    yield c(attention, r(*q), r(*k), r(*v), scale=0.25)
    yield c(attention, r(*q), r(*k), r(*v), make.truth(4, 1, 8, 12) | True, 0.0, False)
    yield c(attention, r(*q), r(*k), r(*v), attn_mask=r(8, 8, 12))
    yield c(attention, r(*q), r(*q), r(*q), None, 0.0, True)
    yield c(attention, r(*q), r(4, 4, 8, 4), r(4, 4, 8, 4), None, 0.0, True, enable_gqa=True)
    yield c(attention, r(4, 8, 4), r(4, 8, 4), r(4, 8, 4))
    yield c(attention, r(*q), r(*k), r(*v), None, 0.5)
    yield c("autopar.attention", r(*q), r(*q), r(*q), None, 0.0, True)
    yield c("autopar.attention_gathered", r(*q), r(4, 8, 16, 4), r(4, 8, 16, 4), None, 0.0, True, axis="other")
    yield c("autopar.attention_ring", r(*q), r(*q), r(*q), None, 0.0, True, axis="other", ranks=2)
    for n in (1, 2, 3):
        yield c(f"aten.conv{n}d.default", r(4, 8, *(5,) * n), r(4, 8, *(3,) * n), r(4), (1,) * n, (1,) * n)
        yield c(f"aten.conv{n}d.padding", r(4, 8, *(5,) * n), r(4, 8, *(3,) * n), None, (1,) * n, "same")
    yield from on_reals(
        make, ("conv2d", [(4, 8, 4, 4), (12, 8, 2, 2)], None, (2, 2)),
        ("conv2d", [(4, 8, 4, 4), (8, 1, 3, 3), (8,)], (1, 1), (1, 1), (1, 1), 8), ("conv1d", [(8, 5), (4, 8, 3)]),
    )  # fmt: skip
    yield c("aten.conv2d.default", r(4, 16, 4, 4), r(24, 2, 3, 3), r(24), (1, 1), (1, 1), (1, 1), 8)
    yield c("aten.conv2d.default", r(4, 8, 4, 4), r(8, 4, 3, 3), groups=2)  # fewer groups than four ranks
    yield c("aten.conv1d.default", r(16, 5), r(8, 2, 3), groups=8)
    yield c("aten.layer_norm.default", r(4, 4, 8), (8,), r(8), r(8))
    yield c("aten.layer_norm.default", r(4, 4, 8), (4, 8), r(4, 8), None)
    yield c("aten.layer_norm.default", r(4, 4, 8), (8,))
    yield c("aten.rms_norm.default", r(4, 4, 8), (8,), r(8))
    yield c("aten.group_norm.default", r(4, 8, 4), 2, r(8), r(8))
    yield from images(make)


def images(make: Maker) -> Iterator[Example]:
    """Pooling, resampling, transposed convolutions, norms over samples or space; windows overlap."""
    c, r = make.call, make.real
    x = {n: (4, 8, *(8,) * n) for n in (1, 2, 3)}
    for n in (1, 2, 3):
        three, own = (3,) * n, x[n]
        yield from on_reals(
            make, (f"max_pool{n}d", own, three, (1,) * n, (1,) * n), (f"avg_pool{n}d", own, three, (1,) * n, (1,) * n),
            (f"adaptive_avg_pool{n}d", own, three), (f"adaptive_max_pool{n}d", own, three),
            (f"upsample_nearest{n}d.vec", own, (12,) * n, None),
        )  # fmt: skip
        name = f"aten.conv_transpose{n}d." + ("default" if n == 1 else "input")
        yield c(name, r(4, 8, *(4,) * n), r(8, 4, *three), r(4), (2,) * n, (1,) * n)
        yield c(name, r(4, 8, *(4,) * n), r(8, 1, *three), None, (2,) * n, (1,) * n, (0,) * n, 8)
        yield c(name, r(4, 16, *(4,) * n), r(16, 3, *three), r(24), (2,) * n, (1,) * n, (0,) * n, 8)
        if n > 1:
            yield c(f"aten.max_pool{n}d_with_indices.default", r(*own), three, (1,) * n, (1,) * n)
    yield from on_reals(
        make, ("upsample_linear1d.vec", x[1], (12,), True, None), ("upsample_bilinear2d.vec", x[2], None, False, (2.0, 2.0)),
        ("upsample_bicubic2d.vec", x[2], (12, 12), False, None), ("upsample_trilinear3d.vec", x[3], (12,) * 3, True, None),
        ("pixel_shuffle", (4, 16, 4, 4), 2), ("pixel_unshuffle", (4, 4, 8, 8), 2),
        ("instance_norm", [(4, 8, 4, 4), (8,), (8,)], None, None, True, 0.1, 1e-5, False),
    )  # fmt: skip
    for name, gates, states in (("lstm", 4, 2), ("gru", 3, 1), ("rnn_tanh", 1, 1), ("rnn_relu", 1, 1)):
        hidden = tuple(r(1, 4, 8) for _ in range(states))
        weights = (r(8 * gates, 6), r(8 * gates, 8), r(8 * gates), r(8 * gates))
        for first in (True, False):
            x = r(4, 3, 6) if first else r(3, 4, 6)
            start = hidden if states > 1 else hidden[0]
            yield c(f"aten.{name}.input", x, start, weights, True, 1, 0.0, True, False, first)
    yield c("autopar.batch_norm", r(4, 8, 4, 4), r(8), r(8), 1e-5)
    yield c("autopar.batch_norm", r(4, 8), r(8), r(8), 1e-5)
    still = (r(8, grad=False), r(8, grad=False).abs() + 0.5, False, 0.1, 1e-5, False)
    yield c("aten.batch_norm.default", r(4, 8, 4, 4), r(8), r(8), *still)
    yield c("aten.batch_norm.default", r(4, 8), None, None, *still)
    yield c("autopar.batch_norm", r(4, 8, 4), None, None, 1e-5)
    for weight in (r(8), None):
        yield c("autopar.batch_norm_running", r(4, 8, 4), r(8, grad=False), r(8, grad=False), weight, weight, 0.1, 1e-5)
    yield c("autopar.total", r(4, 8, grad=False))


def losses(make: Maker) -> Iterator[Example]:
    """Embeddings and losses; labels that do not count stand unevenly, on one rank alone for some splits."""
    c, r, w = make.call, make.real, make.whole
    yield c("aten.embedding.default", r(8, 4), w(4, 8, high=8))
    for padding in (0, 3, 7):
        yield c("aten.embedding.default", r(8, 4), w(4, 8, high=8), padding)
    yield c("aten.embedding.default", r(8, 4), w(4, 8, high=8), -1, True, False)
    yield c("autopar.embedding_vocabulary", r(8, 4), w(4, 8, high=8), "other")
    ids, factors = w(4, 8, high=8), r(4, 8)
    for mode in ("sum", "mean", "max"):
        for padding in (-1, 0, 3, 7):
            yield c("autopar.embedding_bag", r(8, 4), ids, None, mode, padding, False)
        yield c("autopar.embedding_bag_ragged", r(8, 4), ids.view(-1), torch.tensor([0, 5, 5, 20]), None, mode, 3)
    for padding in (-1, 3):
        yield c("autopar.embedding_bag", r(8, 4), ids, factors, "sum", padding, False)
    yield c("autopar.embedding_bag", r(8, 4), ids, None, "sum", -1, True)
    starts = torch.tensor([0, 0, 9, 30, 32])
    yield c("autopar.embedding_bag_ragged", r(8, 4), ids.view(-1), starts, r(32), "sum", -1, False, True)
    for mode, given in (("sum", None), ("mean", None), ("sum", factors)):
        yield c("autopar.embedding_bag_vocabulary", r(8, 4), ids, "other", given, mode, 3)
    labels = w(4, 8, high=12)
    labels[0, :] = -100
    labels[1, 2:5] = -100
    for smoothing in (0.0, 0.1):
        yield c("autopar.cross_entropy_sum", r(4, 8, 12), labels, -100, smoothing)
    yield c("autopar.cross_entropy_sum", r(4, 8, 12), labels.clamp(min=0), 0, 0.0)
    yield c("autopar.cross_entropy_sum", r(32, 12), labels.view(-1), -100, 0.0)
    for smoothing in (0.0, 0.1):
        yield c("autopar.cross_entropy_sum", r(4, 8, 12), labels.clamp(max=10), -100, smoothing, 11)
    yield c("autopar.cross_entropy_vocabulary", r(4, 8, 12), labels, "other", -100, 0.0)
    for lengths in (torch.full((8,), 2), torch.tensor([3, 1, 0, 2, 3, 3, 1, 2])):
        logs, targets = r(8, 8, 12).log_softmax(-1), w(8, 3, high=11) + 1
        yield c("autopar.ctc_losses", logs, targets, torch.full((8,), 8), lengths, 0, False)
    places = (torch.arange(8)[:, None] + torch.arange(8)) % 4 < 1
    places = places[..., None].expand(8, 8, 4)
    yield c("autopar.masked_scatter_by_sample", r(8, 8, 4), places, r(8, 2, 4))
    for reduction in (0, 1, 2):
        yield c("aten.cross_entropy_loss.default", r(32, 12), labels.view(-1), None, reduction)
        yield c("aten.cross_entropy_loss.default", r(4, 12, 8), labels, r(12, grad=False), reduction)
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"):
            yield c(f"aten.{name}.default", r(4, 8), r(4, 8, grad=False), reduction)
        yield c("aten.binary_cross_entropy.default", r(4, 8), r(4, 8, grad=False), None, reduction)
        for weight in (None, r(8, grad=False)):
            target = "aten.binary_cross_entropy_with_logits.default"
            yield c(target, r(4, 8), r(4, 8, grad=False), None, weight, reduction)


def every(table: RuleTable, seed: int = 0) -> Iterator[Example]:
    make = Maker(seed)
    yield from elementwise(table, make)
    for family in FAMILIES:
        yield from family(make)


def matrices(make: Maker) -> Iterator[Example]:
    """Functions of positive definite matrices, and spectra of signals."""
    c, r = make.call, make.real

    def positive() -> Tensor:
        x = r(4, 3, 3).detach()
        return (x @ x.mT + 3 * torch.eye(3, dtype=x.dtype)).requires_grad_()

    for name in ("linalg_cholesky", "cholesky_inverse", "logdet"):
        yield c(f"aten.{name}.default", positive())
    yield c("aten.cholesky_solve.default", r(4, 3, 2), positive())
    yield c("aten.logdet.default", positive().detach()[0])
    window = r(8).detach()
    stft = (8, 2, None, window, False, None, True)
    yield c("aten.stft.default", r(4, 16), *stft)
    yield c("aten.stft.default", r(16), *stft)
    spectrum = torch.stft(r(4, 16).detach(), 8, 2, window=window, return_complex=True).detach().requires_grad_()
    yield c("aten.istft.default", spectrum, 8, 2, None, window, True)


def experts(make: Maker) -> Iterator[Example]:
    """Mixtures of experts: even routing, all tokens to one expert, none to most, one expert twice, no gate."""
    c, r, w = make.call, make.real, make.whole
    gate, up, down = r(4, 8, 5), r(4, 8, 5), r(4, 5, 8)
    some = w(8, 4, high=3)
    some[:4] = 3
    for lead in ((8,), (4, 8), (4, 2, 4)):
        chosen = w(*lead, 8, high=99).argsort(-1)[..., :4] % 4
        yield c("autopar.experts", r(*lead, 5), r(*lead, 4), chosen, gate, up, down, None, None, "silu")
    for indices in (some, torch.zeros_like(some), torch.full_like(some, 2)):
        yield c("autopar.experts", r(8, 5), r(8, 4), indices, gate, up, down, None, None, "gelu")
    yield c("autopar.experts", r(8, 5), r(8, 4), some, None, up, down, None, None, "relu2")
    yield c("autopar.experts", r(8, 5, grad=False), r(8, 4), some, None, up, down, None, None, "gelu_tanh")
    pairs, biases = r(4, 5, 16), r(4, 16)
    oss = "silu alpha=1.702 limit=0.5 shift=1.0 is_interleaved is_transposed"
    yield c("autopar.experts", r(8, 5), r(8, 4), some, None, pairs, r(4, 8, 5), None, biases, oss)
    yield c("autopar.experts", r(8, 5), r(8, 4), some, None, r(4, 16, 5), down, None, None, "gelu is_interleaved")
    yield c("autopar.experts", r(8, 5), r(8, 4), some, gate, up, down, r(4, 8), r(4, 8), "silu limit=0.5")
    yield c("autopar.experts_dispatch", r(8, 5), r(8, 4), some, gate, up, down, None, None, "silu", "other", 8)
    for dim, shape in ((0, (4, 4)), (1, (8, 4))):
        yield c("autopar.scatter_sum", w(8, 4, high=4), r(8, 4), dim, shape)
    yield c("autopar.scatter_sum", w(8, 4, high=4), r(8, 4, grad=False), 0, (4, 4))


FAMILIES = (moved, whole, reductions, products, losses, experts, matrices)
