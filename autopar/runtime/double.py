"""A model in float64: whether what two float32 runs differ by is rounding.

A difference past the limits may be nothing but rounding that the model amplifies (a key's bias, whose true gradient is
zero). Then the same plan in float64 agrees with one device in float64, and one device alone is off by as much between
the two dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.errors import TraceError
from autopar.graph.ir import Graph
from autopar.graph.trace import trace
from autopar.lower.emit import OPAQUE
from autopar.opaque_ops import MODULE, region_of

if TYPE_CHECKING:
    from autopar.runtime.verify import Subject


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


@dataclass(frozen=True, slots=True)
class DoubleSubject:
    """A subject whose parameters, buffers and inputs are the float32 ones, held in float64."""

    subject: Subject

    def build(self) -> nn.Module:
        """The model on CPU."""
        return self.subject.build().double()

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = False) -> dict[str, Tensor]:
        """Inputs by name."""
        batch = self.subject.make_batch(batch_size, seed=seed, padded=padded)
        return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


def traced_in_double(subject: DoubleSubject, graph: Graph) -> Graph | None:
    """The subject in float64 as the operators, names and blocks of ``graph``, so that its plans fit; None: they differ.

    Traced anew: constants that were folded in float32 are rounded.
    """
    batch = subject.make_batch(max(graph.batch_size, 2), seed=0, padded=True)
    example = {name: value.to("meta") for name, value in batch.items()}
    model = subject.build()
    try:
        with in_double():
            found = trace(model, (), example, name=graph.name, opaque=_opaque_modules(graph), exact=graph.exact)
    except TraceError:
        return None
    if _outline(found) != _outline(graph):
        return None
    return replace(found, fingerprint=graph.fingerprint, blocks=graph.blocks, mixing=graph.mixing)


def _opaque_modules(graph: Graph) -> tuple[str, ...]:
    """Paths of the modules that run as they are written."""
    regions = (region_of(str(op.args[0])) for op in (*graph.prelude, *graph.ops) if op.target == OPAQUE)
    return tuple(dict.fromkeys(region.name for region in regions if region.kind == MODULE))


def _outline(graph: Graph) -> tuple[object, ...]:
    """What two graphs share that differ by dtypes alone."""
    ops = (*graph.prelude, *graph.ops)
    return (
        tuple(p.name for p in graph.parameters),
        tuple((op.name, op.target, op.operands, tuple(o.shape for o in op.outputs)) for op in ops),
        tuple((b.index, b.label) for b in graph.blocks),
    )
