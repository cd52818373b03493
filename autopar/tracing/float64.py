"""A user's code in float64: what it says of float32 is taken as said of float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


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
