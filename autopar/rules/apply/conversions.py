"""Changes of type: the operator that makes each, and what it moves forward and backward.

Source of the table: ``spmd-types`` and Megatron's f and g; see docs/adr/0001-types.md. A tensor
without gradient moves nothing backward, and I and R are the same for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.plan.mesh import Type


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """How one type becomes another on one axis.

    Attributes:
        target: the operator in emitted code, ``autopar.NAME``; empty when nothing is emitted.
        forward: the collective it runs forward, or None; sizes: see :func:`collective_bytes`.
        backward: likewise for the gradient.
    """

    target: str
    forward: str | None
    backward: str | None


_TABLE: dict[tuple[str, str], Conversion] = {
    ("I", "R"): Conversion(target="autopar.invariant_to_replicate", forward=None, backward="all_reduce"),
    ("I", "S"): Conversion(target="autopar.shard", forward=None, backward="all_gather"),
    ("I", "P"): Conversion(target="autopar.keep_on_first", forward=None, backward=None),
    ("R", "S"): Conversion(target="autopar.shard", forward=None, backward=None),
    ("R", "P"): Conversion(target="autopar.keep_on_first", forward=None, backward=None),
    ("S", "R"): Conversion(target="autopar.all_gather", forward="all_gather", backward="reduce_scatter"),
    ("S", "I"): Conversion(target="autopar.all_gather", forward="all_gather", backward=None),
    ("S", "S"): Conversion(target="autopar.all_to_all", forward="all_to_all", backward="all_to_all"),
    ("P", "I"): Conversion(target="autopar.all_reduce", forward="all_reduce", backward=None),
    ("P", "R"): Conversion(target="autopar.all_reduce", forward="all_reduce", backward="all_reduce"),
    ("P", "S"): Conversion(target="autopar.reduce_scatter", forward="reduce_scatter", backward="all_gather"),
}


def conversion(source: Type, target: Type, *, requires_grad: bool) -> Conversion | None:
    """The change from ``source`` to ``target``; None when there is none (R to I with a gradient, S to P).

    Equal types give a conversion that does nothing.

    >>> from autopar.plan.mesh import I, R, S
    >>> conversion(S(1), R, requires_grad=True).backward
    'reduce_scatter'
    >>> conversion(R, I, requires_grad=True) is None
    True
    """
    if source == target or (not requires_grad and {source.kind, target.kind} <= {"I", "R"}):
        return Conversion(target="", forward=None, backward=None)
    found = _TABLE.get((source.kind, target.kind))
    if found is None or requires_grad:
        return found
    return Conversion(target=found.target, forward=found.forward, backward=None)


def emitted_arguments(axis: str, source: Type, target: Type) -> tuple[str | int, ...]:
    """Arguments after the tensor in emitted code: the axis, then dims, then the type at the end where it matters.

    shard(x, axis, dim, from), all_gather(x, axis, dim, to), reduce_scatter(x, axis, dim),
    all_to_all(x, axis, split_dim_after, gathered_dim), all_reduce(x, axis, to),
    invariant_to_replicate(x, axis), keep_on_first(x, axis, from).
    """
    match source.kind, target.kind:
        case (("I" | "R"), "S"):
            return (axis, target.dim, source.kind)
        case (("I" | "R"), "P"):
            return (axis, source.kind)
        case "S", "S":
            return (axis, target.dim, source.dim)
        case "S", _:
            return (axis, source.dim, target.kind)
        case "P", "S":
            return (axis, target.dim)
        case "P", _:
            return (axis, target.kind)
        case _:
            return (axis,)


def collective_bytes(kind: str, *, full_num_bytes: int, size: int) -> int:
    """The S of the cost formulas: the full tensor, except that all-to-all counts one rank's part."""
    return full_num_bytes // size if kind == "all_to_all" else full_num_bytes
