"""Strategies and typings on one mesh axis, and the conditions that a typing as a whole must meet.

On an axis with ring attention, every split dim that an operator reads or produces is in *zig-zag order*: the dim is cut into 2 n chunks,
and rank r of n holds chunks r and 2 n - 1 - r. Under a causal mask all ranks then have the same work. The order holds for every split
dim on the axis, so that the operands of an operator agree:

- A strategy without a target of its own runs the same operator on any set of chunks. ``verify_rule(..., zigzag=True)`` checks this by
  execution for every rule. A contracted dim is a sum, whose order is free. A view maps chunks of one dim to chunks of the other.
- Inputs, buffers and parameters at rest are in the order of the checkpoint. A plain all-gather completes them, and the complete tensor
  is split in zig-zag order (``_Sharding._from_checkpoint_order`` of :mod:`autopar.rules.apply`). Complete values (R, I, P) have this
  order too.
- Strategies that depend on the rank's part are refused: :func:`check_strategy`. So are dims that 2 n does not divide: :func:`check_part`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from autopar.errors import InternalError, RuleError
from autopar.graph.graph import Graph, Op, Ref, TensorSpec
from autopar.plan.mesh import I, P, R, Type


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to run an operator on one axis.

    Attributes:
        name: unique among the strategies of the operator and stable between versions, because plans contain it
            (``split n``, ``invariant``, ``replicate``, ``linear 0``, ``vocabulary``).
        inputs: the required type of each of ``Op.operands``.
        outputs: the type of each output.
        work: the fraction of the operator's work that one rank does: 1/size if it is split, 1 if every rank repeats it.
        target: the operator that a rank calls instead of the original one; empty for the original one.
        random: whether ranks must draw different random numbers.
    """

    name: str
    inputs: tuple[Type, ...]
    outputs: tuple[Type, ...]
    work: Fraction = Fraction(1)
    target: str = ""
    random: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Typing:
    """The types of a whole graph on one axis: a solver chooses them, and :func:`autopar.rules.apply.shard` applies them.

    Attributes:
        axis: the mesh axis (``tp``), or ``batch``, which stands for micro-batches and the data axes together.
        size: the number of ranks on the axis. For ``batch`` it is the number of parts of the traced batch, a fraction below one if the
            micro-batch is larger than the traced batch.
        strategies: the strategy of every operator of ``prelude`` and ``ops``, by the operator's name.
        parameters: the type of each parameter at rest, by name: I or S(d).
        inputs: the type of each input or buffer, by name: R, or S(d) for inputs that arrive split. Those that are missing are R.
    """

    axis: str
    size: Fraction
    strategies: Mapping[str, Strategy]
    parameters: Mapping[str, Type]
    inputs: Mapping[str, Type] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """What :func:`autopar.rules.local_calls.localize` needs to write the call of one rank.

    Attributes:
        axis, size: as in :class:`Typing`.
        operands: the local specs of the operands, in order.
        outputs: the local specs of the outputs.
        count_scale: the global batch size over the traced batch size, 1 on every axis but ``batch``. Literals that count samples are
            multiplied by it: a mean over the batch dim divides by the global count.
    """

    axis: str
    size: Fraction
    operands: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    count_scale: Fraction = Fraction(1)


GATHERED = "autopar.attention_gathered"
"""Attention of split queries over complete keys and values."""
RING = "autopar.attention_ring"
"""Ring attention, which splits queries, keys and values."""
ZIGZAG_SAFE = ("", "autopar.partial_mean", RING)
"""The targets that strategies may have where split dims are in zig-zag order; none of them depends on the part that its rank holds."""

FORM_AT, AXIS_AT, COUNT_AT, PARTS_AT = 8, 9, 10, 12
"""Positions among the arguments of a mixture of experts (:mod:`autopar.ops.experts`): form, axis, number of experts of all ranks, parts."""


def is_zigzag(strategies: Iterable[Strategy]) -> bool:
    """Return whether the strategies of one axis put its split dims in zig-zag order: one of them is ring attention."""
    return any(strategy.target == RING for strategy in strategies)


