"""One pin: what kinds there are, and how they are read (the table is in :mod:`autopar.planner.space.pin_kinds`)."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from autopar.errors import UsageError
from autopar.plan.mesh import Type, parse_type
from autopar.plan.plan import RECOMPUTES, Recompute
from autopar.plan.schedule import SCHEDULES
from autopar.planner.space.space import ATTENTION_KINDS

_RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
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

    def holds(self, found: int) -> bool:
        return _RELATIONS[self.relation](found, self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePin:
    """A name that must (or, with ``!=``, must not) be chosen: ``schedule``, ``precision``, ``cp_attention``, ``offload``, ``groups``, ``data_shares``."""

    text: str
    key: str
    relation: str
    value: str

    def holds(self, found: str) -> bool:
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
    if name in ("groups", "data_shares"):
        return (_order if name == "groups" else _shares)(text, relation, value)
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


def _order(text: str, relation: str, value: str) -> ChoicePin:
    if relation not in ("=", "==", "!=") or not re.fullmatch(r"\d+(-\d+)*", value):
        raise UsageError(
            f"The pin '{text}' is no order of node groups",
            fix="Write for example groups=1-0: each group by its place in the cluster's file, from 0",
        )
    return ChoicePin(text=text, key="groups", relation=relation, value=value)


def _shares(text: str, relation: str, value: str) -> ChoicePin:
    if relation not in ("=", "==", "!=") or not (value == EQUAL or re.fullmatch(r"\d+(-\d+)+", value)):
        raise UsageError(
            f"The pin '{text}' gives no shares of node groups",
            fix="Write for example data_shares=3-1: the samples that a data rank of each node group takes at once. Or 'equal'",
        )
    shares = value if value == EQUAL else "-".join(str(int(share)) for share in value.split("-"))
    return ChoicePin(text=text, key="data_shares", relation=relation, value=shares)


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
