"""What one block of one rank's graph costs, as data: its time, collectives, kept activations and peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import cast

from autopar.cost.operators.work import COLLECTIVES
from autopar.errors import InternalError
from autopar.graph.graph import Op, Ref, TensorSpec
from autopar.plan.mesh import DATA_AXES, Type, conversion
from autopar.plan.plan import Recompute
from autopar.rules.apply import OVER_DATA
from autopar.rules.strategy import AXIS_AT, PARTS_AT, RING


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A collective of one block.

    Attributes:
        kind: a name of ``autopar.cost.network.collectives.KINDS``.
        axis: the mesh axis that it runs over.
        num_bytes: the bytes of the full tensor; of an all-to-all those of one rank's part.
        backward: whether it runs in backward.
        repeated: for a forward collective, whether recompute runs it again; torch's checkpoint stops after the last operator that keeps
            something.
    """

    kind: str
    axis: str
    num_bytes: int
    backward: bool
    repeated: bool = True


TRAVELLING = frozenset(("autopar.experts_dispatch", "autopar.experts_dispatch_split"))
"""Mixtures of experts whose tokens travel to other ranks."""

_STATISTICS = frozenset(("autopar.batch_norm", "autopar.batch_norm_running"))

SENDING = COLLECTIVES | TRAVELLING | _STATISTICS | {"autopar.cross_entropy_vocabulary", RING, OVER_DATA}
"""Operators for which :func:`messages` yields collectives."""


def messages(op: Op, spec_of: Callable[[Ref], TensorSpec]) -> Iterator[Message]:
    """Yield the collectives that an operator of a local graph runs, forward and backward.

    Args:
        op: the operator.
        spec_of: the specs of its operands.
    """
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
    if op.target == RING:
        yield from _ring_messages(op, spec_of)
        return
    if op.target in _STATISTICS:
        yield from _statistics_messages(op, spec_of)
        return
    if op.target == OVER_DATA:
        yield from _over_data(op, spec_of)
        return
    if op.target not in COLLECTIVES:
        return
    name, axis = op.target.removeprefix("autopar.").removeprefix("zigzag_"), str(op.args[1])
    before, after = spec_of(op.operands[0]).num_bytes, op.spec.num_bytes
    forward, backward, end = _DIRECTIONS.get(name, ("", "", ""))
    size = before if name == "all_to_all" else max(before, after)
    if forward:
        yield Message(kind=forward, axis=axis, num_bytes=size, backward=False)
    if backward and op.spec.requires_grad and end in ("", op.args[-1]):
        yield Message(kind=backward, axis=axis, num_bytes=size, backward=True)


def _ring_messages(op: Op, spec_of: Callable[[Ref], TensorSpec]) -> Iterator[Message]:
    """Yield what ring attention sends, priced as collectives that move as much: all keys and values go round.

    Backward sends them round again, together with their gradients.
    """
    kwargs = dict(op.kwargs)
    whole = sum(spec_of(ref).num_bytes for ref in op.operands[1:3]) * cast("int", kwargs["ranks"])
    hops = (("all_gather", False), ("all_gather", True), ("reduce_scatter", True))
    for kind, is_backward in hops if op.spec.requires_grad else hops[:1]:
        yield Message(kind=kind, axis=str(kwargs["axis"]), num_bytes=whole, backward=is_backward)


def _statistics_messages(op: Op, spec_of: Callable[[Ref], TensorSpec]) -> Iterator[Message]:
    """Yield the sums of a batch norm over the axes that split space: one number for each channel, twice in each direction.

    The sums over the data axes are not priced.
    """
    x = spec_of(op.operands[0])
    for axis in [arg for arg in op.args if isinstance(arg, str) and arg not in DATA_AXES]:
        for is_backward in (False, False, True, True) if op.spec.requires_grad else (False, False):
            num_bytes = x.shape[1] * max(4, x.dtype.itemsize)
            yield Message(kind="all_reduce", axis=axis, num_bytes=num_bytes, backward=is_backward)


