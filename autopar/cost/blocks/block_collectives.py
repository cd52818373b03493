"""The collectives that the operators of one rank's graph run, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from autopar.cost.operators.work import COLLECTIVES
from autopar.graph.graph import Op, Ref, TensorSpec
from autopar.plan.mesh import DATA_AXES, parse_type
from autopar.rules.apply import OVER_DATA
from autopar.rules.local_calls import conversion
from autopar.rules.other_kernels import ring_messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A collective of one block; ``num_bytes`` as :func:`autopar.rules.local_calls.collective_bytes` counts.

    ``repeated``: a forward one that runs again when the block is recomputed; torch's checkpoint stops after the last
    operator that keeps something.
    """

    kind: str
    axis: str
    num_bytes: int
    backward: bool
    repeated: bool = True


TRAVELLING = frozenset(("autopar.experts_dispatch", "autopar.experts_dispatch_split"))
"""Mixtures whose tokens travel to other ranks."""

SENDING = COLLECTIVES | TRAVELLING | {"autopar.cross_entropy_vocabulary", "autopar.attention_ring", OVER_DATA}
"""Operators that :func:`messages` says something of."""


def messages(op: Op, spec_of: Callable[[Ref], TensorSpec]) -> Iterator[Message]:
    """The collectives that an operator of a local graph runs, forward and backward; ``spec_of``: of its operands."""
    if op.target == "autopar.cross_entropy_vocabulary":
        axis, smoothing = str(op.args[2]), op.args[4] if len(op.args) > 4 else 0.0
        logits, target = (spec_of(ref) for ref in op.operands[:2])
        token_bytes = target.numel * max(4, logits.dtype.itemsize)
        for count in (1, 3 if smoothing else 2):
            yield Message(kind="all_reduce", axis=axis, num_bytes=count * token_bytes, backward=False)
        return
    if op.target in TRAVELLING:
        yield from _travels(op, spec_of)
        return
    if op.target == "autopar.attention_ring":
        known = dict(op.kwargs)
        whole = sum(spec_of(ref).num_bytes for ref in op.operands[1:3]) * cast("int", known["ranks"])
        for inside in ring_messages(whole, backward=op.spec.requires_grad):
            yield Message(kind=inside.kind, axis=str(known["axis"]), num_bytes=whole, backward=inside.backward)
        return
    if op.target == OVER_DATA:
        yield from _over_data(op, spec_of)
        return
    if op.target not in COLLECTIVES:
        return
    name, axis = op.target.removeprefix("autopar.").removeprefix("zigzag_"), str(op.args[1])
    before, after = spec_of(op.operands[0]).num_bytes, op.spec.num_bytes
    forward, backward = _directions(name, op)
    size = before if name == "all_to_all" else max(before, after)
    if forward:
        yield Message(kind=forward, axis=axis, num_bytes=size, backward=False)
    if backward and op.spec.requires_grad:
        yield Message(kind=backward, axis=axis, num_bytes=size, backward=True)


def _over_data(op: Op, spec_of: Callable[[Ref], TensorSpec]) -> Iterator[Message]:
    """A change of type over all data ranks: whole tensors, over one data axis after the other.

    A gather over both axes moves less on the one inside.
    """
    before, after = (parse_type(str(op.args[i])) for i in (1, 2))
    change = conversion(before, after, requires_grad=op.spec.requires_grad)
    if change is None:
        return
    whole = max(spec_of(op.operands[0]).num_bytes, op.spec.num_bytes)
    for axis in DATA_AXES:
        for kind, is_backward in ((change.forward, False), (change.backward, True)):
            if kind:
                yield Message(kind=kind, axis=axis, num_bytes=whole, backward=is_backward)


def _travels(op: Op, spec_of: Callable[[Ref], TensorSpec]) -> Iterator[Message]:
    """Rows to their experts on other ranks and back, as if routing were even."""
    hidden, weights = map(spec_of, op.operands[:2])
    sent = hidden.num_bytes * weights.shape[-1]
    if op.target == "autopar.experts_dispatch_split":
        sent //= cast("int", op.args[10])
    for is_backward, count in ((False, 2), (True, 2 if hidden.requires_grad else 1)):
        message = Message(kind="all_to_all", axis=str(op.args[7]), num_bytes=sent, backward=is_backward)
        yield from (message,) * count


def _directions(name: str, op: Op) -> tuple[str, str]:
    """Collectives forward and backward of an emitted change of type; the table of ``rules.local_calls``."""
    end = op.args[-1]
    match name:
        case "all_reduce":
            return "all_reduce", "all_reduce" if end == "R" else ""
        case "all_gather":
            return "all_gather", "reduce_scatter" if end == "R" else ""
        case "reduce_scatter":
            return "reduce_scatter", "all_gather"
        case "all_to_all":
            return "all_to_all", "all_to_all"
        case "shard":
            return "", "all_gather" if end == "I" else ""
        case "invariant_to_replicate":
            return "", "all_reduce"
        case _:
            return "", ""
