"""Reads and writes plans as JSON files. Nothing of a plan is lost in a file; errors name the file and the path in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, cast

from autopar.errors import PlanError, PlanFileError, UsageError, reason
from autopar.plan.check import check_plan
from autopar.plan.plan import FORMAT_VERSION, Plan
from autopar.util.files import check_places, write_json
from autopar.util.toml import CHANGE, Table, as_table

_MAKE_ANEW = "Make it anew with 'autopar search ... -o FILE'"
WRITTEN_BY = "written_by"
"""The only key of a plan file that is not a field of the plan: the version of autopar that wrote it."""
_NAME_ONE = "Name a file that 'autopar search ... -o FILE' wrote"


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values. Keys are in the order of the fields, types are written as ``S(0)``, and numbers are not rounded."""
    written_by = {WRITTEN_BY: f"autopar {_autopar_version()}"}
    return {"version": plan.version} | written_by | cast("dict[str, Any]", as_table(plan))


def plan_from_dict(data: object, *, place: str = "plan") -> Plan:
    """Return the plan of a result of :func:`plan_to_dict`.

    Args:
        data: the decoded JSON.
        place: the name of the source in errors (the file).

    Raises:
        PlanError: the data is not a plan; the error names the path in it, what was expected there, and what was found.
    """
    _check_version(data, place)
    table = Table(cast("Mapping[str, object]", data), file=place, only_finite=True)
    table.has(WRITTEN_BY)
    try:
        if table.integer("version") != FORMAT_VERSION:
            raise table.wrong("version", str(FORMAT_VERSION), table.raw("version"))
        plan = table.record(Plan)
    except UsageError as error:
        raise error.becoming(PlanError, fix=error.fix.replace(CHANGE, _MAKE_ANEW)) from error
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
        write_json(target, plan_to_dict(plan))
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
    except (ValueError, RecursionError) as error:  # a number of too many digits, lists that are nested too deeply
        raise PlanError(f"The plan file is not JSON ({reason(error)})", where=place, fix=_MAKE_ANEW) from error
    return plan_from_dict(data, place=place)


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
