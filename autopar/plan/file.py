"""Plans as files: exact JSON both ways, every fault named by file and path, and the difference of two plans."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast, get_args

from autopar.errors import AutoparError, PlanError, PlanFileError
from autopar.plan.check import check_plan
from autopar.plan.json_schema import WRITTEN_BY, is_tuple, plan_schema
from autopar.plan.plan import FORMAT_VERSION, Plan
from autopar.plan.tensor_types import Type, parse_type

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

_LINE_LENGTH = 110
_MAKE_ANEW = "make it anew with 'autopar search ... -o FILE'"


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values, keys in the order of the fields; types as ``S(0)``; no number is rounded."""
    written_by = {WRITTEN_BY: f"autopar {_autopar_version()}"}
    return {"version": plan.version} | written_by | cast("dict[str, Any]", encode(plan))


def plan_from_dict(data: object, *, place: str = "plan") -> Plan:
    """The plan that :func:`plan_to_dict` gave.

    Args:
        data: decoded JSON.
        place: what an error calls the source (the file).

    Raises:
        PlanError: names the path in the document, the law and the value.
    """
    _check_version(data, place)
    error = next(iter(sorted(_validator().iter_errors(data), key=_error_order)), None)
    if error is not None:
        _refuse(error, place)
    fields = {key: value for key, value in cast("dict[str, Any]", data).items() if key != WRITTEN_BY}
    plan = cast("Plan", _decode(Plan, fields, f"{place}: "))
    check_plan(plan, place=place)
    return plan


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan, whole or not at all: under a temporary name beside ``path``, then renamed.

    Raises:
        PlanError: the plan is inconsistent, or the file cannot be written.
    """
    target = Path(path)
    check_plan(plan, place=str(target))
    text = dumps(plan_to_dict(plan)) + "\n"
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise PlanError("the plan can be written", value=error, place=str(target)) from error


def load_plan(path: str | Path) -> Plan:
    """Read a plan file.

    Raises:
        PlanFileError: the file is missing, cut off, not JSON, of a newer format, or inconsistent; says where.
    """
    try:
        return _read_plan(Path(path))
    except PlanError as error:
        raise PlanFileError(error.law, value=error.value, place=error.place, remedy=error.remedy) from error


def _read_plan(path: Path) -> Plan:
    place = str(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        remedy = "make one with 'autopar search ... -o FILE'" if isinstance(error, FileNotFoundError) else _MAKE_ANEW
        raise PlanError("the plan file can be read as UTF-8 text", value=error, place=place, remedy=remedy) from error
    try:
        data = json.loads(text, object_pairs_hook=_unique(place), parse_constant=_no_constant(place))
    except json.JSONDecodeError as error:
        where = f"{place}, line {error.lineno}, column {error.colno}"
        cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        found = "a file that is empty" if not text.strip() else "a file that is cut off" if cut else error.msg
        raise PlanError("a plan file is JSON", value=found, place=where, remedy=_MAKE_ANEW) from error
    return plan_from_dict(data, place=place)


def dumps(data: object) -> str:
    """JSON for people: what is short stands on a line, long lists of words are filled like a paragraph."""
    return _write(data, 0, 0)


def encode(value: Any, *, rare: bool = False) -> Any:
    """``rare``: also the fields that a file has only where they are not the default."""
    if isinstance(value, Type):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        written = (f for f in fields if rare or not (f.metadata and getattr(value, f.name) == f.default))
        return {field.name: encode(getattr(value, field.name), rare=rare) for field in written}
    if isinstance(value, tuple):
        return [encode(item, rare=rare) for item in value]
    return value


def _decode(hint: Any, value: Any, place: str) -> Any:
    """Rebuild what the schema has already checked."""
    if hint is Type:
        return parse_type(value)
    if hint is float or hint is int:
        return hint(value)
    if is_tuple(hint):
        items = get_args(hint)
        hints: Sequence[Any] = items[:1] * len(value) if items[-1] is Ellipsis else items
        return tuple(_decode(h, v, f"{place}[{i}]") for i, (h, v) in enumerate(zip(hints, value, strict=True)))
    if dataclasses.is_dataclass(hint):
        annotations = typing.get_type_hints(hint)
        separator = "" if place.endswith(": ") else "."
        fields = {key: _decode(annotations[key], item, f"{place}{separator}{key}") for key, item in value.items()}
        try:
            return cast("type[Any]", hint)(**fields)
        except AutoparError as error:
            raise PlanError(error.law, value=error.value, place=place, remedy=error.remedy) from error
    return value


def _check_version(data: object, place: str) -> None:
    if not isinstance(data, Mapping):
        raise PlanError("a plan file holds one JSON object", value=type(data).__name__, place=place, remedy=_MAKE_ANEW)
    version = data.get("version")
    if isinstance(version, int) and not isinstance(version, bool) and version > FORMAT_VERSION:
        writer = data.get(WRITTEN_BY)
        is_newer = isinstance(writer, str) and writer and writer.removeprefix("autopar ") != _autopar_version()
        newer = f"{writer} or later" if is_newer else "the autopar that wrote it"
        raise PlanError(
            f"this autopar ({_autopar_version()}) reads plan formats up to version {FORMAT_VERSION}",
            value=f"version {version}",
            place=f"{place}: version",
            remedy=f"read it with {newer}",
        )


@cache
def _validator() -> Validator:
    from jsonschema import Draft202012Validator  # a tenth of a second that only readers of plans need

    return Draft202012Validator(plan_schema())


def _error_order(error: ValidationError) -> tuple[int, list[str]]:
    """Unknown and missing keys of outer objects first: they explain what follows."""
    return len(error.absolute_path), [str(part) for part in error.absolute_path]


def _refuse(error: ValidationError, place: str) -> NoReturn:
    path = _dotted(error.absolute_path)
    law, value, remedy = error.message, None, _MAKE_ANEW
    found: object = short(error.instance)
    match error.validator:
        case "additionalProperties":
            known = sorted(error.schema["properties"])
            unknown = next(key for key in error.instance if key not in known)
            close = difflib.get_close_matches(unknown, known, n=1)
            law, found = "every key of a plan is known", repr(unknown)
            remedy = f"did you mean {close[0]!r}?" if close else "remove it"
        case "required":
            missing = next(key for key in error.validator_value if key not in error.instance)
            law, found = f"the key {missing!r} is given", "nothing"
        case "type":
            law = f"the value is of type {error.validator_value}"
        case "enum":
            law = f"the value is one of {', '.join(map(str, error.validator_value))}"
        case "const":
            law = f"the value is {error.validator_value}"
        case "pattern":
            law, remedy = "a type is one of I, R, P, S(d)", "write for example S(0)"
        case "minimum":
            law = f"the value is at least {error.validator_value}"
        case "minItems" | "maxItems":
            law, found = f"the list has {error.validator_value} items", len(error.instance)
        case _:
            found = value
    raise PlanError(law, value=found, place=f"{place}: {path}" if path else place, remedy=remedy) from None


def _dotted(path: Sequence[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _unique(place: str) -> Any:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise PlanError("a key is given once", value=f"{twice!r} twice", place=place, remedy="remove one")
        return found

    return build


def _no_constant(place: str) -> Any:
    def refuse(text: str) -> NoReturn:
        raise PlanError("every number of a plan is finite", value=text, place=place, remedy=_MAKE_ANEW)

    return refuse


def _write(value: Any, depth: int, lead: int) -> str:
    """``lead``: characters that stand before the value on its line."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not isinstance(value, dict | list) or not value or (depth > 0 and lead + len(line) < _LINE_LENGTH):
        return line
    inner, outer = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict):
        items = []
        for key, item in value.items():
            head = f"{json.dumps(key, ensure_ascii=False)}: "
            items.append(f"{inner}{head}{_write(item, depth + 1, len(inner) + len(head))}")
        return "{\n" + ",\n".join(items) + f"\n{outer}}}"
    if any(isinstance(item, dict | list) for item in value):
        return "[\n" + ",\n".join(inner + _write(item, depth + 1, len(inner)) for item in value) + f"\n{outer}]"
    return "[\n" + _fill([json.dumps(item, ensure_ascii=False) for item in value], inner) + f"\n{outer}]"


def _fill(words: list[str], indent: str) -> str:
    lines, line = [], indent
    for index, word in enumerate(words):
        piece = word + ("," if index < len(words) - 1 else "")
        if line != indent and len(line) + 1 + len(piece) > _LINE_LENGTH:
            lines.append(line)
            line = indent
        line += piece if line == indent else f" {piece}"
    return "\n".join([*lines, line])


@cache
def _autopar_version() -> str:
    try:
        return metadata.version("autopar")
    except metadata.PackageNotFoundError:
        return "of this checkout"


__all__ = [
    "dumps",
    "load_plan",
    "plan_from_dict",
    "plan_schema",
    "plan_to_dict",
    "save_plan",
]


def short(value: object) -> str:
    if isinstance(value, list):
        plain = all(not isinstance(item, dict | list) for item in value)
        text = json.dumps(value) if plain else f"{len(value)} items"
    elif isinstance(value, dict):
        text = "an object"
    else:
        text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
