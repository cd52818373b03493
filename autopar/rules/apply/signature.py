"""Sequences of operators as text, by which blocks with equal operators are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from autopar.graph.graph import Argument, Op, Ref, TensorSpec, map_refs


def signature(ops: Sequence[Op], spec_of: Callable[[Ref], TensorSpec]) -> str:
    """Text that is equal for equal sequences of operators, names aside; equal ones have equal strategies."""
    known: dict[str, str] = {}
    outside: dict[Ref, str] = {}

    def numbered(ref: Ref) -> Argument:
        if ref.name in known:
            return f"{known[ref.name]}[{ref.index}]"
        if ref not in outside:  # a tensor without gradient has other strategies than one with
            spec = spec_of(ref)
            outside[ref] = f"${len(outside)}:{spec.shape}:{spec.dtype}:{spec.requires_grad}"
        return outside[ref]

    lines: list[str] = []
    for op in ops:
        args: Iterable[Argument] = (map_refs(arg, numbered) for arg in op.args)
        kwargs = ((key, map_refs(value, numbered)) for key, value in op.kwargs)
        for_salt = tuple(args)[:2] if op.target == "autopar.dropout" else tuple(args)
        lines.append(
            f"{op.target}{for_salt}{tuple(kwargs)}{[(s.shape, s.dtype, s.requires_grad) for s in op.outputs]}{op.layouts}"
        )
        known[op.name] = f"%{len(known)}"
    return "\n".join(lines)
