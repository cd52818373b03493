"""Function modes: contexts that change calls of torch functions while user code runs.

- :func:`for_products` casts the operands of products to one dtype, as ``torch.autocast`` does. Buffers in float32 stay in float32
  (:func:`autopar.models.graph_for_plan.on_meta`), and code creates tensors in it (``torch.zeros(n, h)``), so that positions which are
  added to an input promote all that follows. The kernels of products do not promote. Functions without a kernel for half
  precision (decompositions, Fourier transforms, distances) take and return float32, also as under ``torch.autocast``.
- :class:`Selections` traces losses of the elements that a boolean mask selects, CTC losses and covariances.
- :func:`in_double` runs a model in float64.

:func:`apart_from_trace` runs code outside of the modes of a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_ALL = 99
"""A number of arguments that no function reaches: all of them are operands."""
_PRODUCTS = (
    *("linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot"),
    *("addmm", "addmv", "addbmm", "baddbmm", "einsum", "tensordot", "cdist", "cross", "prelu", "lerp"),
    *(f"conv{kind}{n}d" for n in (1, 2, 3) for kind in ("", "_transpose")),
    *(f"{kind}{end}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for end in ("", "_cell")),
)
_OPERANDS = {
    **dict.fromkeys(_PRODUCTS, _ALL),
    "grid_sample": 2,
    "scaled_dot_product_attention": 3,  # a mask may be in another dtype
    "multi_head_attention_forward": _ALL,  # it adds a mask in a product
}
"""Names of functions of torch whose operands must have one dtype, with the number of first arguments that are operands."""
_OF_DOUBLES = ("layer_norm", "group_norm")
"""Names of functions whose kernels accept float32 weights with an input in half precision, but not with one in float64."""
_WRITERS = (
    "index_add", "index_copy", "index_put", "index_reduce", "masked_scatter", "scatter", "scatter_add", "scatter_reduce",
)  # fmt: skip
_INTO = ("__setitem__", *(f"{name}{end}" for name in _WRITERS for end in ("", "_")))
"""Names of functions that write values into their first argument and require that the values have its dtype."""
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
"""Names of functions that, like those of torch.linalg and torch.fft above, have no kernel for bfloat16.

They were found by calling each function on a CPU in torch 2.13. GPUs lack the kernels of the decompositions and transforms too.
"""
_PLACES = (torch, Tensor, torch.nn.functional, torch._C._nn, torch._VF)


def for_products(model: torch.nn.Module) -> AbstractContextManager[object]:
    """Return a context for the forward of ``model``, in which products take operands in the dtype of its parameters.

    The context does nothing if the floating-point parameters are in float32 or in more than one dtype.
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return _InOneDtype(dtypes.pop()) if len(dtypes) == 1 and torch.float32 not in dtypes else nullcontext()