def _over_data(op: Op, spec_of: Callable[[Ref], TensorSpec]) -> Iterator[Message]:
    """Yield the collectives of a change of type over all data ranks: the full tensor over one data axis after the other.

    A gather over both axes at once would move less on the inner one.
    """
    before, after = (Type.from_text(str(op.args[i])) for i in (1, 2))
    change = conversion(before, after, requires_grad=op.spec.requires_grad)
    if change is None:
        return
    whole = max(spec_of(op.operands[0]).num_bytes, op.spec.num_bytes)
    for axis in DATA_AXES:
        for kind, is_backward in ((change.forward, False), (change.backward, True)):
            if kind:
                yield Message(kind=kind, axis=axis, num_bytes=whole, backward=is_backward)


def _travels(op: Op, spec_of: Callable[[Ref], TensorSpec]) -> Iterator[Message]:
    """Yield the collectives that send rows to their experts on other ranks and back, as if routing were even."""
    hidden, weights = map(spec_of, op.operands[:2])
    sent = hidden.num_bytes * weights.shape[-1]
    if op.target == "autopar.experts_dispatch_split":
        sent //= cast("int", op.args[PARTS_AT])
    for is_backward, count in ((False, 2), (True, 2 if hidden.requires_grad else 1)):
        message = Message(kind="all_to_all", axis=str(op.args[AXIS_AT]), num_bytes=sent, backward=is_backward)
        yield from (message,) * count


