"""Operands of a product in one dtype, where the plan's precision has put the model's parameters into another than float32.

Buffers in single precision stay so (``tracing.on_meta``), and code makes tensors in it (``torch.zeros(n, h)``), so that positions
that are added to an input make all that follows single. The kernels of products take one dtype and promote nothing; so what is
single there takes the parameters' dtype, as under ``torch.autocast``. What promotes by itself does so. What has no kernel for halves
(decompositions, Fourier transforms, distances) takes and gives float32, as under ``torch.autocast`` too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_ALL = 99
_OPERANDS = {
    **dict.fromkeys(
        ("linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot"), _ALL
    ),
    **dict.fromkeys(("addmm", "addmv", "addbmm", "baddbmm", "einsum", "tensordot", "cdist", "prelu", "lerp"), _ALL),
    **dict.fromkeys((f"conv{kind}{n}d" for n in (1, 2, 3) for kind in ("", "_transpose")), _ALL),
    **dict.fromkeys(
        (f"{kind}{end}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for end in ("", "_cell")), _ALL
    ),
    "grid_sample": 2,
    "scaled_dot_product_attention": 3,  # a mask may be in another dtype
    "multi_head_attention_forward": 3,
}
"""Functions of torch whose operands have one dtype, and how many of the first arguments are operands."""
_OF_DOUBLES = ("layer_norm", "group_norm")
"""Whose kernels take weights in float32 beside halves, not beside doubles."""
_INTO = tuple(f"{name}{end}" for name in ("index_add", "index_copy", "scatter", "scatter_add") for end in ("", "_"))
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
    "view_as_complex", "quantile", "nanquantile", "stft", "istft", "ctc_loss", "multi_margin_loss",
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