def check_strategy(strategy: Strategy, place: str) -> None:
    """Refuse a strategy that cannot run in zig-zag order.

    Raises:
        RuleError: the strategy depends on the part of a split dim that its rank holds.
    """
    if strategy.target not in ZIGZAG_SAFE:
        raise RuleError(
            f"The strategy '{strategy.name}' cannot be used beside ring attention, as it depends on which part its rank has",
            where=place,
            fix="Use another kind of attention on this axis (cp_attention=gather or ulysses), or another strategy here",
        )


def check_part(spec: TensorSpec, kind: Type, size: int, place: str, *, axis: str) -> None:
    """Refuse a split dim that does not consist of 2 n equal chunks on n ranks.

    Raises:
        RuleError: twice ``size`` does not divide the dim.
    """
    if spec.shape[kind.dim] % (2 * size):
        raise RuleError(
            f"A tensor of shape {spec.shape} cannot be split as {kind} in zig-zag order: the dim does not divide by twice {axis}={size}",
            where=place,
            fix="Use another kind of attention on this axis (cp_attention=gather or ulysses)",
        )


@dataclass(slots=True, kw_only=True)
class SampleSums:
    """Collects the sums over all samples that the prelude computes before the step (``Graph.sums``), for one typing of axis ``batch``.

    Attributes:
        graph: the graph that the typing is applied to.
        sums: the values that are summed, in the order in which they were found.
        read_as_partial: the values of which an operator reads this rank's summand, with the place of that operator.
    """

    graph: Graph
    sums: dict[Ref, None] = field(default_factory=dict)
    read_as_partial: dict[Ref, str] = field(default_factory=dict)

    def crosses(self, ref: Ref, current: Type, wanted: Type, *, same: bool) -> bool:
        """Return whether a value changes its type within the step, so that samples of different data ranks meet.

        This is a sum over samples that the model itself reads as a total, a complete value that becomes a summand, or any change of type if
        ``Graph.mixing`` is set. Totals of the prelude are not among these, as they are summed before the step.

        Args:
            ref: the value.
            current: its type.
            wanted: the type in which an operator reads it.
            same: whether the two types are equal for this value.
        """
        if same or self.graph.is_parameter(ref):
            return False
        if ref in self.sums or (current == P and not wanted.is_split and self.graph.is_prelude(ref)):
            return False
        return bool(self.graph.mixing) or (P in (current, wanted) and not current.is_split and not wanted.is_split)

    def check(self, ref: Ref, current: Type, wanted: Type, op: Op, *, same: bool) -> None:
        """Check that ``op`` can read a value that does not change its type within the step, and record the sum if it is one.

        Raises:
            RuleError: the samples of the batch depend on each other.
            InternalError: the strategy of the operator is wrong.
        """
        place = f"{op.name} ({op.target})"
        if self.graph.is_parameter(ref):
            if wanted not in (R, I):
                raise InternalError(f"A parameter is {wanted} for the samples of a batch, not complete", where=place)
            return
        if wanted == P:
            self.read_as_partial[ref] = place
        if same:
            conflict = ref in self.sums and wanted == P
        elif current == P and wanted in (R, I) and self.graph.is_prelude(ref):
            self.sums[ref] = None
            conflict = ref in self.read_as_partial
        else:
            raise RuleError(
                f"Samples of the batch depend on each other ({ref} is {current} where {wanted} is needed), so it cannot be split",
                where=f"{place}, {op.module or 'no module'}{f', {op.source}' if op.source else ''}",
                fix="Statistics over the batch (batch normalisation) need one data rank and one micro-batch: pin them",
            )
        if conflict:
            raise InternalError(f"The sum {ref} over samples is read both as a total and as a part", where=place)

    def new_value(self, ref: Ref, current: Type, *, in_prelude: bool) -> None:
        """Record that the new value of a buffer, which is not complete on a rank, becomes a sum over all samples.

        Raises:
            RuleError: the value is not such a sum.
        """
        if current != P or not in_prelude or ref in self.read_as_partial:
            producer = self.graph.producer(ref)
            raise RuleError(
                f"The new value of this buffer is not the same for all samples ({current}), so the batch cannot be split",
                where=f"{ref.name} ({producer.module if producer is not None else ''})",
                fix="Keep sums or means over the batch in buffers, not values of single samples",
            )
        self.sums[ref] = None