_DIRECTIONS: dict[str, tuple[str, str, str]] = {
    "all_reduce": ("all_reduce", "all_reduce", "R"),
    "all_gather": ("all_gather", "reduce_scatter", "R"),
    "reduce_scatter": ("reduce_scatter", "all_gather", ""),
    "all_to_all": ("all_to_all", "all_to_all", ""),
    "shard": ("", "all_gather", "I"),
    "invariant_to_replicate": ("", "all_reduce", ""),
}
"""The forward and backward collective of each emitted change of type, as in the table of ``rules.local_calls``.

The third entry is the type that the change must end in for the backward collective; empty: any.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCost:
    """A parameter as one rank of the tensor-parallel axes holds it.

    Attributes:
        name: its name in the graph; equal where several blocks share it.
        shape: the local shape.
        num_bytes: the bytes of ``shape`` in the graph's dtype.
        gradient_sum_axes: the axes over which its gradient is summed once a step.
        trained: whether it has a gradient.
        shared: whether other blocks read it too (tied weights).
        spread: whether it belongs to experts over data ranks, so that the data axes neither gather nor shard it.
    """

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    gradient_sum_axes: tuple[str, ...] = ()
    trained: bool = True
    shared: bool = False
    spread: bool = False

    def __hash__(self) -> int:
        """Hash one field: parameters are parts of the keys of many tables."""
        return hash(self.name)

    @property
    def numel(self) -> int:
        """The number of local elements."""
        return prod(self.shape)

    def shard_shape(self, ranks: int) -> tuple[int, ...]:
        """Return the shape of the largest shard; see :meth:`shard_numel`."""
        if not self.shape or ranks == 1 or self.spread:
            return self.shape
        return (-(-self.shape[0] // ranks), *self.shape[1:])

    def shard_numel(self, ranks: int) -> int:
        """Return the elements of the largest shard when dim 0 is split (FSDP2's choice); the last ranks' shards may be smaller."""
        return prod(self.shard_shape(ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveCost:
    """What differs in a block that recomputes its cheap operators in backward (:mod:`autopar.graph.operator_kinds`).

    Attributes:
        time_s: the seconds of recompute.
        least_bytes: the bytes of the values that are kept in every layout of the block, over all its ranks.
        saved_bytes, saved_input_bytes, forward_transient_bytes, backward_transient_bytes: as in :class:`BlockCost`.
    """

    saved_bytes: int
    saved_input_bytes: int
    forward_transient_bytes: int
    backward_transient_bytes: int
    time_s: float = 0.0
    least_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One block on one rank for one micro-batch; seconds, bytes and flops.

    Attributes:
        key: equal for blocks of equal cost.
        forward_s, backward_s: computation.
        communication_forward_s, communication_backward_s: exposed collectives on the block's own axes.
        communication_again_s: the part of the forward collectives that runs again under recompute.
        context_forward_s, context_backward_s, context_again_s: the parts of these on the axis ``cp``.
        saved_bytes: what backward needs of the block's values and its inputs; a storage of several values counts once.
        input_bytes: the values of earlier blocks, which full recompute keeps instead.
        saved_input_bytes: the part of ``saved_bytes`` that ``input_bytes`` counts too.
        prelude: the names and bytes of the inputs and prelude values that it reads; a stage holds each once.
        forward_transient_bytes, backward_transient_bytes: the most that is alive at once beyond ``saved_bytes``.
        sends, send_gradients: the bytes of each tensor that a stage that ends here sends on, and of each gradient that it receives back.
        flops, backward_flops: those of matrix products.
        messages: its collectives.
        parameters: the parameters that it reads.
        offloads: whether what it keeps is on the host between its forward and its backward.
        selective: what differs under selective recompute; None where that was not counted.
    """

    key: str
    forward_s: float
    backward_s: float
    communication_forward_s: float
    communication_backward_s: float
    saved_bytes: int
    input_bytes: int
    saved_input_bytes: int
    prelude: tuple[tuple[str, int], ...]
    forward_transient_bytes: int
    backward_transient_bytes: int
    sends: tuple[int, ...]
    send_gradients: tuple[int, ...]
    flops: float
    backward_flops: float
    messages: tuple[Message, ...]
    parameters: tuple[ParameterCost, ...]
    context_forward_s: float = 0.0
    context_backward_s: float = 0.0
    communication_again_s: float = 0.0
    context_again_s: float = 0.0
    offloads: bool = False
    selective: SelectiveCost | None = None

    def __hash__(self) -> int:
        """Hash a few of the 23 fields, which tell most blocks apart: blocks are keys of many tables."""
        return hash((self.forward_s, self.backward_s, self.saved_bytes, self.forward_transient_bytes))

    @property
    def shared_names(self) -> list[str]:
        """The names of the parameters that other blocks read too."""
        return [p.name for p in self.parameters if p.shared]

    @property
    def send_bytes(self) -> int:
        """The bytes of all tensors that are sent on."""
        return sum(self.sends)

    @property
    def send_gradient_bytes(self) -> int:
        """The bytes of all gradients that come back."""
        return sum(self.send_gradients)

    @property
    def remade(self) -> SelectiveCost:
        """The block under selective recompute.

        Raises:
            InternalError: the block's work was counted without it.
        """
        if self.selective is None:
            raise InternalError(f"Block {self.key} was priced without selective recompute, which is now asked for")
        return self.selective

    def recompute_s(self, mode: Recompute) -> float:
        """Return the seconds that recompute adds to backward; full recompute includes collectives of the forward."""
        if mode == "none":
            return 0.0
        return self.remade.time_s if mode == "selective" else self.forward_s + self.communication_again_s

    def kept_bytes(self, mode: Recompute) -> int:
        """Return the bytes kept on the device from forward to backward."""
        return 0 if self.offloads else self._saved_bytes(mode)

    def moved_bytes(self, mode: Recompute) -> int:
        """Return the bytes kept on the host from forward to backward."""
        return self._saved_bytes(mode) if self.offloads else 0

    def _saved_bytes(self, mode: Recompute) -> int:
        if mode == "selective":
            return self.remade.saved_bytes
        return self.input_bytes if mode == "full" else self.saved_bytes

    def kept_input_bytes(self, mode: Recompute) -> int:
        """Return the part of :meth:`kept_bytes` that ``input_bytes`` counts too."""
        if mode == "selective":
            return self.remade.saved_input_bytes
        return self.input_bytes if mode == "full" else self.saved_input_bytes

    def passing_bytes(self, mode: Recompute) -> int:
        """Return the most that is alive at once beyond :meth:`kept_bytes`."""
        if mode == "selective":
            return max(self.remade.forward_transient_bytes, self.remade.backward_transient_bytes)
        passing = max(self.forward_transient_bytes, self.backward_transient_bytes)
        return passing + self.moved_bytes(mode) + (self.saved_bytes if mode == "full" else 0)
