"""Which version of autopar's own code this is."""

from __future__ import annotations

import hashlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of autopar."""

_NOT_PRICED = ("cli", "report", "runtime", "lower", "benchmark", "validate", "measure", "verification")
"""Folders of the package that no time depends on."""


def sources() -> str:
    """A hash of the code that makes graphs and times: searches by different versions must not mix."""
    found = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if name.parts[0] not in _NOT_PRICED:
            found.update(f"{name.as_posix()}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]
