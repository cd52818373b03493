"""Elementwise chains that are one operator of torch: less memory kept for backward, fewer kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isclose, pi, sqrt

from autopar.graph.graph import Op, Ref
from autopar.tracing.builder import Builder


@dataclass(frozen=True, slots=True)
class _Uses:
    ops: Mapping[str, Op]
    count: Mapping[str, int]

    def only(self, ref: object, target: str) -> Op | None:
        """The operator that makes ``ref``, when it is ``target`` and nothing else reads it."""
        op = self.ops.get(ref.name) if isinstance(ref, Ref) else None
        return op if op is not None and op.target == target and self.count[op.name] == 1 else None


def fuse_gelu(builder: Builder, roots: frozenset[Ref]) -> None:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as GPT-2 writes it, becomes ``aten.gelu(x, tanh)``.

    Backward then needs x alone, where the eight operators keep five tensors. Changes
    ``builder.ops`` in place; what is left of the chains is dead code.
    """
    count: dict[str, int] = {ref.name: 1 for ref in roots}
    for op in builder.ops:
        for ref in op.operands:
            count[ref.name] = count.get(ref.name, 0) + 1
    uses = _Uses({op.name: op for op in builder.ops}, count)
    fused = []
    for op in builder.ops:
        source = _gelu_input(op, uses) if op.target == "aten.mul.Tensor" else None
        if source is not None:
            op = replace(op, target="aten.gelu.default", args=(source,), kwargs=(("approximate", "tanh"),))
            builder.producers[op.name] = op
        fused.append(op)
    builder.ops = fused


def _gelu_input(op: Op, uses: _Uses) -> Ref | None:
    """x, when ``op`` is the last product of the chain."""
    for half, rest in (op.args[:2], op.args[1::-1]):
        halved, shifted = uses.only(half, "aten.mul.Tensor"), uses.only(rest, "aten.add.Tensor")
        if halved is None or shifted is None or halved.args[1] != 0.5 or shifted.args[1] != 1.0:
            continue
        bent = uses.only(shifted.args[0], "aten.tanh.default")
        scaled = uses.only(bent.args[0], "aten.mul.Tensor") if bent is not None else None
        if scaled is None or not _close(scaled.args[1], sqrt(2.0 / pi)):
            continue
        summed = uses.only(scaled.args[0], "aten.add.Tensor")
        source = halved.args[0]
        if summed is None or summed.args[0] != source or not isinstance(source, Ref):
            continue
        cubic = uses.only(summed.args[1], "aten.mul.Tensor")
        cube = uses.only(cubic.args[0], "aten.pow.Tensor_Scalar") if cubic is not None else None
        if cubic is not None and cube is not None and _close(cubic.args[1], 0.044715) and cube.args == (source, 3.0):
            return source
    return None


def _close(value: object, expected: float) -> bool:
    return isinstance(value, float) and isclose(value, expected, rel_tol=1e-6)
