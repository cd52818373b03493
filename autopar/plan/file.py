"""Reads and writes plans as JSON files, and generates their schema from the dataclasses of plans.

Nothing of a plan is lost in a file. Errors name the file and the path in it.
``python -m autopar.plan.file docs/reference/plan.schema.json`` writes the published schema; a test keeps it up to date.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast, get_args, get_origin

from autopar.errors import AutoparError, PlanError, PlanFileError, UsageError
from autopar.plan.check import check_plan
from autopar.plan.mesh import Type, parse_type
from autopar.plan.plan import FORMAT_VERSION, Plan
from autopar.util.files import check_places, write_text
from autopar.util.toml import dotted

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator


_LINE_LENGTH = 110
"""Columns of a line of a plan file."""
_MAKE_ANEW = "Make it anew with 'autopar search ... -o FILE'"
_NAME_ONE = "Name a file that 'autopar search ... -o FILE' wrote"


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values. Keys are in the order of the fields, types are written as ``S(0)``, and numbers are not rounded."""
    written_by = {WRITTEN_BY: f"autopar {_autopar_version()}"}
    return {"version": plan.version} | written_by | cast("dict[str, Any]", encode(plan))


def plan_from_dict(data: object, *, place: str = "plan") -> Plan:
    """Return the plan of a result of :func:`plan_to_dict`.

    Args:
        data: the decoded JSON.
        place: the name of the source in errors (the file).

    Raises:
        PlanError: the data is not a plan; the error names the path in it, what was expected there, and what was found.
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
    """Write a plan, completely or not at all: to a temporary file next to ``path``, which is then renamed.

    Raises:
        PlanError: the plan is inconsistent, or the file cannot be written.
    """
    check_places(path=path)
    target = Path(path)
    check_plan(plan, place=str(target))
    try:
        write_text(target, dumps(plan_to_dict(plan)) + "\n")
    except UsageError as error:
        raise error.becoming(PlanError) from error


def load_plan(path: str | Path) -> Plan:
    """Read a plan file.

    Raises:
        PlanFileError: the file is missing, truncated, not JSON, of a newer format, or inconsistent; the error names the place.
    """
    check_places(path=path)
    try:
        return _read_plan(Path(path))
    except PlanError as error:
        raise error.becoming(PlanFileError) from error


def _read_plan(path: Path) -> Plan:
    place = str(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        fix = "Make one with 'autopar search ... -o FILE'" if isinstance(error, FileNotFoundError) else _NAME_ONE
        raise PlanError.unreadable(place, error, fix=fix) from error
    try:
        data = json.loads(text, object_pairs_hook=partial(_unique, place), parse_constant=partial(_no_constant, place))
    except json.JSONDecodeError as error:
        where = f"{place}, line {error.lineno}, column {error.colno}"
        is_cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        state = "is empty" if not text.strip() else "is cut off" if is_cut else f"is not JSON ({error.msg})"
        raise PlanError(f"The plan file {state}", where=where, fix=_MAKE_ANEW) from error
    return plan_from_dict(data, place=place)


def dumps(data: object) -> str:
    """Return JSON that people can read: short values are on one line, and long lists of words are filled like a paragraph."""
    return _write(data, 0, 0)


def encode(value: Any, *, rare: bool = False) -> Any:
    """Return a value of a plan as JSON values; ``rare`` includes fields that files contain only if they differ from their default."""
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
    """Return the value of type ``hint`` from JSON that the schema has checked already; ``place`` is its path, for errors."""
    if hint is Type:
        return parse_type(value)
    if hint is float or hint is int:
        try:
            return hint(value)
        except OverflowError as error:
            raise PlanError("A number of the plan is too large", where=place, fix=_MAKE_ANEW) from error
    if get_origin(hint) is tuple:
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
            raise error.becoming(PlanError, where=place) from error
    return value


def _check_version(data: object, place: str) -> None:
    if not isinstance(data, Mapping):
        raise PlanError("A plan file holds a JSON object, this one something else", where=place, fix=_NAME_ONE)
    version = data.get("version")
    if isinstance(version, int) and not isinstance(version, bool) and version > FORMAT_VERSION:
        writer = data.get(WRITTEN_BY)
        is_newer = isinstance(writer, str) and writer and writer.removeprefix("autopar ") != _autopar_version()
        newer = f"{writer} or later" if is_newer else "the autopar that wrote it"
        raise PlanError(
            f"The plan has format version {version}, but this autopar ({_autopar_version()}) reads formats up to {FORMAT_VERSION}",
            where=place,
            fix=f"Read it with {newer}",
        )


@cache
def _validator() -> Validator:
    from jsonschema import Draft202012Validator  # takes a tenth of a second, and only reading plans needs it

    return Draft202012Validator(plan_schema())


def _error_order(error: ValidationError) -> tuple[int, list[str]]:
    """Return a sort key by which errors of outer objects come first, as they explain the other errors."""
    return len(error.absolute_path), [str(part) for part in error.absolute_path]


def _refuse(error: ValidationError, place: str) -> NoReturn:
    """Raise a PlanError in plain words for an error of the schema."""
    path = dotted(tuple(error.absolute_path))
    problem = f"Wrong value of '{path}'" if path else "Wrong value"
    expected, got, fix = "", short(error.instance), _MAKE_ANEW
    match error.validator:
        case "additionalProperties":
            known = sorted(error.schema["properties"])
            unknown = next(key for key in error.instance if key not in known)
            close = difflib.get_close_matches(unknown, known, n=1)
            problem, got = f"Unknown key '{unknown}'" + (f" in '{path}'" if path else ""), ""
            fix = f"Did you mean '{close[0]}'?" if close else "Remove it"
        case "required":
            missing = next(key for key in error.validator_value if key not in error.instance)
            problem, got = f"Missing key '{missing}'" + (f" in '{path}'" if path else ""), ""
        case "type":
            expected = f"a value of type {error.validator_value}"
        case "enum":
            expected = f"one of {', '.join(map(str, error.validator_value))}"
        case "const":
            expected = str(error.validator_value)
        case "pattern":
            expected, fix = "I, R, P or S(d)", "Write for example S(0)"
        case "minimum":
            expected = f"at least {error.validator_value}"
        case "minItems" | "maxItems":
            expected, got = f"{error.validator_value} items", str(len(error.instance))
        case _:
            got = error.message
    raise PlanError(problem, where=place, expected=expected, got=got or None, fix=fix) from None


def _unique(place: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a JSON file as a dict; a key that is given twice is an error."""
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise PlanError(f"The key '{twice}' is given twice", where=place, fix="Remove one of them")
    return data


