"""The amount of work of an operator, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.graph.graph import TensorSpec

Specs = Sequence[TensorSpec]

FLOAT = 4
"""The bytes of the dtype in which torch computes losses of half precision logits."""


@dataclass(frozen=True, slots=True)
class Product:
    """``count`` products of matrices [rows, depth] and [depth, columns] in one kernel."""

    count: int
    rows: int
    columns: int
    depth: int

    @property
    def flops(self) -> float:
        """Two flops for each multiply-add."""
        return 2.0 * self.count * self.rows * self.columns * self.depth

    @property
    def gradients(self) -> tuple[Product, Product]:
        """The products that give the gradients of the left and of the right matrix."""
        return (
            Product(self.count, self.rows, self.depth, self.columns),
            Product(self.count, self.depth, self.columns, self.rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one operator, forward and backward.

    Attributes:
        flops, backward_flops: flops of matrix products; elementwise work counts only as bytes.
        products, backward_products: the products where their shapes are known; their flops add up to those above.
        matmuls, backward_matmuls: library calls for products, each of which takes ``Overheads.product_s``.
        smallest_dim: the smallest of the products' m, n, k, at which efficiency curves are read.
        is_attention: whether the products are those of fused attention, which has its own rate.
        dtype: the dtype of products where it is not the operator's.
        num_bytes, backward_bytes: bytes read and written.
        backward_extra_bytes: bytes read and written in backward by kernels other than the products' (sums for a bias).
        launches, backward_launches: kernel launches; 0 for a view.
        saved: the positions of the operands that backward needs.
        saves_output: whether backward needs the output.
        saved_bytes: what else backward needs.
        workspace_bytes, backward_workspace_bytes: temporaries inside the operator.
        function, elements: the elementwise function that it computes (``autopar.cost.operators.work.FUNCTIONS``; empty: none), and the
            number of its elements.
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
    backward_extra_bytes: int = 0
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
    """Return the bytes of all specs."""
    return sum([spec.num_bytes for spec in specs])


def with_grad(operands: Specs) -> list[TensorSpec]:
    """Return the operands with a gradient."""
    return [spec for spec in operands if spec.requires_grad]
