"""What a rule gives and what a solver chooses: strategies and typings, for one mesh axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from autopar.graph.graph import Argument, TensorSpec
from autopar.plan.mesh import Type


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Bytes that an operator's own implementation moves inside (vocabulary-parallel cross entropy).

    ``kind`` is a collective (``all_reduce`` ...); ``num_bytes`` that of the full tensor, for an all-to-all
    that of one rank's part (as ``rules.conversions.collective_bytes``).
    """

    kind: str
    num_bytes: int
    backward: bool = False


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
        extra: keyword arguments to add to the call.
        communication: what ``target`` moves inside.
        random: True where ranks must draw distinct random numbers.
    """

    name: str
    inputs: tuple[Type, ...]
    outputs: tuple[Type, ...]
    work: Fraction = Fraction(1)
    target: str = ""
    extra: tuple[tuple[str, Argument], ...] = ()
    communication: tuple[Communication, ...] = ()
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
    """What a rule needs to write one rank's call: see ``rules.localize``.

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
