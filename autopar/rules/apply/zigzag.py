"""The zig-zag order of ring attention as a property of a typing: what may stand beside a ring, and why it is right.

On an axis with a ring every split dim that an operator reads or makes is in *zig-zag order*: of 2 n chunks rank r has
chunks r and 2 n - 1 - r, so that a causal mask leaves every rank the same work. It holds for all operators of the axis and
for every dim that is split there, the sequence or not, so that operands of one operator agree:

- *values of operators* (sequence, samples, hidden, heads, channels, classes): a strategy without a target of its own runs
  the same operator on a part, whichever part it is. That it is right for any set of chunks, not for neighbours alone, is
  checked by execution for every rule (``verify_rule(..., zigzag=True)``). A contracted dim is a sum, whose order is free,
  as both operands have it in the same order. Where dims are merged or cut (views), chunks of one are chunks of the other,
  since both divide by 2 n;
- *inputs, buffers and parameters at rest* are in their own order, as a checkpoint has them: a part of theirs becomes whole
  by a plain all-gather, and split in zig-zag order from the whole (``_Sharding._from_own_order``). Weights of norms and
  linears, tables split by columns and experts split by width are such parameters;
- *whole values* (R, I, P) are in their own order;
- *strategies that know which part their rank has* are refused: look-up in a table split by rows, cross entropy over split
  classes, experts by rank, batch statistics, gathered attention;
- *a dim that does not divide by 2 n* is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.errors import RuleError
from autopar.graph.graph import TensorSpec
from autopar.plan.mesh import Type
from autopar.rules.strategy import Strategy

RING = "autopar.attention_ring"
ZIGZAG_SAFE = ("", "autopar.partial_mean", RING)
"""What strategies may call where split dims are in zig-zag order: else nothing that knows which part its rank has."""


def is_zigzag(strategies: Iterable[Strategy]) -> bool:
    """Whether split dims are in zig-zag order beside these strategies of one axis."""
    return any(strategy.target == RING for strategy in strategies)


def check_strategy(strategy: Strategy, place: str) -> None:
    """Refuses what cannot stand beside a ring.

    Raises:
        RuleError: the strategy depends on which part of a split dim its rank has.
    """
    if strategy.target not in ZIGZAG_SAFE:
        raise RuleError(
            f"The strategy '{strategy.name}' cannot be used beside ring attention, as it depends on which part its rank has",
            where=place,
            fix="Use another kind of attention on this axis (cp_attention=gather or ulysses), or another strategy here",
        )


def check_part(spec: TensorSpec, kind: Type, size: int, place: str, *, axis: str) -> None:
    """Refuses a split dim that is not made of 2 n equal chunks.

    Raises:
        RuleError: it does not divide.
    """
    if spec.shape[kind.dim] % (2 * size):
        raise RuleError(
            f"A tensor of shape {spec.shape} cannot be split as {kind} in zig-zag order: the dim does not divide by twice {axis}={size}",
            where=place,
            fix="Use another kind of attention on this axis (cp_attention=gather or ulysses)",
        )
