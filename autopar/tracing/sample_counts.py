"""A check that numbers in a graph do not depend on the batch size.

``loss.sum() / labels.numel()`` is traced as a division by a number, which is wrong for any other batch size. Shapes may depend on
the batch size, but numbers and constants may not. For nearly all models, forward passes at two batch sizes show that they do not,
in a fraction of the time of a trace. For all other models, traces at two batch sizes are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from operator import eq
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _pytree as pytree

from autopar.errors import TraceError
from autopar.graph.aliasing import dim_groups
from autopar.graph.graph import Graph, Op
from autopar.ops.kernels import aten_targets, resolve

_SMALL = 64
"""Number of elements of a constant up to which its values are compared between forward passes."""


_VIEWS = aten_targets("view.default _unsafe_view.default reshape.default")
_CUTS = aten_targets("slice.Tensor")


class CountError(TraceError):
    """A number in a model depends on the batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a forward pass.

    Attributes:
        target: The name of the operator.
        values: The numbers, flags and small constants among its arguments, which must not depend on the batch size.
        sizes: The sizes and indices among its arguments, which may depend on the batch size if a result does.
        results: The shapes of its results.
        operands: The shapes of its operands if all of them are constants, else empty.
        dims: The dims along which it combines or selects elements of constants. None if it is elementwise or a view, or if not all
            operands are constants.
        viewed: The shape of its operand if it is a view to other sizes or a slice, else empty.
    """

    target: str
    values: tuple[object, ...]
    sizes: tuple[object, ...]
    results: tuple[tuple[int, ...], ...]
    operands: tuple[tuple[int, ...], ...] = ()
    dims: tuple[int, ...] | None = None
    viewed: tuple[int, ...] = ()


def call_of(
    target: Any, args: Sequence[object], kwargs: Mapping[str, object], result: object, *, depends: bool
) -> Call:
    """Return a description of a call for :func:`are_same`.

    Args:
        target: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        result: Its result.
        depends: Whether it depends on values of the batch, of a parameter or of a buffer, and not only on constants.
    """
    values, sizes = _split(target, args, kwargs)
    # `x.new_ones(sizes)` takes nothing of x but its dtype and device
    operands = () if depends or str(target).startswith("aten.new_") else _shapes((args, kwargs))
    return Call(
        target=str(target),
        values=values,
        sizes=sizes,
        results=_shapes(result),
        operands=operands,
        dims=_dims(target, args) if operands else None,
        viewed=_shapes(args)[0] if str(target) in _CUTS or str(target) in _VIEWS else (),
    )


def _dims(target: Any, args: Sequence[object]) -> tuple[int, ...] | None:
    """Return the dims among the arguments of a call, as non-negative dims of its first tensor; None if it is elementwise or a view."""
    if torch.Tag.pointwise in target.tags or target.is_view:
        return None
    rank = next((leaf.dim() for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)), 0)
    dims = [value for argument, value in zip(target._schema.arguments, args, strict=False) if "dim" in argument.name]
    return tuple(value % rank for value in pytree.tree_leaves(dims) if isinstance(value, int) and rank)


def _shapes(values: object) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of all tensors in nested containers."""
    return tuple(tuple(leaf.shape) for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))