def _no_constant(place: str, text: str) -> NoReturn:
    raise PlanError(f"A number of the plan is {text}", where=place, fix=_MAKE_ANEW)


def _write(value: Any, depth: int, lead: int) -> str:
    """Return the JSON of a value; ``lead`` is the number of characters in front of it on its line."""
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
    """Return words with commas as a paragraph of indented lines."""
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


def short(value: object) -> str:
    """Return a value as it is written in errors, in at most 60 characters."""
    if isinstance(value, list):
        plain = all(not isinstance(item, dict | list) for item in value)
        text = json.dumps(value) if plain else f"{len(value)} items"
    elif isinstance(value, dict):
        text = "an object"
    else:
        text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


DIALECT = "https://json-schema.org/draft/2020-12/schema"
TYPE_PATTERN = r"^(I|R|P|S\((0|[1-9][0-9]*)\))$"
WRITTEN_BY = "written_by"
"""The only key of a plan file that is not a field of the plan: the version of autopar that wrote it."""


def plan_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of plan files and of results of :func:`autopar.plan.file.plan_to_dict`."""
    definitions: dict[str, Any] = {}
    root = _object(Plan, definitions)
    root["properties"][WRITTEN_BY] = {"type": "string", "description": "The autopar that wrote the file."}
    root["properties"]["version"] = {"const": FORMAT_VERSION}
    root["required"] = sorted({*root["required"], "version"})
    return {"$schema": DIALECT, "title": "autopar plan", **root, "$defs": dict(sorted(definitions.items()))}


def _object(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a dataclass, whose description is the first paragraph of its docstring."""
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    return {
        "description": " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split()).replace("``", ""),
        "type": "object",
        "properties": {field.name: schema_of(hints[field.name], definitions) for field in fields},
        "required": sorted(field.name for field in fields if not has_default(field)),
        "additionalProperties": False,
    }


def schema_of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one annotation; the schemas of dataclasses are added to ``definitions`` and referenced."""
    scalars: dict[Any, dict[str, Any]] = {
        str: {"type": "string"},
        bool: {"type": "boolean"},
        int: {"type": "integer", "minimum": 0},
        float: {"type": "number"},
        Type: {"type": "string", "pattern": TYPE_PATTERN, "description": "I, R, P or S(dim)"},
    }
    if hint in scalars:
        return scalars[hint]
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    if get_origin(hint) is tuple:
        items = get_args(hint)
        if items[-1] is Ellipsis:
            return {"type": "array", "items": schema_of(items[0], definitions)}
        parts = [schema_of(item, definitions) for item in items]
        return {"type": "array", "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)}
    if get_origin(hint) in (types.UnionType, typing.Union):
        return {"anyOf": [schema_of(item, definitions) for item in get_args(hint)]}
    if hint is type(None):
        return {"type": "null"}
    if dataclasses.is_dataclass(hint):
        cls = cast("type", hint)
        if cls.__name__ not in definitions:
            definitions[cls.__name__] = {}  # ends the recursion if the class refers to itself
            definitions[cls.__name__] = _object(cls, definitions)
        return {"$ref": f"#/$defs/{cls.__name__}"}
    raise TypeError(f"no schema for a field of type {hint}")


def has_default(field: dataclasses.Field[Any]) -> bool:
    """Return whether a field may be missing in a file."""
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def schema_text() -> str:
    """Return the text of the published schema."""
    return json.dumps(plan_schema(), indent=2) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(schema_text(), encoding="utf-8")
