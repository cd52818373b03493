"""Several operators seen together: fused projections taken apart, elementwise chains that are one operator of torch.

GPT-2 computes query, key and value as one product and splits it; split over ranks, that product
would be cut across the boundaries of the three. As three linears over parts of the parameter, each
splits by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isclose, pi, sqrt
from typing import TypeAlias, cast

from autopar.graph.graph import Op, Parameter, Part, Ref
from autopar.tracing.builder import Builder
from autopar.tracing.forms.basic import LINEAR_TARGETS

Label: TypeAlias = "int | None"
"""A dim of the linear's output by number; None for a dim of size 1 that was put in."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """An operator that takes features ``start:stop``; ``order``: its dims as dims of the linear's output."""

    op: Op
    start: int
    stop: int
    order: tuple[Label, ...]


_GROUP = -1
"""Label of the dim that counts the fused projections, where a view has split the features into (n, size)."""


def unfuse(builder: Builder, parameters: tuple[Parameter, ...], roots: frozenset[Ref]) -> tuple[Parameter, ...]:
    """Rewrites ``builder.ops`` in place and returns the parameters, parts in the place of what was cut.

    ``roots``: values that are read from outside.
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
    """Parameters read in slices alone, along one dim that the slices cover once, become their parts.

    Experts keep gate and up in one tensor [E, 2f, h]; each half splits by itself.
    """
    users = _users(builder)
    renamed: dict[Ref, Ref] = {}
    result: list[Parameter] = []
    for parameter in parameters:
        readers = users.get(parameter.name, [])
        if parameter.aliases or parameter.part or not _cover(parameter, readers, roots):
            result.append(parameter)
            continue
        found = {op.name: cast("tuple[int, int, int]", op.args[1:4]) for op in readers}
        parts = {span: _part(builder, parameter, *span) for span in sorted(set(found.values()))}
        result += parts.values()
        renamed |= {Ref(name): Ref(parts[span].name) for name, span in found.items()}
    if renamed:
        kept = [op for op in builder.ops if Ref(op.name) not in renamed]
        builder.ops = [op.with_operands(tuple(renamed.get(ref, ref) for ref in op.operands)) for op in kept]
        builder.producers = {op.name: op for op in builder.ops}
    return tuple(result)


def _users(builder: Builder) -> dict[str, list[Op]]:
    """For each name that is read the operators that read it, each once for each of its values."""
    users: dict[str, list[Op]] = {}
    for op in builder.ops:
        for ref in dict.fromkeys(op.operands):
            users.setdefault(ref.name, []).append(op)
    return users


def _cover(parameter: Parameter, users: list[Op], roots: frozenset[Ref]) -> bool:
    """Whether ``users`` are slices of step 1 along one dim that cover it without overlap."""
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
    """Whether several ``start:stop`` cover a dim of ``length`` without overlap."""
    ordered = sorted(spans)
    edges = [0, *(stop for _, stop in ordered)]
    return len(spans) > 1 and edges == [*(start for start, _ in ordered), length]


def _cuts(linear: Op, users: dict[str, list[Op]], roots: frozenset[Ref]) -> tuple[list[_Leaf], list[str]]:
    """How the output is cut, when cutting is all that is done with it and the pieces cover it once; else no leaves.

    Returns:
        The operators that cut, and names of those between the linear and them.
    """
    *lead, features = linear.spec.shape
    last = len(lead)
    leaves: list[_Leaf] = []
    inner: list[str] = []

    def follow(op: Op, labels: tuple[Label, ...]) -> bool:
        """Walks from ``op``, whose dims are ``labels``, to the operators that cut; False at any other use."""
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

    covered = follow(linear, tuple(range(last + 1))) and _partition({(o.start, o.stop) for o in leaves}, features)
    return (leaves, inner) if covered else ([], [])


def _moved(op: Op, labels: tuple[Label, ...], last: int, user: Op) -> tuple[Label, ...] | None:
    """Labels after a view, transpose, ... ; None when the features are mixed with something else, and after other operators."""
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
        kept = iter([label for label, n in zip(labels, before, strict=True) if n != 1])
        return tuple(next(kept) if n != 1 else None for n in after)
    splits_last = labels[-1] == last and _GROUP not in labels and after[:-2] == before[:-1]
    return (*labels[:-1], _GROUP, last) if splits_last else None


