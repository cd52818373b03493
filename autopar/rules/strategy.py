"""What a rule gives and a solver chooses, strategies and typings of one mesh axis; and what must hold of a typing as a whole.

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
        name: unique among the strategies of the operator and stable between versions: it stands in
            plans (``split n``, ``invariant``, ``replicate``, ``linear 0``, ``vocabulary``).
        inputs: required type of each of ``Op.operands``.
        outputs: type of each output.
        work: part of the operator's work that one rank does (1/size when split, 1 when repeated).
        target: what to call instead of the operator's own target; empty: the same operator on local
            shapes.
        random: True where ranks must draw distinct random numbers.
    """

    name: str
    inputs: tuple[Type, ...]
    outputs: tuple[Type, ...]
    work: Fraction = Fraction(1)
    target: str = ""
    random: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Typing:
    """The types of a whole graph on one axis: what a solver chooses and a pass applies.

    Attributes:
        axis: mesh axis (``tp``), or ``batch`` for everything that splits samples: micro-batches
            and the data axes together.
        size: ranks on the axis; for ``batch`` parts of the traced batch (may be a fraction below
            one when the micro-batch is larger than the traced batch).
        strategies: by operator name, for every operator of ``prelude`` and ``ops``.
        parameters: at rest, by parameter name: I or S(d).
        inputs: by name of input or buffer: R, or S(d) for inputs that arrive split. Missing: R.
    """

    axis: str
    size: Fraction
    strategies: Mapping[str, Strategy]
    parameters: Mapping[str, Type]
    inputs: Mapping[str, Type] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """What a rule needs to write one rank's call: see ``local_calls.localize``.

    Attributes:
        axis, size: as in :class:`Typing`.
        operands: local specs of the operands, in order.
        outputs: local specs of the outputs.
        count_scale: global batch over traced batch: by what a count of samples that stands as a
            literal must be multiplied (a mean over the batch dim divides by the global count). 1 on
            every axis but ``batch``.
    """

    axis: str
    size: Fraction
    operands: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    count_scale: Fraction = Fraction(1)


GATHERED = "autopar.attention_gathered"
RING = "autopar.attention_ring"
ZIGZAG_SAFE = ("", "autopar.partial_mean", RING)
"""What strategies may call where split dims are in zig-zag order: else nothing that knows which part its rank has."""

FORM_AT, AXIS_AT, COUNT_AT, PARTS_AT = 8, 9, 10, 12
"""Positions in a mixture of experts (:mod:`autopar.ops.experts`) of its form, axis, number of experts of all ranks, and parts."""


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


@dataclass(slots=True, kw_only=True)
class SampleSums:
    """Sums over all samples that prelude values make before the step, as they are found.

    Attributes:
        sums: the values that are summed, in order.
        read_as_partial: values of which some operator reads a part, with its place.
    """

    graph: Graph
    sums: dict[Ref, None] = field(default_factory=dict)
    read_as_partial: dict[Ref, str] = field(default_factory=dict)

    def crosses(self, ref: Ref, found: Type, wanted: Type, *, same: bool) -> bool:
        """A sum over samples that the model itself reads as a total, or a whole value that becomes a summand.

        Where samples meet, whatever becomes another type; totals of the prelude are made before the step.

        Args:
            same: the types are equal for this value.
        """
        if same or self.graph.is_parameter(ref):
            return False
        if ref in self.sums or (found == P and not wanted.is_split and self.graph.is_prelude(ref)):
            return False
        return bool(self.graph.mixing) or (P in (found, wanted) and not found.is_split and not wanted.is_split)

    def check(self, ref: Ref, found: Type, wanted: Type, op: Op, *, same: bool) -> None:
        """Whether ``op`` can read a value that does not cross samples.

        Raises:
            RuleError: it cannot, as samples meet.
            InternalError: it cannot, as the strategy is wrong.
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
        elif found == P and wanted in (R, I) and self.graph.is_prelude(ref):
            self.sums[ref] = None
            conflict = ref in self.read_as_partial
        else:
            raise RuleError(
                f"Samples of the batch depend on each other ({ref} is {found} where {wanted} is needed), so it cannot be split",
                where=f"{place}, {op.module or 'no module'}{f', {op.source}' if op.source else ''}",
                fix="Statistics over the batch (batch normalisation) need one data rank and one micro-batch: pin them",
            )
        if conflict:
            raise InternalError(f"The sum {ref} over samples is read both as a total and as a part", where=place)

    def new_value(self, ref: Ref, found: Type, *, in_prelude: bool) -> None:
        """The new value of a buffer, which is not whole, becomes a sum over all samples.

        Raises:
            RuleError: it is none.
        """
        if found != P or not in_prelude or ref in self.read_as_partial:
            producer = self.graph.producer(ref)
            raise RuleError(
                f"The new value of this buffer is not the same for all samples ({found}), so the batch cannot be split",
                where=f"{ref.name} ({producer.module if producer is not None else ''})",
                fix="Keep sums or means over the batch in buffers, not values of single samples",
            )
        self.sums[ref] = None
