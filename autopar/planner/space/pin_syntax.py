"""The language of pins: how each is read; and as a table, what each kind is written like and holds."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from autopar.errors import UsageError
from autopar.plan.mesh import Type, parse_type
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
"""By their sign; of numbers, and of columns of them."""

ACTIVATIONS = "activations"

BUCKET = "bucket_bytes"
"""The one whole number that is chosen after the candidate."""

_SAME = {"zero_stage": "zero", "micro_batch_size": "micro_batch"}
"""Other names of some numbers."""

_NUMBERS = (
    *("pp", "dp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "ep_data", "zero", "zero_stage", "micro_batch"),
    *("micro_batch_size", "num_micro_batches", "virtual_stages", "vocab_multiple", BUCKET),
)
_AXES = ("tp",)
_CHOICES = {
    "schedule": SCHEDULES,
    "precision": ("fp32", "bf16", "fp16", "fp8", "fp64"),
    "cp_attention": ATTENTION_KINDS,
    "offload": ("none", "optimizer"),
}
EQUAL = "equal"
"""Of ``data_shares``: all data ranks take as many samples."""

_KEYS = (*_NUMBERS, *_CHOICES, "groups", "data_shares", "recompute", "opaque", "stage@BLOCKS", "PARAMETER=tp:TYPE")


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberPin:
    """A relation between a degree (or another whole number) and a value."""

    text: str
    key: str
    relation: str
    value: int

    def holds(self, found: int | str) -> bool:
        return bool(RELATIONS[self.relation](found, self.value))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePin:
    """A name that must (or, with ``!=``, must not) be chosen: ``schedule``, ``precision``, ``cp_attention``, ``offload``, ``groups``, ``data_shares``."""

    text: str
    key: str
    relation: str
    value: str

    def holds(self, found: int | str) -> bool:
        return (found == self.value) == (self.relation != "!=")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputePin:
    """Recompute of the blocks of ``selector``; of all blocks where it is empty."""

    text: str
    mode: Recompute
    selector: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePin:
    """The stage of the blocks of ``selector``."""

    text: str
    selector: str
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPin:
    """The type at rest, on ``axis``, of the parameters that the pattern matches."""

    text: str
    pattern: str
    axis: str
    type: Type

    def matches(self, names: Iterable[str]) -> bool:
        return any(fnmatchcase(name, self.pattern) for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaquePin:
    """Modules that are not looked into, by path, pattern or class name: the model is traced with it."""

    text: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPin:
    """What the blocks of ``selector`` keep for backward lives on the host; of all blocks where it is empty."""

    text: str
    selector: str


Pin = ActivationPin | NumberPin | ChoicePin | RecomputePin | StagePin | ParameterPin | OpaquePin


def parse_pin(text: str) -> Pin:
    """Reads one pin.

    >>> parse_pin("tp<=4")
    NumberPin(text='tp<=4', key='tp', relation='<=', value=4)

    Raises:
        UsageError: malformed, or an unknown name (with the closest known one).
    """
    match = re.fullmatch(r"\s*([^<>=!\s]+)\s*(<=|>=|!=|==|=|<|>)\s*(\S+)\s*", text)
    if match is None:
        raise UsageError(
            f"The pin '{text}' is not of the form NAME=VALUE (or <=, >=, !=)", fix="Write for example tp=4"
        )
    name, relation, value = match.groups()
    if name in _NUMBERS:
        if not value.isdecimal():
            raise UsageError(
                f"The value '{value}' of {name} is not a whole number",
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
        axis, _, type_text = value.partition(":")
        if axis not in _AXES:
            raise UsageError.unknown("axis", axis, _AXES, where=f"pin '{text}'")
        found = parse_type(type_text)
        if found.kind not in ("I", "S"):
            raise UsageError(
                f"A parameter cannot be stored as {type_text}",
                where=f"pin '{text}'",
                fix="Write I or S(d), for example tp:S(0)",
            )
        return ParameterPin(text=text, pattern=name, axis=axis, type=found)
    raise UsageError.unknown("pin", name, _KEYS)


def _choice(text: str, name: str, relation: str, value: str) -> ChoicePin:
    known = _CHOICES[name]
    by_lower = {k.lower(): k for k in known}
    if relation not in ("=", "==", "!="):
        raise UsageError(f"'{relation}' does not go with {name}", where=f"pin '{text}'", fix="Write = or !=")
    if value.lower() not in by_lower:
        more = (ACTIVATIONS, f"{ACTIVATIONS}@BLOCKS") if name == "offload" else ()
        raise UsageError.unknown(name, value, (*known, *more), where=f"pin '{text}'")
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
"""Numbers for each node group: their form, and what to say of others."""


def _by_group(text: str, name: str, relation: str, value: str) -> ChoicePin:
    form, fault, fix = _BY_GROUP[name]
    if relation not in ("=", "==", "!=") or not re.fullmatch(form, value):
        raise UsageError(f"The pin '{text}' {fault}", fix=fix)
    plain = value if value == EQUAL else "-".join(str(int(number)) for number in value.split("-"))
    return ChoicePin(text=text, key=name, relation=relation, value=plain)


def _of_modules(text: str, name: str, value: str) -> Pin:
    """A pin on blocks or modules."""
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
    """One kind of pin.

    Attributes:
        form: how it is written; ``OP`` is one of ``= != < <= > >=``.
        holds: what it holds.
        example: a pin.
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
    """A row for each kind."""
    rows = [(kind.example, kind.form, kind.holds) for kind in PIN_KINDS]
    head = ("example", "form", "what it holds")
    table = plain_table(head, rows, left=head, width=140, indent=0)
    return (
        f"{table}\n\nOP is one of = != < <= > >=. BLOCKS is a dotted path whose parts may be * or a range: it names the blocks whose\n"
        "label contains it. Several pins go in one --pin with commas, or in a file: --pin @FILE, one a line, # before a remark."
    )


def pins_summary() -> dict[str, dict[str, str]]:
    """The same as JSON values, by example."""
    return {kind.example: {"form": kind.form, "holds": kind.holds} for kind in PIN_KINDS}