def _cut(
    builder: Builder, op: Op, leaves: list[_Leaf], by_name: dict[str, Parameter], parts: dict[str, list[Parameter]]
) -> dict[str, list[Op]]:
    """What is put in the place of operators, by their names: of ``op`` one linear for each span, of a cut its dims in order."""
    weight, *bias = op.operands[1:]
    out_dim = 0 if op.target == "aten.linear.default" else 1
    made: dict[tuple[int, int], Op] = {}
    for span in sorted({(leaf.start, leaf.stop) for leaf in leaves}):
        pieces: list[Ref] = []
        for ref, dim in ((weight, out_dim), *((b, 0) for b in bias)):
            part = _part(builder, by_name[ref.name], dim, *span)
            parts.setdefault(ref.name, []).append(part)
            pieces.append(Ref(part.name))
        spec = replace(op.spec, shape=(*op.spec.shape[:-1], span[1] - span[0]))
        made[span] = replace(op.with_operands((op.operands[0], *pieces)), name=builder.unique(op.name), outputs=(spec,))
        builder.specs[Ref(made[span].name)] = spec
    ordered = {leaf.op.name: _ordered(builder, made[leaf.start, leaf.stop], leaf) for leaf in leaves}
    return {op.name: list(made.values())} | ordered


def _part(builder: Builder, whole: Parameter, dim: int, start: int, stop: int) -> Parameter:
    shape = list(whole.spec.shape)
    shape[dim] = stop - start
    name = builder.unique(f"{whole.name}_{start}")
    part = replace(
        whole, name=name, spec=replace(whole.spec, shape=tuple(shape)), part=Part(dim=dim, start=start, stop=stop)
    )
    builder.leaf(name, part.spec)
    builder.parameters.add(name)
    return part


def _ordered(builder: Builder, linear: Op, leaf: _Leaf) -> list[Op]:
    """Operators that give ``leaf.op``'s value, under its name, from the part's linear."""
    made: list[Op] = []
    source, spec = Ref(linear.name), linear.spec
    sizes = linear.spec.shape
    order = [label for label in leaf.order if label is not None]
    order += [label for label in range(len(sizes)) if label not in order]  # dims of size 1 that a view removed
    if order != sorted(order):
        spec = replace(spec, shape=tuple(sizes[label] for label in order))
        made.append(
            replace(
                leaf.op,
                name=builder.unique(f"{leaf.op.name}_order"),
                target="aten.permute.default",
                args=(source, tuple(order)),
                kwargs=(),
                outputs=(spec,),
            )
        )
        source = Ref(made[-1].name)
        builder.specs[source] = made[-1].spec
    made.append(replace(leaf.op, target="aten.view.default", args=(source, leaf.op.spec.shape), kwargs=()))
    return made


def fuse_gelu(builder: Builder, roots: frozenset[Ref]) -> None:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as GPT-2 writes it, becomes ``aten.gelu(x, tanh)``.

    Backward then needs x alone, where the eight operators keep five tensors. Changes
    ``builder.ops`` in place; what is left of the chains is dead code.
    """
    count = Counter(ref.name for refs in (roots, *(op.operands for op in builder.ops)) for ref in refs)

    def only(ref: object, target: str) -> Op | None:
        """The operator that makes ``ref``, when it is ``target`` and nothing else reads it."""
        op = builder.producers.get(ref.name) if isinstance(ref, Ref) else None
        return op if op is not None and op.target == target and count[op.name] == 1 else None

    fused = []
    for op in builder.ops:
        source = _gelu_input(op, only) if op.target == "aten.mul.Tensor" else None
        if source is not None:
            op = replace(op, target="aten.gelu.default", args=(source,), kwargs=(("approximate", "tanh"),))
            builder.producers[op.name] = op
        fused.append(op)
    builder.ops = fused


def _gelu_input(op: Op, only: Callable[[object, str], Op | None]) -> Ref | None:
    """x, when ``op`` is the last product of the chain."""
    for half, rest in (op.args[:2], op.args[1::-1]):
        halved, shifted = only(half, "aten.mul.Tensor"), only(rest, "aten.add.Tensor")
        if halved is None or shifted is None or halved.args[1] != 0.5 or shifted.args[1] != 1.0:
            continue
        bent = only(shifted.args[0], "aten.tanh.default")
        scaled = only(bent.args[0], "aten.mul.Tensor") if bent is not None else None
        if scaled is None or not _close(scaled.args[1], sqrt(2.0 / pi)):
            continue
        summed = only(scaled.args[0], "aten.add.Tensor")
        source = halved.args[0]
        if summed is None or summed.args[0] != source or not isinstance(source, Ref):
            continue
        cubic = only(summed.args[1], "aten.mul.Tensor")
        cube = only(cubic.args[0], "aten.pow.Tensor_Scalar") if cubic is not None else None
        if cubic is not None and cube is not None and _close(cubic.args[1], 0.044715) and cube.args == (source, 3.0):
            return source
    return None


def _close(value: object, expected: float) -> bool:
    return isinstance(value, float) and isclose(value, expected, rel_tol=1e-6)
