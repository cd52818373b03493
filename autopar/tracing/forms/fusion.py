"""Passes over several operators: fused projections are split, and elementwise chains become one operator of torch.

GPT-2 computes query, key and value by one linear and then splits its output. If ranks shared that linear, their parts would not
coincide with query, key and value. It therefore becomes three linears over parts of the parameter, each of which can be split.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import isclose, pi, sqrt
from typing import TypeAlias, cast

from autopar.graph.graph import Argument, Op, Parameter, Part, Ref
from autopar.tracing.builder import Builder
from autopar.tracing.forms.basic import LINEAR_TARGETS

Label: TypeAlias = "int | None"
"""A dim of the output of a linear; None for a dim of size 1 that was inserted."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """An operator that takes the features ``start:stop`` of the output of a linear.

    Attributes:
        op: The operator, a slice or a select.
        start, stop: The range of features.
        order: The dims of its result as dims of the output of the linear.
    """

    op: Op
    start: int
    stop: int
    order: tuple[Label, ...]


_GROUP = -1
"""Label of the dim that counts the projections, after a view has split the features into (projections, features of each)."""


def unfuse(builder: Builder, parameters: tuple[Parameter, ...], roots: frozenset[Ref]) -> tuple[Parameter, ...]:
    """Split each linear whose output is only read in parts into one linear for each part.

    Args:
        builder: Its operators are rewritten.
        parameters: The parameters of the model.
        roots: The values that are read from outside of the operators.

    Returns:
        The parameters, with their parts in place of those that were split.
    """
    users = _users(builder)
    by_name = {parameter.name: parameter for parameter in parameters}
    parts: dict[str, list[Parameter]] = {}
    replaced: dict[str, list[Op]] = {}
    for op in builder.ops:
        if op.target not in LINEAR_TARGETS:
            continue
        weights = [ref.name for ref in op.operands[1:]]
        if any(name not in by_name or len(users[name]) != 1 or by_name[name].aliases for name in weights):
            continue
        leaves, inner = _cuts(op, users, roots)
        if leaves:
            replaced |= {name: [] for name in inner} | _cut(builder, op, leaves, by_name, parts)
    if not replaced:
        return parameters
    builder.ops = [new for op in builder.ops for new in replaced.get(op.name, [op])]
    builder.producers = {op.name: op for op in builder.ops}
    return tuple(new for parameter in parameters for new in parts.get(parameter.name, [parameter]))


def cut_parameters(builder: Builder, parameters: tuple[Parameter, ...], roots: frozenset[Ref]) -> tuple[Parameter, ...]:
    """Split each parameter that is only read in slices along one dim, if these cover the dim exactly once.

    For example, experts have gate and up in one tensor [E, 2f, h], of which each half can be split over ranks. Arguments and result
    are those of :func:`unfuse`.
    """
    users = _users(builder)
    renamed: dict[Ref, Ref] = {}
    result: list[Parameter] = []
    for parameter in parameters:
        readers = users.get(parameter.name, [])
        if parameter.aliases or parameter.part or not _cover(parameter, readers, roots):
            result.append(parameter)
            continue
        spans = {op.name: cast("tuple[int, int, int]", op.args[1:4]) for op in readers}
        parts = {span: _part(builder, parameter, *span) for span in sorted(set(spans.values()))}
        result += parts.values()
        renamed |= {Ref(name): Ref(parts[span].name) for name, span in spans.items()}
    if renamed:
        remaining = [op for op in builder.ops if Ref(op.name) not in renamed]
        builder.ops = [op.renamed(renamed) for op in remaining]
        builder.producers = {op.name: op for op in builder.ops}
    return tuple(result)


def _users(builder: Builder) -> dict[str, list[Op]]:
    """For each name, the operators that read it. An operator occurs once for each output of the name that it reads."""
    users: dict[str, list[Op]] = {}
    for op in builder.ops:
        for ref in dict.fromkeys(op.operands):
            users.setdefault(ref.name, []).append(op)
    return users


def _cover(parameter: Parameter, users: list[Op], roots: frozenset[Ref]) -> bool:
    """Return whether the users of a parameter are slices of step 1 along one dim that cover it without overlap."""
    if len(users) < 2 or any(
        op.target != "aten.slice.Tensor"
        or len(op.args) != 4
        or op.operands[0].name != parameter.name
        or Ref(op.name) in roots
        for op in users
    ):
        return False
    dims = {op.args[1] for op in users}
    (dim,) = dims if len(dims) == 1 else (None,)
    spans = {cast("tuple[int, int]", op.args[2:4]) for op in users}
    return isinstance(dim, int) and _partition(spans, parameter.spec.shape[dim])


def _partition(spans: set[tuple[int, int]], length: int) -> bool:
    """Return whether two or more ranges cover a dim of size ``length`` without overlap."""
    ordered = sorted(spans)
    edges = [0, *(stop for _, stop in ordered)]
    return len(spans) > 1 and edges == [*(start for start, _ in ordered), length]


def _cuts(linear: Op, users: dict[str, list[Op]], roots: frozenset[Ref]) -> tuple[list[_Leaf], list[str]]:
    """Follow the output of a linear to the operators that take parts of it.

    Returns:
        These operators, and the names of the operators in between. Both are empty if the output is used in another way, or if the
        parts do not cover it exactly once.
    """
    *lead, features = linear.spec.shape
    last = len(lead)
    leaves: list[_Leaf] = []
    inner: list[str] = []

    def follow(op: Op, labels: tuple[Label, ...]) -> bool:
        """Follow ``op``, whose dims are ``labels``, to the operators that take parts; False if it is used in another way."""
        if Ref(op.name) in roots or not users.get(op.name):
            return False
        for user in users[op.name]:
            if user.target == "aten.slice.Tensor" and len(user.args) == 4:
                dim, start, stop = cast("tuple[int, int, int]", user.args[1:4])
                if labels[dim] != last or _GROUP in labels:
                    return False
                leaves.append(_Leaf(user, start, stop, labels))
            elif user.target == "aten.select.int":
                dim, index = cast("tuple[int, int]", user.args[1:3])
                if labels[dim] != _GROUP:
                    return False
                size = features // op.spec.shape[dim]
                leaves.append(_Leaf(user, index * size, (index + 1) * size, labels[:dim] + labels[dim + 1 :]))
            else:
                moved = _moved(op, labels, last, user)
                if moved is None or not follow(user, moved):
                    return False
                inner.append(user.name)
        return True

    is_cut = follow(linear, tuple(range(last + 1)))
    is_cut = is_cut and _partition({(leaf.start, leaf.stop) for leaf in leaves}, features)
    return (leaves, inner) if is_cut else ([], [])


def _moved(op: Op, labels: tuple[Label, ...], last: int, user: Op) -> tuple[Label, ...] | None:
    """Return the labels of the dims after ``user``, an operator that only moves or splits the dims of ``op``.

    None for any other operator, and if a view joins the features with another dim.
    """
    if user.target == "aten.clone.default":
        return labels
    if user.target == "aten.transpose.int":
        order = list(labels)
        a, b = cast("tuple[int, int]", user.args[1:3])
        order[a], order[b] = order[b], order[a]
        return tuple(order)
    if user.target == "aten.permute.default":
        return tuple(labels[dim] for dim in cast("tuple[int, ...]", user.args[1]))
    if user.target not in ("aten.view.default", "aten.unsqueeze.default"):
        return None
    before, after = op.spec.shape, user.spec.shape
    if tuple(n for n in before if n != 1) == tuple(n for n in after if n != 1):
        remaining = iter([label for label, n in zip(labels, before, strict=True) if n != 1])
        return tuple(next(remaining) if n != 1 else None for n in after)
    splits_last = labels[-1] == last and _GROUP not in labels and after[:-2] == before[:-1]
    return (*labels[:-1], _GROUP, last) if splits_last else None


def _cut(
    builder: Builder, op: Op, leaves: list[_Leaf], by_name: dict[str, Parameter], parts: dict[str, list[Parameter]]
) -> dict[str, list[Op]]:
    """Split a linear.

    Args:
        builder: Gets the specs of the new operators and parameters.
        op: The linear.
        leaves: The operators that take parts of its output.
        by_name: The parameters of the model.
        parts: Gets the parts of each parameter that is split.

    Returns:
        For the linear and each leaf, by its name, the operators that replace it.
    """
    weight, *bias = op.operands[1:]
    out_dim = 0 if op.target == "aten.linear.default" else 1
    linears: dict[tuple[int, int], Op] = {}
    for span in sorted({(leaf.start, leaf.stop) for leaf in leaves}):
        operands = [op.operands[0]]
        for ref, dim in ((weight, out_dim), *((b, 0) for b in bias)):
            part = _part(builder, by_name[ref.name], dim, *span)
            parts.setdefault(ref.name, []).append(part)
            operands.append(Ref(part.name))
        spec = replace(op.spec, shape=(*op.spec.shape[:-1], span[1] - span[0]))
        linears[span] = replace(op.with_operands(tuple(operands)), name=builder.unique(op.name), outputs=(spec,))
        builder.specs[Ref(linears[span].name)] = spec
    ordered = {leaf.op.name: _ordered(builder, linears[leaf.start, leaf.stop], leaf) for leaf in leaves}
    return {op.name: list(linears.values())} | ordered


def _part(builder: Builder, parameter: Parameter, dim: int, start: int, stop: int) -> Parameter:
    """Register and return the slice ``start:stop`` of a parameter along ``dim``."""
    shape = list(parameter.spec.shape)
    shape[dim] = stop - start
    name = builder.unique(f"{parameter.name}_{start}")
    spec = replace(parameter.spec, shape=tuple(shape))
    builder.leaf(name, spec)
    builder.parameters.add(name)
    return replace(parameter, name=name, spec=spec, part=Part(dim=dim, start=start, stop=stop))


def _ordered(builder: Builder, linear: Op, leaf: _Leaf) -> list[Op]:
    """Return the operators that compute the value of ``leaf.op``, under its name, from the linear of its part."""
    sizes, kept = linear.spec.shape, [label for label in leaf.order if label is not None]
    order = (*kept, *(label for label in range(len(sizes)) if label not in kept))  # dims of size 1 that a view removed
    view = replace(leaf.op, target="aten.view.default", args=(Ref(linear.name), leaf.op.spec.shape), kwargs=())
    if order == tuple(range(len(sizes))):
        return [view]
    name, spec = builder.unique(f"{leaf.op.name}_order"), replace(linear.spec, shape=tuple(sizes[d] for d in order))
    builder.specs[Ref(name)] = spec
    args = (Ref(linear.name), order)
    permuted = replace(view, name=name, target="aten.permute.default", args=args, outputs=(spec,))
    return [permuted, view.with_operands((Ref(name),))]


_X = "x"
_Pattern: TypeAlias = "float | str | tuple[str | _Pattern, ...]"
"""A number, :data:`_X` for one value that is the same at all of its places, or an operator of torch with the patterns of its arguments."""

_CUBIC: _Pattern = ("add.Tensor", _X, ("mul.Tensor", ("pow.Tensor_Scalar", _X, 3.0), 0.044715))
_GELU: tuple[_Pattern, _Pattern] = (
    ("mul.Tensor", _X, 0.5),
    ("add.Tensor", ("tanh.default", ("mul.Tensor", _CUBIC, sqrt(2.0 / pi))), 1.0),
)
"""The factors of 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""


