"""``docs/reference/plan.schema.json``: ``python -m tools.evidence.plan_schema FILE`` writes the JSON schema of plan files.

It is generated from the dataclasses of plans; a test keeps it up to date.
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

from autopar.plan.file import WRITTEN_BY
from autopar.plan.mesh import Type
from autopar.plan.plan import FORMAT_VERSION, Plan

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TYPE_PATTERN = r"^(I|R|P|S\((0|[1-9][0-9]*)\))$"


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
