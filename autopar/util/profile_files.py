"""Profile files, written whole or not at all (``autopar.util.files``); their folder is made where it is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autopar.util import files


def write_toml(path: Path, data: dict[str, Any], *, comment: str = "") -> None:
    """``data`` as TOML under ``comment``."""
    import tomli_w  # a GPU machine that only measures ('make gpu') may not have it

    write_text(path, (f"# {comment}\n" if comment else "") + tomli_w.dumps(data))


def write_json(path: Path, data: dict[str, Any]) -> None:
    """``data`` as JSON, one entry of its lists a line."""
    parts = []
    for key, value in data.items():
        if isinstance(value, list) and value:
            inner = ",\n".join(json.dumps(item, separators=(",", ":")) for item in value)
            parts.append(f"{json.dumps(key)}: [\n{inner}\n]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    write_text(path, "{\n" + ",\n".join(parts) + "\n}\n")


def write_text(path: Path, text: str) -> None:
    """Any text.

    Raises:
        UsageError: the file cannot be written.
    """
    files.write_text(path, text, make_folder=True)