class _InOneDtype(TorchFunctionMode):
    """Casts float32 operands of a product to ``dtype`` if another operand of the call has ``dtype``.

    Values that are written into a tensor take its dtype. Arguments in ``dtype`` become float32 in calls of functions that have no kernel
    for half precision. If ``dtype`` is float64, which has all kernels, these functions count as products.
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
        options = dict(kwargs or {})
        if func in self._of_singles:
            return func(*self._cast(args, torch.float32), **self._cast(options, torch.float32))
        count = self._counts.get(func, 0)
        if count and self._is_mixed((args, options)):
            args = (*self._cast(args[:count], self._dtype), *args[count:])
            options = self._cast(options, self._dtype) if count == _ALL else options
        elif func in self._into and self._is_mixed((args, options)):
            target = args[0] if args else options["input"]
            args = tuple(v if v is target else self._cast(v, target.dtype) for v in args)
            options = {key: v if v is target else self._cast(v, target.dtype) for key, v in options.items()}
        return func(*args, **options)

    def _is_mixed(self, values: Any) -> bool:
        """Return whether tensors in both dtypes, float32 and that of the parameters, are among ``values``."""
        dtypes = {leaf.dtype for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)}
        return torch.float32 in dtypes and self._dtype in dtypes

    def _cast(self, values: Any, dtype: torch.dtype) -> Any:
        """Return ``values`` with all tensors in float32 and in the dtype of the parameters cast to ``dtype``."""
        mixed = (torch.float32, self._dtype)
        return pytree.tree_map_only(Tensor, lambda value: value.to(dtype) if value.dtype in mixed else value, values)


def _named(name: str) -> list[Any]:
    """Return the functions and methods of torch called ``name``."""
    return [getattr(place, name) for place in _PLACES if hasattr(place, name)]


def _of_singles() -> frozenset[Any]:
    """Return the functions that have no kernel for half precision."""
    functions = {function for name in _OF_SINGLES for function in _named(name)}
    for namespace, names in ((torch.linalg, _LINALG), (torch.fft, _FOURIER)):
        functions |= {getattr(namespace, name) for name in names if hasattr(namespace, name)}
    return frozenset(functions)


_MASKED = (torch.masked_select, Tensor.masked_select, Tensor.__getitem__)
_ELEMENTWISE = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits
)  # fmt: skip
_COVARIANCES = (torch.cov, Tensor.cov, torch.corrcoef, Tensor.corrcoef)
_REDUCTIONS = ("mean", "sum")
_MEANS, _SUMS = (torch.mean, Tensor.mean), (torch.sum, Tensor.sum)


class Selections(TorchFunctionMode):
    """Replaces losses, sums and means of selected elements by those of all elements in which the others do not count.

    So it does with functions that read values without need: CTC losses and covariances.

    The size of ``x[mask]`` and of ``masked_select`` depends on values, so it is not known in a trace. A loss, a sum or a mean of the
    selection has a form without it: targets that are not selected become the ignored class, and other elements that are not selected
    become zeros.

    torch's CTC loss reads the lengths as values. It is traced as one loss for each sample and their sum or mean. Targets may be padded,
    [samples, length], or a selection from padded ones, which are then moved to the front of each row in their order. Where the length
    of a sample's targets is not the number of elements selected in its row, torch would divide the selection elsewhere: the loss of
    such a sample is nan.
    """

    def __init__(self) -> None:
        super().__init__()
        # By the id of the selection: the selection, the tensor and the mask that it was made of, and the versions of these two. Holding
        # the selection keeps its id from being used again.
        self._selected: dict[int, tuple[Tensor, Tensor, Tensor, tuple[int, int]]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        loss = None
        if func is F.ctc_loss:
            loss = self._ctc(*args, **options)
        elif func in _COVARIANCES:
            loss = _covariance(*args, is_scaled=func in _COVARIANCES[2:], **options)
        elif func is F.cross_entropy:
            loss = self._classes(*args, **options)
        elif func in _ELEMENTWISE:
            loss = self._elements(func, *args, **options)
        elif func in (*_MEANS, *_SUMS) and len(args) == 1 and not options:
            values, mask = self._source_of(args[0])
            if mask is not None:
                return _reduced(values, _expanded(mask, values), is_mean=func in _MEANS)
        if loss is not None:
            return loss
        result = func(*args, **options)
        if func in _MASKED and len(args) == 2 and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            values, mask = args
            if mask.dim() and mask.shape == values.shape[: mask.dim()]:
                self._selected[id(result)] = result, values, mask, (values._version, mask._version)
        return result

    def _source_of(self, selection: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the tensor and the mask that ``selection`` was selected from; ``selection`` and None if it is no selection.

        None is also returned if the selection, the tensor or the mask was written to since.
        """
        if id(selection) not in self._selected:
            return selection, None
        _, values, mask, versions = self._selected[id(selection)]
        if selection._version or versions != (values._version, mask._version):
            return selection, None
        return values, mask

    def _sources_of(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the tensors that ``first`` and ``second`` were selected from by one mask, and the mask; None for other tensors."""
        (first, mask), (second, other_mask) = self._source_of(first), self._source_of(second)
        return None if mask is None or mask is not other_mask else (first, second, mask)

    def _classes(
        self, logits: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int = -100, **options: Any
    ) -> Tensor | None:
        """Return the cross-entropy of selected logits; None unless the logits and targets are selections by the same mask."""
        sources = self._sources_of(logits, target) if _is_reduced(options) else None
        if sources is None:
            return None
        logits, target, mask = sources
        if mask.dim() != target.dim() or logits.dim() != target.dim() + 1:
            return None
        target = target.masked_fill(~mask, ignore_index)
        return F.cross_entropy(logits.flatten(0, -2), target.flatten(), weight, ignore_index=ignore_index, **options)

    def _elements(self, loss: Any, first: Tensor, second: Tensor, *rest: Any, **options: Any) -> Tensor | None:
        """Return an elementwise loss of two selections; None unless both are from tensors of one shape by the same mask."""
        sources = self._sources_of(first, second) if _is_reduced(options) and not rest else None
        if sources is None or options.get("weight") is not None:
            return None
        first, second, mask = sources
        if first.shape != second.shape:
            return None
        mask = _expanded(mask, first)
        values = loss(first.masked_fill(~mask, 0), second.masked_fill(~mask, 0), **{**options, "reduction": "none"})
        return _reduced(values, mask, is_mean=options.get("reduction") != "sum")

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
        """Return the CTC loss in the form that is traced; None if torch itself has to take or refuse the arguments."""
        values, mask = self._source_of(targets)
        is_batch = log_probs.dim() == 3 and values.dim() == 2 and values.shape[0] == log_probs.shape[1]
        if not is_batch or reduction not in ("none", *_REDUCTIONS):
            return None
        lengths = [_lengths(value) for value in (input_lengths, target_lengths)]
        if mask is not None:
            order = (~mask).to(torch.int64).sort(dim=1, stable=True).indices
            values = values.masked_fill(~mask, blank).gather(1, order)
        losses: Tensor = torch.ops.autopar.ctc_losses(log_probs, values, *lengths, blank, zero_infinity)
        if mask is not None:
            losses = losses.masked_fill(mask.sum(1) != lengths[1], torch.nan)
        if reduction == "none":
            return losses
        return losses.sum() if reduction == "sum" else (losses / lengths[1].clamp(min=1)).mean()


def _covariance(
    input: Tensor,  # noqa: A002  a keyword of torch
    *,
    is_scaled: bool,
    correction: int = 1,
    **weights: Tensor | None,
) -> Tensor | None:
    """Return ``torch.cov`` of rows, or ``torch.corrcoef`` (``is_scaled``); None if torch itself has to take or refuse the arguments.

    Torch asks whether it divides by a positive number, which reads a value.
    """
    is_weighted = any(weight is not None for weight in weights.values())
    if input.dim() != 2 or input.is_complex() or is_weighted or input.shape[1] <= correction:
        return None
    centred = input - input.mean(1, keepdim=True)
    result = centred @ centred.T / (input.shape[1] - correction)
    if not is_scaled:
        return result
    scale = result.diagonal().sqrt()
    return (result / scale[:, None] / scale).clamp(-1, 1)


def _is_reduced(options: Mapping[str, Any]) -> bool:
    """Return whether the keyword arguments of a loss reduce it to one number, without the deprecated ``size_average`` and ``reduce``."""
    is_old = options.get("size_average") is not None or options.get("reduce") is not None
    return options.get("reduction", "mean") in _REDUCTIONS and not is_old


def _expanded(mask: Tensor, values: Tensor) -> Tensor:
    """Expand ``mask``, whose shape is that of the leading dims of ``values``, to the shape of ``values``."""
    return mask.reshape(*mask.shape, *[1] * (values.dim() - mask.dim())).expand_as(values)


def _reduced(values: Tensor, mask: Tensor, *, is_mean: bool) -> Tensor:
    """Return the sum or mean of the elements of ``values`` that ``mask`` selects.

    Floating-point values are added in float32 or wider, because the sum for a mean may leave the range of float16.
    """
    wide = values.to(torch.promote_types(values.dtype, torch.float32)) if values.is_floating_point() else values
    total = wide.masked_fill(~mask, 0).sum()
    return total / mask.sum() if is_mean else total


def _lengths(lengths: Any) -> Tensor:
    """Return ``lengths``, a tensor or a list of one number for each sample, as a tensor.

    If all numbers in a list are equal, the tensor is filled with that number, so that the trace holds for any number of samples.
    """
    if isinstance(lengths, Tensor) or len(set(lengths)) > 1:
        return torch.as_tensor(lengths, dtype=torch.int64)
    return torch.full((len(lengths),), lengths[0])


class _Doubled(TorchFunctionMode):
    """Replaces float32 by float64 in all calls of a model's code: in casts, in factories and as the dtype of an accumulation."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args, named = pytree.tree_map(
            lambda value: torch.float64 if value is torch.float32 else value, (args, dict(kwargs or {}))
        )
        if func is torch._grouped_mm and [x.ndim for x in args] == [2, 3]:
            func = _grouped_mm
        return func(*args, **named)