def fuse_gelu(builder: Builder, roots: frozenset[Ref]) -> None:
    """Replace the product of :data:`_GELU`, as GPT-2 computes it, by ``aten.gelu(x, approximate="tanh")``.

    Its backward only needs x, while that of the eight operators needs five tensors. The operators of ``builder`` are changed, and
    the rest of each chain remains as dead code. ``roots`` are the values that are read from outside of the operators.
    """
    num_reads = Counter(ref.name for refs in (roots, *(op.operands for op in builder.ops)) for ref in refs)

    def matches(argument: Argument, pattern: _Pattern, found: set[Argument]) -> bool:
        """Return whether an argument is what ``pattern`` says, by operators that have a single reader; ``found`` gets what :data:`_X` is."""
        if pattern == _X:
            found.add(argument)
            return True
        if not isinstance(pattern, tuple):
            return isinstance(argument, int | float) and isclose(argument, cast("float", pattern), rel_tol=1e-6)
        op = builder.producers.get(argument.name) if isinstance(argument, Ref) else None
        if op is None or op.target != f"aten.{pattern[0]}" or num_reads[op.name] != 1:
            return False
        return all(matches(a, p, found) for a, p in zip(op.args, pattern[1:], strict=False))

    fused = []
    for op in builder.ops:
        for factors in (op.args[:2], op.args[1::-1]) if op.target == "aten.mul.Tensor" else ():
            found: set[Argument] = set()
            if all(matches(a, p, found) for a, p in zip(factors, _GELU, strict=True)) and len(found) == 1:
                op = replace(op, target="aten.gelu.default", args=tuple(found), kwargs=(("approximate", "tanh"),))
                builder.producers[op.name] = op
                break
        fused.append(op)
    builder.ops = fused
