"""Modes of a user's code: stretches without gradient, operands of a product in one dtype, losses of selections, and all of it in float64.

A graph is one list of operators, and ``run_decompositions`` too forgets where gradients were off: what was computed there
would get one. So every tensor that enters such a stretch is cut off by ``detach``, which stays.

Buffers in single precision stay so (``tracing.on_meta``), and code makes tensors in it (``torch.zeros(n, h)``), so that positions
that are added to an input make all that follows single. The kernels of products take one dtype and promote nothing; so what is
single there takes the parameters' dtype, as under ``torch.autocast``. What promotes by itself does so. What has no kernel for halves
(decompositions, Fourier transforms, distances) takes and gives float32, as under ``torch.autocast`` too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.errors import TraceError
from autopar.tracing.side_effects import root_of, writes

_REGION = "wrap_with_set_grad_enabled"
_DROPOUTS = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
)


def cut_off(program: torch.export.ExportedProgram, place_of: Callable[[fx.Node], str]) -> None:
    """Puts ``detach`` behind what enters a stretch without gradient; changes ``program``.

    Args:
        place_of: the user's line of a node, for messages.

    Raises:
        TraceError: an activation with a gradient is written in place where gradients are off.
    """
    trained = {
        getattr(spec.arg, "name", ""): (spec.target or "").removeprefix("model.")
        for spec in program.graph_signature.input_specs
        if spec.kind == InputKind.PARAMETER
    }
    for module in program.graph_module.modules():
        for node in list(module.graph.nodes) if isinstance(module, fx.GraphModule) else ():
            # a dropout of nothing returns its argument, with its gradient; torch's decomposition returns a copy
            if node.target in _DROPOUTS and not (node.args[1] and node.args[2]):
                node.replace_all_uses_with(node.args[0])
                module.graph.erase_node(node)
    _Marker(place_of, trained).walk(program.graph_module, set(trained), off=False)


def written_parameter(name: str, place: str = "") -> TraceError:
    """Forward writes to a parameter."""
    return TraceError(
        f"The parameter {name} is written to in forward",
        where=place,
        fix="Write to it after optimizer.step(), outside of the model, or make it a buffer",
    )


class _Marker:
    """One pass over a module and the regions inside; ``parameters``: their names in the model."""

    def __init__(self, place_of: Callable[[fx.Node], str], parameters: dict[str, str]) -> None:
        self.place_of, self.parameters = place_of, parameters

    def walk(self, module: fx.GraphModule, with_gradient: set[str], *, off: bool) -> None:
        """``with_gradient``: names of the placeholders of ``module`` that have one; grows by what depends on them."""
        for node in list(module.graph.nodes):
            if node.op == "output":
                continue
            operands = [n for n in node.all_input_nodes if n.name in with_gradient]
            if node.op == "call_function" and writes(node):
                self._check(node, with_gradient, off)
            region = region_of(node, module)
            if region is not None:
                inner, is_on = region
                places = [n for n in inner.graph.nodes if n.op == "placeholder"]
                arguments = [a for a in node.args if isinstance(a, fx.Node) and a.op != "get_attr"]
                entering = {p.name for p, a in zip(places, arguments, strict=False) if a.name in with_gradient}
                self.parameters |= {
                    p.name: self.parameters[a.name]
                    for p, a in zip(places, arguments, strict=False)
                    if a.name in self.parameters
                }
                if not is_on and not off:
                    _detach(inner, places)
                self.walk(inner, entering, off=off or not is_on)
                if not is_on:
                    continue
            if operands and not off:
                with_gradient.add(node.name)

    def _check(self, node: fx.Node, with_gradient: set[str], off: bool) -> None:
        written, detached = root_of(node.args[0])
        if written.op == "placeholder" and written.name in self.parameters:
            raise written_parameter(self.parameters[written.name], self.place_of(node))
        if written.name in with_gradient and (off or detached):
            raise TraceError(
                f"{node.target} writes in place to {written.name}, which has a gradient, where gradients are off",
                where=self.place_of(node) or node.name,
                fix="Write x = x.masked_fill(...) or the like, with gradients on, or detach a copy",
            )


def region_of(node: fx.Node, module: fx.GraphModule) -> tuple[fx.GraphModule, bool] | None:
    """The stretch that a call runs, and whether gradients are on in it; None for any other call."""
    target = node.target
    if not isinstance(target, torch._ops.HigherOrderOperator) or str(target._name) != _REGION:
        return None
    head = node.args[1]
    assert isinstance(head, fx.Node)
    inner = getattr(module, str(head.target))
    assert isinstance(inner, fx.GraphModule)
    return inner, bool(node.args[0])


def _detach(inner: fx.GraphModule, places: list[fx.Node]) -> None:
    for place in places:
        if not (isinstance(place.meta.get("val"), Tensor) and place.meta["val"].is_floating_point()):
            continue
        users = [user for user in place.users if user.op != "output"]
        with inner.graph.inserting_after(places[-1]):
            made = inner.graph.call_function(torch.ops.aten.detach.default, (place,))
        made.meta = dict(place.meta)
        for user in users:
            user.replace_input_with(place, made)
    inner.recompile()


_ALL = 99
_OPERANDS = {
    **dict.fromkeys(
        ("linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot"), _ALL
    ),
    **dict.fromkeys(
        ("addmm", "addmv", "addbmm", "baddbmm", "einsum", "tensordot", "cdist", "cross", "prelu", "lerp"), _ALL
    ),
    **dict.fromkeys((f"conv{kind}{n}d" for n in (1, 2, 3) for kind in ("", "_transpose")), _ALL),
    **dict.fromkeys(
        (f"{kind}{end}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for end in ("", "_cell")), _ALL
    ),
    "grid_sample": 2,
    "scaled_dot_product_attention": 3,  # a mask may be in another dtype
    "multi_head_attention_forward": _ALL,  # it adds a mask in a product
}
"""Functions of torch whose operands have one dtype, and how many of the first arguments are operands."""
_OF_DOUBLES = ("layer_norm", "group_norm")
"""Whose kernels take weights in float32 beside halves, not beside doubles."""
_WRITERS = (
    "index_add", "index_copy", "index_put", "index_reduce", "masked_scatter", "scatter", "scatter_add", "scatter_reduce",
)  # fmt: skip
_INTO = ("__setitem__", *(f"{name}{end}" for name in _WRITERS for end in ("", "_")))
"""What writes values into its first argument, of whose dtype they are."""
_LINALG = (
    "cholesky", "cholesky_ex", "cond", "det", "eig", "eigh", "eigvals", "eigvalsh", "householder_product", "inv",
    "inv_ex", "ldl_factor", "ldl_solve", "lstsq", "lu", "lu_factor", "lu_factor_ex", "lu_solve", "matrix_rank",
    "pinv", "qr", "slogdet", "solve", "solve_ex", "solve_triangular", "svd", "svdvals", "tensorinv", "tensorsolve",
    "vander",
)  # fmt: skip
_FOURIER = tuple(
    f"{inverse}{kind}fft{dims}" for inverse in ("", "i") for kind in ("", "r", "h") for dims in ("", "2", "n")
)
_OF_SINGLES = (
    "cdist", "pdist", "cholesky", "cholesky_inverse", "cholesky_solve", "inverse", "det", "logdet", "slogdet",
    "svd", "qr", "pinverse", "triangular_solve", "lu_solve", "geqrf", "orgqr", "ormqr", "complex", "polar",
    "view_as_complex", "quantile", "nanquantile", "huber_loss", "stft", "istft", "ctc_loss", "multi_margin_loss",
    "multilabel_margin_loss", "avg_pool3d", "local_response_norm",
)  # fmt: skip
"""Without a kernel for bfloat16 on a CPU in torch 2.13, and on GPUs the decompositions and transforms: found by calling them."""
_PLACES = (torch, Tensor, torch.nn.functional, torch._C._nn, torch._VF)


def for_products(model: torch.nn.Module) -> AbstractContextManager[object]:
    """A context for the model's forward: products have operands in the dtype of its parameters, if that is one other than float32."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return _InOneDtype(dtypes.pop()) if len(dtypes) == 1 and torch.float32 not in dtypes else nullcontext()


