"""In what two plans differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autopar.plan.file import encode, short
from autopar.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference between two plans; a missing side is None."""

    path: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.path}: {short(self.before)} -> {short(self.after)}"


def diff_plans(before: Plan, after: Plan) -> list[Change]:
    """What differs, in the order of the document; the record of the search and the format are left out."""
    left, right = encode(before, rare=True), encode(after, rare=True)
    for data in (left, right):
        del data["search"], data["version"]
    return list(_differences(left, right, ""))


def _differences(before: Any, after: Any, path: str) -> Iterator[Change]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before:
            yield from _differences(before[key], after[key], f"{path}.{key}" if path else key)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (left, right) in enumerate(zip(before, after, strict=True)):
            yield from _differences(left, right, f"{path}[{index}]")
    elif before != after or type(before) is not type(after):
        yield Change(path=path, before=before, after=after)