def _grouped_mm(
    rows: Tensor, matrices: Tensor, offs: Tensor, bias: None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return the products of the groups of ``rows`` [s, k] with ``matrices`` [g, k, n], a tensor [s, n], also in float64.

    ``torch._grouped_mm`` has no kernel for float64 in torch 2.13.

    Args:
        offs: holds for each group the row after its last one, [g]. The results of rows after the last group are zeros.
    """
    ends = offs.tolist()
    groups = zip([0, *ends[:-1]], ends, matrices, strict=True)
    products = [rows[start:end] @ matrix for start, end, matrix in groups]
    return torch.cat([*products, rows.new_zeros(len(rows) - ends[-1], matrices.shape[-1])])


@contextmanager
def in_double() -> Iterator[None]:
    """Inside, code computes in float64 what it would compute in float32, by default or by name."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubled():
            yield
    finally:
        torch.set_default_dtype(before)


def apart_from_trace(function: Callable[[], Any], modes: Sequence[TorchFunctionMode]) -> Any:
    """Return what ``function`` returns, run where the tracer does not see it.

    The modes of torch belong to a thread, so that those of the trace do not hold in another one. The flags of an export are off while
    ``function`` runs, and its random numbers do not change the state of the generator.

    Args:
        function: runs in a thread of its own.
        modes: function modes in which the caller has started the trace. The user's code runs in them too.
    """

    def under_modes() -> Any:
        with torch.random.fork_rng(devices=[]), ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            return function()

    with (
        mock.patch.object(torch.compiler, "_is_exporting_flag", new=False),
        mock.patch.object(torch.compiler, "_is_compiling_flag", new=False),
        ThreadPoolExecutor(1) as pool,
    ):
        return pool.submit(under_modes).result()
