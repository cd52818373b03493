"""Whether numbers in a graph count samples.

``loss.sum() / labels.numel()`` traces as a division by a number, that of the example's batch: for another batch size
it would be wrong, wherever it stands. Sizes may depend on the batch size, numbers and constants may not. Forward passes at two
sizes show of nearly all models that none does, in a fraction of the time of a trace; of the others a second trace tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import eq
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _pytree as pytree

from autopar.errors import TraceError
from autopar.graph.graph import Graph, Op
from autopar.ops.kernels import resolve

_SMALL = 64
"""Elements of a constant up to which its values are compared."""


class CountError(TraceError):
    """A number in a model depends on the batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a pass calls, without the sizes in it.

    Attributes:
        values: numbers, flags and small constants among its arguments.
        sizes: its other numbers.
        results: shapes.
        operands: shapes, where all of them are constants; else empty.
        dims: that it works along; none where each element of the results depends on its own place in the operands alone.
    """

    target: str
    values: tuple[object, ...]
    sizes: tuple[object, ...]
    results: tuple[tuple[int, ...], ...]
    operands: tuple[tuple[int, ...], ...] = ()
    dims: tuple[int, ...] | None = None


def call_of(
    target: Any, args: Sequence[object], kwargs: Mapping[str, object], result: object, *, depends: bool
) -> Call:
    """What a call of an operator is, for :func:`are_same`.

    Args:
        depends: on more than constants, such as the batch or a parameter.
    """
    values, sizes = _split(target, args, kwargs)
    operands = () if depends else _shapes((args, kwargs))
    return Call(
        target=str(target),
        values=values,
        sizes=sizes,
        results=_shapes(result),
        operands=operands,
        dims=_dims(target, args) if operands else None,
    )


def _dims(target: Any, args: Sequence[object]) -> tuple[int, ...] | None:
    """The dims that a call names, of its first tensor; None where it is elementwise or a view."""
    if torch.Tag.pointwise in target.tags or target.is_view:
        return None
    rank = next((leaf.dim() for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)), 0)
    named = [value for argument, value in zip(target._schema.arguments, args, strict=False) if "dim" in argument.name]
    return tuple(value % rank for value in pytree.tree_leaves(named) if isinstance(value, int) and rank)


def _shapes(values: object) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(leaf.shape) for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))


def _split(
    target: Any, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Numbers and small constants among the arguments of a call: values, then sizes, places and counts along a dim.

    Of an operator without a schema whole numbers are taken for sizes.
    """
    schema = getattr(target, "_schema", None)
    arguments = () if schema is None else schema.arguments
    named = {argument.name: argument for argument in arguments}
    given = [*zip_longest(arguments[: len(args)], args), *((named.get(key), value) for key, value in kwargs.items())]
    values: list[object] = []
    sizes: list[object] = []
    for argument, value in given:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, bool | int | float | complex | Tensor):
                is_size = isinstance(leaf, int) if schema is None else _is_size(schema.name, argument)
                (sizes if is_size else values).append(number_of(leaf))
    return tuple(values), tuple(sizes)


def _is_size(operator: str, argument: Any) -> bool:
    if operator == "aten::arange":  # what it counts to is a size, what it counts by a value
        return bool(argument.name == "end")
    return "int" in str(argument.type).lower() and argument.name != "steps"  # of linspace, whose values it changes


def number_of(value: object) -> object:
    """A number, flag or text as it is, the values of a small constant, and of anything else its type's name."""
    if isinstance(value, Tensor):
        if isinstance(value, FakeTensor) or value.device.type == "meta" or value.numel() > _SMALL:
            return "tensor"
        with unset_fake_temporarily():
            return str(value.tolist())
    if isinstance(value, (float, complex)) and value != value:  # noqa: PLR0124  not a number, which equals nothing
        return "nan"
    return value if isinstance(value, (bool, int, float, complex, str)) else type(value).__name__


def are_same(calls: Sequence[Call], larger: Sequence[Call]) -> bool:
    """Whether passes at two batch sizes show that no number or constant depends on the batch size; False where they may not.

    Of a constant whose shape does, elements are taken for the same as long as nothing joins or picks them along that dim.
    """
    return bool(calls) and len(calls) == len(larger) and all(map(_is_same, calls, larger))


def _is_same(one: Call, two: Call) -> bool:
    if (one.target, one.values, one.dims) != (two.target, two.values, two.dims):
        return False
    if any(map(eq, one.results, two.results)) and (one.sizes != two.sizes or one.operands != two.operands):
        return False
    if one.dims is None or one.operands == two.operands:
        return True
    if list(map(len, one.operands)) != list(map(len, two.operands)):
        return False
    cut = [
        [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if sizes[0] != sizes[1]]
        for shapes in zip(one.operands, two.operands, strict=True)
    ]
    return all(len(dims) < 2 for dims in cut) and not set(one.dims).intersection(cut[0])


def check_numbers(graph: Graph, larger: Graph) -> None:
    """Compare a trace with one at another batch size.

    Raises:
        CountError: numbers or constants differ, or the operators do.
    """
    there = {op.name: op for op in (*larger.prelude, *larger.ops)}
    constants, more = ({b.name: b.value for b in own.buffers if not b.fqn} for own in (graph, larger))
    for op in (*graph.prelude, *graph.ops):
        other = there.get(op.name)
        if other is None or (other.target, other.operands) != (op.target, op.operands):
            raise _depends(graph, larger, op, op.target, "other calls")
        (values, sizes), (larger_values, larger_sizes) = _given(op, constants), _given(other, more)
        for one, two in zip_longest(values, larger_values):
            if not _agree(one, two):
                raise _depends(graph, larger, op, _said(one), _said(two))
        if sizes != larger_sizes and op.outputs == other.outputs:
            raise _depends(graph, larger, op, f"{list(sizes)}", f"{list(larger_sizes)}")
    if graph.loss != larger.loss:
        raise _depends(graph, larger, graph.producer(graph.loss), f"{len(graph.ops)} calls", f"{len(larger.ops)}")


def _depends(graph: Graph, larger: Graph, op: Op | None, here: str, there: str) -> CountError:
    return CountError(
        f"A number in the model depends on the batch size: {here} for a batch of {graph.batch_size}, "
        f"{there} for one of {larger.batch_size}",
        where="" if op is None else op.source or op.module or op.name,
        fix="Take a mean, or divide by a count of the inputs: (labels != -100).sum()",
    )


def _given(op: Op, constants: Mapping[str, Tensor | None]) -> tuple[list[object], tuple[object, ...]]:
    """Numbers and constants among the arguments; and sizes."""
    target = resolve(op.target) if op.target.startswith("aten.") else None
    values, sizes = _split(target, op.args, dict(op.kwargs))
    return [*values, *(constants[r.name] for r in op.operands if constants.get(r.name) is not None)], sizes


def _agree(one: object, two: object) -> bool:
    """Whether two numbers are the same, or two constants where they share a place."""
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return bool(one == two) or (one != one and two != two)  # noqa: PLR0124  not a number, which equals nothing
    if one.dim() != two.dim() or one.dtype != two.dtype:
        return False
    places = tuple(slice(min(sizes)) for sizes in zip(one.shape, two.shape, strict=True))
    return torch.allclose(one[places], two[places], rtol=0.0, atol=0.0, equal_nan=True)


def _said(value: object) -> str:
    if isinstance(value, Tensor):
        return str(value.item()) if value.numel() == 1 else f"a constant of shape {tuple(value.shape)}"
    return "nothing" if value is None else str(value)
