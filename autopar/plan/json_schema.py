"""The JSON schema of a plan file, generated from the dataclasses of ``autopar.plan.plan``.

``python -m autopar.plan.json_schema docs/reference/plan.schema.json`` writes the published copy; a test keeps it equal.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

from autopar.plan.plan import FORMAT_VERSION, Plan
from autopar.plan.tensor_types import Type

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TYPE_PATTERN = r"^(I|R|P|S\((0|[1-9][0-9]*)\))$"
WRITTEN_BY = "written_by"
"""The one key of a plan file that is not a field of the plan: which autopar wrote it."""


def plan_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of what :func:`autopar.plan.file.plan_to_dict` gives and ``plan.json`` holds."""
    definitions: dict[str, Any] = {}
    root = _object(Plan, definitions)
    root["properties"][WRITTEN_BY] = {"type": "string", "description": "The autopar that wrote the file."}
    root["properties"]["version"] = {"const": FORMAT_VERSION}
    root["required"] = sorted({*root["required"], "version"})
    return {"$schema": DIALECT, "title": "autopar plan", **root, "$defs": dict(sorted(definitions.items()))}


def _object(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
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
    """The schema of one annotation; dataclasses are put into ``definitions`` and referred to."""
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
    if is_tuple(hint):
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
            definitions[cls.__name__] = {}  # taken, should it refer to itself
            definitions[cls.__name__] = _object(cls, definitions)
        return {"$ref": f"#/$defs/{cls.__name__}"}
    raise TypeError(f"no schema for a field of type {hint}")


def is_tuple(hint: Any) -> bool:
    """Whether an annotation is ``tuple[...]``."""
    return get_origin(hint) is tuple


def has_default(field: dataclasses.Field[Any]) -> bool:
    """Whether a field may be missing from a file."""
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def schema_text() -> str:
    """The published text."""
    return json.dumps(plan_schema(), indent=2) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(schema_text(), encoding="utf-8")