class _InOneDtype(TorchFunctionMode):
    """Casts operands of products that are float32 to ``dtype`` where another operand, or a parameter, has it.

    Halves become float32 where nothing computes with them.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        names = dict(_OPERANDS) | (dict.fromkeys(_OF_DOUBLES, _ALL) if dtype == torch.float64 else {})
        self._counts = {function: count for name, count in names.items() for function in _named(name)}
        self._into = {function for name in _INTO for function in _named(name)}
        self._of_singles = _of_singles()
        if dtype == torch.float64:
            self._counts |= dict.fromkeys(self._of_singles, _ALL)
            self._of_singles = frozenset()
        self._dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in self._of_singles:
            return func(*self._cast(args, torch.float32), **self._cast(given, torch.float32))
        count = self._counts.get(func, 0)
        if count and self._is_mixed((args, given)):
            args = (*self._cast(args[:count], self._dtype), *args[count:])
            given = self._cast(given, self._dtype) if count == _ALL else given
        elif func in self._into and self._is_mixed((args, given)):
            target = args[0] if args else given["input"]
            args = tuple(v if v is target else self._cast(v, target.dtype) for v in args)
            given = {key: v if v is target else self._cast(v, target.dtype) for key, v in given.items()}
        return func(*args, **given)

    def _is_mixed(self, values: Any) -> bool:
        dtypes = {leaf.dtype for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)}
        return torch.float32 in dtypes and self._dtype in dtypes

    def _cast(self, values: Any, dtype: torch.dtype) -> Any:
        """Floating tensors of the two dtypes in ``dtype``."""
        own = (torch.float32, self._dtype)
        return pytree.tree_map_only(Tensor, lambda value: value.to(dtype) if value.dtype in own else value, values)


def _named(name: str) -> list[Any]:
    """Functions and methods of that name."""
    return [getattr(place, name) for place in _PLACES if hasattr(place, name)]


def _of_singles() -> frozenset[Any]:
    """Functions that have no kernel for halves."""
    found = {function for name in _OF_SINGLES for function in _named(name)}
    for place, names in ((torch.linalg, _LINALG), (torch.fft, _FOURIER)):
        found |= {getattr(place, name) for name in names if hasattr(place, name)}
    return frozenset(found)


_MASKED = (torch.masked_select, Tensor.masked_select, Tensor.__getitem__)
_ELEMENTWISE = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits
)  # fmt: skip
_REDUCTIONS = ("mean", "sum")
_MEANS, _SUMS = (torch.mean, Tensor.mean), (torch.sum, Tensor.sum)


class Selections(TorchFunctionMode):
    """While tracing, losses of what a mask selects are losses of everything in which the rest counts nothing; and CTC losses.

    How much ``x[mask]`` and ``masked_select`` give no trace knows. Where a loss, a mean or a sum of it is all that is asked,
    values that are not selected are ignored classes, or zeros of which nothing is added.

    Torch's CTC loss has no form without values. It is traced as the loss of each sample, then their sum or mean. Targets may be padded,
    [samples, length], or one after the other as a selection makes them: they are moved to the front of each row, in their order. Lengths
    of targets that are not the numbers selected of each row would part them elsewhere: the loss of such a sample is nan.
    """

    def __init__(self) -> None:
        super().__init__()
        # by identity of what was selected, which is held, so that identities stay theirs: of what, by what, and the versions of both
        self._selected: dict[int, tuple[Tensor, Tensor, Tensor, tuple[int, int]]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        loss = None
        if func is F.ctc_loss:
            loss = self._ctc(*args, **given)
        elif func is F.cross_entropy:
            loss = self._classes(*args, **given)
        elif func in _ELEMENTWISE:
            loss = self._elements(func, *args, **given)
        elif func in (*_MEANS, *_SUMS) and len(args) == 1 and not given:
            values, mask = self._of(args[0])
            if mask is not None:
                return _reduced(values, _like(mask, values), is_mean=func in _MEANS)
        if loss is not None:
            return loss
        result = func(*args, **given)
        if func in _MASKED and len(args) == 2 and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            values, mask = args
            if mask.dim() and mask.shape == values.shape[: mask.dim()]:
                self._selected[id(result)] = result, values, mask, (values._version, mask._version)
        return result

    def _of(self, given: Tensor) -> tuple[Tensor, Tensor | None]:
        """What was selected of what, by which mask; ``given`` and None for what is no selection, or was written to since."""
        if id(given) not in self._selected:
            return given, None
        _, values, mask, versions = self._selected[id(given)]
        if given._version or versions != (values._version, mask._version):
            return given, None
        return values, mask

    def _both(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """What two selections by one mask are of, and the mask; None for all else."""
        (one, mask), (other, again) = self._of(first), self._of(second)
        return None if mask is None or mask is not again else (one, other, mask)

    def _classes(
        self, logits: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int = -100, **given: Any
    ) -> Tensor | None:
        found = self._both(logits, target) if _is_reduced(given) else None
        if found is None:
            return None
        logits, target, mask = found
        if mask.dim() != target.dim() or logits.dim() != target.dim() + 1:
            return None
        target = target.masked_fill(~mask, ignore_index)
        return F.cross_entropy(logits.flatten(0, -2), target.flatten(), weight, ignore_index=ignore_index, **given)

    def _elements(self, loss: Any, first: Tensor, second: Tensor, *rest: Any, **given: Any) -> Tensor | None:
        found = self._both(first, second) if _is_reduced(given) and not rest else None
        if found is None or given.get("weight") is not None:
            return None
        first, second, mask = found
        if first.shape != second.shape:
            return None
        mask = _like(mask, first)
        values = loss(first.masked_fill(~mask, 0), second.masked_fill(~mask, 0), **{**given, "reduction": "none"})
        return _reduced(values, mask, is_mean=given.get("reduction") != "sum")

    def _ctc(
        self,
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: str = "mean",
        zero_infinity: bool = False,
    ) -> Tensor | None:
        """The loss as traced; None where torch is to say what it thinks of the arguments."""
        values, mask = self._of(targets)
        is_batch = log_probs.dim() == 3 and values.dim() == 2 and values.shape[0] == log_probs.shape[1]
        if not is_batch or reduction not in ("none", *_REDUCTIONS):
            return None
        lengths = [_lengths(value) for value in (input_lengths, target_lengths)]
        if mask is not None:
            order = (~mask).to(torch.int64).sort(dim=1, stable=True).indices
            values = values.masked_fill(~mask, blank).gather(1, order)
        each: Tensor = torch.ops.autopar.ctc_losses(log_probs, values, *lengths, blank, zero_infinity)
        if mask is not None:
            each = each.masked_fill(mask.sum(1) != lengths[1], torch.nan)
        if reduction == "none":
            return each
        return each.sum() if reduction == "sum" else (each / lengths[1].clamp(min=1)).mean()


def _is_reduced(given: Mapping[str, Any]) -> bool:
    """Whether a loss is one number, and its arguments say so in today's words."""
    is_old = given.get("size_average") is not None or given.get("reduce") is not None
    return given.get("reduction", "mean") in _REDUCTIONS and not is_old