def _split(
    target: Any, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Return the numbers and small constants among the arguments of a call, separated into values and sizes (or indices).

    Integers are assumed to be sizes if the operator has no schema.
    """
    schema = getattr(target, "_schema", None)
    arguments = () if schema is None else schema.arguments
    by_name = {argument.name: argument for argument in arguments}
    pairs = [*zip_longest(arguments[: len(args)], args), *((by_name.get(key), value) for key, value in kwargs.items())]
    values: list[object] = []
    sizes: list[object] = []
    for argument, value in pairs:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, bool | int | float | complex | Tensor):
                is_size = isinstance(leaf, int) if schema is None else _is_size(schema.name, argument)
                (sizes if is_size else values).append(number_of(leaf))
    return tuple(values), tuple(sizes)


def _is_size(operator: str, argument: Any) -> bool:
    """Return whether an argument of an operator is a size or an index along a dim, according to the schema."""
    if operator == "aten::arange":  # its end is a size, but its start and step are values of its result
        return bool(argument.name == "end")
    # The values of a linspace depend on its steps.
    return "int" in str(argument.type).lower() and argument.name != "steps"


def number_of(value: object) -> object:
    """Return an argument of a call in a form that can be compared between passes.

    Numbers, flags and strings are returned unchanged, and a small constant as its values. Anything else is replaced by the name of
    its type.
    """
    if isinstance(value, Tensor):
        if isinstance(value, FakeTensor) or value.device.type == "meta" or value.numel() > _SMALL:
            return "tensor"
        with unset_fake_temporarily():
            return str(value.tolist())
    if isinstance(value, (float, complex)) and value != value:  # noqa: PLR0124  not a number, which equals nothing
        return "nan"
    return value if isinstance(value, (bool, int, float, complex, str)) else type(value).__name__


def are_same(calls: Sequence[Call], larger: Sequence[Call]) -> bool:
    """Return whether forward passes at two batch sizes show that no number or constant depends on the batch size.

    A constant whose shape depends on the batch size is assumed to have equal elements where both have some, as long as no call
    combines or selects elements along that dim. If the result is False, numbers may or may not depend on the batch size.

    Args:
        calls: The calls of a pass; empty if the model did not run.
        larger: The calls of a pass at a larger batch size.
    """
    return bool(calls) and len(calls) == len(larger) and all(map(_is_same, calls, larger))


def _is_same(call: Call, larger: Call) -> bool:
    """Return whether two corresponding calls show no dependence on the batch size."""
    if (call.target, call.values, call.dims) != (larger.target, larger.values, larger.dims):
        return False
    if any(map(eq, call.results, larger.results)) and (call.sizes != larger.sizes or call.operands != larger.operands):
        return False
    if call.viewed != larger.viewed and not _keeps_samples(call, larger):
        return False
    if call.dims is None or call.operands == larger.operands:
        return True
    if list(map(len, call.operands)) != list(map(len, larger.operands)):
        return False
    batch_dims = list(map(_changed, call.operands, larger.operands))
    return all(len(dims) < 2 for dims in batch_dims) and not set(call.dims).intersection(batch_dims[0])


def _keeps_samples(call: Call, larger: Call) -> bool:
    """Return whether the dim of samples of a view, or slice, stays the dim with as many elements before it; else a size hides samples.

    ``x[:2]`` and ``x.view(2, -1)`` look like a whole batch, and like its samples one by one, at a batch of two.
    """
    before = _changed(call.viewed, larger.viewed)
    after = _changed(call.results[0], larger.results[0])
    if call.target in _CUTS:
        return bool(after)
    return len(before) == len(after) == 1 and prod(call.viewed[: before[0]]) == prod(call.results[0][: after[0]])


def _changed(shape: tuple[int, ...], larger: tuple[int, ...]) -> list[int]:
    """Return the dims in which two shapes differ; all of the first if they have other numbers of dims."""
    if len(shape) != len(larger):
        return list(range(len(shape)))
    return [dim for dim, sizes in enumerate(zip(shape, larger, strict=True)) if sizes[0] != sizes[1]]


def check_numbers(graph: Graph, larger: Graph) -> None:
    """Compare a graph with that of a trace at a larger batch size.

    Raises:
        CountError: Numbers, constants or operators differ.
    """
    larger_ops = {op.name: op for op in (*larger.prelude, *larger.ops)}
    constants, larger_constants = ({b.name: b.value for b in g.buffers if not b.fqn} for g in (graph, larger))
    for op in (*graph.prelude, *graph.ops):
        other = larger_ops.get(op.name)
        if other is None or (other.target, other.operands) != (op.target, op.operands):
            raise _count_error(graph, larger, op, op.target, "other calls")
        (values, sizes), (larger_values, larger_sizes) = _numbers(op, constants), _numbers(other, larger_constants)
        for value, larger_value in zip_longest(values, larger_values):
            if not _agree(value, larger_value):
                raise _count_error(graph, larger, op, _text(value), _text(larger_value))
        if sizes != larger_sizes and op.outputs == other.outputs:
            raise _count_error(graph, larger, op, f"{list(sizes)}", f"{list(larger_sizes)}")
        if op.target == "aten.view.default" and not _is_split_alike(graph, larger, op, other):
            raise _count_error(graph, larger, op, f"a shape {op.spec.shape}", f"{other.spec.shape}")
    if graph.loss != larger.loss:
        raise _count_error(graph, larger, graph.producer(graph.loss), f"{len(graph.ops)} calls", f"{len(larger.ops)}")


def _is_split_alike(graph: Graph, larger: Graph, op: Op, other: Op) -> bool:
    """Return whether a view takes the outermost dim of a group, where it grows with the batch, to one that grows with it too."""
    before, after = graph.spec(op.operands[0]).shape, op.spec.shape
    grown = _changed(before, larger.spec(other.operands[0]).shape)
    grown_after = _changed(after, other.spec.shape)
    for input_dims, output_dims in dim_groups(before, after):
        source = next((i for i in input_dims if before[i] > 1), None)
        target = next((j for j in output_dims if after[j] > 1), None)
        if source in grown and target not in grown_after:
            return False
    return True


def _count_error(graph: Graph, larger: Graph, op: Op | None, value: str, larger_value: str) -> CountError:
    return CountError(
        f"A number in the model depends on the batch size: {value} for a batch of {graph.batch_size}, "
        f"{larger_value} for one of {larger.batch_size}",
        where="" if op is None else op.source or op.module or op.name,
        fix="Take a mean, or divide by a count of the inputs: (labels != -100).sum()",
    )


def _numbers(op: Op, constants: Mapping[str, Tensor | None]) -> tuple[list[object], tuple[object, ...]]:
    """Return the numbers and constants among the arguments of an operator, and the sizes among them."""
    target = resolve(op.target) if op.target.startswith("aten.") else None
    values, sizes = _split(target, op.args, dict(op.kwargs))
    return [*values, *(constants[r.name] for r in op.operands if constants.get(r.name) is not None)], sizes


def _agree(value: object, larger: object) -> bool:
    """Return whether two numbers are equal, or two constants in the elements that both have."""
    if not isinstance(value, Tensor) or not isinstance(larger, Tensor):
        return bool(value == larger) or (value != value and larger != larger)  # noqa: PLR0124  NaN does not equal itself
    if value.dim() != larger.dim() or value.dtype != larger.dtype:
        return False
    overlap = tuple(slice(min(sizes)) for sizes in zip(value.shape, larger.shape, strict=True))
    return torch.allclose(value[overlap], larger[overlap], rtol=0.0, atol=0.0, equal_nan=True)


def _text(value: object) -> str:
    """Return a number or constant as an error message shows it."""
    if isinstance(value, Tensor):
        return str(value.item()) if value.numel() == 1 else f"a constant of shape {tuple(value.shape)}"
    return "nothing" if value is None else str(value)
