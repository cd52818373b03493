"""The syntax of pins: the parser of each kind, and the table of kinds that ``autopar pins`` prints."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from autopar.errors import UsageError
from autopar.plan.mesh import Type, type_at_rest
from autopar.plan.plan import RECOMPUTES, Recompute
from autopar.plan.schedule import SCHEDULES
from autopar.planner.space.space import ATTENTION_KINDS
from autopar.util.formatting import plain_table

RELATIONS: dict[str, Callable[[Any, int], Any]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
"""The relations of pins by their sign; they apply to numbers and to columns of numbers."""

ACTIVATIONS = "activations"
"""The value of ``offload`` that moves the activations of blocks."""

BUCKET = "bucket_bytes"
"""The only number that is chosen after the candidate."""

_SAME = {"zero_stage": "zero", "micro_batch_size": "micro_batch"}
"""Keys by their synonyms."""

_NUMBERS = (
    *("pp", "dp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "ep_data", "zero", "zero_stage", "micro_batch"),
    *("micro_batch_size", "num_micro_batches", "virtual_stages", "vocab_multiple", BUCKET),
)
_CHOICES = {
    "schedule": SCHEDULES,
    "precision": ("fp32", "bf16", "fp16", "fp8", "fp64"),
    "cp_attention": ATTENTION_KINDS,
    "offload": ("none", "optimizer"),
}
EQUAL = "equal"
"""The value of ``data_shares`` for which all data ranks take equally many samples."""

_KEYS = (*_NUMBERS, *_CHOICES, "groups", "data_shares", "recompute", "opaque", "stage@BLOCKS", "PARAMETER=tp:TYPE")


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberPin:
    """A relation between a whole number, such as a degree, and a value.

    Attributes:
        text: the pin as written.
        key: the name of the number, no synonym.
        relation: the sign, a key of :data:`RELATIONS`.
        value: the number on the right of the sign.
    """

    text: str
    key: str
    relation: str
    value: int

    def holds(self, value: int | str) -> bool:
        return bool(RELATIONS[self.relation](value, self.value))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePin:
    """A value that must, or with ``!=`` must not, be chosen for a choice that is no number.

    Attributes:
        text: the pin as written.
        key: ``schedule``, ``precision``, ``cp_attention``, ``offload``, ``groups`` or ``data_shares``.
        relation: ``=``, ``==`` or ``!=``.
        value: the value.
    """

    text: str
    key: str
    relation: str
    value: str

    def holds(self, value: int | str) -> bool:
        return (value == self.value) == (self.relation != "!=")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputePin:
    """The recompute mode of the blocks that ``selector`` matches; an empty selector matches all blocks."""

    text: str
    mode: Recompute
    selector: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePin:
    """The pipeline stage of the blocks that ``selector`` matches, from 0."""

    text: str
    selector: str
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPin:
    """The type on ``axis`` in which the parameters that ``pattern`` matches are stored."""

    text: str
    pattern: str
    axis: str
    type: Type

    def matches(self, names: Iterable[str]) -> bool:
        return any(fnmatchcase(name, self.pattern) for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaquePin:
    """Modules that are not traced, by path, pattern or class name."""

    text: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPin:
    """The blocks whose activations live on the host: those that ``selector`` matches; an empty selector matches all blocks."""

    text: str
    selector: str


Pin = ActivationPin | NumberPin | ChoicePin | RecomputePin | StagePin | ParameterPin | OpaquePin


_DIGITS = 18
"""Of a number: those that every int64 holds, in which candidates are listed."""


def parse_pin(text: str) -> Pin:
    """Return the pin of a text.

    >>> parse_pin("tp<=4")
    NumberPin(text='tp<=4', key='tp', relation='<=', value=4)

    Raises:
        UsageError: the text is malformed or has an unknown name (with the closest known one).
    """
    match = re.fullmatch(r"\s*([^<>=!\s]+)\s*(<=|>=|!=|==|=|<|>)\s*(\S+)\s*", text)
    if match is None:
        raise UsageError(
            f"The pin '{text}' is not of the form NAME=VALUE (or <=, >=, !=)", fix="Write for example tp=4"
        )
    name, relation, value = match.groups()
    if name in _NUMBERS:
        if not value.isdecimal() or len(value) > _DIGITS:
            fault = f"has more than {_DIGITS} digits" if value.isdecimal() else "is not a whole number"
            raise UsageError(
                f"The value '{value}' of {name} {fault}",
                where=f"pin '{text}'",
                fix=f"Write for example {name}=4",
            )
        return NumberPin(text=text, key=_SAME.get(name, name), relation=relation, value=int(value))
    if name in _BY_GROUP:
        return _by_group(text, name, relation, value)
    if name == "offload" and value.partition("@")[0] == ACTIVATIONS:
        return _activations(text, relation, value)
    if name in _CHOICES:
        return _choice(text, name, relation, value)
    if relation not in ("=", "=="):
        raise UsageError(f"'{relation}' does not go with {name}", where=f"pin '{text}'", fix="Write =")
    if name in ("recompute", "opaque") or name.startswith("stage@"):
        return _of_modules(text, name, value)
    if ":" in value:
        axis, stored = type_at_rest(value, where=f"pin '{text}'")
        return ParameterPin(text=text, pattern=name, axis=axis, type=stored)
    raise UsageError.unknown("pin", name, _KEYS)


def _choice(text: str, name: str, relation: str, value: str) -> ChoicePin:
    values = _CHOICES[name]
    by_lower = {k.lower(): k for k in values}
    if relation not in ("=", "==", "!="):
        raise UsageError(f"'{relation}' does not go with {name}", where=f"pin '{text}'", fix="Write = or !=")
    if value.lower() not in by_lower:
        more = (ACTIVATIONS, f"{ACTIVATIONS}@BLOCKS") if name == "offload" else ()
        raise UsageError.unknown(name, value, (*values, *more), where=f"pin '{text}'")
    return ChoicePin(text=text, key=name, relation=relation, value=by_lower[value.lower()])


def _activations(text: str, relation: str, value: str) -> ActivationPin:
    _, at, selector = value.partition("@")
    if relation not in ("=", "==") or bool(at) != bool(selector):
        raise UsageError(
            f"The pin '{text}' does not say which activations are offloaded",
            fix="Write offload=activations for all blocks, or for example offload=activations@layers.0-11",
        )
    return ActivationPin(text=text, selector=selector)


_BY_GROUP = {
    "groups": (
        r"\d+(-\d+)*",
        "is no order of node groups",
        "Write for example groups=1-0: each group by its place in the cluster's file, from 0",
    ),
    "data_shares": (
        rf"{EQUAL}|\d+(-\d+)+",
        "gives no shares of node groups",
        "Write for example data_shares=3-1: the samples that a data rank of each node group takes at once. Or 'equal'",
    ),
}
"""The pins with one number for each node group: the pattern of their values, and the fault and the remedy of values that do not match."""


def _by_group(text: str, name: str, relation: str, value: str) -> ChoicePin:
    form, fault, fix = _BY_GROUP[name]
    if relation not in ("=", "==", "!=") or not re.fullmatch(form, value):
        raise UsageError(f"The pin '{text}' {fault}", fix=fix)
    plain = value if value == EQUAL else "-".join(str(int(number)) for number in value.split("-"))
    return ChoicePin(text=text, key=name, relation=relation, value=plain)


def _of_modules(text: str, name: str, value: str) -> Pin:
    """Return a pin on blocks or modules."""
    if name == "recompute":
        return _recompute(text, value)
    if name == "opaque":
        return OpaquePin(text=text, name=value)
    if not value.isdecimal():
        raise UsageError(f"The stage '{value}' is not a whole number", where=f"pin '{text}'", fix="Count stages from 0")
    return StagePin(text=text, selector=name.removeprefix("stage@"), stage=int(value))


def _recompute(text: str, value: str) -> RecomputePin:
    mode, at, selector = value.partition("@")
    if mode not in RECOMPUTES or bool(at) != bool(selector):
        raise UsageError(
            f"Unknown recompute '{value}'",
            where=f"pin '{text}'",
            fix="Choose none, selective or full, for some blocks as in recompute=full@layers.0-11",
        )
    return RecomputePin(text=text, mode=mode, selector=selector)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinKind:
    """One kind of pin, for display.

    Attributes:
        form: how it is written; ``OP`` is one of ``= != < <= > >=``.
        holds: what it fixes.
        example: a pin of this kind.
    """

    form: str
    holds: str
    example: str


_ROWS = (
    ("tp OP N", "ranks that split tensors", "tp<=4"),
    ("pp OP N", "stages' ranks of the pipeline", "pp=2"),
    ("cp OP N", "ranks that split the sequence", "cp=2"),
    ("dp OP N", "data ranks", "dp=8"),
    ("dp_shard OP N, dp_replicate OP N", "data ranks that split states, and copies of these groups", "dp_shard=4"),
    ("ep OP N, ep_data OP N", "ranks that experts are split over, and how many of them are data ranks", "ep=4"),
    ("zero OP N", "ZeRO stage, 0 to 3", "zero=1"),
    ("micro_batch OP N", "samples that a data rank takes at once", "micro_batch>=2"),
    ("num_micro_batches OP N", "micro-batches of a step", "num_micro_batches=8"),
    ("schedule=NAME", "the pipeline's schedule: GPipe, 1F1B, Interleaved1F1B; also !=", "schedule=1F1B"),
    ("virtual_stages OP N", "stages of each pipeline rank", "virtual_stages=2"),
    ("stage@BLOCKS=N", "the stage of blocks, from 0", "stage@layers.0-7=0"),
    ("recompute=MODE[@BLOCKS]", "none, selective or full; of all blocks, or of some", "recompute=full@layers.0-11"),
    ("offload=WHAT", "none, optimizer, activations or activations@BLOCKS on the host", "offload=optimizer"),
    ("PARAMETER=tp:TYPE", "how parameters lie on tp, by a pattern of names: S(d) split, I whole", "*.up_proj.weight=tp:S(0)"),
    ("cp_attention=KIND", "how attention runs under cp: gather, ulysses, ring; also !=", "cp_attention=ring"),
    ("vocab_multiple OP N", "each rank's rows of a vocabulary are padded to a multiple", "vocab_multiple=128"),
    ("bucket_bytes OP N", "gradients that are summed together", "bucket_bytes=26214400"),
    ("precision=NAME", "the precision; also !=", "precision=bf16"),
    ("groups=I-J", "order of the node groups of a mixed cluster, from 0; also !=", "groups=1-0"),
    ("data_shares=A-B", "samples that a rank of each node group takes at once, or equal; also !=", "data_shares=3-1"),
    ("opaque=NAME", "a module runs as it is written: its path, a pattern, a class", "opaque=encoder.router"),
)  # fmt: skip

PIN_KINDS = tuple(PinKind(form=form, holds=holds, example=example) for form, holds, example in _ROWS)


def render_pins() -> str:
    """Return the table of all kinds of pins for the terminal."""
    rows = [(kind.example, kind.form, kind.holds) for kind in PIN_KINDS]
    head = ("example", "form", "what it holds")
    table = plain_table(head, rows, left=head, width=140, indent=0)
    return (
        f"{table}\n\nOP is one of = != < <= > >=. BLOCKS is a dotted path whose parts may be * or a range: it names the blocks whose\n"
        "label contains it. Several pins go in one --pin with commas, or in a file: --pin @FILE, one a line, # before a remark."
    )


def pins_summary() -> dict[str, dict[str, str]]:
    """Return the kinds of pins as JSON values, by example."""
    return {kind.example: {"form": kind.form, "holds": kind.holds} for kind in PIN_KINDS}