def _like(mask: Tensor, values: Tensor) -> Tensor:
    """A mask of leading dims for all elements."""
    return mask.reshape(*mask.shape, *[1] * (values.dim() - mask.dim())).expand_as(values)


def _reduced(values: Tensor, mask: Tensor, *, is_mean: bool) -> Tensor:
    """The sum or mean of what is selected, in float32 or better: a mean's sum leaves the range of float16."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32)) if values.is_floating_point() else values
    total = wide.masked_fill(~mask, 0).sum()
    return total / mask.sum() if is_mean else total


def _lengths(given: Any) -> Tensor:
    """Of each sample; a list of one number for all is filled with it, which is right for any number of samples."""
    if isinstance(given, Tensor) or len(set(given)) > 1:
        return torch.as_tensor(given, dtype=torch.int64)
    return torch.full((len(given),), given[0])


class _Doubled(TorchFunctionMode):
    """Says float64 wherever the code of a model says float32: casts, factories, accumulation."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args, named = pytree.tree_map(_doubled, (args, dict(kwargs or {})))
        if func is getattr(torch, "_grouped_mm", None) and [x.ndim for x in args] == [2, 3]:
            func = _grouped_mm
        return func(*args, **named)


def _grouped_mm(
    rows: Tensor, matrices: Tensor, offs: Tensor, bias: None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """What torch has no kernel for in float64: rows [s, k] by matrices [g, k, n], group by group, into [s, n].

    Args:
        offs: [g], the row after the last of each group; rows after the last group come out as zeros.
    """
    ends = offs.tolist()
    groups = zip([0, *ends[:-1]], ends, matrices, strict=True)
    products = [rows[start:end] @ matrix for start, end, matrix in groups]
    return torch.cat([*products, rows.new_zeros(len(rows) - ends[-1], matrices.shape[-1])])


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_double() -> Iterator[None]:
    """Inside, models compute in float64 what their code computes in float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubled():
            yield
    finally:
        torch.set_default_dtype(before)
