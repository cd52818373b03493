"""The amount of work of an operator, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.graph.graph import Op, TensorSpec

Specs = Sequence[TensorSpec]

FLOAT = 4
"""Bytes of the type in which torch computes the losses of half precision logits."""


@dataclass(frozen=True, slots=True)
class Product:
    """``count`` products of matrices [rows, depth] and [depth, columns] in one kernel."""

    count: int
    rows: int
    columns: int
    depth: int

    @property
    def flops(self) -> float:
        """Two for each multiply-add."""
        return 2.0 * self.count * self.rows * self.columns * self.depth

    @property
    def gradients(self) -> tuple[Product, Product]:
        """Those that give the gradients of the left and of the right matrix."""
        return (
            Product(self.count, self.rows, self.depth, self.columns),
            Product(self.count, self.depth, self.columns, self.rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One operator, forward and backward.

    Attributes:
        flops, backward_flops: of matrix products; elementwise work counts as bytes alone.
        products, backward_products: where their shapes are known; their flops add up to those above.
        matmuls, backward_matmuls: calls of a library for them, of which each takes ``Overheads.product_s``.
        smallest_dim: of the products' m, n, k; where efficiency curves are read.
        is_attention: the products are those of fused attention, which has a rate of its own.
        dtype: in which products multiply, where that is not the operator's own.
        num_bytes, backward_bytes: read and written.
        beside_bytes: read and written in backward by kernels other than the products' (sums for a bias).
        launches, backward_launches: kernels; 0 for a view.
        saved: positions of the operands that backward needs.
        saves_output: backward needs the output.
        saved_bytes: what backward needs besides.
        workspace_bytes, backward_workspace_bytes: temporaries inside the operator.
        function, elements: the elementwise function that it computes (``autopar.cost.operators.work.FUNCTIONS``; empty: none of them)
            and of how many elements.
    """

    flops: float = 0.0
    backward_flops: float = 0.0
    products: tuple[Product, ...] = ()
    backward_products: tuple[Product, ...] = ()
    matmuls: int = 0
    backward_matmuls: int = 0
    smallest_dim: int = 1
    is_attention: bool = False
    dtype: str = ""
    num_bytes: int = 0
    backward_bytes: int = 0
    beside_bytes: int = 0
    launches: int = 1
    backward_launches: int = 0
    saved: tuple[int, ...] = ()
    saves_output: bool = False
    saved_bytes: int = 0
    workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    function: str = ""
    elements: int = 0


def total(specs: Specs) -> int:
    """Bytes of all."""
    return sum([spec.num_bytes for spec in specs])


def with_grad(operands: Specs) -> list[TensorSpec]:
    """Those that backward reaches."""
    return [spec for spec in operands if spec.requires_grad]


def argument(op: Op, position: int, name: str, default: object) -> object:
    """A positional or named argument of an operator."""
    if position < len(op.args):
        return op.args[position]
    return dict(op.kwargs).get(name, default)
